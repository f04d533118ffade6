"""Run tests of the engine with the runner in the same process, and again with the runner behind a socket."""

from __future__ import annotations

import pytest

from support.harness import Harness

OVER_ZMQ = {
    "test_common_engine", "test_concurrent_pauses", "test_deadlines", "test_eos_update", "test_in_place", "test_inbox",
    "test_label_and_reset", "test_non_finite", "test_pause", "test_pause_admission", "test_pause_fence",
    "test_pause_holds", "test_pause_timeouts", "test_sleep", "test_sleep_moves",
    "test_weight_session", "test_weight_update",
}  # fmt: skip


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.module.__name__.rsplit(".", 1)[-1] in OVER_ZMQ:
        slow = () if metafunc.module.__name__.endswith("test_inbox") else pytest.mark.slow
        places = [pytest.param(False, id="in_process"), pytest.param(True, id="over_zmq", marks=slow)]
        metafunc.parametrize("runner_over_zmq", places, indirect=True)


@pytest.fixture(autouse=True)
def runner_over_zmq(request, monkeypatch):
    """Give every harness of a test its runner in this process, or over ZMQ."""
    if not getattr(request, "param", False):
        yield
        return
    made, make = [], Harness.__init__

    def keep(self, *args, **kwargs):
        make(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(Harness, "runner_over_zmq", True)
    monkeypatch.setattr(Harness, "__init__", keep)
    yield
    for harness in made:
        harness.runner.may_stage.set()
        harness.close()
