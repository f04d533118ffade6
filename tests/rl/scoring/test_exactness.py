"""The trainer's log probabilities of sampled tokens are those of the engine, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import paddle
import pytest

from fastdeploy.model_executor.ops import get_ops
from rl.scoring.loop import LENGTH, Loop, Rollout, assert_no_mismatch, bits

DTYPES = ["float32", "bfloat16"]


@pytest.fixture(params=[*DTYPES, "int8"])
def dtype(request: pytest.FixtureRequest) -> str:
    """Return a dtype, or "int8" for bfloat16 with this quantization."""
    return request.param


def rollouts_of(loop: Loop, i: int) -> list[Rollout]:
    """Generate one batch, with the disturbance of round ``i``."""
    rollouts = loop.begin()
    loop.engine.run_rounds(12)
    if i % 3 == 0:
        assert loop.engine.pause(mode="keep").failure is None
        assert loop.engine.resume().failure is None
    if i % 3 == 1:
        return loop.finish_aborted(rollouts)
    return loop.finish(rollouts)


def run_updates(loop: Loop, count: int) -> None:
    """Train for ``count`` updates, and compare all tokens of each."""
    before = None
    for i in range(count):
        rollouts = rollouts_of(loop, i)
        assert all(len(one.tokens) == LENGTH for one in rollouts)
        assert_no_mismatch(loop.scorer, rollouts)
        logprobs = [one.logprobs for one in rollouts]
        assert logprobs != before, "the update changed nothing"
        before = logprobs
        loop.train(rollouts)
        loop.publish(kv="recompute")
    assert loop.engine.engine.kv.hit_tokens > 0, "no prefix hit"
    assert loop.engine.engine.scheduler.num_preemptions > 0, "no preemption"


@pytest.mark.covers("dtype", "model")
@pytest.mark.parametrize("model", ["qwen2_tied", "qwen3_wide", "llama", "gemma", "qwen3_moe"])
def test_all_tokens_are_equal_over_updates_pauses_prefix_hits_and_preemptions(checkpoints, tmp_path, model, dtype):
    run_updates(Loop(checkpoints[model], dtype, tmp_path), 3)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["qwen2_tied", "qwen3_wide", "llama"])
def test_all_tokens_are_equal_over_200_updates(checkpoints, tmp_path, model, dtype):
    run_updates(Loop(checkpoints[model], dtype, tmp_path), 200)


@pytest.fixture
def avx2() -> Iterator[None]:
    ops = get_ops("float32")
    before = ops.isa
    ops.set_isa("avx2")
    yield
    ops.set_isa(before)


def test_all_tokens_are_equal_with_avx2(checkpoints, tmp_path, dtype, avx2):
    run_updates(Loop(checkpoints["qwen3_wide"], dtype, tmp_path), 3)


def test_log_probabilities_at_a_temperature_are_those_of_mode_temperature(checkpoints, tmp_path, dtype):
    loop = Loop(checkpoints["qwen2"], dtype, tmp_path, temperature=0.7, logprobs_mode="temperature")
    rollouts = loop.finish(loop.begin())
    assert_no_mismatch(loop.scorer, rollouts, 0.7)
    with pytest.raises(AssertionError, match="differ"):
        assert_no_mismatch(loop.scorer, rollouts)


def switched(loop: Loop, kv: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Update while requests are in flight. Returns, of all tokens: whether the new weights sampled it, the engine's log
    probability, and the one of the trainer with the weights that sampled it."""
    others, rollouts = loop.finish(loop.begin()), loop.begin()
    loop.engine.run_rounds(14)
    loop.collect(rollouts)
    group = [one for ones in rollouts.values() for one in ones]
    counts = [len(one.tokens) for one in group]
    assert max(counts) > 1
    started = [one.sample for one in group if one.tokens]
    old = np.split(loop.scorer.logprobs(started).numpy(), np.cumsum([len(output) for _, output in started])[:-1])
    assert loop.engine.pause(mode="keep").failure is None
    loop.collect(rollouts)
    assert counts == [len(one.tokens) for one in group]
    loop.train(others)
    loop.publish(kv=kv)
    assert loop.engine.resume().failure is None
    loop.finish(rollouts)
    new = np.split(loop.scorer.logprobs([one.sample for one in group]).numpy(), len(group))
    first = iter(old)
    trainer = [np.concatenate([next(first) if k else [], values[k:]]) for k, values in zip(counts, new, strict=True)]
    by_new = [np.arange(LENGTH) >= k for k in counts]
    return np.concatenate(by_new), np.array([x for one in group for x in one.logprobs]), np.concatenate(trainer)


def test_tokens_of_a_request_that_saw_two_weights_are_equal_with_kv_recompute(checkpoints, tmp_path, dtype):
    by_new, server, trainer = switched(Loop(checkpoints["qwen2"], dtype, tmp_path), "recompute")
    assert by_new.any() and not by_new.all()
    np.testing.assert_array_equal(bits(server), bits(trainer))


def test_tokens_after_a_switch_with_kv_keep_differ_since_older_weights_made_their_keys(checkpoints, tmp_path, dtype):
    by_new, server, trainer = switched(Loop(checkpoints["qwen2"], dtype, tmp_path, num_blocks=64), "keep")
    np.testing.assert_array_equal(bits(server)[~by_new], bits(trainer)[~by_new])
    assert (bits(server) != bits(trainer))[by_new].mean() > 0.3


@pytest.mark.parametrize("dtype", DTYPES)  # the int8 value of a weight with another bit may be the same
def test_one_bit_of_one_weight_shows(checkpoints, tmp_path, dtype):
    loop = Loop(checkpoints["qwen2"], dtype, tmp_path)
    state = loop.scorer.state()
    name = "model.layers.0.mlp.down_proj.weight"
    array = state[name].numpy()  # bfloat16 as uint16 bits
    flat = array.view(np.uint16 if dtype == "bfloat16" else np.uint32).reshape(-1)
    flat[7] ^= 1
    changed = paddle.to_tensor(array) if dtype == "float32" else paddle.to_tensor(array).view("bfloat16")
    loop.publish(state | {name: changed}, kv="recompute")
    with pytest.raises(AssertionError, match="log probabilities differ"):
        assert_no_mismatch(loop.scorer, loop.finish(loop.begin()))
    loop.publish(kv="recompute")
    assert_no_mismatch(loop.scorer, loop.finish(loop.begin()))
