"""Draws depend on seed, choice and position only. Penalties and bans work as documented."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.model_executor.ops.reference import ReferenceOps
from fastdeploy.worker.sampler import Sampler, apply_penalties_and_bans
from support.specs import prompt
from support.step_driver import Driver, Sequence, draws_of, fresh

RANDOM = SamplingParams(temperature=1.0, seed=1234, logprobs=0, max_tokens=64)


def test_draws_do_not_depend_on_batch_chunks_or_an_abort_and_resubmit(make_runner):
    driver = Driver(make_runner("qwen3"))
    request = Sequence("r", prompt(31, 211), RANDOM)
    undisturbed = driver.generate([fresh(request)], 24)[0].output
    others = [Sequence(f"o{i}", prompt(20 + i, 211), RANDOM, choice=i) for i in range(5)]
    assert driver.generate([*others, batched := fresh(request)], 24, chunk=7) and batched.output == undisturbed
    resubmitted = Sequence("another id", request.ids + undisturbed[:10], RANDOM)
    assert driver.generate([resubmitted], 14)[0].output == undisturbed[10:]


def test_choices_and_seeds_draw_different_tokens(make_runner):
    driver = Driver(make_runner("qwen3"))
    requests = [Sequence("r", prompt(31, 211), RANDOM, choice=i) for i in range(3)]
    requests += [Sequence("r", prompt(31, 211), SamplingParams(seed=s, max_tokens=64)) for s in (1, 2)]
    outputs = {tuple(s.output) for s in driver.generate(requests, 24)}
    assert len(outputs) == 5


def test_repetition_penalty_counts_prompt_and_output_the_others_only_output():
    ids = [0, 1, 2, 2, 3]  # the prompt is 0, 1
    settings = [
        SamplingParams(repetition_penalty=2.0),
        SamplingParams(),
        SamplingParams(presence_penalty=0.5, frequency_penalty=0.25),
    ]
    draws = draws_of([(ids, 2, params, ()) for params in settings])
    logits = paddle.to_tensor(np.tile(np.array([2.0, -2.0, 1.0, -1.0, 3.0], np.float32), (3, 1)))
    apply_penalties_and_bans(logits, draws, [0, 2], [])
    np.testing.assert_allclose(logits.numpy()[0], [1.0, -4.0, 0.5, -2.0, 3.0])
    np.testing.assert_allclose(logits.numpy()[1], [2.0, -2.0, 1.0, -1.0, 3.0])
    np.testing.assert_allclose(logits.numpy()[2], [2.0, -2.0, 0.0, -1.75, 3.0])


def test_banned_ids_are_never_drawn_and_logprobs_stay_raw():
    logits = paddle.to_tensor(np.array([[5.0, 4.0, 1.0], [5.0, 4.0, 1.0]], np.float32))
    greedy = SamplingParams(temperature=0.0, logprobs=2, repetition_penalty=1.5)
    plain = SamplingParams(temperature=0.0, logprobs=2)
    sampler = Sampler(ReferenceOps("float32"))
    first, second = sampler.sample(logits, draws_of([([2], 1, greedy, (0, 99)), ([2], 1, plain, ())]))
    assert (first.token_ids, second.token_ids) == ([1], [0])
    log_softmax = np.array([5.0, 4.0, 1.0]) - np.log(np.exp([5.0, 4.0, 1.0]).sum())
    assert first.logprobs[0].logprob == pytest.approx(log_softmax[1], abs=1e-6)
    assert first.logprobs[0].top == second.logprobs[0].top
    assert [token for token, _ in first.logprobs[0].top] == [0, 1]


def test_each_step_uses_the_settings_of_its_own_rows():
    ids, logits = [1, 2, 3], np.random.default_rng(0).normal(size=(2, 50)).astype(np.float32)
    hot, greedy = SamplingParams(temperature=5.0, seed=3), SamplingParams(temperature=0.0, logprobs=0)
    penalised = SamplingParams(temperature=0.0, repetition_penalty=1e9)
    logits[:, 2] = 9.0
    sampler = Sampler(ReferenceOps("float32"))
    for params in ((hot, hot), (greedy, hot), (hot, greedy), (penalised, greedy), (greedy, greedy)):
        draws = draws_of([(ids, 3, one, ()) for one in params])
        drawn = sampler.sample(paddle.to_tensor(logits), draws)
        alone = Sampler(ReferenceOps("float32")).sample(paddle.to_tensor(logits), draws)
        assert drawn == alone
        assert [bool(one.logprobs) for one in drawn] == [one.logprobs is not None for one in params]
        for one, sampled in zip(params, drawn, strict=True):
            assert one is hot or (sampled.token_ids == [2]) == (one is greedy)


def test_min_tokens_bans_end_tokens_in_a_running_batch(make_runner):
    driver = Driver(make_runner("qwen2"))
    free = Sequence("r", prompt(64, 211), SamplingParams(temperature=0.0))
    driver.step([free])
    held = Sequence("r", prompt(64, 211), SamplingParams(temperature=0.0), banned=(free.output[0],))
    driver.step([held, again := fresh(free)])
    assert held.output != free.output and again.output == free.output
