"""Publishing of the difference from the last publication: each replica is sent what it lacks."""

from __future__ import annotations

import asyncio
import json
from collections import deque

import numpy as np
import pytest

from fastdeploy.core.errors import InvalidField
from fastdeploy.core.fingerprint import fingerprint, over_all
from fastdeploy.core.serving_dtype import in_dtype
from fastdeploy.rl.errors import FleetError
from rl.fake_server import CHECKPOINT, FakeServer, fleet
from rl.fake_weights import FakeWeights

RNG = np.random.default_rng(4)
STATE = {"a": RNG.normal(size=(50, 40)).astype(np.float32), "b": RNG.normal(size=300).astype(np.float32)}


def moved(state: dict[str, np.ndarray], share: float = 0.02) -> dict[str, np.ndarray]:
    """Return a state in which a share of the values changed."""
    return {n: np.where(RNG.random(v.shape) < share, v * np.float32(1.5), v) for n, v in state.items()}


def fingerprint_of(state: dict[str, np.ndarray], dtype: str = "float32") -> str:
    return over_all({n: fingerprint(in_dtype(v, dtype).reshape(-1)) for n, v in state.items()})


def assert_serve(servers: list[FakeServer], state: dict[str, np.ndarray]) -> None:
    for server in servers:
        assert server.weights.fingerprint == fingerprint_of(state, server.weights.dtype)
        assert server.session is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("via", ["upload", "shared_memory", "folder"])
@pytest.mark.parametrize("compression", ["none", "zstd"])
async def test_only_what_changed_is_sent_after_the_first_publication(dtype, via, compression, tmp_path):
    async with fleet(2) as (servers, client):
        for server in servers:
            server.weights = FakeWeights(dtype)
        options = {"via": via, "folder": str(tmp_path), "compression": compression}
        first = await client.publish(STATE, **options)
        assert first.deltas == () and first.changed_values is None
        state = STATE
        for step in range(10):
            state = moved(state)
            done = await client.publish(state, step, chunk_mb=step % 2, **options)
            assert_serve(servers, state)
            assert done.deltas == (servers[0].url, servers[1].url) and done.version == str(step)
            assert 0 < done.changed_values < 300 and done.nbytes < first.nbytes / 4
            assert done.full_nbytes == 2300 * {"float32": 4, "bfloat16": 2}[dtype]
        bodies = servers[0].bodies("/v1/weights/chunk")
        assert {body.get("compression", "none") for body in bodies[-2:]} == {compression}


async def test_fingerprints_are_sent_with_every_part_unless_the_query_of_an_upload_would_be_too_long():
    async with fleet(1) as (servers, client):
        for count, via in ((40, "upload"), (200, "upload"), (200, "shared_memory")):
            state = {f"model.layers.{i}.norm": np.ones(2, np.float32) for i in range(count)}
            await client.publish(state, via=via, delta="never")
        few, many, in_body = servers[0].bodies("/v1/weights/chunk")
        assert len(json.loads(few["fingerprints"])) == 40 and "fingerprints" not in many
        assert len(in_body["fingerprints"]) == 200


async def test_differences_to_other_hosts_are_compressed():
    async with fleet(1) as (servers, client):
        await client.publish(STATE, via="upload")
        client.replicas[0].url = servers[0].url.replace("127.0.0.1", "127.0.0.2")
        await client.publish(moved(STATE), via="upload")
        assert servers[0].bodies("/v1/weights/chunk")[-1]["compression"] == "zstd"


async def test_an_unchanged_state_sends_no_tensor_but_sets_the_version():
    async with fleet(2) as (servers, client):
        await client.publish(STATE, "one")
        done = await client.publish(STATE, "two")
        assert (done.tensors, done.nbytes, done.changed_values) == (0, 0, 0)
        assert [s.version for s in servers] == ["two"] * 2 and len(servers[0].bodies("/v1/weights/chunk")) == 1


async def test_the_trainer_may_change_its_tensors_after_a_publication():
    async with fleet(1) as (servers, client):
        state = {name: value.copy() for name, value in STATE.items()}
        await client.publish(state)
        state["b"][7] += 1
        assert (await client.publish(state)).changed_values == 1
        assert_serve(servers, state)
        state["a"] += 1  # sent whole
        state["b"][7] += 1
        await client.publish(state)
        assert_serve(servers, state)


