"""SyncRolloutClient: the methods of RolloutClient, for any number of threads."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from fastdeploy.core.loop_thread import LoopThread
from fastdeploy.rl.client import RolloutClient
from fastdeploy.rl.sync_client import SyncRolloutClient
from rl.fake_server import FakeServer, Fault

PARAMS = {"max_tokens": 6, "seed": 1, "ignore_eos": True}


@pytest.fixture
def server() -> Iterator[FakeServer]:
    """A scripted server in an event loop of its own."""
    loop = LoopThread("fake-server")
    fake = loop.run(FakeServer().__aenter__())
    yield fake
    loop.run(fake.__aexit__())
    loop.stop()


def test_the_sync_client_has_every_method_of_the_async_client():
    def public(cls):
        return {name for name, member in inspect.getmembers(cls, inspect.isfunction) if not name.startswith("_")}

    assert public(RolloutClient) <= public(SyncRolloutClient)
    assert public(SyncRolloutClient) - public(RolloutClient) == {"generate_many"}


def test_generating_pausing_and_publishing_from_many_threads(server):
    with SyncRolloutClient(server.url) as client, ThreadPoolExecutor(8) as pool:
        server.faults.extend([Fault("abort", 2), Fault("drop", 1)])
        alone = client.generate([1, 2], PARAMS)
        assert list(pool.map(lambda _: client.generate([1, 2], PARAMS).token_ids, range(16))) == [alone.token_ids] * 16
        with client.paused("keep") as report:
            assert report["is_paused"] and client.is_paused() and server.holds
        assert not server.holds
        assert client.publish({"a": np.ones(2, np.float32)}, 3, via="upload").version == "3"
        many = [r.token_ids for r in client.generate_many([[1, 2]] * 3, PARAMS)]
        assert many[0] == alone.token_ids and len(set(map(tuple, many))) == 3, "equal prompts get different answers"
        assert client.generate_many([[1, 2]], PARAMS | {"first_choice": 2})[0].token_ids == many[2]
        assert [r.index for r in client.generate_group([1, 2], PARAMS, n=2)] == [0, 1]
        with pytest.raises(ValueError), client.paused():
            raise ValueError
        assert not server.holds
    client.close()


@pytest.mark.processes
def test_the_client_imports_neither_paddle_nor_torch():
    code = (
        "import sys, fastdeploy.rl.client, fastdeploy.rl.sync_client, fastdeploy.rl.state_encoding;"
        "assert not {'paddle', 'torch', 'zmq', 'fastapi'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
