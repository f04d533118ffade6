"""Publishing of differences to real servers, which serve in float32 and in bfloat16."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from e2e.server import Server, until
from fastdeploy.core.serving_dtype import dtype_of, in_dtype
from fastdeploy.rl.client import RolloutClient
from fastdeploy.rl.sync_client import SyncRolloutClient
from fastdeploy.testing.checkpoints import write_checkpoint
from rl.embedded_weights import embedded_weights
from rl.real_server import Wire
from support.specs import SPECS
from worker.new_weights import new_tensors
from worker.test_mixture_updates import of_transformers

TRAINER = Path(__file__).with_name("trainer_child.py")
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
State = Mapping[str, np.ndarray]


@pytest.fixture(scope="module", params=["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def dtype(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def server(dtype) -> Iterator[Server]:
    with Server("--max-num-seqs", "2", "--num-gpu-blocks-override", "64", "--dtype", dtype) as server:
        yield server


class Training:
    """The weights of a trainer in float32. ``step`` changes a share of the values."""

    def __init__(self, seed: int):
        self._rng = np.random.default_rng(seed)
        self.state = embedded_weights()

    def step(self, share: float) -> State:
        for value in self.state.values():
            index = self._rng.integers(0, value.size, int(np.ceil(share * value.size)))
            value.reshape(-1)[index] *= self._rng.choice(np.array([0.9, 1.1, -1.0], np.float32), index.size)
        return self.state


def assert_serves(server: Server, state: State, dtype: str) -> None:
    """Check every bit that serves against the state, rounded to the serving dtype."""
    sums = {name: hashlib.sha256(in_dtype(value, dtype).tobytes()).hexdigest() for name, value in state.items()}
    assert server.weights(checksums=True)["checksums"] == sums


@pytest.mark.parametrize("via", ["shared_memory", "upload", "folder"])
def test_many_differences_leave_the_bits_of_the_state(server, dtype, via, tmp_path):
    training = Training(1)
    options = {"via": via, "folder": str(tmp_path), "compression": "zstd" if via == "upload" else "none"}
    with SyncRolloutClient(server.url) as client:
        assert not client.publish(training.state, **options).is_delta
        for step in range(4):
            done = client.publish(training.step((0.01, 0.03)[step % 2]), step, chunk_mb=step % 2, **options)
            assert done.is_delta and done.version == str(step) and done.nbytes < done.full_nbytes / 5
            assert 0 < done.changed_values < 0.03 * sum(v.size for v in training.state.values())
        assert_serves(server, training.state, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("source", [np.float32, np.float16])
def test_fifty_publications_leave_the_bits_of_the_state(server, dtype, source):
    training = Training(2)
    with SyncRolloutClient(server.url) as client:
        for step in range(50):
            state = {name: v.astype(source) for name, v in training.step((0.01, 0.02, 0.03)[step % 3]).items()}
            state[HEAD] = state[EMBEDDING].copy()
            assert client.publish(state, step).is_delta == (step > 0)
            if step % 10 == 9:
                del state[HEAD]
                assert_serves(server, {name: v.astype(np.float32) for name, v in state.items()}, dtype)


def test_a_mixture_is_published_as_transformers_has_it_with_a_layer_that_predicts_further_tokens(dtype, tmp_path):
    spec = replace(SPECS["glm_moe"], shards=1)
    folder, new, later = write_checkpoint(tmp_path / "model", spec), new_tensors(spec, 1), new_tensors(spec, 1)
    later["model.layers.1.mlp.experts.3.up_proj.weight"][0] += 1
    more = {"model.layers.3.enorm.weight": np.ones(64, np.float32)}
    small = ("--max-num-seqs", "2", "--num-gpu-blocks-override", "64")
    with Server(*small, "--dtype", dtype, "--model", str(folder)) as server, SyncRolloutClient(server.url) as client:
        for state, is_delta in ((new, False), (later, True)):
            assert client.publish(of_transformers(state) | more).is_delta == is_delta
            sums = {
                name: hashlib.sha256(in_dtype(value, dtype_of(name, dtype)).tobytes()) for name, value in state.items()
            }
            assert server.weights(checksums=True)["checksums"] == {name: one.hexdigest() for name, one in sums.items()}
        assert not client.publish((of_transformers(new) | more).items()).is_delta


@pytest.mark.parametrize("dtype", ["bfloat16"], indirect=True)  # the child computes the bits of bfloat16
@pytest.mark.parametrize("framework", ["torch", pytest.param("paddle", marks=pytest.mark.slow)])
def test_states_of_frameworks_are_published_bit_by_bit(server, dtype, framework):
    path = os.pathsep.join([str(TRAINER.parents[1]), str(TRAINER.parents[2])])
    child = subprocess.Popen(
        [sys.executable, str(TRAINER), framework, server.url],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    with child:
        lines = [line for line in child.stdout if line.startswith("{")]
    assert child.returncode == 0 and len(lines) == 3
    done = [json.loads(line) for line in lines]
    assert [line["is_delta"] for line in done] == [False, True, True]
    assert done[2]["nbytes"] < done[0]["nbytes"] / 10
    assert server.weights(checksums=True)["checksums"] == done[-1]["checksums"]


def test_a_new_trainer_sends_the_whole_first(server, dtype):
    training = Training(3)
    for _ in range(2):
        with SyncRolloutClient(server.url) as client:
            assert [client.publish(training.step(0.02)).is_delta for _ in range(2)] == [False, True]
        assert_serves(server, training.state, dtype)


def test_a_change_by_another_trainer_is_noticed(server, dtype):
    training, other = Training(4), Training(5)
    with SyncRolloutClient(server.url) as client:
        client.publish(training.step(0.02))
        with SyncRolloutClient(server.url) as second:
            second.publish(other.step(0.5))
        assert [client.publish(training.step(0.02)).is_delta for _ in range(2)] == [False, True]
        assert_serves(server, training.state, dtype)


async def test_a_begin_whose_answer_is_lost_is_taken_up_again(server, dtype):
    training = Training(6)
    # The connections of client: the reply of the first one, which is that of begin, breaks off.
    async with Wire(server.url, [10]) as wire, RolloutClient(wire.url) as client:
        await client.publish(training.step(0.02))
    assert_serves(server, training.state, dtype)
    assert server.weights()["session"] is None


@pytest.mark.slow
def test_a_server_that_restarts_between_publications_is_sent_the_whole(server, dtype):
    training = Training(7)
    with SyncRolloutClient(server.url) as client:
        client.publish(training.step(0.02))
        boot_id = server.weights()["boot_id"]
        os.kill(server.engine_pid, signal.SIGKILL)
        until(lambda: restarted(server, boot_id), 60, "restarted")
        for expected in (False, True):
            assert client.publish(training.step(0.02)).is_delta == expected
            assert_serves(server, training.state, dtype)
        assert client.generate([40, 41], {"max_tokens": 3}).token_ids


def restarted(server: Server, boot_id: str) -> bool:
    reply = server.get("/v1/weights")
    return reply.status == 200 and reply.result["boot_id"] != boot_id
