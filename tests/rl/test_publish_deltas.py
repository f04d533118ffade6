"""Publishing of the difference from the last publication."""

from __future__ import annotations

import asyncio
import json
from collections import deque

import numpy as np
import pytest

from fastdeploy.core.errors import FastDeployError, InvalidField, WeightUpdateRefused
from fastdeploy.core.fingerprint import fingerprint, over_all
from fastdeploy.core.serving_dtype import in_dtype
from fastdeploy.rl.errors import Unreachable, WrongWeights
from rl.fake_server import CHECKPOINT, FakeServer, fake_site
from rl.fake_weights import FakeWeights

RNG = np.random.default_rng(4)
STATE = {"a": RNG.normal(size=(50, 40)).astype(np.float32), "b": RNG.normal(size=300).astype(np.float32)}


def moved(state: dict[str, np.ndarray], share: float = 0.02) -> dict[str, np.ndarray]:
    """Return a state in which a share of the values changed."""
    return {n: np.where(RNG.random(v.shape) < share, v * np.float32(1.5), v) for n, v in state.items()}


def fingerprint_of(state: dict[str, np.ndarray], dtype: str = "float32") -> str:
    return over_all({n: fingerprint(in_dtype(v, dtype).reshape(-1)) for n, v in state.items()})


def assert_serves(server: FakeServer, state: dict[str, np.ndarray]) -> None:
    assert server.weights.fingerprint == fingerprint_of(state, server.weights.dtype)
    assert server.session is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("via", ["upload", "shared_memory", "folder"])
@pytest.mark.parametrize("compression", ["none", "zstd"])
async def test_only_what_changed_is_sent_after_the_first_publication(dtype, via, compression, tmp_path):
    async with fake_site() as (server, client):
        server.weights = FakeWeights(dtype)
        options = {"via": via, "folder": str(tmp_path), "compression": compression}
        first = await client.publish(STATE, **options)
        assert not first.is_delta and first.changed_values is None
        state = STATE
        for step in range(10):
            state = moved(state)
            done = await client.publish(state, step, chunk_mb=step % 2, **options)
            assert_serves(server, state)
            assert done.is_delta and done.version == str(step)
            assert 0 < done.changed_values < 300 and done.nbytes < first.nbytes / 4
            assert done.full_nbytes == 2300 * {"float32": 4, "bfloat16": 2}[dtype]
        bodies = server.bodies("/v1/weights/chunk")
        assert {body.get("compression", "none") for body in bodies[-2:]} == {compression}


async def test_fingerprints_are_sent_with_every_part_unless_the_query_of_an_upload_would_be_too_long():
    async with fake_site() as (server, client):
        for count, via in ((40, "upload"), (200, "upload"), (200, "shared_memory")):
            state = {f"model.layers.{i}.norm": np.ones(2, np.float32) for i in range(count)}
            await client.publish(state, via=via, delta="never")
        few, many, in_body = server.bodies("/v1/weights/chunk")
        assert len(json.loads(few["fingerprints"])) == 40 and "fingerprints" not in many
        assert len(in_body["fingerprints"]) == 200


async def test_differences_to_other_hosts_are_compressed():
    async with fake_site() as (server, client):
        await client.publish(STATE, via="upload")
        client.connection.is_local = False
        await client.publish(moved(STATE), via="upload")
        assert server.bodies("/v1/weights/chunk")[-1]["compression"] == "zstd"


async def test_an_unchanged_state_sends_no_tensor_but_sets_the_version():
    async with fake_site() as (server, client):
        await client.publish(STATE, "one")
        done = await client.publish(STATE, "two")
        assert (done.tensors, done.nbytes, done.changed_values) == (0, 0, 0)
        assert server.version == "two" and len(server.bodies("/v1/weights/chunk")) == 1


