"""Steps that the engine computes before it serves requests."""

from __future__ import annotations

import pytest

from fastdeploy.engine.warm_up import PROMPT_TOKENS, warm_up
from fastdeploy.scheduler.pacer import StepPacer
from support.fake_runner import FakeRunner, expected_tokens
from support.harness import Harness


def test_warm_up_gives_the_pacer_a_measured_budget():
    runner, pacer = FakeRunner(num_blocks=80, max_model_len=300), StepPacer(2048, 0.25)
    runner.step_s = 0.1
    warm_up(runner, pacer)
    assert [plan.num_tokens for plan in runner.plans] == [PROMPT_TOKENS, PROMPT_TOKENS, 1]
    assert pacer.budget(0) > StepPacer.FIRST_GUESS


@pytest.mark.parametrize("max_model_len", [1, 2, 5, 128])
@pytest.mark.parametrize("max_tokens", [1, 3, 2048])
def test_warm_up_stays_within_the_limits_of_the_settings(max_model_len, max_tokens):
    blocks = -(-max_model_len // 4)
    runner = FakeRunner(num_blocks=blocks, max_model_len=max_model_len, vocab=7)
    warm_up(runner, StepPacer(max_tokens, 0.25))
    for plan in runner.plans:
        assert 1 <= plan.num_tokens <= max_tokens
        assert max(plan.chunks[0].token_ids) < 7


def test_requests_after_the_warm_up_are_computed_from_their_own_kv():
    """The fake runner refuses a step whose context is not the sequence's own."""
    harness = Harness(FakeRunner(num_blocks=40, max_model_len=128))
    warm_up(harness.runner, harness.engine.scheduler.pacer)
    harness.add("r", list(range(20)), max_tokens=5)
    harness.run_out()
    assert harness.stream("r").tokens == expected_tokens(list(range(20)), 5)
    harness.engine.lifecycle.check_integrity()
