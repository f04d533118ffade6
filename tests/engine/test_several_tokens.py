"""A step that makes several tokens for a sequence: all that is behind the runner takes them in. Plans do not, yet."""

from __future__ import annotations

import pytest

from fastdeploy.core.outputs import Span
from fastdeploy.core.plan import NonFinite, Sampled, ScheduledChunk
from fastdeploy.inter_communicator import messages as m
from support.fake_runner import FakeRunner, Known, expected_tokens, next_token
from support.harness import PROMPT, Harness

AT_ONCE = 3


class SeveralTokens(FakeRunner):
    """Makes AT_ONCE tokens for each sequence, in its only step."""

    def _run(self, chunk: ScheduledChunk, known: Known) -> Sampled | NonFinite | None:
        sampled = super()._run(chunk, known)
        if isinstance(sampled, Sampled):
            while len(sampled.token_ids) < AT_ONCE:
                tokens = known.tokens + sampled.token_ids
                sampled.token_ids.append(next_token(tokens, self.weights, self.info.vocab_size, (), 0))
            sampled.logprobs.extend(sampled.logprobs * (AT_ONCE - 1))
        return sampled


@pytest.mark.parametrize("max_tokens", range(1, AT_ONCE + 1))
def test_tokens_behind_the_last_one_are_dropped(max_tokens):
    h = Harness(SeveralTokens())
    h.add("r", PROMPT, max_tokens=max_tokens, logprobs=0)
    h.run_out()
    stream = h.stream("r")
    assert stream.tokens == expected_tokens(PROMPT, max_tokens) and stream.reason == "length"
    assert len(stream.logprobs) == max_tokens
    assert (stream.spans[0].start, stream.spans[-1].end) == (0, max_tokens)
    assert f"generation_tokens_total {max_tokens}.0" in h.ask(m.MetricsArgs()).result["text"]


@pytest.mark.parametrize("at", range(1, AT_ONCE + 1))
def test_a_stop_token_ends_the_request_in_the_middle_of_a_step(at):
    tokens = expected_tokens(PROMPT, at)
    h = Harness(SeveralTokens())
    h.add("r", PROMPT, max_tokens=20, stop_token_ids=(tokens[-1],))
    h.run_out()
    assert h.stream("r").tokens == tokens and h.stream("r").reason == "stop"
    assert h.stream("r").finals[0].stop_reason == tokens[-1]


def test_all_tokens_of_a_step_have_one_span():
    h = Harness(SeveralTokens())
    h.add("r", PROMPT, max_tokens=AT_ONCE, retain_s=60.0, fingerprint="body")
    h.run_out()
    output = h.stream("r").finals[0]
    assert len(output.token_ids) == AT_ONCE and isinstance(output.spans[0], Span)
    assert [(span.start, span.end) for span in output.spans] == [(0, AT_ONCE)]
