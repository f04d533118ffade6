"""An update that is given up while it hangs in a read changes nothing when the read comes back."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from fastdeploy.core.errors import WeightUpdateRefused
from fastdeploy.core.runner import Staging
from fastdeploy.worker import staging as staging_module
from fastdeploy.worker.model_runner import ModelRunner
from support.step_driver import outputs, update
from worker.new_weights import new_tensors, sha

WHERE = ["before it opens the source", "in a read"]


@pytest.fixture
def hung_add(part, monkeypatch):
    """Return a function that begins an update, and adds to it on a thread until that hangs. Returns the staging, the
    errors of ``add``, and a function that lets it go on and waits for its end."""
    mended = threading.Event()

    def begin(runner: ModelRunner, where: str) -> tuple[Staging, list[BaseException], Callable]:
        source, entered, errors = part(new_tensors()), threading.Event(), list[BaseException]()
        owner, name = (staging_module, "open_source") if where == WHERE[0] else (runner.ops, "stage")
        real = getattr(owner, name)

        def hang(*args):
            entered.set()
            assert mended.wait(60)
            return real(*args)

        def add() -> None:
            try:
                staging.add(source, {})
            except WeightUpdateRefused as error:
                errors.append(error)

        def end() -> None:
            mended.set()
            thread.join(60)

        staging = runner.begin_update(False)
        thread = threading.Thread(target=add)
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, hang)
            thread.start()
            assert entered.wait(60)
        return staging, errors, end

    yield begin
    mended.set()


@pytest.mark.parametrize("where", WHERE)
def test_an_abandoned_add_that_hung_takes_no_weights_when_it_returns(where, make_runner, hung_add):
    runner = make_runner("qwen2")
    before = outputs(runner)
    staging, errors, end = hung_add(runner, where)
    staging.abandon()
    assert runner.has_weights
    end()
    assert len(errors) == 1 and "given up" in errors[0].message
    assert outputs(runner) == before
    with pytest.raises(WeightUpdateRefused):
        staging.finish()


def test_memory_that_a_hanging_add_may_write_to_is_never_used_again(make_runner, hung_add, part):
    runner, new = make_runner("qwen2", standby_weights="on"), new_tensors(seed=5)
    runner.refresh_standby()
    staging, _, end = hung_add(runner, "in a read")
    staging.abandon()
    assert runner.standby_nbytes == 0
    update(runner, part(new))
    expected = outputs(runner)
    end()  # writes to the memory that it took
    for _ in range(2):
        assert outputs(runner) == expected and runner.checksums() == {name: sha(array) for name, array in new.items()}
        update(runner, part(new))


def test_an_add_that_works_ends_early_when_it_is_abandoned(make_runner, hung_add, monkeypatch):
    runner, stops = make_runner("qwen2"), list[int]()
    stage = runner.ops.stage
    monkeypatch.setattr(
        runner.ops, "stage", lambda items, stop, dtype: stops.append(int(stop[0])) or stage(items, stop)
    )
    staging, _, end = hung_add(runner, "in a read")
    staging.abandon()
    end()
    assert stops == [1]
