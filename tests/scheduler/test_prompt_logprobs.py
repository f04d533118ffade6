"""Prompt logprobs: each prompt token from the second on is reported once, and all under the same weights."""

from __future__ import annotations

import pytest

from fastdeploy.core.errors import InvalidField
from fastdeploy.core.request import Preemption
from fastdeploy.inter_communicator import messages as m
from support.fake_runner import FakeRunner, expected_tokens
from support.harness import Harness

PROMPT = list(range(1, 31))


def reported(h: Harness, request_id: str, choice: int = 0) -> list[tuple[int, float]]:
    """Return the (prompt token, logprob) of all outputs of a choice, in order."""
    outputs = [o for x in h.transport.sent["a"] if isinstance(x, m.Outputs) for o in x.outputs]
    mine = [o for o in outputs if (o.request_id, o.choice) == (request_id, choice)]
    return [(entry.top[0][0], entry.logprob) for o in mine for entry in o.prompt_logprobs]


def all_of(prompt: list[int], weights: int = 0) -> list[tuple[int, float]]:
    return [(token, -1.0 - weights) for token in prompt[1:]]


@pytest.mark.parametrize("budget", [1, 7, 8, 64])
def test_a_prompt_in_several_chunks_gets_all_logprobs_in_order(budget):
    h = Harness(max_num_batched_tokens=budget)
    h.add("r", PROMPT, prompt_logprobs=1, max_tokens=3)
    h.add("plain", PROMPT[5:], max_tokens=3)
    h.add("one token", [5], prompt_logprobs=1, max_tokens=2)
    h.run_out()
    assert reported(h, "r") == all_of(PROMPT) and reported(h, "plain") == reported(h, "one token") == []
    assert len(h.stream("one token").tokens) == 2
    assert h.stream("r").tokens == expected_tokens(PROMPT, 3)


def test_only_the_first_choice_computes_prompt_logprobs():
    h = Harness(max_num_batched_tokens=8)
    h.add("g", PROMPT, n=3, prompt_logprobs=0, max_tokens=3)
    h.run_out()
    assert reported(h, "g") == all_of(PROMPT) and reported(h, "g", 1) == reported(h, "g", 2) == []
    assert h.runner.computed_tokens == len(PROMPT) + 2 + 2 * 3, "the other choices share the prompt's KV"


def test_prompt_logprobs_take_no_prefix_hit_and_leave_blocks_for_later_hits():
    h = Harness()
    h.add("before", PROMPT, max_tokens=1)
    h.run_out()
    h.add("asks", PROMPT, prompt_logprobs=1, max_tokens=1)
    h.run_out()
    assert reported(h, "asks") == all_of(PROMPT) and h.stream("asks").finals[0].cached_tokens == 0
    fresh = Harness()
    fresh.add("asks", PROMPT, prompt_logprobs=1, max_tokens=1)
    fresh.run_out()
    fresh.add("after", PROMPT, max_tokens=1)
    fresh.run_out()
    assert fresh.stream("after").finals[0].cached_tokens == len(PROMPT) - 1


def test_prompt_logprobs_are_reported_once_if_the_request_is_preempted_before_and_after_its_first_token():
    h = Harness(FakeRunner(num_blocks=20, max_model_len=64), max_num_batched_tokens=8)
    h.add("first", [7] * 8, max_tokens=50)
    h.add("asks", PROMPT, prompt_logprobs=1, max_tokens=30)
    h.run_rounds(3)
    request = h.engine.lifecycle.requests.get("asks")[0]
    assert 0 < request.num_computed < len(PROMPT)
    h.engine.scheduler.retract(request, Preemption.MEMORY)
    h.run_out()
    assert h.stream("asks").finals[0].num_preempted > 0, "preempted after the first token, too"
    assert reported(h, "asks") == all_of(PROMPT) and h.stream("asks").tokens == expected_tokens(PROMPT, 30)


