"""Updates in place at the worker: the new weights are written over the old ones, and nothing executes meanwhile."""

from __future__ import annotations

from unittest.mock import Mock

import numpy as np
import pytest

from fastdeploy.core.errors import WeightUpdateRefused, WrongOrder
from fastdeploy.core.plan import StepPlan
from fastdeploy.model_executor.ops.interface import PackedLinear
from fastdeploy.worker.model_runner import ModelRunner
from support.step_driver import outputs, update
from worker.new_weights import HEAD, SPEC, K, Q, new_tensors


def linears(runner: ModelRunner) -> dict[str, PackedLinear]:
    return {key: value for key, value in runner.weights.values.items() if hasattr(value, "out_features")}


@pytest.mark.parametrize("partial", [False, True])
def test_in_place_writes_to_the_memory_of_the_old_weights(partial, make_runner, part, fresh, monkeypatch):
    runner, new = make_runner("qwen2", standby_weights="off"), new_tensors()
    old = linears(runner)
    monkeypatch.setattr(runner.ops, "new_linear", Mock(side_effect=AssertionError("memory was allocated")))
    update(runner, part(new), in_place=True, partial=partial)
    assert all(value is old[key] for key, value in linears(runner).items())
    monkeypatch.undo()
    assert outputs(runner) == fresh(SPEC, new)


def test_nothing_executes_between_the_first_tensor_in_place_and_the_commit(make_runner, part, fresh):
    runner, new = make_runner("qwen2"), new_tensors()
    before = outputs(runner)
    staging = runner.begin_update(False, True)
    with pytest.raises(WeightUpdateRefused):  # the header is refused before weights are taken
        staging.add(part({"other": new[Q]}), {})
    assert runner.has_weights and outputs(runner) == before
    staging = runner.begin_update(False, True)
    staging.add(part({Q: new[Q]}), {})
    assert not runner.has_weights
    for call in (lambda: runner.execute(StepPlan(0, [], [])), runner.checksums):
        with pytest.raises(WrongOrder):
            call()
    staging.add(part({name: array for name, array in new.items() if name != Q}), {})
    runner.commit(staging.finish().weights)
    assert runner.has_weights and outputs(runner) == fresh(SPEC, new)


@pytest.mark.parametrize("how", ["refused", "abandoned", "missing"])
def test_after_a_failure_in_place_only_a_whole_update_makes_it_serve_again(how, make_runner, part, fresh):
    runner, new = make_runner("qwen2"), new_tensors()
    staging = runner.begin_update(False, True)
    if how == "refused":
        new_k = new[K].copy()
        new_k[0, 0] = np.inf
        with pytest.raises(WeightUpdateRefused):
            staging.add(part(new | {K: new_k}), {})
    else:
        staging.add(part({Q: new[Q], HEAD: new[HEAD]}), {})
    if how == "missing":
        with pytest.raises(WeightUpdateRefused):
            staging.finish()
    staging.abandon()
    with pytest.raises(WeightUpdateRefused):
        staging.finish()
    with pytest.raises(WrongOrder):
        runner.execute(StepPlan(0, [], []))
    with pytest.raises(WrongOrder):
        runner.begin_update(True, False)
    for in_place in (True, False):
        update(runner, part(new), in_place=in_place)
        assert outputs(runner) == fresh(SPEC, new)
