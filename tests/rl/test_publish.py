"""Publishing: first all tensors are staged, then comes the commit."""

from __future__ import annotations

import asyncio
import json
from collections import deque

import numpy as np
import pytest
from safetensors.numpy import load

from fastdeploy.core.errors import FastDeployError, InvalidField, UpdateInProgress, WrongOrder
from fastdeploy.rl.connection import reply_error
from fastdeploy.rl.errors import Unreachable
from fastdeploy.rl.state_encoding import SHM
from rl.fake_server import FakeServer, Fault, fake_site
from rl.fake_weights import read_source
from support.loop_clock import pass_time

STATE = {"a": np.arange(6, dtype=np.float32), "b": np.ones((2, 2), np.float16)}


def sessions(server: FakeServer) -> list[str]:
    return [path.rsplit("/", 1)[1] for path in server.paths() if path.startswith("/v1/weights/")]


async def test_all_tensors_are_staged_before_the_commit():
    async with fake_site() as (server, client):
        staged, commit = [], server._v1_weights_commit

        def commit_and_record(body):
            staged.extend(server.session["staging"].arrived)
            return commit(body)

        server._v1_weights_commit = commit_and_record
        done = await client.publish(STATE, "v1", via="upload", chunk_mb=0, kv="recompute")
        assert done.number == 1 and done.version == "v1" and done.report["weight_epoch"] == 1
        assert staged == ["a", "b"] and sessions(server) == ["begin", "chunk", "chunk", "commit"]
        assert [list(load(upload)) for upload in server.uploads] == [["a"], ["b"]]
        (begin,) = server.bodies("/v1/weights/begin")
        key = begin.pop("idempotency_key")
        assert key and begin == {"kv": "recompute", "partial": False, "version": "v1"}


async def test_shared_memory_is_the_default_on_one_host_and_deleted_after_use():
    async with fake_site() as (server, client):
        seen, stage = [], server._v1_weights_chunk

        def read(body):
            seen.append((load(read_source(body))["a"].tolist(), body["fingerprints"].keys()))
            return stage(body)

        server._v1_weights_chunk = read
        await client.publish(STATE)
        assert seen == [(STATE["a"].tolist(), STATE.keys())]
        (body,) = server.bodies("/v1/weights/chunk")
        assert not (SHM / body["shared_memory"]).exists()


async def test_a_folder_is_written_for_the_server_and_deleted(tmp_path):
    async with fake_site() as (server, client):
        await client.publish(STATE, via="folder", folder=str(tmp_path))
        assert list(tmp_path.iterdir()) == [] and server.weight_epoch == 1
        with pytest.raises(InvalidField, match="folder"):
            await client.publish(STATE, via="folder")


async def test_a_stream_of_tensors_is_sent_in_parts_and_may_reuse_its_buffer():
    async with fake_site() as (server, client):
        buffer = np.zeros(6, np.float32)

        async def pairs():
            for i in range(5):
                buffer[:] = i
                yield f"t{i}", buffer

        await client.publish(pairs(), via="upload", chunk_mb=1)
        await client.publish([("x", np.ones(3, np.float32)), ("y", np.ones(1, np.float32))], via="upload", chunk_mb=0)
        loaded = [{k: v.tolist() for k, v in load(upload).items()} for upload in server.uploads]
        first = {f"t{i}": [float(i)] * 6 for i in range(5)}
        assert loaded == [first, {"x": [1.0] * 3}, {"y": [1.0]}]


@pytest.mark.parametrize("step", ["begin", "chunk"])
@pytest.mark.parametrize("how", ["refused", "lost"])
async def test_if_staging_fails_nothing_is_committed_and_no_session_stays_open(step, how):
    async with fake_site() as (server, client):
        answer = (409, "update_in_progress") if how == "refused" else (0, "drop")
        server.refuse[f"/v1/weights/{step}"] = deque([answer] * (2 if (step, how) == ("begin", "lost") else 1))
        with pytest.raises(UpdateInProgress if how == "refused" else Unreachable):
            await client.publish(STATE, via="upload")
        assert (server.weight_epoch, server.session) == (0, None)
        assert (await client.publish(STATE, via="upload")).number == 1
        assert server.weight_epoch == 1


