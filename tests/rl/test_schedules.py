"""Any schedule of restarts, refusals, full queues, aborts and broken connections, with a real server's answers: every
answer equals that of an undisturbed run, no request runs twice, and nothing is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdeploy.core.errors import FastDeployError
from fastdeploy.engine import admission
from fastdeploy.http import errors
from fastdeploy.rl.client import RolloutClient
from fastdeploy.rl.errors import HoldLost
from fastdeploy.rl.frameworks import verl_server
from fastdeploy.rl.frameworks.trl import FastDeployWeightTransfer
from fastdeploy.rl.frameworks.verl_server import Limits, VerlServer
from rl.coroutines import run
from rl.real_server import RealServer, Wire, real_server
from support.fake_runner import EXPERTS, expected_rows, expected_tokens
from support.search import examples

TOKENS = 40
PARAMS = {"max_tokens": TOKENS, "ignore_eos": True}
LIMITS = Limits(prompt_length=64, response_length=TOKENS, max_model_len=128, ignore_eos=True)
PROMPTS = [[11, 12, k + 1] for k in range(4)]
LONG_TAIL = [21, 22, 23, 24] * 20  # makes a prompt that is prefilled in several steps
# Events while requests run, one after the other, each after a pause in milliseconds.
EVENTS = st.lists(
    st.tuples(st.sampled_from(["restart", "cut", "abort", "reject", "hold", "crowd"]), st.integers(0, 30)), max_size=5
)
BUDGETS = st.lists(st.one_of(st.none(), st.integers(0, 4000)), max_size=8)
SCHEDULES = examples(5)


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    """The shared server: two requests run, two wait, a fifth is refused."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(admission, "RETRY_AFTER_S", 0.02)
        patch.setitem(errors.RETRY_AFTER, 503, 0.02)
        patch.setattr(verl_server, "BACKOFF_S", 0.01)
        with real_server(runner={"step_s": 0.0005, "experts": EXPERTS}, max_num_seqs=2, max_waiting=4) as server:
            yield server


async def disturb(server: RealServer, wire: Wire, events: list[tuple[str, int]]) -> None:
    """Cause ``events`` by another client than the tested one. Await this together with the tested calls: after an error
    here a hold may stand, and the calls would wait for ever."""
    for kind, milliseconds in events:
        await asyncio.sleep(milliseconds / 1000)
        match kind:
            case "restart":
                await asyncio.to_thread(server.restart_engine)
                await asyncio.to_thread(server.wait_ready)
            case "cut":
                wire.cut()
            case "abort":
                await asyncio.to_thread(server.post, "/v1/abort_requests", abort_all=True)
            case "reject" | "hold":
                body = {"mode": "abort", "admission": kind, "hold_id": "other"}
                await asyncio.to_thread(lambda body=body: server.post("/v1/pause", **body))
                await asyncio.sleep(0.03)
                await asyncio.to_thread(server.post, "/v1/resume", hold_id="other")
            case "crowd":  # fills the queue, and disconnects without waiting
                body = {"prompt": [5, 6], "n": 4, "max_tokens": 20, "ignore_eos": True}
                await asyncio.to_thread(server.post, "/v1/completions", **body)


def assert_nothing_is_left(server: RealServer) -> None:
    server.wait_ready()
    status = server.http.get("/v1/is_paused").json()["result"]
    assert (status["holds"], status["is_paused"]) == ([], False)
    reply = server.post("/v1/completions", prompt=[1, 2], max_tokens=3, ignore_eos=True, return_token_ids=True)
    assert reply.json()["choices"][0]["token_ids"] == expected_tokens([1, 2], 3)


@SCHEDULES
@given(
    events=EVENTS,
    budgets=BUDGETS,
    n=st.integers(1, 3),
    named=st.booleans(),
    retained=st.booleans(),
    scored=st.booleans(),
    routed_from=st.sampled_from([None, 0, 2]),
)
def test_no_schedule_of_faults_changes_an_answer_of_the_client(
    server, events, budgets, n, named, retained, scored, routed_from
):
    prompts = [prompt + LONG_TAIL for prompt in PROMPTS] if scored else PROMPTS

    async def go():
        async with Wire(server.url, [None, *budgets]) as wire, RolloutClient(wire.url, max_failures=100) as client:
            params = PARAMS | ({"retain_s": 5.0} if named and retained else {})
            params |= {"prompt_logprobs": 0} if scored else {}
            if routed_from is not None:
                params |= {"routed_experts": True, "routed_experts_start": routed_from}
            tasks = []
            for k, prompt in enumerate(prompts):
                options = {"request_id": f"{id(wire)}-{k}"} if named else {}
                tasks.append(client.generate_group(prompt, params, n=n, **options))
            _, *groups = await asyncio.gather(disturb(server, wire, events), *tasks)
            return groups

    groups = run(go())
    for prompt, group in zip(prompts, groups, strict=True):
        for rollout in group:
            known = [entry and list(entry) for entry in rollout.prompt_logprobs or []]
            assert known == ([None, *([token] for token in prompt[1:])] if scored else [])
            assert rollout.token_ids == expected_tokens(prompt, TOKENS)
            assert rollout.logprobs == [-float(token) for token in rollout.token_ids]
            assert rollout.finish_reason == "length"
            routed = rollout.routed_experts
            if routed_from is None:
                assert routed is None
            else:
                assert (routed.info, routed.start) == (EXPERTS, routed_from)
                assert routed.data == expected_rows(prompt + rollout.token_ids, EXPERTS, routed_from)
            spans = rollout.spans
            assert [s.start for s in spans] + [TOKENS] == [0] + [s.end for s in spans]
    assert_nothing_is_left(server)


