"""SkyRL's weight sender on a real server. SkyRL's own client is in tests/frameworks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from e2e.server import LiveStream, Server
from fastdeploy.rl.errors import FleetError
from fastdeploy.rl.frameworks.skyrl import FastDeployWeightSender, policy_worker
from rl.frameworks.test_trl import state, weights


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server("--dtype", "float32", "--num-gpu-blocks-override", "2048").wait_ready()
    yield server
    server.stop()
    server.remove()


class Source:
    """A source that counts the tensors taken from it; another rank would wait in a collective for the rest."""

    def __init__(self, pairs: list):
        self.pairs, self.taken = pairs, 0

    def __iter__(self) -> Iterator:
        for pair in self.pairs:
            self.taken += 1
            yield pair


def test_each_sync_is_a_version_and_only_rank_0_sends(server):
    before = state(server)[2]
    source = Source(weights(1.01))
    sender = FastDeployWeightSender([server.url], source)
    sender.send_weights()
    paused, version, checksum = state(server)
    assert (paused, version) == (False, "1") and checksum != before
    sender.send_weights()
    assert state(server)[1] == "2" and [p.version for p in sender.publications] == ["1", "2"]
    other = Source(weights(1.02))
    FastDeployWeightSender([server.url], other, is_sender=False).send_weights()
    assert other.taken == len(other.pairs), "its share of the collectives"
    assert state(server)[1:] == ("2", checksum)


def test_a_refused_sync_raises_and_leaves_no_rank_waiting(server):
    before = state(server)
    (name, array), *rest = weights(1.0)
    source = Source([(name, array[:1]), *rest])  # refused with the first chunk, before the rest is read
    sender = FastDeployWeightSender([server.url], source, chunk_mb=1)
    with pytest.raises(FleetError):
        sender.send_weights()
    assert source.taken == len(source.pairs)
    assert state(server) == before and sender.publications == []


@pytest.mark.parametrize("reset", [False, True])
def test_with_a_prefix_cache_reset_frozen_requests_are_recomputed(server, reset):
    stream = LiveStream(server, list(range(40, 60)), max_tokens=600).wait_for_tokens()
    assert server.post("/pause?mode=keep&clear_cache=false").status == 200
    sender = FastDeployWeightSender([server.url], weights(1.03))
    sender.skyrl_set_reset_prefix_cache(reset)
    sender.send_weights()
    recomputed = sender.publications[0].reports[0].result["tokens_to_recompute"]
    assert server.post("/resume").status == 200
    assert stream.wait_end().finals == ["length"]
    assert (recomputed > 0) == reset


def test_the_policy_worker_differs_from_skyrls_only_in_the_sender():
    class Base:
        def other(self) -> str:
            return "kept"

    worker = policy_worker(Base)
    assert issubclass(worker, Base) and worker().other() == "kept"
    assert "init_weight_sync_state" in vars(worker)
