"""The server handle that verl calls, against the scripted server, without verl. test_verl.py uses verl itself."""

from __future__ import annotations

import asyncio
import copy
from collections import deque
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from fastdeploy.core.errors import ContextLengthExceeded, FastDeployError, InvalidField, WeightUpdateRefused
from fastdeploy.rl.client import RolloutClient
from fastdeploy.rl.errors import RolloutFailed
from fastdeploy.rl.frameworks import verl_server
from fastdeploy.rl.frameworks.verl_server import Limits, VerlServer, address_of, peek_first, publish_step
from rl.fake_server import FakeServer, Fault, fake_site

PROMPT = [11, 12, 13, 14, 15]
PARAMS = {"temperature": 1.0, "logprobs": True, "ignore_eos": True, "seed": 3, "max_tokens": 8}
LIMITS = Limits(prompt_length=10, response_length=20, max_model_len=64)


@pytest.fixture
def waits(monkeypatch) -> list[float]:
    """The seconds of each wait that the server handle asked for."""
    seconds_of_waits: list[float] = []
    sleep = asyncio.sleep

    async def record(seconds: float) -> None:
        seconds_of_waits.append(round(seconds, 4))
        await sleep(seconds)

    monkeypatch.setattr(verl_server, "asyncio", SimpleNamespace(**(vars(asyncio) | {"sleep": record})))
    monkeypatch.setattr(verl_server, "BACKOFF_S", 0.001)
    return seconds_of_waits


@asynccontextmanager
async def handle(*faults: Fault | None, limits: Limits = LIMITS):
    async with FakeServer(*faults) as server:
        verl = VerlServer(server.url, limits, SimpleNamespace)
        yield server, verl
        await verl.close()


async def test_a_whole_answer_is_completed_and_has_the_step_of_its_weights():
    async with handle() as (server, verl):
        server.version, before = "41", copy.deepcopy(PARAMS)
        out = await verl.generate(PROMPT, PARAMS, "r1")
        assert out.stop_reason == "completed" and len(out.token_ids) == len(out.log_probs) == 8
        assert [out.extra_fields[f"{which}global_steps"] for which in ("", "min_", "max_")] == [41, 41, 41]
        assert before == PARAMS and server.requests[0]["request_id"] == "r1"
        assert server.requests[0]["logprobs_mode"] == "processed"
        assert (await verl.generate(PROMPT, PARAMS | {"logprobs": False}, "r2")).log_probs is None


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("kind", ["abort", "drop", "engine_dead"])
async def test_a_broken_generation_is_returned_as_aborted_with_its_tokens(kind, k):
    async with handle(Fault(kind, k)) as (server, verl):
        out = await verl.generate(PROMPT, PARAMS, "r1")
        assert out.stop_reason == "aborted" and len(out.token_ids) == len(out.log_probs) == k
        assert len(server.requests) == 1, "verl's client continues, the handle does not"


