"""A client's hold stands while its process renews it. A hold that ended early is reported."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from e2e.server import until
from fastdeploy.core.errors import InvalidField
from fastdeploy.engine.requests.delivery import DeliveryFence
from fastdeploy.rl.client import RolloutClient
from fastdeploy.rl.errors import HoldLost
from fastdeploy.rl.frameworks.trl import FastDeployWeightTransfer
from fastdeploy.rl.sync_client import SyncRolloutClient
from rl.real_server import RealServer, real_server


@pytest.fixture(scope="module")
def shared() -> Iterator[RealServer]:
    with real_server() as server:
        yield server


@pytest.fixture
def server(shared) -> Iterator[RealServer]:
    """The shared server, without a hold before and after each test."""
    yield shared
    for hold in shared.holds():
        shared.post("/v1/resume", hold_id=hold["id"])


class Renewals:
    """Counts the renewals at the engine. ``outlive`` lets three times a ttl of 60 s pass, with renewals in between."""

    def __init__(self, server: RealServer, monkeypatch):
        self._server, self._made = server, threading.Semaphore(0)
        renew = server.engine.pause.renew

        def counted(args):
            result = renew(args)
            self._made.release()
            return result

        monkeypatch.setattr(server.engine.pause, "renew", counted)

    def outlive(self) -> None:
        for _ in range(6):
            while self._made.acquire(blocking=False):
                pass  # ignore earlier renewals, and wait for the next one
            assert self._made.acquire(timeout=30)
            self._server.pass_time(30.0)


def expire(server: RealServer) -> None:
    """End all holds as the end of their ttl does. A renewal on its way may come first, so this is repeated."""

    def expired() -> bool:
        for hold in list(server.engine.pause.holds.values()):
            hold.expires_at = 0.0
        return not server.holds()

    until(expired, 30, "no hold")


@pytest.mark.processes
def test_a_trainer_that_dies_inside_a_pause_leaves_no_hold_behind(server):
    code = (
        "import sys, time; from fastdeploy.rl.sync_client import SyncRolloutClient\n"
        "SyncRolloutClient(sys.argv[1]).pause(); print('paused', flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code, server.url], stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"paused\n"
    assert [hold["ttl_left_s"] is not None for hold in server.holds()] == [True]
    child.kill()
    child.wait()
    child.stdout.close()
    server.pass_time(61.0)
    until(lambda: not server.holds(), 30, "no hold")
    assert not server.http.get("/v1/is_paused").json()["result"]["is_paused"]


async def test_a_hold_stands_while_the_trainers_event_loop_is_blocked(server, monkeypatch):
    renewals = Renewals(server, monkeypatch)
    async with RolloutClient(server.url) as client, client.paused():
        renewals.outlive()  # blocks the loop
        assert len(server.holds()) == 1
    assert not server.holds()


@pytest.mark.parametrize("how", ["ttl", "restart", "foreign resume"])
async def test_a_hold_that_ended_early_raises_at_the_end_and_stops_a_publication(server, tmp_path, how):
    (tmp_path / "w1").mkdir()
    async with RolloutClient(server.url) as client:
        with pytest.raises(HoldLost, match="may have run meanwhile") as lost:
            async with client.paused():
                if how == "ttl":
                    expire(server)
                elif how == "restart":
                    server.restart_engine()
                    server.wait_ready()
                else:
                    server.post("/v1/resume", hold_id=server.holds()[0]["id"])
                with pytest.raises(HoldLost):
                    await client.update_weights(str(tmp_path / "w1"))
        assert lost.value.__cause__.code == "hold_not_found"
        info = await client.connection.call("GET", "/v1/weights")
        assert info["weight_epoch"] == server.engine.scopes.base.served.weight_epoch
        assert info["session"] is None and server.runner.weights == 0
        await client.resume()  # HoldLost is raised only once
        async with client.paused():
            pass


async def test_an_exception_inside_a_pause_gets_a_note_of_the_lost_hold(server):
    async with RolloutClient(server.url) as client:
        with pytest.raises(ValueError) as failed:
            async with client.paused():
                expire(server)
                raise ValueError("of the trainer")
        assert "may have run meanwhile" in failed.value.__notes__[0]
    with SyncRolloutClient(server.url) as client:
        with pytest.raises(KeyboardInterrupt) as interrupted, client.paused():
            expire(server)
            raise KeyboardInterrupt
        assert "may have run meanwhile" in interrupted.value.__notes__[0]


async def test_a_pause_without_a_block_is_renewed_until_the_resume_or_the_end_of_the_client(server, monkeypatch):
    renewals = Renewals(server, monkeypatch)
    async with RolloutClient(server.url) as client:
        await client.pause("keep", hold_id="a", ttl_s=60.0)
        await client.pause("wait", hold_id="b", ttl_s=None)
        await asyncio.to_thread(renewals.outlive)
        left = {hold["id"]: hold["ttl_left_s"] for hold in server.holds()}
        assert left.keys() == {"a", "b"} and left["a"] <= 60.0 and left["b"] is None
    server.pass_time(61.0)
    await asyncio.to_thread(until, lambda: [hold["id"] for hold in server.holds()] == ["b"], 30, "only b")
    async with RolloutClient(server.url) as client:
        await client.resume("b")
    assert not server.holds()
    assert not [thread for thread in threading.enumerate() if thread.name == "renew-holds"]


async def test_a_drain_that_takes_longer_than_the_ttl_is_renewed_meanwhile(server, monkeypatch):
    """The pause is answered only at the end of the drain."""
    renewals, drained = Renewals(server, monkeypatch), threading.Event()
    monkeypatch.setattr(DeliveryFence, "passed", property(lambda fence: drained.is_set()))
    async with RolloutClient(server.url) as client:
        task = asyncio.create_task(client.pause("keep", timeout_s=3600.0))
        await asyncio.to_thread(renewals.outlive)
        assert not task.done()
        drained.set()
        await task
        await client.resume()


def test_the_sync_client_and_the_trl_integration_renew_holds_and_report_lost_ones(server, monkeypatch):
    renewals = Renewals(server, monkeypatch)
    with SyncRolloutClient(server.url) as client:
        with client.paused():
            renewals.outlive()
        with pytest.raises(HoldLost), client.paused():
            expire(server)
    transfer = FastDeployWeightTransfer(server.url, hold_ttl_s=60.0)
    transfer.pause()
    renewals.outlive()
    transfer.resume()
    transfer.pause()
    expire(server)
    with pytest.raises(HoldLost):
        transfer.resume()
    transfer.destroy()


async def test_an_invalid_ttl_is_refused_and_no_hold_is_placed(server):
    async with RolloutClient(server.url) as client:
        with pytest.raises(InvalidField, match="ttl_s"):
            await client.pause("keep", ttl_s=1e12)
    assert not server.holds()