async def test_each_replica_is_sent_what_it_lacks():
    async with fleet() as (servers, client):
        await client.publish(STATE)
        servers[1].restart()
        state = moved(STATE)
        done = await client.publish(state)
        assert done.deltas == (servers[0].url, servers[2].url)
        assert_serve(servers, state)
        # Other weights from elsewhere, with the same epoch as before.
        servers[0].weights.tensors = dict(servers[0].weights.tensors, a=np.zeros(2000, np.float32))
        state = moved(state)
        assert (await client.publish(state)).deltas == (servers[1].url, servers[2].url)
        assert_serve(servers, state)
        assert len((await client.publish(moved(state))).deltas) == 3


async def test_a_replica_that_failed_at_the_commit_is_sent_the_whole_next_time():
    async with fleet(2) as (servers, client):
        await client.publish(STATE)
        servers[0].refuse["/v1/weights/commit"] = deque([(409, "session_expired")])
        state = moved(STATE)
        with pytest.raises(FleetError, match="left out"):
            await client.publish(state)
        servers[0].session = None
        assert_serve(servers[1:], state)
        state = moved(state)
        assert (await client.publish(state)).deltas == (servers[1].url,)
        assert_serve(servers, state)


@pytest.mark.parametrize("how", ["refused", "cancelled", "late"])
async def test_after_an_aborted_publication_the_difference_is_from_the_last_good_one(how):
    async with fleet(2) as (servers, client):
        await client.publish(STATE)
        wrong = moved(STATE)
        if how == "refused":
            servers[1].refuse["/v1/weights/chunk"] = deque([(409, "session_expired")])
            with pytest.raises(FleetError, match="no replica has committed"):
                await client.publish(wrong)
        else:
            stage = servers[0]._v1_weights_chunk
            task = asyncio.create_task(client.publish(wrong, deadline_s=600 if how == "cancelled" else 0.0))
            servers[0]._v1_weights_chunk = lambda body: task.cancel() or stage(body)
            with pytest.raises(asyncio.CancelledError if how == "cancelled" else FleetError):
                await task
            servers[0]._v1_weights_chunk = stage
        assert_serve(servers, STATE)
        state = moved(STATE)
        assert len((await client.publish(state)).deltas) == 2
        assert_serve(servers, state)


async def test_tensors_that_change_while_they_are_sent_are_refused():
    async with fleet(1) as (servers, client):
        await client.publish(STATE)
        state = {name: value.copy() for name, value in STATE.items()}
        state["a"] += 1  # sent whole
        begin = servers[0]._v1_weights_begin

        def begin_and_train(body):
            state["a"][3] = 7.0
            return begin(body)

        servers[0]._v1_weights_begin = begin_and_train
        with pytest.raises(FleetError, match="weight_update_refused"):
            await client.publish(state)
        assert_serve(servers, STATE)
        servers[0]._v1_weights_begin = begin
        await client.publish(state)
        assert_serve(servers, state)


async def test_a_replica_that_serves_other_weights_after_the_commit_is_an_error():
    async with fleet(2) as (servers, client):
        for state in (STATE, moved(STATE)):
            commit = servers[0]._v1_weights_commit
            servers[0]._v1_weights_commit = lambda body, commit=commit: commit(body) | {"fingerprint": "0" * 64}
            with pytest.raises(FleetError, match="serves weights with the fingerprint 000") as failed:
                await client.publish(state)
            assert [r.ok for r in failed.value.reports] == [False, True]
            assert [replica.stale is None for replica in client.replicas] == [False, True]
            servers[0]._v1_weights_commit = commit


async def test_a_state_that_changed_almost_everywhere_is_sent_whole():
    async with fleet(2) as (servers, client):
        await client.publish(STATE)
        state = {name: value + 1 for name, value in STATE.items()}
        done = await client.publish(state)
        assert done.deltas == () and done.changed_values == 2300 and done.nbytes == done.full_nbytes
        assert len((await client.publish(moved(state))).deltas) == 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_a_tensor_that_changed_everywhere_is_sent_whole_within_a_difference(dtype):
    async with fleet() as (servers, client):
        for server in servers:
            server.weights = FakeWeights(dtype)
        await client.publish(STATE)
        servers[1].restart()
        state = moved(STATE) | {"b": STATE["b"] + 1}
        done = await client.publish(state, chunk_mb=0)
        assert len(done.deltas) == 2 and done.changed_values < 400
        encodings = [body.get("encoding", "dense") for body in servers[0].bodies("/v1/weights/chunk")[1:]]
        assert encodings == ["dense", "overwrite"]
        assert_serve(servers, state)
        assert len((await client.publish(moved(state))).deltas) == 3