async def test_routing_has_all_layers_and_is_joined_over_attempts_as_verl_joins_it():
    async with handle(None, Fault("abort", 3), limits=replace(LIMITS, routed_experts=True)) as (server, verl):
        whole = await verl.generate(PROMPT, PARAMS, "r1")
        first = await verl.generate(PROMPT, PARAMS, "r2")
        rest = await verl.generate(PROMPT + first.token_ids, PARAMS | {"max_tokens": 5}, "r3")
        assert [out.routed_experts.shape for out in (whole, first, rest)] == [(12, 3, 1), (7, 3, 1), (12, 3, 1)]
        expected = [[[p % 4], [0], [p * p // 3 % 4]] for p in range(len(PROMPT) + 8 - 1)]
        assert whole.routed_experts.tolist() == expected
        joined = [*first.routed_experts.tolist(), *rest.routed_experts[-len(rest.token_ids) :].tolist()]
        assert joined == expected
    async with handle(Fault("abort", 0)) as (server, verl):
        assert (await verl.generate(PROMPT, PARAMS, "r1")).routed_experts is None
        assert server.requests[0]["routed_experts"] is False


async def test_the_reported_steps_are_those_at_which_the_tokens_were_sampled():
    async with handle() as (server, verl):
        server.version = "4"

        def update(position):
            if position == 6:
                server.version, server.weight_epoch = "5", 1

        server.before_token = update
        fields = (await verl.generate(PROMPT, PARAMS, "r1")).extra_fields
        assert (fields["min_global_steps"], fields["max_global_steps"], fields["global_steps"]) == (4, 5, 4)
        await verl.set_global_steps(9)
        assert server.calls[-1] == ("/v1/update_weights", {"version": "9"})
        server.faults.append(Fault("abort", 0))
        assert (await verl.generate(PROMPT, PARAMS, "r2")).extra_fields["global_steps"] == 9


async def test_max_tokens_is_as_asked_or_the_rest_of_the_response_within_the_context():
    assert LIMITS.max_tokens(7, 5) == 7
    assert LIMITS.max_tokens(None, 5) == 20 and LIMITS.max_tokens(None, 25) == 5
    assert LIMITS.max_tokens(None, 40) == 1 and LIMITS.max_tokens(99, 60) == 4
    with pytest.raises(ContextLengthExceeded, match="prompt_ids"):
        LIMITS.max_tokens(1, 64)
    async with handle() as (server, verl):
        await verl.generate(PROMPT, {"max_new_tokens": 6}, "r")
        assert server.requests[0]["max_tokens"] == 6 and "max_new_tokens" not in server.requests[0]


async def test_logits_that_are_not_finite_raise():
    async with handle(Fault("non_finite", 3)) as (_, verl):
        with pytest.raises(RolloutFailed, match="non_finite_logits") as failed:
            await verl.generate(PROMPT, PARAMS, "r")
        assert len(failed.value.partial[0].token_ids) == 3


async def test_images_are_refused_by_name():
    async with handle() as (_, verl):
        with pytest.raises(InvalidField, match="image_data"):
            await verl.generate(PROMPT, PARAMS, "r", image_data=[b"x"])


async def test_abort_all_holds_or_rejects_requests_as_asked_until_the_resume():
    async with handle() as (server, verl):
        pauses = []

        def pause(body):
            pauses.append(body)
            server.holds[body["hold_id"]] = body["admission"]
            return {"aborted_ids": ["r1", "r2"], "forced_ids": []}

        server._v1_pause = pause
        assert await verl.abort_all_requests() == {"aborted_count": 2, "request_ids": ["r1", "r2"]}
        assert pauses[0]["mode"] == "abort" and pauses[0]["clear_cache"] is True and pauses[0]["ttl_s"] == 60.0
        assert list(server.holds.values()) == ["hold"]
        await verl.abort_all_requests(reject_request=True)
        assert list(server.holds.values()) == ["reject"]
        await verl.abort_all_requests(reset_prefix_cache=False)
        assert list(server.holds.values()) == ["hold"] and pauses[-1]["clear_cache"] is False
        server.holds["other"] = "hold"
        await verl.resume_generation()
        assert server.holds == {"other": "hold"}


@pytest.mark.parametrize("kind", ["reject", "full"])
async def test_a_busy_server_is_asked_again_after_its_retry_after(kind, waits):
    async with handle(*[Fault(kind)] * 5) as (server, verl):
        out = await verl.generate(PROMPT, PARAMS, "r1")
        assert out.stop_reason == "completed" and len(out.token_ids) == 8
        assert [body["request_id"] for body in server.requests] == ["r1"] * 6, "no server had accepted the id"
        assert waits == [0.01] * 5


async def test_a_lasting_refusal_ends_as_an_abort_without_a_busy_loop(waits, monkeypatch):
    monkeypatch.setattr(verl_server, "BUSY_S", 0.05)
    async with handle(*[Fault("full")] * 1000) as (server, verl):
        out = await verl.generate(PROMPT, PARAMS, "r1")
        assert out.stop_reason == "aborted" and out.token_ids == []
        assert len(server.requests) == len(waits) >= 1, "a wait follows each refusal"
        assert set(waits[:-1]) <= {0.01} and waits[-1] <= 0.01


async def test_a_request_is_aborted_after_one_wait_if_verl_asked_for_rejections(waits):
    """verl then sends the request to another server."""
    async with handle() as (server, verl):
        server._v1_pause = lambda body: {"aborted_ids": []}
        await verl.abort_all_requests(reject_request=True)
        server.faults.extend([Fault("reject")] * 9)
        rejected = await verl.generate(PROMPT, PARAMS, "late")
        assert rejected.stop_reason == "aborted" and rejected.token_ids == []
        assert len(server.requests) == 1 and waits == [0.01]


@pytest.mark.parametrize("status", [401, 403])
async def test_a_wrong_key_raises_at_once(status):
    async with handle() as (server, verl):
        server.refuse["/v1/completions"] = deque([(status, "invalid_api_key")] * 9)
        with pytest.raises(FastDeployError, match="invalid_api_key"):
            await verl.generate(PROMPT, PARAMS, "r1")
        assert len(server.requests) == 1


async def test_equal_prompts_of_a_seeded_run_get_different_answers_that_each_run_repeats():
    """verl's full_determinism has one seed per server, and sends the members of a group one by one."""
    unseeded = {name: value for name, value in PARAMS.items() if name != "seed"}
    seeds, answers = [], []
    for _ in range(2):
        async with handle(limits=replace(LIMITS, seed=5)) as (server, verl):
            asked = [unseeded, unseeded | {"seed": -1}] * 2
            answers.append([tuple((await verl.generate(PROMPT, asked[k], f"r{k}")).token_ids) for k in range(4)])
            await verl.generate(PROMPT, PARAMS, "with a seed")
            seeds.append([body["seed"] for body in server.requests])
    assert seeds[0] == seeds[1] and len(set(seeds[0])) == 5 and seeds[0][-1] == PARAMS["seed"]
    assert answers[0] == answers[1] and len(set(answers[0])) == 4
    assert all(0 <= seed < 2**63 for seed in seeds[0])


async def test_an_update_without_a_step_keeps_the_last_step_of_the_results():
    async with handle() as (server, verl), RolloutClient(server.url) as client:
        server.version = "41"
        for global_steps, expected in ((None, 41), (42, 42), (None, 42)):
            weight_epoch = server.weight_epoch
            tensors = iter([("a", np.ones(2, np.float32))])
            await publish_step([client], tensors, global_steps, via="upload")
            assert server.weight_epoch == weight_epoch + 1
            fields = (await verl.generate(PROMPT, PARAMS, f"r{weight_epoch}")).extra_fields
            assert (fields["global_steps"], fields["max_global_steps"]) == (expected, expected)


async def test_one_stream_of_weights_goes_to_the_address_of_each_rollout_replica():
    async with FakeServer() as one, FakeServer() as other:
        buffer = np.zeros(6, np.float32)

        def gathered():
            for i in range(20):
                buffer[:] = i
                yield f"t{i}", buffer

        async with RolloutClient(one.url) as first, RolloutClient(other.url) as second:
            options = {"via": "upload", "chunk_mb": 0}
            done = await publish_step([first, second], gathered(), 7, **options)
            assert [p.version for p in done] == ["7", "7"]
            for server in (one, other):
                assert {name: values[0] for name, values in server.weights.tensors.items()} == {
                    f"t{i}": i for i in range(20)
                }
            other.refuse["/v1/weights/chunk"] = deque([(400, "weight_update_refused")])
            with pytest.raises(WeightUpdateRefused):
                await publish_step([first, second], gathered(), 8, **options)
            assert [(s.version, s.session) for s in (one, other)] == [("7", None)] * 2


async def test_no_address_commits_before_all_have_all_tensors(monkeypatch):
    tensors = {"a": np.ones(2, np.float32)}
    async with fake_site() as (one, first), fake_site() as (other, second):
        call = second.connection.call

        async def late_call(method, path, *args, **kwargs):
            if path == "/v1/weights/chunk":
                await asyncio.sleep(0.3)  # the first address has the tensors long before
            return await call(method, path, *args, **kwargs)

        monkeypatch.setattr(second.connection, "call", late_call)
        other.refuse["/v1/weights/chunk"] = deque([(400, "weight_update_refused")])
        with pytest.raises(WeightUpdateRefused):
            await publish_step([first, second], iter(tensors.items()), 8, via="upload")
        assert "/v1/weights/chunk" in one.paths()
        assert [(s.version, s.session) for s in (one, other)] == [("0", None)] * 2
        await publish_step([first, second], iter(tensors.items()), 8, via="upload")
        assert [(s.version, s.session) for s in (one, other)] == [("8", None)] * 2


def test_rollout_replicas_share_addresses_if_there_are_fewer():
    def addresses(num_replicas, **options):
        return [tuple(address_of(rank, options)) for rank in range(num_replicas)]

    assert addresses(2) == [(None, None, True)] * 2, "each starts a server"
    assert addresses(2, urls=["a", "b"], control_urls=["c", "d"]) == [("a", "c", True), ("b", "d", True)]
    one_each, shared = ("g", None, True), ("g", None, False)
    assert addresses(3, urls=["g"]) == addresses(3, urls=["g", "g/", "g"]) == [one_each, shared, shared]
    assert [first for *_, first in addresses(4, urls=["a", "b"])] == [True, True, False, False]
    for options in ({"urls": "http://a"}, {"urls": ["a", "b"], "control_urls": ["c"]}, {"control_urls": ["c"]}):
        with pytest.raises(InvalidField, match=list(options)[-1]):
            address_of(0, options)


async def test_tensors_of_sync_and_async_iterators_arrive_and_an_empty_iterator_is_detected():
    async def pairs():
        for k in range(3):
            yield k, k

    for weights in (pairs(), iter([(k, k) for k in range(3)])):
        some, all_of_them = await peek_first(weights)
        assert some and [pair async for pair in all_of_them] == [(0, 0), (1, 1), (2, 2)]
    some, all_of_them = await peek_first(iter([]))
    assert not some and [pair async for pair in all_of_them] == []


async def test_a_repeated_sleep_or_wake_up_changes_nothing():
    async with handle() as (server, verl):
        asleep: set[str] = set()

        def change(how):
            def changed(body):
                tags = set(body["tags"])
                assert not (asleep & tags if how is set.update else tags - asleep), "the server refuses that"
                how(asleep, tags)
                return {}

            return changed

        server._v1_weights = lambda body: {"asleep": sorted(asleep)}
        server._v1_sleep, server._v1_wakeup = change(set.update), change(set.difference_update)
        steps = [
            (verl.release_kv_cache, {"kv_cache"}),
            (verl.release_kv_cache, {"kv_cache"}),
            (verl.sleep, {"weight", "kv_cache"}),
            (verl.sleep, {"weight", "kv_cache"}),
            (lambda: verl.wake_up(["weights"]), {"kv_cache"}),
            (verl.resume_kv_cache, set()),
            (verl.wake_up, set()),
        ]
        for step, expected in steps:
            await step()
            assert asleep == expected
        with pytest.raises(InvalidField, match="tags"):
            await verl.wake_up(["unknown"])
    async with handle(limits=Limits(1, 1, 9, sleeps=False, frees_kv=False)) as (server, verl):
        for call in (verl.sleep, verl.wake_up, verl.release_kv_cache, verl.resume_kv_cache):
            await call()
        assert server.calls == []


async def test_one_request_is_aborted_by_its_id():
    async with handle() as (server, verl):
        known = {"r1"}
        server._v1_abort_requests = lambda body: {"aborted": [r for r in body["req_ids"] if r in known]}
        assert await verl.abort_request("r1") == {"aborted": True, "request_id": "r1"}
        assert server.paths()[-1] == "/reset_prefix_cache"
        assert (await verl.abort_request("unknown"))["aborted"] is False
        assert server.paths()[-1] == "/v1/abort_requests"
