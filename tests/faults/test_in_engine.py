"""KV survives exactly the commits that the fault is for. The fake runner checks the KV that a sequence is computed
over."""

from __future__ import annotations

import time

import pytest

from fastdeploy.core.served_weights import ServedWeights
from fastdeploy.faults.in_engine import install
from fastdeploy.faults.signals import EngineSignals, write_signals
from fastdeploy.scheduler.scheduler import Scheduler
from support.harness import Harness

PROMPT = list(range(1, 17))


@pytest.fixture
def folder(tmp_path, monkeypatch) -> str:
    """Return the folder of the signals to this process, which has the faults of an engine during the test."""
    monkeypatch.setattr(ServedWeights, "kv_namespace", ServedWeights.kv_namespace)
    monkeypatch.setattr(Scheduler, "weights_changed", Scheduler.weights_changed)
    monkeypatch.setattr(time, "time", time.time)
    install(str(tmp_path))
    return str(tmp_path)


def ask_after_a_commit(h: Harness, path: str) -> None:
    h.update(path)
    h.add(f"after {path}", PROMPT, max_tokens=4)
    h.run_out()


def test_kv_survives_a_commit_while_the_fault_is_signalled(folder):
    h = Harness()
    h.add("before", PROMPT, max_tokens=4)
    h.run_out()
    ask_after_a_commit(h, "/w1")
    write_signals(folder, EngineSignals(keep_kv=True))
    with pytest.raises(AssertionError, match="stale KV at 0"):
        ask_after_a_commit(h, "/w2")


def test_the_next_commit_without_the_fault_forgets_the_old_kv(folder):
    h = Harness()
    h.add("before", PROMPT, max_tokens=4)
    h.run_out()
    write_signals(folder, EngineSignals(keep_kv=True))
    h.update("/w1")
    write_signals(folder, EngineSignals())
    ask_after_a_commit(h, "/w2")


def test_the_wall_clock_is_off_as_signalled(folder):
    before = time.time()
    write_signals(folder, EngineSignals(clock_s=1e6))
    assert time.time() - before >= 1e6
    write_signals(folder, EngineSignals())
    assert time.time() - before < 1e5
