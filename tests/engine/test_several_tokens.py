"""A step that makes several tokens for a sequence, since its drafts were right: all that is behind the runner takes
them in, and none behind the last token."""

from __future__ import annotations

import pytest

from fastdeploy.core.outputs import Span
from fastdeploy.inter_communicator import messages as m
from support.drafters import ScriptedDrafter, coming_tokens
from support.fake_runner import FakeRunner, expected_tokens
from support.harness import PROMPT, Harness

AT_ONCE = 3


def harness(right: int = AT_ONCE - 1, wrong: int = 0, **config) -> Harness:
    """Return an engine whose drafts are ``right`` right ones and then ``wrong`` wrong ones."""
    runner = FakeRunner()

    def guess(request):
        drafts = coming_tokens(runner, request, right + wrong)
        return drafts[:right] + [(token + 1) % runner.info.vocab_size for token in drafts[right:]]

    return Harness(runner, drafter=ScriptedDrafter(guess), **config)


@pytest.mark.parametrize("max_tokens", range(1, 2 * AT_ONCE + 2))
def test_tokens_behind_the_last_one_do_not_exist(max_tokens):
    h = harness(right=20)
    h.add("r", PROMPT, max_tokens=max_tokens, logprobs=0)
    h.run_out()
    stream = h.stream("r")
    assert stream.tokens == expected_tokens(PROMPT, max_tokens) and stream.reason == "length"
    assert [logprob.logprob for logprob in stream.logprobs] == [-float(token) for token in stream.tokens]
    assert (stream.spans[0].start, stream.spans[-1].end) == (0, max_tokens)
    assert f"generation_tokens_total {max_tokens}.0" in h.ask(m.MetricsArgs()).result["text"]
    assert len(h.runner.plans) <= 2


@pytest.mark.parametrize("at", range(1, 2 * AT_ONCE))
def test_a_stop_token_ends_the_request_in_the_middle_of_a_step(at):
    tokens = expected_tokens(PROMPT, at)
    h = harness()
    h.add("r", PROMPT, max_tokens=20, stop_token_ids=(tokens[-1],), logprobs=0)
    h.run_out()
    stream = h.stream("r")
    assert stream.tokens == tokens and stream.reason == "stop" and len(stream.logprobs) == at
    assert stream.finals[0].stop_reason == tokens[-1]


def test_all_tokens_of_a_step_have_one_span():
    h = harness()
    h.add("r", PROMPT, max_tokens=1 + AT_ONCE, retain_s=60.0, fingerprint="body")
    h.run_out()
    output = h.stream("r").finals[0]
    assert len(output.token_ids) == AT_ONCE and isinstance(output.spans[0], Span)
    assert [(span.start, span.end) for span in output.spans] == [(1, 1 + AT_ONCE)]


@pytest.mark.parametrize(("right", "wrong", "steps"), [(2, 0, 11), (0, 2, 30), (2, 1, 11), (3, 4, 9), (0, 0, 30)])
def test_each_step_makes_one_token_more_than_it_has_right_drafts(right, wrong, steps):
    h = harness(right, wrong)
    h.add("r", PROMPT, max_tokens=30)
    h.run_out()
    assert h.stream("r").tokens == expected_tokens(PROMPT, 30)
    assert len(h.runner.plans) == steps


def test_the_next_turn_finds_the_kv_of_accepted_drafts_and_of_no_other():
    """The fake runner refuses KV that is not of the tokens of the prompt."""
    h = harness(right=2, wrong=4)
    h.add("r", PROMPT, max_tokens=14)
    h.run_out()
    h.add("next", PROMPT + h.stream("r").tokens + [7, 8], max_tokens=5)
    h.run_out()
    assert h.engine.kv.hit_tokens == len(PROMPT) + 13  # nothing has computed the last token


def test_drafts_take_no_kv_from_other_requests():
    h = Harness(FakeRunner(num_blocks=8, block_size=4, max_model_len=32), drafter=ScriptedDrafter(lambda _: [1] * 20))
    h.add("a", [1] * 8, max_tokens=9)
    h.add("b", [2] * 8, max_tokens=7)
    h.run_out()
    assert h.engine.scheduler.num_preemptions == 0
    assert h.stream("a").tokens == expected_tokens([1] * 8, 9) and h.stream("b").tokens == expected_tokens([2] * 8, 7)


def test_a_step_with_drafts_stays_within_max_num_batched_tokens():
    h = harness(right=20, max_num_batched_tokens=10)
    h.add("a", [1] * 4, max_tokens=30)
    h.add("b", [2] * 4, max_tokens=30)
    h.run_out()
    assert max(plan.num_tokens for plan in h.runner.plans) == 10
    assert h.stream("b").tokens == expected_tokens([2] * 4, 30)


def test_a_step_that_is_given_up_verifies_its_drafts_again_or_others():
    h = harness()
    h.add("r", PROMPT, max_tokens=12)
    h.run_rounds(2)
    for _ in range(3):
        h.runner.in_step = lambda: h.call(m.PauseArgs("keep"))
        h.run_rounds(2)
        h.engine.scheduler.speculation.drafter.guess = lambda _: []
        h.resume()
        h.run_rounds()
    h.run_out()
    assert h.engine.metrics.steps_abandoned._value.get() == 3
    assert h.stream("r").tokens == expected_tokens(PROMPT, 12)


def test_logits_behind_a_right_draft_that_are_not_finite_end_the_request_one_token_later():
    tokens = expected_tokens(PROMPT, 4)
    h = harness(right=5)
    h.runner.poison = {tokens[3]}
    h.add("r", PROMPT, max_tokens=12)
    h.run_out()
    assert h.stream("r").tokens == tokens and h.stream("r").reason == "error"
