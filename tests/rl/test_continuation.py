"""Continuation of an aborted answer: the joined answer equals that of an undisturbed run."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdeploy.core.errors import InvalidField
from fastdeploy.rl.client import RolloutClient
from fastdeploy.rl.continuation import REST_OF_CONTEXT, PartialRollout, RolloutRequest
from fastdeploy.rl.errors import MalformedReply, RolloutFailed
from fastdeploy.rl.rollout import Rollout
from rl.coroutines import run
from rl.fake_server import EOS, FakeServer, Fault, rows_of, token_at
from support.loop_clock import pass_time
from support.search import examples

PROMPT = [11, 12, 13, 14, 15]
PARAMS = {"max_tokens": 12, "seed": 3, "ignore_eos": True, "prompt_logprobs": 0}


def rollouts(*faults: Fault | None, params=PARAMS, n: int = 1) -> tuple[list[Rollout], FakeServer]:
    async def go():
        async with FakeServer(*faults) as server, RolloutClient(server.url) as client:
            return await client.generate_group(PROMPT, params, n=n), server

    return run(go())


def rollout(*faults: Fault | None, params=PARAMS) -> tuple[Rollout, FakeServer]:
    (one,), server = rollouts(*faults, params=params)
    return one, server


def content(r: Rollout) -> tuple:
    spans = [(s.version, s.weight_epoch, s.start, s.end) for s in r.spans]
    told = r.token_ids, r.logprobs, spans, r.text, r.prompt_logprobs, r.routed_experts
    return *told, r.finish_reason, r.stop_reason, r.index


def begun(request: RolloutRequest, tokens: list[int]) -> PartialRollout:
    """Return a choice whose first attempt has made ``tokens``."""
    partial = PartialRollout(request)
    partial.begin_attempt()
    partial.add_output({"token_ids": tokens, "logprobs": {"token_logprobs": [-1.0] * len(tokens)}}, None)
    return partial


@pytest.mark.parametrize("kind", ["abort", "drop", "engine_dead"])
@pytest.mark.parametrize("k", range(13))
def test_an_answer_aborted_at_any_token_equals_that_of_an_undisturbed_run(k, kind):
    alone, _ = rollout()
    assert len(alone.token_ids) == 12 == len(alone.logprobs) and alone.finish_reason == "length"
    joined, server = rollout(Fault(kind, k))
    assert content(joined) == content(alone)
    assert joined.num_resumes == len(server.requests) - 1 == (1 if k < 12 else 0)


@pytest.mark.parametrize(
    ("fault", "cached"),
    [(None, 1), (Fault("abort"), 2), (Fault("abort", 5), 1), (Fault("drop"), 2), (Fault("drop", 5), None)],
)
def test_the_cached_tokens_are_those_of_the_attempt_that_made_the_first_token(fault, cached):
    assert rollout(fault)[0].cached_tokens == cached


@examples(40)
@given(
    faults=st.lists(
        st.builds(Fault, st.sampled_from(["abort", "drop", "engine_dead", "reject", "full"]), st.integers(0, 9))
        | st.builds(Fault, st.just("abort"), st.just(0), st.integers(0, len(PROMPT) - 1)),
        max_size=6,
    ),
    n=st.integers(1, 3),
    params=st.fixed_dictionaries(
        {
            "seed": st.integers(0, 50),
            "max_tokens": st.integers(1, 40),
            "min_tokens": st.integers(0, 1),
            "prompt_logprobs": st.sampled_from([0, None]),
        },
        optional={
            "ignore_eos": st.booleans(),
            "logprobs": st.sampled_from([None, 0, 2]),
            "routed_experts": st.booleans(),
        },
    ),
)
def test_any_schedule_of_faults_gives_the_undisturbed_answer(faults, n, params):
    before = copy.deepcopy(params)
    alone, _ = rollouts(params=params, n=n)
    joined, server = rollouts(*faults, params=params, n=n)
    assert [content(r) for r in joined] == [content(r) for r in alone]
    for r in joined:
        if params.get("routed_experts"):
            assert r.routed_experts.num_rows == len(PROMPT) + len(r.token_ids) - 1
        assert len(r.token_ids) <= params["max_tokens"]
        assert r.logprobs is None if params.get("logprobs", 0) is None else len(r.logprobs) == len(r.token_ids)
    assert params == before, "the caller's parameters are not changed"


def test_a_continuation_asks_for_the_remaining_tokens_with_the_same_seed_and_choice():
    joined, server = rollout(Fault("abort", 4), Fault("drop", 3), params=PARAMS | {"min_tokens": 6, "temperature": 0.7})
    first, second, third = server.requests
    assert [b["max_tokens"] for b in server.requests] == [12, 8, 5]
    assert [b["min_tokens"] for b in server.requests] == [6, 2, 0]
    assert [b.get("resumed_tokens") for b in server.requests] == [None, 4, 7]
    assert [len(b["prompt"]) for b in server.requests] == [5, 9, 12]
    assert {b["seed"] for b in server.requests} == {3} and {b["temperature"] for b in server.requests} == {0.7}
    assert third["prompt"] == PROMPT + joined.token_ids[:7]
    assert "prompt_logprobs" in first and "prompt_logprobs" not in second, "prompt logprobs are requested once"
    assert len(joined.prompt_logprobs) == len(PROMPT) and joined.prompt_logprobs[1] == {12: {"logprob": -0.5}}
    assert joined.num_preempted == 2  # of the two attempts that reported it: the first and the last


def test_prompt_logprobs_that_were_lost_are_asked_for_again_and_cut_to_the_original_prompt():
    request = RolloutRequest(PROMPT, {"prompt_logprobs": 0, "max_tokens": 9})
    partial = begun(request, [1, 2])
    body = request.body([partial])
    assert body["prompt_logprobs"] == 0
    partial.begin_attempt()
    entries = [None, *({str(t): {"logprob": -1.0}} for t in body["prompt"][1:])]
    partial.add_output({"token_ids": [3], "logprobs": {"token_logprobs": [-3.0]}, "prompt_logprobs": entries}, None)
    assert len(partial.rollout().prompt_logprobs) == len(PROMPT)
    assert "prompt_logprobs" not in request.body([partial])


@pytest.mark.parametrize("prefilled", [None, *range(len(PROMPT))])
def test_a_part_of_the_prompt_logprobs_is_not_taken_for_all_of_them(prefilled):
    """Known failure 52: an abort within the prompt, before the first token."""
    alone, _ = rollout()
    joined, server = rollout(Fault("abort", 0, prefilled), Fault("drop", 0), Fault("abort", 0, prefilled))
    assert content(joined) == content(alone) and len(joined.prompt_logprobs) == len(PROMPT)
    assert ["prompt_logprobs" in body for body in server.requests] == [True] * 4


def test_a_token_with_a_part_of_the_prompt_logprobs_is_malformed():
    partial = begun(RolloutRequest(PROMPT, {"prompt_logprobs": 0}), [])
    event = {"token_ids": [1], "logprobs": {"token_logprobs": [-1.0]}, "prompt_logprobs": [None]}
    with pytest.raises(MalformedReply, match="5 prompt tokens, got 1"):
        partial.add_output(event, None)


def test_aborted_choices_of_a_group_continue_without_changing_the_others():
    group, server = rollouts(Fault("drop", 5), n=4)
    assert [r.token_ids for r in group] == [[token_at(3, k, position) for position in range(5, 17)] for k in range(4)]
    assert server.requests[0]["n"] == 4 and "first_choice" not in server.requests[0]
    assert sorted((b["n"], b.get("first_choice", 0)) for b in server.requests[1:]) == [(1, k) for k in range(4)]


@pytest.mark.parametrize("given", [{}, {"seed": -1}], ids=str)
def test_a_seed_is_chosen_by_the_client_and_stays_the_same(given):
    joined, server = rollout(Fault("abort", 5), params={"max_tokens": 12, "ignore_eos": True, **given})
    assert {b["seed"] for b in server.requests} == {joined.seed} and joined.seed >= 0
    again, _ = rollout(params={"max_tokens": 12, "ignore_eos": True, "seed": joined.seed})
    assert again.token_ids == joined.token_ids


def test_without_max_tokens_the_rest_of_the_context_is_asked_for():
    seed = next(s for s in range(1000) if EOS in [token_at(s, 0, p) for p in range(9, 30)] and
                EOS not in [token_at(s, 0, p) for p in range(5, 9)])  # fmt: skip
    joined, server = rollout(Fault("abort", 4), params={"seed": seed})
    assert {b["max_tokens"] for b in server.requests} == {REST_OF_CONTEXT} and joined.finish_reason == "stop"


def test_an_abort_by_the_callers_own_deadline_is_not_continued():
    done, server = rollout(Fault("deadline", 4), params=PARAMS | {"deadline_s": 1.0})
    assert (done.finish_reason, done.stop_reason, len(done.token_ids)) == ("abort", "deadline", 4)
    assert len(server.requests) == 1


def test_a_deadline_covers_all_attempts_together():
    _, server = rollout(Fault("abort", 4), Fault("abort", 3), params=PARAMS | {"deadline_s": 5.0})
    given = [b["deadline_s"] for b in server.requests]
    assert 5.0 > given[0] > given[1] > given[2] > 0
    request = RolloutRequest(PROMPT, {"deadline_s": 1e-9})
    assert request.body([PartialRollout(request)])["deadline_s"] > 0, "0 would be refused"


def test_an_aborted_attempt_whose_last_token_is_eos_is_complete():
    request = RolloutRequest(PROMPT, {"max_tokens": 9, "min_tokens": 2, "stop_token_ids": [5]}, eos_ids=(EOS,))
    for tokens, end in (([1, EOS], "stop"), ([1, 5], "stop"), ([EOS], None), ([1, 2], None)):
        partial = begun(request, tokens)
        partial.end_attempt_early()
        assert partial.finish_reason == end, tokens


@pytest.mark.parametrize(
    "chunk",
    [
        {"token_ids": [1, 2], "logprobs": {"token_logprobs": [-1.0]}},
        {"token_ids": [1, 2], "logprobs": {"token_logprobs": [-1.0, None]}},
        {"token_ids": [1, 2], "logprobs": None},
        {"token_ids": [1] * 4, "logprobs": {"token_logprobs": [-1.0] * 4}},
    ],
)
def test_missing_logprobs_and_too_many_tokens_raise(chunk):
    partial = begun(RolloutRequest(PROMPT, {"max_tokens": 3}), [])
    with pytest.raises(MalformedReply):
        partial.add_output(chunk, None)


def test_a_choice_with_max_tokens_is_complete_although_its_last_event_was_lost():
    partial = begun(RolloutRequest(PROMPT, {"max_tokens": 3}), [1, 2, 3])
    partial.end_attempt_early()
    assert partial.finish_reason == "length"


def test_all_choices_of_a_group_have_the_prompt_logprobs_also_if_the_stream_breaks_after_some_were_complete():
    params = {"seed": 25, "max_tokens": 6, "prompt_logprobs": 0}
    (first, second, third), server = rollouts(Fault("engine_dead", 5), params=params, n=3)
    assert len(server.requests) > 1 and {first.num_resumes, second.num_resumes, third.num_resumes} == {0, 1}
    assert len(first.prompt_logprobs) == len(PROMPT)
    assert first.prompt_logprobs == second.prompt_logprobs == third.prompt_logprobs


@pytest.mark.parametrize("field", ["n", "stream", "prompt", "request_id", "resumed_tokens"])
def test_a_parameter_that_the_client_sets_itself_is_refused_by_name(field):
    with pytest.raises(InvalidField, match=field):
        RolloutRequest(PROMPT, {field: 1})


async def test_an_invalid_request_raises_at_once_and_is_not_repeated():
    async with FakeServer() as server, RolloutClient(server.url) as client:
        with pytest.raises(InvalidField):
            await client.generate([1000], PARAMS)
        assert len(server.requests) == 1
        assert (await client.generate(PROMPT, PARAMS)).num_resumes == 0


async def test_a_failed_rollout_keeps_its_tokens(monkeypatch):
    async with FakeServer(Fault("drop", 4), *[Fault("drop", 0)] * 99) as server:
        async with RolloutClient(server.url, max_failures=3) as client:
            with pytest.raises(RolloutFailed, match="4 failures in a row") as failed:
                await client.generate(PROMPT, PARAMS)
        assert len(failed.value.partial[0].token_ids) == 4
        assert failed.value.partial[0].finish_reason == "abort"
    add = PartialRollout.add_output

    def add_until_it_hangs(choice: PartialRollout, *output: Any) -> None:
        add(choice, *output)
        if len(choice.token_ids) == 2:
            pass_time(30.0)

    monkeypatch.setattr(PartialRollout, "add_output", add_until_it_hangs)
    async with FakeServer(Fault("hang", 2)) as server, RolloutClient(server.url) as client:
        with pytest.raises(RolloutFailed, match="in time") as failed:
            await client.generate(PROMPT, PARAMS, timeout_s=30.0)
        assert len(failed.value.partial[0].token_ids) == 2


async def test_a_cancelled_generation_closes_its_stream():
    async with FakeServer(Fault("hang", 1)) as server, RolloutClient(server.url) as client:
        task = asyncio.create_task(client.generate(PROMPT, PARAMS))
        while not server.streams:
            await asyncio.sleep(0.01)
        task.cancel()
        while server.streams:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("n", [1, 3])
async def test_non_finite_logits_raise_with_all_tokens_and_are_not_retried(n):
    async with FakeServer(Fault("non_finite", 4)) as server, RolloutClient(server.url) as client:
        with pytest.raises(RolloutFailed, match="non_finite_logits") as failed:
            await client.generate_group(PROMPT, PARAMS, n=n)
    assert len(server.requests) == 1
    rollouts = failed.value.partial
    assert [r.finish_reason for r in rollouts] == ["error"] + ["length"] * (n - 1)
    assert [len(r.token_ids) for r in rollouts] == [4] + [12] * (n - 1)


def test_sampling_masks_and_logprobs_of_given_ids_are_joined_over_attempts():
    params = {"return_sampling_mask": True, "return_sampling_mask_logprobs": True, "logprob_token_ids": [4], "top_k": 2}
    partial = PartialRollout(RolloutRequest(PROMPT, params))
    for token in (7, 8):
        partial.begin_attempt()
        logprobs = {"token_logprobs": [-1.0], "top_logprobs": [{f"token_id:{token}": -1.0, "token_id:4": -2.0}]}
        masks = {"sampling_mask": [[4, token]], "sampling_mask_logprobs": [[-2.0, -1.0]]}
        partial.add_output({"token_ids": [token], "logprobs": logprobs, "finish_reason": "abort", **masks}, None)
    joined = partial.rollout()
    assert joined.sampling_masks == [[4, 7], [4, 8]] and joined.sampling_mask_logprobs == [[-2.0, -1.0]] * 2
    assert joined.top_logprobs == [{7: -1.0, 4: -2.0}, {8: -1.0, 4: -2.0}]
    partial.begin_attempt()
    with pytest.raises(MalformedReply, match="sampling_mask"):
        partial.add_output({"token_ids": [9], "logprobs": logprobs, "sampling_mask": []}, None)


def test_a_continuation_asks_for_the_rows_that_are_not_here_yet():
    params = PARAMS | {"routed_experts": True, "routed_experts_start": 2}
    joined, server = rollout(Fault("abort", 4), Fault("drop", 0), Fault("drop", 3), params=params)
    assert [b["routed_experts_start"] for b in server.requests] == [2, 8, 8, 11]
    assert joined.routed_experts.start == 2 and joined.routed_experts.info.layers == (0, 2)
    expected = [[[p % 4], [p * p // 3 % 4]] for p in range(2, len(PROMPT) + 12 - 1)]
    assert joined.routed_experts.array().tolist() == expected


def test_a_server_that_returns_rows_unasked_is_told_not_to():
    _, server = rollout()
    assert server.requests[0]["routed_experts"] is False


@pytest.mark.parametrize(
    ("change", "message"),
    [({"start": 1}, "from position 0 on, got 10 bytes of shape"), ({"shape": [4, 2, 1]}, "got 10 bytes"),
     ({"num_experts": 300}, "got 10 bytes"), ({"layers": [0]}, "got 10 bytes"),
     (None, "expected routed_experts up to position 5, got those up to 0")],
)  # fmt: skip
def test_rows_that_do_not_fit_are_refused(change, message):
    partial = PartialRollout(RolloutRequest(PROMPT, {"routed_experts": True, "logprobs": None}))
    partial.begin_attempt()
    rows = None if change is None else rows_of(range(5)) | change
    with pytest.raises(MalformedReply, match=message):
        partial.add_output({"token_ids": [9], "routed_experts": rows}, None)


def test_rows_of_another_model_are_refused():
    partial = PartialRollout(RolloutRequest(PROMPT, {"routed_experts": True, "logprobs": None}))
    partial.begin_attempt()
    partial.add_output({"token_ids": [9], "routed_experts": rows_of(range(5))}, None)
    with pytest.raises(MalformedReply, match="num_experts=4.*got those of.*num_experts=8"):
        partial.add_output({"token_ids": [9], "routed_experts": rows_of(range(5, 6)) | {"num_experts": 8}}, None)
