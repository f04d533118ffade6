"""Number of prompt tokens in a step, and the steps that are computed before the engine serves requests."""

from __future__ import annotations

import pytest

from fastdeploy.scheduler.chunks import StepPacer
from support.fake_runner import FakeRunner, expected_tokens
from support.harness import Harness


def observe(pacer: StepPacer, prompt_s: float, decode_s: float = 0.0) -> None:
    """Let ``pacer`` learn from steps with and without 256 prompt tokens, which take ``prompt_s`` seconds."""
    for _ in range(50):
        pacer.observe(0, decode_s)
        pacer.observe(256, decode_s + prompt_s)


def test_the_first_step_is_small():
    assert StepPacer(2048, 0.25).budget(0) == StepPacer.FIRST_GUESS
    assert StepPacer(20, 0.25).budget(0) == 20


def test_the_budget_follows_what_prompt_tokens_cost():
    pacer = StepPacer(2048, 0.25)
    observe(pacer, 0.256)  # 1 ms each
    assert 128 <= pacer.budget(0) <= 256 and pacer.budget(0) % StepPacer.ALIGN == 0
    observe(pacer, 0.0256)
    assert pacer.budget(0) == 2048


def test_the_budget_on_a_slow_device_is_at_least_one_tile():
    pacer = StepPacer(2048, 0.01)
    pacer.observe(256, 100.0)
    assert pacer.budget(0) == StepPacer.ALIGN


def test_slow_decodes_lower_the_budget():
    pacer = StepPacer(2048, 0.25)
    observe(pacer, 0.128, decode_s=0.2)  # 0.5 ms each
    assert pacer.budget(0) == 64


def test_steps_with_few_prompt_tokens_do_not_change_the_budget():
    pacer = StepPacer(2048, 0.25)
    observe(pacer, 0.1, decode_s=0.04)
    budget = pacer.budget(0)
    for _ in range(400):
        pacer.observe(2, 0.045)
    pacer.observe(2, 3.0)
    assert pacer.budget(0) == budget


def test_decodes_lower_the_budget_only_to_keep_max_num_batched_tokens():
    pacer = StepPacer(300, 0.01)
    pacer.observe(64, 100.0)
    assert [pacer.budget(running) for running in (0, 100, 256, 300, 400)] == [64, 64, 44, 0, 0]


def test_the_budget_recovers_from_a_slow_first_step_beside_many_decodes():
    pacer = StepPacer(2048, 0.25)
    pacer.observe(64, 0.3)
    assert pacer.budget(0) == 64
    for _ in range(50):
        prefill = pacer.budget(63)
        pacer.observe(0, 0.04)
        pacer.observe(prefill, 0.04 + prefill * 0.0004)
    assert pacer.budget(63) > 400


def test_warm_up_gives_the_pacer_a_measured_budget():
    runner, pacer = FakeRunner(num_blocks=80, max_model_len=300), StepPacer(2048, 0.25)
    runner.step_s = 0.1
    pacer.warm_up(runner)
    assert [plan.num_tokens for plan in runner.plans] == [StepPacer.WARM_UP_TOKENS, StepPacer.WARM_UP_TOKENS, 1]
    assert pacer.budget(0) > StepPacer.FIRST_GUESS


@pytest.mark.parametrize("max_model_len", [1, 2, 5, 128])
@pytest.mark.parametrize("max_tokens", [1, 3, 2048])
def test_warm_up_stays_within_the_limits_of_the_settings(max_model_len, max_tokens):
    blocks = -(-max_model_len // 4)
    runner = FakeRunner(num_blocks=blocks, max_model_len=max_model_len, vocab=7)
    StepPacer(max_tokens, 0.25).warm_up(runner)
    for plan in runner.plans:
        assert 1 <= plan.num_tokens <= max_tokens
        assert max(plan.chunks[0].token_ids) < 7


def test_requests_after_the_warm_up_are_computed_from_their_own_kv():
    """The fake runner refuses a step whose context is not the sequence's own."""
    harness = Harness(FakeRunner(num_blocks=40, max_model_len=128))
    harness.engine.scheduler.pacer.warm_up(harness.runner)
    harness.add("r", list(range(20)), max_tokens=5)
    harness.run_out()
    assert harness.stream("r").tokens == expected_tokens(list(range(20)), 5)
    harness.engine.lifecycle.check_integrity()