@pytest.mark.parametrize("delta", [False, True])
async def test_if_before_commit_raises_nothing_is_committed(delta):
    async with fake_site() as (server, client):
        first, second = ({"a": np.full(100, float(k), np.float32)} for k in (1, 2))
        second["a"][1:] = 1.0
        if delta:
            await client.publish(first, "1")

        async def refuse():
            assert server.paths()[-1] == "/v1/weights/chunk", "all tensors are staged"
            raise WrongOrder("a test")

        version = server.version
        with pytest.raises(WrongOrder):
            await client.publish(second, "2", before_commit=refuse)
        assert server.session is None and server.version == version
        assert (await client.publish(second, "2")).version == "2"


async def test_a_publication_that_is_cancelled_or_late_aborts_its_session():
    async with fake_site() as (server, client):
        server._v1_weights_chunk = lambda body: task.cancel() or {"tensors": 1, "nbytes": 1}
        task = asyncio.create_task(client.publish(STATE, via="upload", chunk_mb=0))
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (server.weight_epoch, server.session) == (0, None)
        server._v1_weights_chunk = lambda body: pass_time(600.0) or {"tensors": 1, "nbytes": 1}
        with pytest.raises(Unreachable, match="nothing was committed"):
            await client.publish(STATE, via="upload", chunk_mb=0)
        assert (server.weight_epoch, server.session) == (0, None)


async def test_a_commit_that_is_refused_is_no_publication():
    async with fake_site() as (server, client):
        await client.publish(STATE, "v1", via="upload")
        server.refuse["/v1/weights/commit"] = deque([(409, "session_expired")])
        with pytest.raises(FastDeployError, match="session_expired"):
            await client.publish(STATE, "v2", via="upload")
        server.session = None
        r = await client.generate([1, 2], {"max_tokens": 2, "ignore_eos": True})
        assert (r.min_version, r.staleness) == ("v1", 0)
        assert (await client.publish(STATE, "v2", via="upload")).number == 2


@pytest.mark.parametrize("took_place", [True, False])
async def test_a_commit_whose_answer_is_lost_is_confirmed_by_a_query(took_place):
    async with fake_site() as (server, client):
        server.refuse["/v1/weights/commit"] = deque([(0, "drop_reply" if took_place else "drop")])
        if took_place:
            assert (await client.publish(STATE, via="upload")).report["status"] == "committed"
        else:
            with pytest.raises(Unreachable, match="did not take place"):
                await client.publish(STATE, via="upload")


async def test_update_weights_without_a_version_is_labelled_with_the_weight_epoch():
    async with fake_site() as (server, client):
        done = await client.update_weights("/w")
        assert done.version == "1" and done.number == 1
        assert server.calls[-2][1] == {"model_path": "/w", "session_id": "s-1"}
        assert server.bodies("/v1/weights/begin")[0].keys() == {"idempotency_key"}
        assert (await client.update_weights("/w", version=40, kv="recompute")).version == "40"


async def test_a_failed_call_raises_the_servers_error_with_the_report_of_a_gateway():
    async with fake_site() as (server, client):
        await client.set_version(7)
        assert server.calls[-1] == ("/v1/update_weights", {"version": "7"})
        await client.abort_all()
        assert server.calls[-1] == ("/v1/abort_requests", {"abort_all": True})
        server.refuse["/v1/sleep"] = deque([(409, "wrong_order")])
        with pytest.raises(WrongOrder):
            await client.sleep("weight")
        server.down = True
        with pytest.raises(Unreachable):
            await client.health()
    replicas = [{"name": "replica-0", "status": "rolled_back"}, {"name": "replica-1", "status": "refused"}]
    body = {"error": {"message": "one refused", "code": "fleet_call_failed", "replicas": replicas}}
    assert reply_error(409, {}, json.dumps(body).encode()).detail["replicas"] == replicas


async def test_a_rollout_in_flight_continues_during_a_publication():
    async with fake_site(Fault("abort", 3)) as (_, client):
        await client.publish(STATE, via="upload")
        r = await client.generate([1, 2], {"max_tokens": 9, "ignore_eos": True}, max_staleness=0)
        assert len(r.token_ids) == 9 and r.staleness == 0


@pytest.mark.parametrize("drops", [1, 2])
async def test_a_begin_whose_answer_is_lost_is_taken_up_again_or_its_session_aborted(drops):
    async with fake_site() as (server, client):
        server.refuse["/v1/weights/begin"] = deque([(0, "drop_reply")] * drops)
        if drops == 2:
            with pytest.raises(Unreachable):
                await client.publish(STATE, via="upload")
            assert (server.weight_epoch, server.session) == (0, None)
        assert (await client.publish(STATE, via="upload")).number == 1
        assert len({body["idempotency_key"] for body in server.bodies("/v1/weights/begin")}) == drops
        assert server.session is None