async def test_the_trainer_may_change_its_tensors_after_a_publication():
    async with fake_site() as (server, client):
        state = {name: value.copy() for name, value in STATE.items()}
        await client.publish(state)
        state["b"][7] += 1
        assert (await client.publish(state)).changed_values == 1
        assert_serves(server, state)
        state["a"] += 1  # sent whole
        state["b"][7] += 1
        await client.publish(state)
        assert_serves(server, state)


@pytest.mark.parametrize("how", ["restart", "restart in another dtype", "other weights"])
async def test_a_server_that_does_not_serve_the_last_publication_is_sent_the_whole(how):
    async with fake_site() as (server, client):
        await client.publish(STATE)
        if how == "other weights":  # from elsewhere, with the same epoch as before
            server.weights.tensors = dict(server.weights.tensors, a=np.zeros(2000, np.float32))
        else:
            server.restart()
        if how == "restart in another dtype":
            server.weights = FakeWeights("bfloat16")
        state = moved(STATE)
        assert not (await client.publish(state)).is_delta
        assert_serves(server, state)
        if how == "restart in another dtype":
            assert not (await client.publish(state)).is_delta, "the copy has the old dtype"
        state = moved(state)
        assert (await client.publish(state)).is_delta
        assert_serves(server, state)


async def test_after_a_commit_that_failed_the_difference_is_from_the_last_good_one():
    async with fake_site() as (server, client):
        await client.publish(STATE)
        server.refuse["/v1/weights/commit"] = deque([(409, "session_expired")])
        with pytest.raises(FastDeployError, match="session_expired"):
            await client.publish(moved(STATE))
        server.session = None
        state = moved(STATE)
        assert (await client.publish(state)).is_delta
        assert_serves(server, state)


@pytest.mark.parametrize("how", ["refused", "cancelled", "late"])
async def test_after_an_aborted_publication_the_difference_is_from_the_last_good_one(how):
    async with fake_site() as (server, client):
        await client.publish(STATE)
        wrong = moved(STATE)
        if how == "refused":
            server.refuse["/v1/weights/chunk"] = deque([(409, "session_expired")])
            with pytest.raises(FastDeployError, match="session_expired"):
                await client.publish(wrong)
        else:
            stage = server._v1_weights_chunk
            task = asyncio.create_task(client.publish(wrong, deadline_s=600 if how == "cancelled" else 0.0))
            server._v1_weights_chunk = lambda body: task.cancel() or stage(body)
            with pytest.raises(asyncio.CancelledError if how == "cancelled" else Unreachable):
                await task
            server._v1_weights_chunk = stage
        assert_serves(server, STATE)
        state = moved(STATE)
        assert (await client.publish(state)).is_delta
        assert_serves(server, state)


async def test_tensors_that_change_while_they_are_sent_are_refused():
    async with fake_site() as (server, client):
        await client.publish(STATE)
        state = {name: value.copy() for name, value in STATE.items()}
        state["a"] += 1  # sent whole
        begin = server._v1_weights_begin

        def begin_and_train(body):
            state["a"][3] = 7.0
            return begin(body)

        server._v1_weights_begin = begin_and_train
        with pytest.raises(WeightUpdateRefused):
            await client.publish(state)
        assert_serves(server, STATE)
        server._v1_weights_begin = begin
        await client.publish(state)
        assert_serves(server, state)


async def test_a_server_that_serves_other_weights_after_the_commit_is_an_error():
    async with fake_site() as (server, client):
        for state in (STATE, moved(STATE)):
            commit = server._v1_weights_commit
            server._v1_weights_commit = lambda body, commit=commit: commit(body) | {"fingerprint": "0" * 64}
            with pytest.raises(WrongWeights, match="serves weights with the fingerprint 000"):
                await client.publish(state)
            server._v1_weights_commit = commit
            await client.publish(STATE)


