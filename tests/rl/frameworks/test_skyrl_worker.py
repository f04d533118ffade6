"""SkyRL's weight sender on a real server. SkyRL's own client is in tests/frameworks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from e2e.server import LiveStream
from fastdeploy.core.errors import InvalidField, WeightUpdateRefused
from fastdeploy.rl.frameworks.skyrl import FastDeployWeightSender, policy_worker
from rl.embedded_weights import scaled_weights, served_state


class Source:
    """Counts the tensors taken from it. With several ranks, one that stops early leaves the others in a collective."""

    def __init__(self, pairs: list):
        self.pairs, self.taken = pairs, 0

    def __iter__(self) -> Iterator:
        for pair in self.pairs:
            self.taken += 1
            yield pair


def test_each_sync_is_a_version_and_only_rank_0_sends(server):
    before = served_state(server)[2]
    source = Source(scaled_weights(1.01))
    sender = FastDeployWeightSender([server.url], source)
    sender.send_weights()
    paused, version, checksum = served_state(server)
    assert (paused, version) == (False, "1") and checksum != before
    sender.send_weights()
    assert served_state(server)[1] == "2" and [p.version for p in sender.publications] == ["1", "2"]
    other = Source(scaled_weights(1.02))
    FastDeployWeightSender([server.url], other, is_sender=False).send_weights()
    assert other.taken == len(other.pairs), "every rank takes part in the collectives"
    assert served_state(server)[1:] == ("2", checksum)


def test_a_refused_sync_raises_and_leaves_no_rank_waiting(server):
    before = served_state(server)
    (name, array), *rest = scaled_weights(1.0)
    source = Source([(name, array[:1]), *rest])  # refused with the first chunk, before the rest is read
    sender = FastDeployWeightSender([server.url], source, chunk_mb=1)
    with pytest.raises(WeightUpdateRefused):
        sender.send_weights()
    assert source.taken == len(source.pairs)
    assert served_state(server) == before and sender.publications == []


@pytest.mark.parametrize("reset", [False, True])
def test_with_a_prefix_cache_reset_frozen_requests_are_recomputed(server, reset):
    stream = LiveStream(server, list(range(40, 60)), max_tokens=3900).wait_for_tokens()
    assert server.post("/pause?mode=keep&clear_cache=false").status == 200
    sender = FastDeployWeightSender([server.url], scaled_weights(1.03))
    sender.skyrl_set_reset_prefix_cache(reset)
    sender.send_weights()
    recomputed = sender.publications[0].report["tokens_to_recompute"]
    assert server.post("/resume").status == 200
    assert stream.abort().finals == ["abort"]
    assert (recomputed > 0) == reset


def test_several_servers_are_refused_with_the_command_that_makes_one_address_of_them():
    with pytest.raises(InvalidField, match="^external_server_urls: expected one address .* `fastdeploy fleet "):
        FastDeployWeightSender(["http://a:8180", "http://b:8180"], [])


def test_the_policy_worker_differs_from_skyrls_only_in_the_sender():
    class Base:
        def other(self) -> str:
            return "kept"

    worker = policy_worker(Base)
    assert issubclass(worker, Base) and worker().other() == "kept"
    assert "init_weight_sync_state" in vars(worker)
