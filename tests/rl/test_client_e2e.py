"""RolloutClient against a server with the embedded model, and against the gateway of two."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from e2e.fleet_server import KINDS, FleetServer, server_of
from e2e.server import Server
from examples.embedded_model.tokenizer import chat_ids
from fastdeploy.core.errors import FastDeployError, UpdateInProgress
from fastdeploy.embedded import MODEL_DIR
from fastdeploy.rl.client import RolloutClient
from fastdeploy.rl.continuation import PartialRollout, RolloutRequest
from fastdeploy.rl.rollout import Rollout
from fastdeploy.rl.state_encoding import HostTensor, write_folder
from rl.coroutines import until_running
from rl.embedded_weights import embedded_weights

PROMPT = list(range(40, 60))
LONG = {"max_tokens": 1200, "temperature": 1.0, "ignore_eos": True, "seed": 11, "logprobs": 0}
SHORT = LONG | {"max_tokens": 40}


@pytest.fixture(scope="module", params=KINDS)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with server_of(request.param, "--max-num-seqs", "4", "--num-gpu-blocks-override", "1024") as server:
        yield server


def state(scale: float = 0.0) -> dict[str, np.ndarray]:
    """Return the tensors of a trainer: those of the embedded model, every other one changed by noise of ``scale``."""
    tensors = embedded_weights()
    rng = np.random.default_rng(5)
    for name in list(tensors)[::2] if scale else ():
        tensors[name] = tensors[name] + rng.normal(0, scale, tensors[name].shape).astype(np.float32)
    return tensors


def write_checkpoint(folder: Path, tensors: dict[str, np.ndarray]) -> Path:
    shutil.copytree(MODEL_DIR, folder)
    (folder / "model.safetensors").unlink()
    write_folder({n: HostTensor("F32", t.shape, memoryview(t.tobytes())) for n, t in tensors.items()}, folder)
    return folder


def content(r):
    return r.token_ids, r.logprobs, r.text, r.finish_reason, r.stop_reason


def checksum(server: Server) -> str:
    """Return the checksum of the weights that serve, on every replica of a fleet."""
    found = {server.weights(checksums=True)["checksum"]}
    for name in server.replicas() if isinstance(server, FleetServer) else ():
        found.add(server.ask(name, "/v1/weights?checksums=true")["checksum"])
    assert len(found) == 1
    return found.pop()


async def test_every_way_of_publishing_gives_the_same_weights(server, tmp_path):
    async with RolloutClient(server.url) as client:
        start, moved = state(), state(0.02)
        before = await client.generate(PROMPT, SHORT)
        folder = await client.update_weights(str(write_checkpoint(tmp_path / "new", moved)))
        assert folder.version == str(folder.report["weight_epoch"])
        expected = checksum(server)
        after = await client.generate(PROMPT, SHORT, max_staleness=0)
        assert after.token_ids != before.token_ids and after.min_version == folder.version
        for via in ("upload", "shared_memory", "folder"):
            back = await client.publish(start, "start", via=via, folder=str(tmp_path), chunk_mb=1)
            assert back.version == "start" and checksum(server) != expected
            done = await client.publish(moved, via, via=via, folder=str(tmp_path))
            assert 0 < done.tensors < len(moved), "half of the tensors differ"
            assert checksum(server) == expected
            again = await client.generate(PROMPT, SHORT, max_staleness=0)
            assert content(again) == content(after) and again.spans[0].version == via
        await client.publish(start, "start")
        assert content(await client.generate(PROMPT, SHORT)) == content(before)


async def test_an_unchanged_state_sends_no_tensor_but_sets_the_version(server):
    async with RolloutClient(server.url) as client:
        await client.publish(state(), "one")
        expected = checksum(server)
        done = await client.publish(state(), "two")
        assert done.tensors == 0 and checksum(server) == expected
        r = await client.generate(PROMPT, SHORT, max_staleness=0)
        assert r.min_version == "two"


async def test_a_tensor_that_is_refused_is_not_committed(server):
    async with RolloutClient(server.url) as client:
        before, weight_epoch = checksum(server), server.weights()["weight_epoch"]
        wrong = state() | {"no.such.tensor": np.ones(3, np.float32)}
        for via in ("upload", "shared_memory"):
            with pytest.raises(FastDeployError, match="no.such.tensor"):
                await client.publish(wrong, via=via)
        # Another trainer has a session.
        session = await client.connection.call("POST", "/v1/weights/begin", json={})
        with pytest.raises(UpdateInProgress):
            await client.publish(state(0.1))
        await client.connection.call("POST", "/v1/weights/abort", json={"session_id": session["session_id"]})
        info = server.weights()
        assert info["weight_epoch"] == weight_epoch and info["session"] is None and checksum(server) == before


async def test_rollouts_survive_a_paused_publication_and_label_each_token_with_its_version(server):
    async with RolloutClient(server.url) as client:
        rollouts: list[Rollout] = []
        while not rollouts or any(len(r.spans) < 2 for r in rollouts):  # on a fast machine one may end too early
            await client.publish(state(), "old")
            tasks = [asyncio.create_task(client.generate([*PROMPT, i], LONG)) for i in range(4)]
            await until_running(client, 2, *tasks)
            async with client.paused("keep") as report:
                assert report["is_paused"] and await client.is_paused()
                await client.publish(state(0.02), "new")
            assert not await client.is_paused()
            rollouts = await asyncio.gather(*tasks)
        for r in rollouts:
            assert [s.version for s in r.spans] == ["old", "new"] and r.staleness == 1
            assert r.spans[0].start == 0 and r.spans[0].end == r.spans[1].start and r.spans[1].end == LONG["max_tokens"]
            assert len(r.logprobs) == LONG["max_tokens"] and r.num_resumes == 0
        await client.publish(state(), "old")


@pytest.mark.parametrize(
    "params",
    [pytest.param({"temperature": 0.0}, marks=pytest.mark.slow), {"temperature": 1.0, "repetition_penalty": 1.3}],
)
async def test_aborts_do_not_change_an_answer(server, params):
    async with RolloutClient(server.url) as client:
        options = LONG | params | {"prompt_logprobs": 0, "max_tokens": 800}
        alone = await client.generate_group(PROMPT, options, n=3)
        assert {r.num_resumes for r in alone} == {0}
        joined = alone
        while not any(r.num_resumes for r in joined):  # until an abort came in time
            running = asyncio.create_task(client.generate_group(PROMPT, options, n=3, session_id=0))
            while not running.done():
                await asyncio.sleep(0.05)
                await client.abort_all()
            joined = await running
            assert [content(r) for r in joined] == [content(r) for r in alone]
            assert [r.prompt_logprobs for r in joined] == [r.prompt_logprobs for r in alone]
            assert len(joined[0].prompt_logprobs) == len(PROMPT)


async def test_a_pause_that_aborts_and_rejects_only_delays_an_answer(server):
    async with RolloutClient(server.url) as client:
        alone = await client.generate(PROMPT, LONG)
        aborted = 0
        while not aborted:  # until the pause came in time
            tasks = [asyncio.create_task(client.generate(PROMPT, LONG)) for _ in range(4)]
            await until_running(client, 2, *tasks)
            async with client.paused("abort") as report:
                aborted = report["counts"]["aborted"]
                await asyncio.sleep(0.2)
                assert not aborted or not all(task.done() for task in tasks)
            assert [content(r) for r in await asyncio.gather(*tasks)] == [content(alone)] * 4


async def test_a_stop_string_across_two_attempts_is_found(server):
    async with RolloutClient(server.url) as client:
        free = await client.generate(list(b"347+85="), {"max_tokens": 30, "temperature": 0.0})
        stop = free.text[8:16]
        options = {"max_tokens": 30, "temperature": 0.0, "stop": [stop]}
        alone = await client.generate(list(b"347+85="), options)
        assert (alone.finish_reason, alone.stop_reason) == ("stop", stop) and alone.text == free.text[:8]
        cut = 11  # tokens are bytes here: inside of the stop string
        request = RolloutRequest(list(b"347+85="), options)
        choice = PartialRollout(request)
        choice.begin_attempt()
        head = {"token_ids": free.token_ids[:cut], "logprobs": {"token_logprobs": free.logprobs[:cut]}}
        choice.add_output(head | {"text": free.text[:cut], "finish_reason": "abort"}, None)
        choice.begin_attempt()
        async with client.connection.stream("/v1/completions", request.body([choice]), 30.0) as events:
            async for event in events:
                for item in event["choices"]:  # none in the last event, which has the usage
                    choice.add_output(item, None)
        assert content(choice.rollout()) == content(alone)


async def test_a_chat_is_rendered_by_the_server(server):
    async with RolloutClient(server.url) as client:
        messages = [{"role": "user", "content": "12+34="}]
        r = await client.generate(messages=messages, params={"max_tokens": 40, "temperature": 0.0})
        assert r.prompt_ids == chat_ids("12+34=") and r.text.endswith("46")