async def test_a_state_that_changed_almost_everywhere_is_sent_whole():
    async with fake_site() as (server, client):
        await client.publish(STATE)
        state = {name: value + 1 for name, value in STATE.items()}
        done = await client.publish(state)
        assert not done.is_delta and done.changed_values == 2300 and done.nbytes == done.full_nbytes
        assert (await client.publish(moved(state))).is_delta


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_a_tensor_that_changed_everywhere_is_sent_whole_within_a_difference(dtype):
    async with fake_site() as (server, client):
        server.weights = FakeWeights(dtype)
        await client.publish(STATE)
        state = moved(STATE) | {"b": STATE["b"] + 1}
        done = await client.publish(state, chunk_mb=0)
        assert done.is_delta and done.changed_values < 400
        encodings = [body.get("encoding", "dense") for body in server.bodies("/v1/weights/chunk")[1:]]
        assert encodings == ["dense", "overwrite"]
        assert_serves(server, state)
        assert (await client.publish(moved(state))).is_delta


async def test_without_deltas_no_copy_is_kept():
    async with fake_site() as (server, client):
        for delta in ("auto", "never", "auto"):
            assert not (await client.publish(STATE, delta=delta)).is_delta
        assert (await client.publish(STATE)).is_delta
        await client.publish(STATE, delta="never")
        assert client._publisher._snapshot is None
        with pytest.raises(InvalidField, match="delta"):
            await client.publish(STATE, delta="always")
        with pytest.raises(InvalidField, match="compression"):
            await client.publish(STATE, compression="lz4")


async def test_a_folder_or_a_stream_or_other_tensors_are_followed_by_the_whole():
    async with fake_site() as (server, client):
        others = [
            lambda: client.update_weights(CHECKPOINT, partial=True),
            lambda: client.publish(iter(STATE.items())),
            lambda: client.publish(STATE | {"c": np.ones(3, np.float32)}),
        ]
        for other in others:
            await client.publish(STATE)
            await other()
            assert not (await client.publish(STATE)).is_delta
            assert_serves(server, STATE)


async def test_a_partial_publication_is_a_difference_too():
    async with fake_site() as (server, client):
        await client.publish(STATE)
        state = STATE | {"b": moved(STATE)["b"]}
        assert (await client.publish({"b": state["b"]}, partial=True)).is_delta
        assert_serves(server, state)
        server.weights.tensors = {"a": np.zeros(2000, np.float32)}
        done = await client.publish({"b": state["b"]}, partial=True)
        assert not done.is_delta and done.nbytes == 1200
        assert server.weights.tensors["a"].sum() == 0, "other tensors keep the values of the server"
        for expected in (False, True):
            state = moved(state)
            assert (await client.publish(state)).is_delta == expected
            assert_serves(server, state)


async def test_after_a_refused_difference_the_whole_is_sent():
    async with fake_site() as (server, client):
        await client.publish(STATE)
        client._publisher._snapshot._values["b"][:9] += 1  # as if changed by the trainer while it was copied
        state = moved(STATE)
        with pytest.raises(WeightUpdateRefused):
            await client.publish(state)
        assert_serves(server, STATE)
        assert not (await client.publish(state)).is_delta
        assert_serves(server, state)


async def test_a_tied_tensor_of_the_state_is_neither_counted_nor_sent_twice():
    async with fake_site() as (server, client):
        server.weights = FakeWeights("bfloat16", {"head": "a"})
        tied = STATE | {"norm1": np.ones(3, np.float32), "norm2": np.ones(3, np.float32)}
        await client.publish(tied | {"head": tied["a"].copy()})
        assert_serves(server, tied)
        new = tied | moved(STATE)
        done = await client.publish(new | {"head": new["a"].copy()})
        assert done.is_delta and done.tensors == 2
        assert_serves(server, new)
        with pytest.raises(InvalidField, match="head"):
            await client.publish(new | {"head": tied["b"]})
        assert_serves(server, new)


async def test_a_dtype_that_no_server_takes_is_refused_by_name():
    async with fake_site() as (server, client):
        with pytest.raises(InvalidField, match="b: expected one of F32, F16, BF16"):
            await client.publish(STATE | {"b": np.ones(3)})
        assert server.calls == []