@pytest.mark.parametrize("clear_cache", [False, True])
def test_a_pause_in_the_middle_of_the_prompt_loses_no_logprobs(clear_cache):
    h = Harness(max_num_batched_tokens=8)
    h.add("r", PROMPT, prompt_logprobs=1, max_tokens=3)
    h.run_rounds(2)
    h.pause(mode="keep", clear_cache=clear_cache)
    assert reported(h, "r") == []
    h.resume()
    h.run_out()
    assert reported(h, "r") == all_of(PROMPT)


def test_an_abort_in_the_middle_of_the_prompt_returns_the_logprobs_so_far():
    h = Harness(max_num_batched_tokens=8)
    h.add("r", PROMPT, prompt_logprobs=1, max_tokens=3)
    h.run_rounds(2)
    h.ask(m.AbortArgs(request_ids=["r"]))
    assert reported(h, "r") == all_of(PROMPT)[:16] and h.stream("r").reason == "abort"


@pytest.mark.parametrize("kv", ["keep", "recompute"])
@pytest.mark.parametrize("rounds", [1, 2, 3, 4])
def test_after_an_update_in_the_middle_of_the_prompt_all_logprobs_are_of_the_weights_of_the_first_token(
    tmp_path, kv, rounds
):
    h = Harness(max_num_batched_tokens=8)
    h.add("r", PROMPT, prompt_logprobs=1, max_tokens=20)
    h.run_rounds(rounds)
    first_by_old = h.stream("r").tokens != []
    folder = tmp_path / ("w3" if kv == "keep" else "w3-recompute")
    folder.mkdir()
    assert h.update(folder, kv=kv).failure is None
    h.run_out()
    first = h.stream("r").spans[0].weight_epoch
    assert reported(h, "r") == all_of(PROMPT, weights=3 if first else 0) and (first == 0) >= first_by_old


def test_the_runner_is_told_resumed_tokens_and_first_choice():
    h = Harness()
    h.add("r", PROMPT, resumed_tokens=10, first_choice=2, n=2, max_tokens=2)
    h.run_rounds(2)
    told = {c.new.key: c.new for plan in h.runner.plans for c in plan.chunks if c.new is not None}
    assert sorted(told) == [("r", 2), ("r", 3)]
    assert {new.num_prompt_tokens for new in told.values()} == {20}


@pytest.mark.parametrize(
    ("field", "value"), [("resumed_tokens", 30), ("resumed_tokens", -1), ("first_choice", -1), ("first_choice", 2**31)]
)
def test_impossible_values_of_a_resubmission_are_refused(field, value):
    h = Harness()
    h.add("r", PROMPT, **{field: value})
    h.run_rounds()
    failure = h.rejected("r")
    assert failure.code == InvalidField.code and failure.detail["param"] == field


def test_the_engine_refuses_more_prompt_logprobs_than_a_reply_may_hold():
    h = Harness(FakeRunner(num_blocks=2048, max_model_len=8192))
    h.add("fits", [1] * 8160, prompt_logprobs=256, max_tokens=1)
    h.add("too many", [1] * 8161, prompt_logprobs=256)
    h.run_rounds()
    assert h.rejected("fits") is None
    failure = h.rejected("too many")
    assert failure.detail["param"] == "prompt_logprobs" and "expected at most 2097152" in failure.message


def test_a_new_label_between_two_tokens_makes_two_spans_of_one_weight_epoch():
    """Known failures 26 and 23: only the label changes, and nothing is aborted."""
    h = Harness()
    h.add("r", [1, 2], max_tokens=6)
    h.run_rounds(3)
    before = len(h.stream("r").tokens)
    h.ask(m.SetVersionArgs("renamed"))
    h.run_out()
    spans = h.stream("r").spans
    assert [s.version for s in spans] == ["0"] * before + ["renamed"] * (6 - before)
    assert {s.weight_epoch for s in spans} == {0} and h.stream("r").reason == "length"
