"""The next turn of a conversation finds the KV of the turn before it, if that may be used."""

from __future__ import annotations

import pytest

from fastdeploy.core.weight_source import FolderSource
from fastdeploy.inter_communicator import messages as m
from support.fake_runner import expected_tokens
from support.harness import Harness

PROMPT = [1, 2, 3, 4, 5, 6]
REPLY = [7, 8]


def hits(h: Harness, request_id: str, prompt: list[int], weights: int = 0) -> int:
    """Serve a request, check its tokens, and return its prefix hit."""
    before = h.engine.kv.hit_tokens
    h.add(request_id, prompt, max_tokens=4)
    h.run_out()
    assert h.stream(request_id).tokens == expected_tokens(prompt, 4, weights)
    return h.engine.kv.hit_tokens - before


def test_the_next_turn_finds_every_token_but_the_last_one_whose_kv_is_never_computed():
    h = Harness()
    assert hits(h, "first", PROMPT) == 0
    history = PROMPT + h.stream("first").tokens
    assert hits(h, "second", history + REPLY) == len(history) - 1 == 9
    history += REPLY + h.stream("second").tokens
    assert hits(h, "third", history + REPLY) == len(history) - 1


@pytest.mark.parametrize("rounds", [1, 2, 3, 4])
def test_the_continuation_of_an_aborted_request_finds_every_computed_token(rounds):
    h = Harness(max_num_batched_tokens=4)  # the first rounds compute parts of the prompt
    h.add("first", PROMPT, max_tokens=40)
    h.run_rounds(rounds)
    computed = h.runner.computed_tokens
    h.ask(m.AbortArgs(["first"]))
    assert hits(h, "second", PROMPT + h.stream("first").tokens + REPLY) == computed > 0


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_a_turn_that_ends_in_the_round_of_a_commit_leaves_nothing_for_the_new_weights(kv):
    h = Harness()
    h.add("first", PROMPT, max_tokens=40)
    h.runner.may_stage.clear()
    update = h.call(m.UpdateWeightsArgs(FolderSource("/w1-recompute" if kv == "recompute" else "/w1"), kv=kv))
    h.run_rounds(5)
    h.runner.may_stage.set()
    h.join_staging()
    tokens = h.stream("first").tokens
    h.send(m.CancelRequest("first", reason="stop"))
    h.run_rounds()
    assert h.reply(update).result["weight_epoch"] == 1 and len(h.engine.lifecycle.requests) == 0
    assert hits(h, "second", PROMPT + tokens + REPLY, weights=1) == 0


def test_a_turn_that_ends_with_kv_of_several_weights_leaves_nothing():
    h = Harness()
    h.add("first", PROMPT, max_tokens=8)
    h.run_rounds(3)
    assert h.update("/w1").failure is None
    h.run_out()
    assert {span.weight_epoch for span in h.stream("first").spans} == {0, 1}
    assert hits(h, "second", PROMPT + h.stream("first").tokens + REPLY, weights=1) == 0
