"""Adapters of a client: loads, their staleness, lost adapters, and pauses of one adapter."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fastdeploy.core.errors import FastDeployError, InvalidField, ModelNotFound, WeightUpdateRefused
from fastdeploy.core.files import SHARED_MEMORY
from fastdeploy.core.loop_thread import LoopThread
from fastdeploy.rl.client import RolloutClient
from fastdeploy.rl.errors import HoldLost, RolloutFailed
from fastdeploy.rl.sync_client import SyncRolloutClient
from rl.fake_server import FakeServer, Fault, fake_site
from rl.real_server import real_server
from support.fake_runner import expected_tokens, write_adapter

PROMPT = [11, 12, 13]
PARAMS = {"max_tokens": 8, "seed": 1, "ignore_eos": True}
LORA = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
STATE = {LORA: np.arange(6, dtype=np.float32).reshape(2, 3)}
CONFIG = {"peft_type": "LORA", "r": 2, "target_modules": {"q_proj", "k_proj"}}


async def test_an_adapter_is_loaded_and_its_tokens_say_so():
    async with fake_site() as (server, client):
        publication = await client.load_adapter("a", "/adapters/a", version="step-1", kv="recompute")
        assert (publication.number, publication.version) == (1, "step-1")
        body = {"lora_name": "a", "lora_path": "/adapters/a", "version": "step-1", "kv": "recompute"}
        assert server.bodies("/v1/adapters/load") == [body]
        rollout = await client.generate(PROMPT, PARAMS, lora_name="a")
        (span,) = rollout.spans
        assert (span.version, span.lora_name, span.adapter_epoch, span.publication) == ("step-1", "a", 1, 1)
        (span,) = (await client.generate(PROMPT, PARAMS)).spans
        assert (span.version, span.lora_name, span.adapter_epoch, span.publication) == ("0", None, 0, 0)
        assert [body.get("model") for body in server.requests] == ["a", None]


@pytest.mark.parametrize("via", ["upload", "shared_memory"])
async def test_a_state_dict_is_sent_with_its_config(via, monkeypatch):
    async with fake_site() as (server, client):
        segments: list[bytes] = []
        load = FakeServer._v1_adapters_load

        def read(server, body):
            if "shared_memory" in body:
                with open(f"{SHARED_MEMORY}/{body['shared_memory']}", "rb") as file:
                    segments.append(file.read(body["nbytes"]))
            return load(server, body)

        monkeypatch.setattr(FakeServer, "_v1_adapters_load", read)
        publication = await client.load_adapter("a", STATE, CONFIG, version=7, via=via)
        assert (publication.tensors, publication.nbytes, publication.version) == (1, 24, "7")
        (content,) = segments if via == "shared_memory" else server.uploads
        size = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + size])
        assert header == {LORA: {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}
        assert content[8 + size :] == STATE[LORA].tobytes()
        (body,) = server.bodies("/v1/adapters/load")
        config = json.loads(body["config"]) if via == "upload" else body["config"]
        assert config == {"peft_type": "LORA", "r": 2, "target_modules": ["k_proj", "q_proj"]}
        assert via == "upload" or not Path(SHARED_MEMORY, body["shared_memory"]).exists(), "freed after the load"


async def test_bad_arguments_of_a_load_are_refused_before_any_call():
    async with fake_site() as (server, client):
        for adapter, config, field in (
            (STATE, None, "config"),
            ({}, CONFIG, "config"),
            ("/folder", CONFIG, "config"),
            (STATE, {"r": object()}, "config"),
            ({"a": "text"}, CONFIG, "a"),
        ):
            with pytest.raises(InvalidField, match=field):
                await client.load_adapter("a", adapter, config)
        with pytest.raises(InvalidField, match="via"):
            await client.load_adapter("a", STATE, CONFIG, via="folder")
        with pytest.raises(InvalidField, match="model"):
            await client.generate(PROMPT, {"model": "a"})
        assert server.calls == [] and server.requests == []


async def test_the_staleness_of_an_adapters_tokens_counts_the_loads_of_that_adapter():
    async with fake_site() as (server, client):
        await client.load_adapter("a", "/a", version="first")
        await client.load_adapter("b", "/b")
        server.faults.append(Fault("hang", 2))
        task = asyncio.create_task(client.generate(PROMPT, PARAMS, lora_name="a"))
        while not server.streams:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.02)
        for number in (2, 3):
            assert (await client.load_adapter("a", "/a")).number == number
        await client.load_adapter("b", "/b")
        await client.update_weights("/w")
        server.drop_all()
        rollout = await task
        seen = [(s.version, s.lora_name, s.adapter_epoch, s.publication, s.start, s.end) for s in rollout.spans]
        assert seen == [("first", "a", 1, 1, 0, 2), ("3", "a", 3, 3, 2, 8)]
        assert rollout.staleness == 2 and (rollout.min_version, rollout.max_version) == ("first", "3")
        again = await client.generate(PROMPT, PARAMS, lora_name="a")
        assert again.staleness == 0 and again.token_ids == rollout.token_ids


async def test_publications_of_a_name_go_on_after_an_unload_and_no_span_joins_two_adapters():
    async with fake_site() as (server, client):
        await client.load_adapter("a", "/a")
        await client.load_adapter("a", "/a")
        server.faults.append(Fault("hang", 2))
        other = asyncio.create_task(client.generate(PROMPT, PARAMS, lora_name="a"))
        while not server.streams:
            await asyncio.sleep(0.005)
        await client.unload_adapter("a")
        assert (await client.load_adapter("a", "/another")).number == 3
        server.drop_all()
        rollout = await asyncio.wait_for(other, 30)
        assert (rollout.finish_reason, rollout.stop_reason, len(rollout.token_ids)) == ("abort", "adapter_unloaded", 2)
        assert [(s.adapter_epoch, s.publication) for s in rollout.spans] == [(2, 2)] and rollout.staleness == 1
        new = await client.generate(PROMPT, PARAMS, lora_name="a")
        assert [(s.adapter_epoch, s.publication) for s in new.spans] == [(3, 3)] and new.staleness == 0
        assert new.finish_reason == "length"


@pytest.mark.parametrize("ends_with", ["unload", "reset"])
async def test_tokens_of_an_unloaded_adapter_are_not_taken_for_those_of_the_load_that_is_under_way(ends_with):
    async with fake_site() as (server, client):
        await client.load_adapter("a", "/a")
        rollout = await client.generate(PROMPT, PARAMS, lora_name="a")
        await (client.unload_adapter("a") if ends_with == "unload" else client.reset())
        await client.load_adapter("a", "/b")
        ledger = client._adapters.ledger("a")
        ledger.begin_publication()
        assert [ledger.publication_of(replace(span, publication=0)) for span in rollout.spans] == [1]
        assert [ledger.publication_of(replace(span, adapter_epoch=3)) for span in rollout.spans] == [3]


async def test_an_answer_that_a_fleet_ended_without_its_adapter_is_final():
    async with FakeServer(Fault("unloaded", 3)) as server, RolloutClient(server.url) as client:
        rollout = await client.generate(PROMPT, PARAMS, lora_name=None)
        assert (rollout.finish_reason, rollout.stop_reason, len(rollout.token_ids)) == ("abort", "adapter_unloaded", 3)
        assert len(server.requests) == 1


async def test_a_refused_load_raises_and_the_server_keeps_the_adapter_that_it_has():
    async with fake_site() as (server, client):
        server.refuse["/v1/adapters/load"] = deque([(400, "weight_update_refused")])
        with pytest.raises(WeightUpdateRefused):
            await client.load_adapter("a", "/a")
        with pytest.raises(ModelNotFound):
            await client.generate(PROMPT, PARAMS, lora_name="a")
        await client.load_adapter("a", "/a")
        server.refuse["/v1/adapters/load"] = deque([(400, "weight_update_refused")])
        with pytest.raises(WeightUpdateRefused):
            await client.load_adapter("a", "/a")
        (span,) = (await client.generate(PROMPT, PARAMS, lora_name="a")).spans
        assert (span.adapter_epoch, span.publication) == (1, 1)


async def test_a_load_whose_caller_is_cancelled_counts(monkeypatch):
    async with fake_site() as (server, client):
        begun, go, load = asyncio.Event(), asyncio.Event(), client.connection.call

        async def slow(*args, **kwargs):
            begun.set()
            await go.wait()
            return await load(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(client.connection, "call", slow)
            task = asyncio.create_task(client.load_adapter("a", "/a"))
            await begun.wait()
            task.cancel()
            await asyncio.sleep(0)
            go.set()
            with pytest.raises(asyncio.CancelledError):
                await task
        rollout = await client.generate(PROMPT, PARAMS, lora_name="a")
        assert rollout.spans[0].publication == 1


async def test_a_generation_waits_for_the_next_load_while_the_engine_has_lost_the_adapter():
    async with fake_site() as (server, client):
        await client.load_adapter("a", "/a")
        await client.generate(PROMPT, PARAMS, lora_name="a")
        server.restart()
        task = asyncio.create_task(client.generate(PROMPT, PARAMS, lora_name="a"))
        with pytest.raises(RolloutFailed, match="not finished in time"):
            await client.generate(PROMPT, PARAMS, lora_name="a", timeout_s=0.2)
        assert not task.done() and {body["model"] for body in server.requests} == {"a"}, "never the base model"
        assert (await client.generate(PROMPT, PARAMS)).token_ids, "the base model is served"
        await client.load_adapter("a", "/a")
        assert (await asyncio.wait_for(task, 30)).spans[0].publication == 2


async def test_an_unloaded_name_is_unknown():
    async with fake_site() as (server, client):
        await client.load_adapter("a", "/a")
        await client.unload_adapter("a")
        assert server.adapters == {}
        with pytest.raises(ModelNotFound):
            await asyncio.wait_for(client.generate(PROMPT, PARAMS, lora_name="a"), 30)
        with pytest.raises(ModelNotFound):
            await client.unload_adapter("a")
        await client.load_adapter("a", "/a")
        await client.generate(PROMPT, PARAMS, lora_name="a")


async def test_a_name_that_another_client_unloaded_is_an_error_at_once():
    async with fake_site() as (server, client):
        await client.load_adapter("a", "/a")
        server.adapters.clear()
        with pytest.raises(ModelNotFound):
            await asyncio.wait_for(client.generate(PROMPT, PARAMS, lora_name="a"), 30)


async def test_a_pause_of_an_adapter_is_renewed_and_released_by_its_name():
    async with fake_site(hold_ttl_s=4.0) as (server, client):
        await client.load_adapter("a", "/a")
        await client.load_adapter("b", "/b")
        async with client.paused("keep", lora_name="a", clear_cache=True):
            (hold,) = server.holds
            assert hold.startswith("a/")
            assert server.bodies("/v1/pause")[0]["clear_cache"] is True
            assert await client.is_paused(lora_name="a")
            assert not await client.is_paused(lora_name="b") and not await client.is_paused()
            while not server.bodies("/v1/renew"):
                await asyncio.sleep(0.005)
            assert server.bodies("/v1/renew")[0]["lora_name"] == "a"
        assert server.holds == {}


async def test_a_resume_by_name_releases_the_holds_of_that_adapter_only():
    async with fake_site() as (server, client):
        for name in ("a", "b"):
            await client.load_adapter(name, "/x")
        for name in (None, "a", "b"):
            await client.pause(lora_name=name, hold_id="mine")
        await client.pause(lora_name="a", hold_id="second")
        assert set(server.holds) == {"mine", "a/mine", "a/second", "b/mine"}
        await client.resume("mine", lora_name="a")
        assert set(server.holds) == {"mine", "a/second", "b/mine"}
        await client.resume(lora_name="a")
        assert set(server.holds) == {"mine", "b/mine"}
        await client.resume()
        assert server.holds == {}


async def test_a_pause_of_an_unknown_adapter_fails_and_leaves_no_hold():
    async with fake_site() as (server, client):
        await client.load_adapter("a", "/a")
        server.adapters.clear()
        with pytest.raises(ModelNotFound) as failed:
            await client.pause(lora_name="a")
        assert server.holds == {} and not hasattr(failed.value, "__notes__")


async def test_a_load_inside_a_hold_that_ended_early_changes_nothing():
    async with fake_site() as (server, client):
        await client.load_adapter("a", "/a")
        await client.load_adapter("b", "/b")
        with pytest.raises(HoldLost):
            async with client.paused(lora_name="a"):
                server.holds.clear()
                await client.load_adapter("b", "/b")
                with pytest.raises(HoldLost):
                    await client.load_adapter("a", "/a")
        assert {name: adapter["adapter_epoch"] for name, adapter in server.adapters.items()} == {"a": 1, "b": 2}


async def test_an_abort_by_adapter_names_it():
    async with fake_site() as (server, client):
        await client.abort_all(lora_name="a")
        await client.abort_all()
        assert server.bodies("/v1/abort_requests") == [{"lora_name": "a"}, {"abort_all": True}]


async def test_two_adapters_load_at_the_same_time_and_one_adapter_one_load_at_a_time(monkeypatch):
    """Two controllers share a client. A hung load of one does not hold up the other."""
    async with fake_site() as (server, client):
        server.refuse["/v1/adapters/load"] = deque()
        begun, go = asyncio.Event(), asyncio.Event()
        call = type(client.connection).call

        async def slow(self, method, path, *args, **kwargs):
            if kwargs.get("json", {}).get("lora_path") == "/slow":
                begun.set()
                await go.wait()
            return await call(self, method, path, *args, **kwargs)

        monkeypatch.setattr(type(client.connection), "call", slow)
        first = asyncio.create_task(client.load_adapter("a", "/slow"))
        await begun.wait()
        second = asyncio.create_task(client.load_adapter("a", "/a"))
        await asyncio.wait_for(client.load_adapter("b", "/b"), 30)
        assert not first.done() and not second.done()
        go.set()
        assert [p.number for p in await asyncio.gather(first, second)] == [1, 2]
        assert server.adapters["a"]["lora_path"] == "/a"


def test_the_sync_client_loads_pauses_and_unloads():
    loop = LoopThread("fake-server")
    server = loop.run(FakeServer().__aenter__())
    with SyncRolloutClient(server.url) as client:
        client.load_adapter("a", STATE, CONFIG, version=1, via="upload")
        with client.paused(lora_name="a"):
            assert client.is_paused(lora_name="a") and not client.is_paused()
            client.load_adapter("a", STATE, CONFIG, version=2, via="upload")
        with pytest.raises(ValueError), client.paused("abort", lora_name="a"):
            raise ValueError
        assert not server.holds
        rollout = client.generate(PROMPT, PARAMS, lora_name="a")
        assert (rollout.max_version, rollout.spans[0].adapter_epoch) == ("2", 2)
        client.unload_adapter("a")
        with pytest.raises(ModelNotFound):
            client.generate(PROMPT, PARAMS, lora_name="a")
    loop.run(server.__aexit__())
    loop.stop()


async def test_on_a_real_server_a_swap_of_one_adapter_in_its_pause_leaves_the_others_alone(tmp_path):
    policies = {k: write_adapter(tmp_path / f"a{k}", f"a{k}") for k in (1, 2, 3)}
    params = {"max_tokens": 60, "ignore_eos": True}
    with real_server(runner={"step_s": 0.05}) as server:  # until the pause has disturbed the request
        async with RolloutClient(server.url) as client:
            await client.load_adapter("a", policies[1], version="p1")
            await client.load_adapter("b", policies[3])
            task = asyncio.create_task(client.generate(PROMPT, params, lora_name="a"))
            while not server.post("/v1/abort_requests", lora_name="a").json()["result"]["aborted"]:
                await asyncio.sleep(0.01)
            async with client.paused("abort", lora_name="a", admission="hold"):
                server.runner.pace_s = 0.0
                assert await client.is_paused(lora_name="a") and not await client.is_paused()
                other = await client.generate(PROMPT, params, lora_name="b")
                await client.load_adapter("a", policies[2], version="p2")
                assert not task.done()
            rollout = await task
            assert other.token_ids == expected_tokens(PROMPT, 60, adapter=3)
            assert {span.version for span in rollout.spans} <= {"p1", "p2"} and rollout.max_version == "p2"
            known = list(PROMPT)
            for span in rollout.spans:
                known += expected_tokens(known, span.end - span.start, adapter=span.adapter_epoch)
            assert known == PROMPT + rollout.token_ids and len(rollout.token_ids) == 60
            assert rollout.num_resumes >= 1 and rollout.staleness == (0 if rollout.min_version == "p2" else 1)
            with pytest.raises(FastDeployError, match="not the tensors of an adapter"):
                await client.load_adapter("a", write_adapter(tmp_path / "bad", "nonsense"))
            assert (await client.generate(PROMPT, params, lora_name="a")).max_version == "p2"
            await client.unload_adapter("a")
            with pytest.raises(ModelNotFound):
                await client.generate(PROMPT, params, lora_name="a")


async def test_after_a_reset_the_adapters_of_the_run_before_are_unknown_and_their_names_free(tmp_path):
    with real_server() as server:
        async with RolloutClient(server.url) as client:
            await client.load_adapter("a", write_adapter(tmp_path / "a1", "a1"))
            await client.reset()
            with pytest.raises(ModelNotFound):
                await asyncio.wait_for(client.generate(PROMPT, PARAMS, lora_name="a"), 30)
            await client.load_adapter("a", write_adapter(tmp_path / "a2", "a2"))
            rollout = await client.generate(PROMPT, PARAMS, lora_name="a")
            assert rollout.token_ids == expected_tokens(PROMPT, 8, adapter=2)
            assert rollout.spans[0].publication == 2 and rollout.staleness == 0
