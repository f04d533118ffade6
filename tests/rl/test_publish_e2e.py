"""Publishing of differences to real servers, which serve in float32 and in bfloat16."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest

from e2e.server import Server, until
from fastdeploy.core.serving_dtype import in_dtype
from fastdeploy.rl.client import RolloutClient
from fastdeploy.rl.sync_client import SyncRolloutClient
from rl.embedded_weights import embedded_weights
from rl.real_server import Wire

TRAINER = Path(__file__).with_name("trainer_child.py")
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
State = Mapping[str, np.ndarray]


def start(count: int, *flags: str) -> list[Server]:
    return [Server("--max-num-seqs", "2", "--num-gpu-blocks-override", "64", *flags) for _ in range(count)]


@pytest.fixture(scope="module")
def bfloat16_servers() -> Iterator[list[Server]]:
    yield from served(start(3))


@pytest.fixture(scope="module")
def float32_server() -> Iterator[list[Server]]:
    yield from served(start(1, "--dtype", "float32"))


def served(servers: list[Server]) -> Iterator[list[Server]]:
    try:
        yield [server.wait_ready() for server in servers]
    finally:
        for server in servers:
            server.remove()


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


def assert_serve(servers: list[Server], state: State, dtype: str) -> None:
    """Check every bit that serves against the state, rounded to the serving dtype."""
    sums = {name: hashlib.sha256(in_dtype(value, dtype).tobytes()).hexdigest() for name, value in state.items()}
    for server in servers:
        assert server.weights(checksums=True)["checksums"] == sums


def urls(servers: list[Server]) -> list[str]:
    return [server.url for server in servers]


@pytest.mark.parametrize("via", ["shared_memory", "upload", "folder"])
def test_many_differences_leave_the_bits_of_the_state_in_bfloat16_and_float32(
    bfloat16_servers, float32_server, via, tmp_path
):
    training = Training(1)
    fleet = [bfloat16_servers[0], bfloat16_servers[1], float32_server[0]]
    options = {"via": via, "folder": str(tmp_path), "compression": "zstd" if via == "upload" else "none"}
    with SyncRolloutClient(urls(fleet)) as client, SyncRolloutClient(urls(float32_server)) as other:
        first = client.publish(training.state, **options)
        assert first.deltas == ()
        for step in range(4):
            done = client.publish(training.step((0.01, 0.03)[step % 2]), step, chunk_mb=step % 2, **options)
            assert done.deltas == tuple(urls(fleet[:2])) and done.version == str(step)
            assert 0 < done.changed_values < 0.03 * sum(v.size for v in training.state.values())
        assert_serve(fleet[:2], training.state, "bfloat16")
        assert_serve(fleet[2:], training.state, "float32")
        other.publish(training.state, **options)
        done = other.publish(training.step(0.02), **options)
        assert len(done.deltas) == 1 and done.nbytes < done.full_nbytes / 20
        assert_serve(fleet[2:], training.state, "float32")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_fifty_publications_leave_the_bits_of_the_state(bfloat16_servers, float32_server, dtype):
    training = Training(2)
    for servers, serving in ((bfloat16_servers[:1], "bfloat16"), (float32_server, "float32")):
        with SyncRolloutClient(urls(servers)) as client:
            for step in range(50):
                state = {name: v.astype(dtype) for name, v in training.step((0.01, 0.02, 0.03)[step % 3]).items()}
                state[HEAD] = state[EMBEDDING].copy()
                assert len(client.publish(state, step).deltas) == (step > 0)
                if step % 10 == 9:
                    del state[HEAD]
                    assert_serve(servers, {name: v.astype(np.float32) for name, v in state.items()}, serving)


@pytest.mark.parametrize("framework", ["torch", "paddle"])
def test_states_of_frameworks_are_published_bit_by_bit(bfloat16_servers, framework):
    servers = bfloat16_servers[:2]
    path = os.pathsep.join([str(TRAINER.parents[1]), str(TRAINER.parents[2])])
    child = subprocess.Popen(
        [sys.executable, str(TRAINER), framework, *urls(servers)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    with child:
        lines = [line for line in child.stdout if line.startswith("{")]
    assert child.returncode == 0 and len(lines) == 3
    done = [json.loads(line) for line in lines]
    assert [line["deltas"] for line in done] == [0, 2, 2]
    assert done[2]["nbytes"] < done[0]["nbytes"] / 10
    for server in servers:
        assert server.weights(checksums=True)["checksums"] == done[-1]["checksums"]


def test_a_new_trainer_sends_the_whole_first(bfloat16_servers):
    training = Training(3)
    for _ in range(2):
        with SyncRolloutClient(urls(bfloat16_servers)) as client:
            assert client.publish(training.step(0.02)).deltas == ()
            assert len(client.publish(training.step(0.02)).deltas) == 3
        assert_serve(bfloat16_servers, training.state, "bfloat16")


def test_a_change_by_another_trainer_is_noticed(bfloat16_servers):
    training, other = Training(4), Training(5)
    with SyncRolloutClient(urls(bfloat16_servers)) as client:
        client.publish(training.step(0.02))
        with SyncRolloutClient(bfloat16_servers[1].url) as second:
            second.publish(other.step(0.5))
        assert len(client.publish(training.step(0.02)).deltas) == 2
        assert_serve(bfloat16_servers, training.state, "bfloat16")


async def test_a_begin_whose_answer_is_lost_is_taken_up_again(bfloat16_servers):
    training, server = Training(6), bfloat16_servers[0]
    # The connections of client: the reply of the first one, which is that of begin, breaks off.
    async with Wire(server.url, [10]) as wire, RolloutClient(wire.url) as client:
        await client.publish(training.step(0.02))
    assert_serve([server], training.state, "bfloat16")
    assert server.weights()["session"] is None


@pytest.mark.slow
def test_a_replica_that_restarts_between_publications_is_sent_the_whole(bfloat16_servers):
    training = Training(7)
    with SyncRolloutClient(urls(bfloat16_servers)) as client:
        client.publish(training.step(0.02))
        boot_id = bfloat16_servers[1].weights()["boot_id"]
        os.kill(bfloat16_servers[1].engine_pid, signal.SIGKILL)
        until(lambda: restarted(bfloat16_servers[1], boot_id), 60, "restarted")
        done = client.publish(training.step(0.02))
        assert done.deltas == (bfloat16_servers[0].url, bfloat16_servers[2].url)
        assert_serve(bfloat16_servers, training.state, "bfloat16")
        assert len(client.publish(training.step(0.02)).deltas) == 3
        assert_serve(bfloat16_servers, training.state, "bfloat16")
        assert client.generate([40, 41], {"max_tokens": 3}).token_ids


def restarted(server: Server, boot_id: str) -> bool:
    reply = server.get("/v1/weights")
    return reply.status == 200 and reply.result["boot_id"] != boot_id
