"""Finite weights can give logits that are not finite. Such a row draws nothing and reports it; the other rows of the
batch keep their bits."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import paddle
import pytest

import fastdeploy
from fastdeploy import LLM
from fastdeploy.core.plan import NonFinite, StepPlan
from fastdeploy.core.sampling_params import LOGPROBS_MODES, SamplingParams
from fastdeploy.model_executor.ops.reference import ReferenceOps
from fastdeploy.testing.checkpoints import random_tensors, write_checkpoint
from fastdeploy.worker.sampler import Sampler
from support.specs import SPECS, prompt
from support.step_driver import Driver, Sequence, draws_of, fresh

POISON = 200  # a sequence with this token overflows
NAMES = ["qwen3", "qwen3_bf16"]
SETTINGS = [{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 7, "top_p": 0.8, "presence_penalty": 0.5}]


@pytest.fixture(scope="module", params=NAMES)
def poisoned(request, tmp_path_factory) -> Path:
    """Write a checkpoint with finite weights: one dimension of the first norm is huge, and only the embedding of POISON
    is not 0 there."""
    spec = SPECS[request.param]
    tensors = random_tensors(spec)
    tensors["model.embed_tokens.weight"][:, 5] = 0.0
    tensors["model.embed_tokens.weight"][POISON, 5] = 100.0
    tensors["model.layers.0.input_layernorm.weight"][5] = 3e38
    return write_checkpoint(tmp_path_factory.mktemp("poisoned") / request.param, spec, tensors)


def clean(length: int, **settings) -> Sequence:
    return Sequence(f"p{length}", prompt(length, POISON), SamplingParams(seed=length, max_tokens=64, **settings))


def spoiled(length: int, **settings) -> Sequence:
    sequence = clean(length, **settings)
    sequence.ids[-1] = POISON
    return sequence


def all_settings() -> list[dict]:
    kinds = [{"logprobs": None}] + [{"logprobs": 2, "logprobs_mode": mode} for mode in LOGPROBS_MODES]
    return [setting | kind | {"temperature": t} for setting in SETTINGS for kind in kinds for t in (0.0, 1.0)]


def test_in_every_mode_a_spoiled_row_draws_nothing_and_the_others_have_the_same_bits(make_runner, poisoned):
    settings = all_settings()
    requests = [clean(9 + k % 5, **setting) for k, setting in enumerate(settings)]
    alone = Driver(make_runner(poisoned)).generate([fresh(r) for r in requests], 6)
    bad = [spoiled(12, **setting) for setting in settings]
    mixed = [one for pair in zip([fresh(r) for r in requests], bad, strict=True) for one in pair]
    together = Driver(make_runner(poisoned, num_blocks=256)).generate(mixed, 6)
    assert [s.trace for s in together[::2]] == [s.trace for s in alone]
    assert all(s.output == [] and s.non_finite == NonFinite(12) for s in bad)


def test_blocks_of_a_spoiled_sequence_can_be_reused(make_runner, poisoned):
    undisturbed = Driver(make_runner(poisoned)).generate([clean(40)], 12)[0].trace
    driver = Driver(make_runner(poisoned, num_blocks=8, max_model_len=64))
    driver.generate([spoiled(60)], 1)
    assert driver.generate([clean(40)], 12)[0].trace == undisturbed


def test_a_prefix_before_the_spoiled_token_can_be_shared(poisoned):
    ids, params = prompt(50, POISON), fastdeploy.SamplingParams(seed=3, max_tokens=10, ignore_eos=True, logprobs=1)
    settings = {"num_gpu_blocks_override": 64, "max_model_len": 128}
    with LLM(str(poisoned), **settings) as llm:
        undisturbed = llm.generate([ids], params)[0].outputs[0]
    with LLM(str(poisoned), **settings) as llm:
        bad = llm.generate([[*ids[:40], POISON, 7, 8]], params)[0].outputs[0]
        after = llm.generate([ids], params)[0].outputs[0]
        hits = llm._engine.kv.hit_tokens
    assert bad.finish_reason == "error" and hits >= 32
    assert (after.token_ids, after.logprobs) == (undisturbed.token_ids, undisturbed.logprobs)


@pytest.mark.parametrize("chunk", [None, 7])
def test_prompt_logprobs_name_the_first_position_that_has_none(make_runner, poisoned, chunk):
    runner = make_runner(poisoned)
    driver = Driver(runner)
    asks = clean(20, prompt_logprobs=2)
    asks.ids[10] = POISON  # its logits, for position 11, are the first that are not finite
    told = []
    while asks.computed < len(asks.ids) and not any(isinstance(t, NonFinite) for t in told):
        scheduled = driver.chunk(asks, chunk)
        count = min(scheduled.count, len(asks.ids) - 1 - scheduled.start)
        scheduled = msgspec.structs.replace(scheduled, prompt_logprobs=count)
        told.append(runner.execute(StepPlan(0, [scheduled], [])).prompt_logprobs[0])
        asks.computed += scheduled.count
    assert told[-1] == NonFinite(11)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_raw_logprob_that_is_no_number_is_reported_although_a_ban_hides_the_token(bad):
    logits = paddle.to_tensor(np.array([[bad, 1.0, 2.0]] * 3, np.float32))
    sampler = Sampler(ReferenceOps("float32"))
    params = [SamplingParams(seed=1, logprobs=kind, logprobs_mode=mode)
              for kind, mode in ((None, "raw"), (0, "raw"), (0, "processed"))]  # fmt: skip
    without, raw, processed = sampler.sample(logits, draws_of([([1], 1, p, (0,)) for p in params]))
    assert without.token_ids[0] in (1, 2) and processed.token_ids[0] in (1, 2) and raw == NonFinite(1)


def test_a_row_in_which_everything_is_banned_draws_nothing():
    logits = paddle.to_tensor(np.zeros((1, 3), np.float32))
    draws = draws_of([([1], 1, SamplingParams(seed=1), (0, 1, 2))])
    assert Sampler(ReferenceOps("float32")).sample(logits, draws) == [NonFinite(1)]