@SCHEDULES
@given(events=EVENTS, budgets=BUDGETS)
def test_no_schedule_of_faults_changes_an_answer_that_verls_client_joins(server, events, budgets):
    """verl's client sends the prompt with the tokens so far again while the answer is aborted."""

    async def generate_as_verl(verl: VerlServer, prompt: list[int], name: str) -> tuple[list[int], list[float]]:
        tokens, logprobs = [], []
        for attempt in range(1000):
            left = {"max_tokens": TOKENS - len(tokens), "logprobs": True}
            out = await verl.generate(prompt + tokens, left, f"{name}-{attempt}")
            tokens, logprobs = tokens + out.token_ids, logprobs + out.log_probs
            assert out.extra_fields["global_steps"] == 0
            if out.stop_reason != "aborted":
                return tokens, logprobs
        raise AssertionError("the answer is still aborted after 1000 attempts")

    async def go():
        async with Wire(server.url, budgets) as wire:
            verl = VerlServer(wire.url, LIMITS, SimpleNamespace)
            tasks = [generate_as_verl(verl, p, f"{id(wire)}-{k}") for k, p in enumerate(PROMPTS)]
            _, *answers = await asyncio.gather(disturb(server, wire, events), *tasks)
            await verl.close()
            return answers

    for prompt, (tokens, logprobs) in zip(PROMPTS, run(go()), strict=True):
        assert tokens == expected_tokens(prompt, TOKENS) and logprobs == [-float(token) for token in tokens]
    assert_nothing_is_left(server)


@SCHEDULES
@given(events=EVENTS)
def test_verls_pause_ends_under_any_fault_and_a_lost_hold_is_reported(server, events):
    async def go():
        async with Wire(server.url) as wire:
            verl = VerlServer(wire.url, LIMITS, SimpleNamespace)
            running = [asyncio.create_task(verl.generate(p, {}, f"{id(wire)}-{k}")) for k, p in enumerate(PROMPTS)]
            paused = await verl.abort_all_requests()
            assert paused["aborted_count"] == len(paused["request_ids"])
            assert set(paused["request_ids"]) <= {f"{id(wire)}-{k}" for k in range(len(PROMPTS))}
            harmless = [event for event in events if event[0] != "crowd"]  # the request would wait for the resume
            await disturb(server, wire, harmless)
            try:
                await verl.resume_generation()
            except HoldLost:
                assert "restart" in {kind for kind, _ in harmless}
            else:
                assert "restart" not in {kind for kind, _ in harmless}
            for out in await asyncio.gather(*running):
                assert out.stop_reason in ("aborted", "completed")
            await verl.close()

    run(go())
    assert_nothing_is_left(server)


@SCHEDULES
@given(kind=st.sampled_from(["restart", "cut", "abort", "reject", "hold"]), at=st.sampled_from(["pause", "send"]))
def test_trls_sync_succeeds_or_raises_and_leaves_the_servers_running(server, kind, at):
    """The fake runner refuses the tensors, so each publication fails."""

    async def go():
        async with Wire(server.url) as wire:
            transfer = FastDeployWeightTransfer(wire.url, hold_ttl_s=60.0)

            def step():
                transfer.pause()
                transfer.send_weights(iter([("a", np.ones(2, np.float32))]))

            if at == "pause":
                disturbing = asyncio.create_task(disturb(server, wire, [(kind, 1)]))
                with pytest.raises(FastDeployError):
                    await asyncio.to_thread(step)
                await disturbing
            else:
                await asyncio.to_thread(transfer.pause)
                await disturb(server, wire, [(kind, 0)])
                with pytest.raises(FastDeployError) as failed:
                    await asyncio.to_thread(transfer.send_weights, iter([("a", np.ones(2, np.float32))]))
                notes = getattr(failed.value, "__notes__", [])
                assert any("may have run" in note for note in notes) == (kind == "restart")
            await asyncio.to_thread(transfer.destroy)

    run(go())
    assert_nothing_is_left(server)
