"""Publishing to many replicas: first the tensors on all, then the commits; all or none."""

from __future__ import annotations

import asyncio
from collections import deque

import numpy as np
import pytest
from safetensors.numpy import load

from fastdeploy.core.errors import InvalidField
from fastdeploy.rl.client import RolloutClient
from fastdeploy.rl.errors import FleetError
from fastdeploy.rl.state_encoding import SHM
from rl.fake_server import FakeServer, Fault, fleet
from rl.fake_weights import read_source

STATE = {"a": np.arange(6, dtype=np.float32), "b": np.ones((2, 2), np.float16)}


def sessions(server: FakeServer) -> list[str]:
    return [path.rsplit("/", 1)[1] for path in server.paths() if path.startswith("/v1/weights/")]


async def test_all_tensors_are_staged_on_all_replicas_before_the_first_commit():
    async with fleet() as (servers, client):
        order = []
        for server in servers:
            commit = server._v1_weights_commit

            def commit_and_record(body, server=server, commit=commit):
                order.append([s.session["staging"].arrived if s.session else None for s in servers])
                return commit(body)

            server._v1_weights_commit = commit_and_record
        done = await client.publish(STATE, "v1", via="upload", chunk_mb=0, kv="recompute")
        assert done.number == 1 and done.version == "v1" and [r.ok for r in done.reports] == [True] * 3
        assert order[0] == [["a", "b"]] * 3
        for server in servers:
            assert sessions(server) == ["begin", "chunk", "chunk", "commit"]
            assert [list(load(upload)) for upload in server.uploads] == [["a"], ["b"]]
            (begin,) = server.bodies("/v1/weights/begin")
            key = begin.pop("idempotency_key")
            assert key and begin == {"kv": "recompute", "partial": False, "version": "v1"}


async def test_shared_memory_is_the_default_on_one_host_and_deleted_after_use():
    async with fleet(2) as (servers, client):
        seen = []

        def watch(server):
            stage = server._v1_weights_chunk

            def read(body):
                seen.append((load(read_source(body))["a"].tolist(), body["fingerprints"].keys()))
                return stage(body)

            server._v1_weights_chunk = read

        for server in servers:
            watch(server)
        await client.publish(STATE)
        assert seen == [(STATE["a"].tolist(), STATE.keys())] * 2
        names = [body["shared_memory"] for s in servers for body in s.bodies("/v1/weights/chunk")]
        assert not any((SHM / name).exists() for name in names) and len(set(names)) == 1


async def test_a_folder_is_written_for_the_replicas_and_deleted(tmp_path):
    async with fleet(2) as (servers, client):
        await client.publish(STATE, via="folder", folder=str(tmp_path))
        assert list(tmp_path.iterdir()) == []
        with pytest.raises(InvalidField, match="folder"):
            await client.publish(STATE, via="folder")


async def test_a_stream_of_tensors_is_sent_in_parts_and_may_reuse_its_buffer():
    async with fleet(1) as (servers, client):
        buffer = np.zeros(6, np.float32)

        async def pairs():
            for i in range(5):
                buffer[:] = i
                yield f"t{i}", buffer

        await client.publish(pairs(), via="upload", chunk_mb=1)
        await client.publish([("x", np.ones(3, np.float32)), ("y", np.ones(1, np.float32))], via="upload", chunk_mb=0)
        loaded = [{k: v.tolist() for k, v in load(upload).items()} for upload in servers[0].uploads]
        first = {f"t{i}": [float(i)] * 6 for i in range(5)}
        assert loaded == [first, {"x": [1.0] * 3}, {"y": [1.0]}]


@pytest.mark.parametrize("step", ["begin", "chunk"])
@pytest.mark.parametrize("how", ["refused", "lost"])
async def test_if_staging_fails_on_one_replica_none_commits_and_no_session_stays_open(step, how):
    async with fleet() as (servers, client):
        answer = (409, "update_in_progress") if how == "refused" else (0, "drop")
        servers[1].refuse[f"/v1/weights/{step}"] = deque([answer] * (2 if (step, how) == ("begin", "lost") else 1))
        with pytest.raises(FleetError, match="no replica has committed") as failed:
            await client.publish(STATE, via="upload")
        assert [r.ok for r in failed.value.reports] == [True, False, True]
        assert [s.weight_epoch for s in servers] == [0, 0, 0] and [s.session for s in servers] == [None] * 3
        assert (await client.publish(STATE, via="upload")).number == 1
        assert [s.weight_epoch for s in servers] == [1, 1, 1]


