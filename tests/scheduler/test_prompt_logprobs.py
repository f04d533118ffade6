"""Prompt logprobs: every prompt token from the second on, once, from one set of weights, whatever happens meanwhile."""

from __future__ import annotations

import pytest

from fastdeploy.core.errors import InvalidField
from fastdeploy.inter_communicator import messages as m
from support.fake_runner import FakeRunner, expected_tokens
from support.harness import Harness

PROMPT = list(range(1, 31))


def told(h: Harness, request_id: str, choice: int = 0) -> list[tuple[int, float]]:
    """(prompt token, logprob) as they were sent, in all outputs of the choice."""
    outputs = [o for x in h.transport.sent["a"] if isinstance(x, m.Outputs) for o in x.outputs]
    mine = [o for o in outputs if (o.request_id, o.choice) == (request_id, choice)]
    return [(entry.top[0][0], entry.logprob) for o in mine for entry in o.prompt_logprobs]


def whole(prompt: list[int], weights: int = 0) -> list[tuple[int, float]]:
    return [(token, -1.0 - weights) for token in prompt[1:]]


@pytest.mark.parametrize("budget", [1, 7, 8, 64])
def test_a_prompt_in_chunks_is_told_whole_and_in_order(budget):
    h = Harness(max_num_batched_tokens=budget)
    h.add("r", PROMPT, prompt_logprobs=1, max_tokens=3)
    h.add("plain", PROMPT[5:], max_tokens=3)
    h.run_out()
    assert told(h, "r") == whole(PROMPT) and told(h, "plain") == []
    assert h.stream("r").tokens == expected_tokens(PROMPT, 3)


def test_a_prompt_of_one_token_has_none():
    h = Harness()
    h.add("r", [5], prompt_logprobs=1, max_tokens=2)
    h.run_out()
    assert told(h, "r") == [] and len(h.stream("r").tokens) == 2


def test_a_group_computes_them_once_for_its_first_choice():
    h = Harness(max_num_batched_tokens=8)
    h.add("g", PROMPT, n=3, prompt_logprobs=0, max_tokens=3)
    h.run_out()
    assert told(h, "g") == whole(PROMPT) and told(h, "g", 1) == told(h, "g", 2) == []
    assert h.runner.computed_tokens == len(PROMPT) + 2 + 2 * 3, "the others share the prompt's KV"


def test_a_prefix_hit_is_not_taken_but_what_it_computes_may_be_hit():
    h = Harness()
    h.add("before", PROMPT, max_tokens=1)
    h.run_out()
    h.add("asks", PROMPT, prompt_logprobs=1, max_tokens=1)
    h.run_out()
    assert told(h, "asks") == whole(PROMPT) and h.stream("asks").finals[0].cached_tokens == 0
    fresh = Harness()
    fresh.add("asks", PROMPT, prompt_logprobs=1, max_tokens=1)
    fresh.run_out()
    fresh.add("after", PROMPT, max_tokens=1)
    fresh.run_out()
    assert fresh.stream("after").finals[0].cached_tokens == len(PROMPT) - 1


def test_they_are_told_once_though_the_request_is_preempted_before_and_after_its_first_token():
    h = Harness(FakeRunner(num_blocks=20, max_model_len=64), max_num_batched_tokens=8)
    h.add("first", [7] * 8, max_tokens=50)
    h.add("asks", PROMPT, prompt_logprobs=1, max_tokens=30)
    h.run_rounds(3)
    request = h.engine.lifecycle.requests.get("asks")[0]
    assert 0 < request.num_computed < len(PROMPT)
    h.engine.scheduler.retract(request)
    h.run_out()
    assert h.stream("asks").finals[0].num_preempted > 0, "it gave way while it ran, too"
    assert told(h, "asks") == whole(PROMPT) and h.stream("asks").tokens == expected_tokens(PROMPT, 30)


