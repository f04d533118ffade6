"""With int8, every way to new weights ends in what a start with these weights gives, bit for bit. Values, checksums and
fingerprints are those of bfloat16."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from fastdeploy.core.errors import InvalidField, WeightUpdateRefused
from fastdeploy.core.serving_dtype import widen
from fastdeploy.testing.checkpoints import random_tensors, write_checkpoint
from fastdeploy.testing.tensors import to_bfloat16
from fastdeploy.worker.model_runner import ModelRunner
from support.delta_trainer import Trainer
from support.runner_ops import OPS
from support.specs import SPECS
from support.step_driver import outputs, sleep, update, wake
from worker.new_weights import Tensors, new_tensors

NAMES = ("qwen3_bf16", "qwen2_bf16", "gemma_bf16")  # the last two tie their embedding
Q = "model.layers.1.self_attn.q_proj.weight"
Make = Callable[..., ModelRunner]


@pytest.fixture(params=sorted(OPS))
def make(request, checkpoints, tmp_path) -> Make:
    def make_runner(model: str, quantization: str | None = "int8", **settings: object) -> ModelRunner:
        ops = OPS[request.param]("bfloat16")
        folder = str(checkpoints.get(model, model))
        return ModelRunner(folder, "bfloat16", num_blocks=96, ops=ops, quantization=quantization, **settings)

    return make_runner


def bits(tensors: Tensors) -> Tensors:
    return {name: to_bfloat16(array) for name, array in tensors.items()}


def started_with(make: Make, name: str, tensors: Tensors, folder: Path) -> ModelRunner:
    """Return a runner of a checkpoint with these float32 tensors, rounded to bfloat16."""
    return make(str(write_checkpoint(folder / "started", SPECS[name], tensors)))


@pytest.mark.parametrize("name", NAMES)
def test_products_use_the_int8_values_and_reports_those_of_bfloat16(make, name):
    runner, plain = make(name), make(name, quantization=None)
    assert runner.info.quantization == "int8" and plain.info.quantization is None
    assert runner.fingerprint == plain.fingerprint and runner.checksums() == plain.checksums()
    found, expected = outputs(runner), outputs(plain)
    assert found != expected
    first = [(a[1][0].logprob, b[1][0].logprob) for a, b in zip(found, expected, strict=True)]
    assert max(abs(a - b) for a, b in first) < 0.2


@pytest.mark.parametrize("name", NAMES)
def test_exactly_the_linears_that_steps_multiply_with_have_int8_values(make, name):
    runner = make(name)
    linears = {p.key for p in runner.model.parameters if not p.is_vector}
    quantized = {key for key in linears if runner.weights.values[key].quantized}
    assert linears - quantized == ({"embedding"} if name == "qwen3_bf16" else set())
    assert runner.weights.lm_head.quantized


@pytest.mark.covers("make name", "make standby", "name standby")
@pytest.mark.parametrize("standby", ["on", "off"])
@pytest.mark.parametrize("name", NAMES)
def test_an_update_ends_in_what_a_start_with_the_weights_gives(make, name, standby, tmp_path, part):
    runner = make(name, standby_weights=standby)
    for seed in (31, 32):
        runner.refresh_standby()
        tensors = new_tensors(SPECS[name], seed)
        update(runner, part(bits(tensors)))
    assert outputs(runner) == outputs(started_with(make, name, tensors, tmp_path))


@pytest.mark.parametrize("name", NAMES)
def test_a_partial_update_changes_the_int8_values_of_its_linear_only(make, name, tmp_path, part):
    runner, tensors = make(name), random_tensors(SPECS[name])
    tensors[Q] = new_tensors(SPECS[name], 33)[Q]
    old = dict(runner.weights.values)
    update(runner, part(bits({Q: tensors[Q]})), partial=True)
    assert {key for key, value in runner.weights.values.items() if value is not old[key]} == {"layers.1.qkv"}
    assert outputs(runner) == outputs(started_with(make, name, tensors, tmp_path))


def test_deltas_end_in_what_a_start_with_the_weights_gives(make, tmp_path):
    trainer = Trainer(make("qwen3_bf16", standby_weights="on"), tmp_path, "qwen3_bf16")
    for share in (0.02, 0.5, 0.02):
        trainer.publish(trainer.next_state(share=share))
        trainer.check()
        trainer.runner.refresh_standby()
    state = {name: widen(array) for name, array in trainer.state.items()}
    assert outputs(trainer.runner) == outputs(started_with(make, "qwen3_bf16", state, tmp_path))


def test_an_update_that_is_given_up_changes_nothing(make, part):
    runner = make("qwen3_bf16", standby_weights="on")
    runner.refresh_standby()
    before = outputs(runner)
    staging = runner.begin_update(partial=False)
    staging.add(part(bits(new_tensors(SPECS["qwen3_bf16"], 34))), {})
    staging.abandon()
    with pytest.raises(WeightUpdateRefused):
        staging.finish()
    staging = runner.begin_update(partial=False)
    staging.add(part(bits(new_tensors(SPECS["qwen3_bf16"], 35))), {})
    staging.finish()  # complete, with int8 values, and never committed
    staging.abandon()
    assert outputs(runner) == before


def test_an_update_that_is_given_up_while_int8_values_are_made_is_refused(make, part, monkeypatch):
    runner = make("qwen3_bf16")
    before, quantize = outputs(runner), runner.ops.quantize
    staging = runner.begin_update(partial=False)
    staging.add(part(bits(new_tensors(SPECS["qwen3_bf16"], 36))), {})

    def abandoned(weights, stop) -> None:
        other = threading.Thread(target=staging.abandon)
        other.start()
        other.join()
        quantize(weights, stop)

    monkeypatch.setattr(runner.ops, "quantize", abandoned)
    with pytest.raises(WeightUpdateRefused):
        staging.finish()
    assert outputs(runner) == before


@pytest.mark.parametrize("name", NAMES)
def test_after_a_sleep_the_same_bits_serve(make, name, tmp_path):
    runner = make(name, spill_dir=str(tmp_path))
    before = outputs(runner)
    sleep(runner, "weight", "kv_cache")
    wake(runner, "weight", "kv_cache")
    assert outputs(runner) == before


def test_the_standby_copy_has_memory_for_int8_values_before_the_first_update(make, part):
    runner = make("qwen3_bf16", standby_weights="on")
    runner.refresh_standby()
    serving = sum(runner.weights.values[p.key].nbytes for p in runner.model.parameters if not p.is_vector)
    assert runner.standby_nbytes == serving
    update(runner, part(bits(new_tensors(SPECS["qwen3_bf16"], 37))))
    assert runner.standby_nbytes == serving


def test_a_setting_that_cannot_be_served_is_refused_by_its_name(make, checkpoints):
    with pytest.raises(InvalidField, match="^quantization: expected one of int8, got 'int4'"):
        make("qwen3_bf16", quantization="int4")
    with pytest.raises(InvalidField, match="^quantization: int8 needs the dtype bfloat16, got float32"):
        ModelRunner(str(checkpoints["qwen3"]), num_blocks=96, quantization="int8")