async def test_a_publication_that_is_cancelled_aborts_its_sessions():
    async with fleet(2) as (servers, client):
        servers[0]._v1_weights_chunk = lambda body: task.cancel() or {"tensors": 1, "nbytes": 1}
        task = asyncio.create_task(client.publish(STATE, via="upload", chunk_mb=0))
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [s.weight_epoch for s in servers] == [0, 0] and [s.session for s in servers] == [None] * 2


async def test_a_replica_that_fails_at_the_commit_is_left_out_until_it_is_published_to():
    async with fleet(2) as (servers, client):
        servers[0].refuse["/v1/weights/commit"] = deque([(409, "session_expired")])
        with pytest.raises(FleetError, match="left out") as failed:
            await client.publish(STATE, "v1", via="upload")
        assert [r.ok for r in failed.value.reports] == [False, True]
        for _ in range(4):
            r = await client.generate([1, 2], {"max_tokens": 2, "ignore_eos": True})
            assert r.replicas == (servers[1].url,) and r.min_version == "v1"
        servers[0].session = None
        await client.publish(STATE, "v2", via="upload")
        got = [await client.generate([1, 2], {"max_tokens": 2, "ignore_eos": True}, session_id=i) for i in range(4)]
        assert {r.min_version for r in got} == {"v2"}


@pytest.mark.parametrize("took_place", [True, False])
async def test_a_commit_whose_answer_is_lost_is_confirmed_by_a_query(took_place):
    async with fleet(2) as (servers, client):
        servers[0].refuse["/v1/weights/commit"] = deque([(0, "drop_reply" if took_place else "drop")])
        if took_place:
            assert [r.ok for r in (await client.publish(STATE, via="upload")).reports] == [True, True]
        else:
            with pytest.raises(FleetError, match="did not take place"):
                await client.publish(STATE, via="upload")


async def test_update_weights_without_a_version_is_labelled_with_the_weight_epoch():
    async with fleet(2) as (servers, client):
        done = await client.update_weights("/w")
        assert done.version == "1" and done.number == 1
        assert servers[0].calls[-2][1] == {"model_path": "/w", "session_id": "s-1"}
        assert servers[0].bodies("/v1/weights/begin")[0].keys() == {"idempotency_key"}
        assert (await client.update_weights("/w", version=40, kv="recompute")).version == "40"


async def test_a_failed_call_to_all_replicas_reports_each():
    async with fleet(2) as (servers, client):
        await client.set_version(7)
        assert servers[1].calls[-1] == ("/v1/update_weights", {"version": "7"})
        await client.abort_all()
        assert servers[0].calls[-1] == ("/v1/abort_requests", {"abort_all": True})
        servers[1].refuse["/v1/sleep"] = deque([(409, "wrong_order")])
        with pytest.raises(FleetError, match="wrong_order") as failed:
            await client.sleep("weight")
        assert [r.ok for r in failed.value.reports] == [True, False]
        servers[0].down = True
        assert [r.ok for r in await client.health()] == [False, True]


async def test_a_rollout_in_flight_continues_during_a_publication():
    async with FakeServer(Fault("abort", 3)) as server, RolloutClient(server.url) as client:
        await client.publish(STATE, via="upload")
        r = await client.generate([1, 2], {"max_tokens": 9, "ignore_eos": True}, max_staleness=0)
        assert len(r.token_ids) == 9 and r.staleness == 0


async def test_a_begin_whose_answer_is_lost_is_taken_up_again():
    async with fleet(2) as (servers, client):
        servers[0].refuse["/v1/weights/begin"] = deque([(0, "drop_reply")])
        assert (await client.publish(STATE, via="upload")).number == 1
        first, second = servers[0].bodies("/v1/weights/begin")
        assert first == second and [s.session for s in servers] == [None, None]


async def test_a_session_whose_begin_was_never_answered_is_aborted():
    async with fleet(2) as (servers, client):
        servers[0].refuse["/v1/weights/begin"] = deque([(0, "drop_reply")] * 2)
        with pytest.raises(FleetError, match="no replica has committed"):
            await client.publish(STATE, via="upload")
        assert [s.session for s in servers] == [None, None] and [s.weight_epoch for s in servers] == [0, 0]
        assert (await client.publish(STATE, via="upload")).number == 1