@pytest.mark.parametrize("clear_cache", [False, True])
def test_a_pause_in_the_middle_of_the_prompt_loses_none(clear_cache):
    h = Harness(max_num_batched_tokens=8)
    h.add("r", PROMPT, prompt_logprobs=1, max_tokens=3)
    h.run_rounds(2)
    h.pause(mode="keep", clear_cache=clear_cache)
    assert told(h, "r") == []
    h.resume()
    h.run_out()
    assert told(h, "r") == whole(PROMPT)


def test_an_abort_in_the_middle_returns_those_that_are_known():
    h = Harness(max_num_batched_tokens=8)
    h.add("r", PROMPT, prompt_logprobs=1, max_tokens=3)
    h.run_rounds(2)
    h.ask(m.AbortArgs(request_ids=["r"]))
    assert told(h, "r") == whole(PROMPT)[:16] and h.stream("r").reason == "abort"


@pytest.mark.parametrize("kv", ["keep", "recompute"])
@pytest.mark.parametrize("rounds", [1, 2, 3, 4])
def test_an_update_in_the_middle_of_the_prompt_leaves_none_of_the_old_weights(tmp_path, kv, rounds):
    """The weights of the prompt logprobs are those of the first token."""
    h = Harness(max_num_batched_tokens=8)
    h.add("r", PROMPT, prompt_logprobs=1, max_tokens=20)
    h.run_rounds(rounds)
    first_by_old = h.stream("r").tokens != []
    folder = tmp_path / ("w3" if kv == "keep" else "w3-recompute")
    folder.mkdir()
    assert h.update(folder, kv=kv).failure is None
    h.run_out()
    first = h.stream("r").spans[0].weight_epoch
    assert told(h, "r") == whole(PROMPT, weights=3 if first else 0) and (first == 0) >= first_by_old


def test_resumed_tokens_count_as_output_for_penalties_and_first_choice_for_random_numbers():
    h = Harness()
    h.add("r", PROMPT, resumed_tokens=10, first_choice=2, n=2, max_tokens=2)
    h.run_rounds()
    h.run_rounds()
    told = {c.new.key: c.new for plan in h.runner.plans for c in plan.chunks if c.new is not None}
    assert sorted(told) == [("r", 2), ("r", 3)]
    assert {new.num_prompt_tokens for new in told.values()} == {20}


@pytest.mark.parametrize(
    ("field", "value"), [("resumed_tokens", 30), ("resumed_tokens", -1), ("first_choice", -1), ("first_choice", 2**31)]
)
def test_impossible_resubmissions_are_refused_by_name(field, value):
    h = Harness()
    h.add("r", PROMPT, **{field: value})
    h.run_rounds()
    failure = h.rejected("r")
    assert failure.code == InvalidField.code and failure.detail["param"] == field


def test_more_than_a_reply_may_hold_are_refused_at_the_engines_door_too():
    h = Harness(FakeRunner(num_blocks=2048, max_model_len=8192))
    h.add("fits", [1] * 5190, prompt_logprobs=100, max_tokens=1)
    h.add("too many", [1] * 5191, prompt_logprobs=100)
    h.run_rounds()
    assert h.rejected("fits") is None
    failure = h.rejected("too many")
    assert failure.detail["param"] == "prompt_logprobs" and "expected at most 524288" in failure.message


def test_a_label_changed_between_two_tokens_makes_two_spans_of_one_epoch():
    """known failure 26 and 23: only the label changes, nothing is aborted."""
    h = Harness()
    h.add("r", [1, 2], max_tokens=6)
    h.run_rounds(3)
    before = len(h.stream("r").tokens)
    h.ask(m.SetVersionArgs("renamed"))
    h.run_out()
    spans = h.stream("r").spans
    assert [s.version for s in spans] == ["0"] * before + ["renamed"] * (6 - before)
    assert {s.weight_epoch for s in spans} == {0} and h.stream("r").reason == "length"