async def test_without_deltas_no_copy_is_kept():
    async with fleet(1) as (servers, client):
        for delta in ("auto", "never", "auto"):
            assert (await client.publish(STATE, delta=delta)).deltas == ()
        assert len((await client.publish(STATE)).deltas) == 1
        await client.publish(STATE, delta="never")
        assert client._published_state._snapshot is None
        with pytest.raises(InvalidField, match="delta"):
            await client.publish(STATE, delta="always")
        with pytest.raises(InvalidField, match="compression"):
            await client.publish(STATE, compression="lz4")


async def test_a_folder_or_a_stream_or_other_tensors_are_followed_by_the_whole():
    async with fleet(1) as (servers, client):
        others = [
            lambda: client.update_weights(CHECKPOINT, partial=True),
            lambda: client.publish(iter(STATE.items())),
            lambda: client.publish(STATE | {"c": np.ones(3, np.float32)}),
        ]
        for other in others:
            await client.publish(STATE)
            await other()
            assert (await client.publish(STATE)).deltas == ()
            assert_serve(servers, STATE)


async def test_a_partial_publication_is_a_difference_too():
    async with fleet(2) as (servers, client):
        await client.publish(STATE)
        state = STATE | {"b": moved(STATE)["b"]}
        servers[1].weights.tensors = {"a": np.zeros(2000, np.float32)}
        done = await client.publish({"b": state["b"]}, partial=True)
        assert done.deltas == (servers[0].url,) and done.nbytes == 1200
        assert_serve(servers[:1], state)
        assert servers[1].weights.tensors["a"].sum() == 0, "other tensors keep the values of the replica"
        state = moved(state)
        assert (await client.publish(state)).deltas == (servers[0].url,)
        assert_serve(servers, state)


async def test_an_update_in_place_sends_the_whole():
    async with fleet(1) as (servers, client):
        await client.publish(STATE)
        state = moved(STATE)
        assert (await client.publish(state, in_place=True)).deltas == ()
        assert_serve(servers, state)
        assert (await client.publish(moved(state))).deltas == (servers[0].url,)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
async def test_replicas_of_another_dtype_than_the_first_are_always_sent_the_whole(dtype):
    async with fleet() as (servers, client):
        servers[0].weights, servers[2].weights = FakeWeights("bfloat16"), FakeWeights("bfloat16")
        state = STATE
        for expected in ((), (servers[0].url, servers[2].url)):
            state = moved(state)
            sent = {name: value.astype(dtype) for name, value in state.items()}
            assert (await client.publish(sent)).deltas == expected
            assert_serve(servers, {name: value.astype(np.float32) for name, value in sent.items()})
        with pytest.raises(InvalidField, match="different dtypes"):
            await client.publish(iter(sent.items()))
        assert [s.session for s in servers] == [None] * 3


async def test_after_a_refused_difference_the_whole_is_sent():
    async with fleet(2) as (servers, client):
        await client.publish(STATE)
        client._published_state._snapshot._values["b"][:9] += 1  # as if changed by the trainer while it was copied
        state = moved(STATE)
        with pytest.raises(FleetError, match="weight_update_refused"):
            await client.publish(state)
        assert_serve(servers, STATE)
        assert (await client.publish(state)).deltas == ()
        assert_serve(servers, state)


async def test_a_tied_tensor_of_the_state_is_neither_counted_nor_sent_twice():
    async with fleet(2) as (servers, client):
        for server in servers:
            server.weights = FakeWeights("bfloat16", {"head": "a"})
        tied = STATE | {"norm1": np.ones(3, np.float32), "norm2": np.ones(3, np.float32)}
        await client.publish(tied | {"head": tied["a"].copy()})
        assert_serve(servers, tied)
        new = tied | moved(STATE)
        done = await client.publish(new | {"head": new["a"].copy()})
        assert len(done.deltas) == 2 and done.tensors == 2
        assert_serve(servers, new)
        with pytest.raises(InvalidField, match="head"):
            await client.publish(new | {"head": tied["b"]})
        assert_serve(servers, new)


async def test_a_dtype_that_no_server_takes_is_refused_by_name():
    async with fleet(1) as (servers, client):
        with pytest.raises(InvalidField, match="b: expected one of F32, F16, BF16"):
            await client.publish(STATE | {"b": np.ones(3)})
        assert servers[0].calls == []
