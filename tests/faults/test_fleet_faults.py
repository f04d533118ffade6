"""The client of a fleet has the faults that the client of one engine has. The engines are threads of this process."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from fastdeploy.core.config import ServeConfig
from fastdeploy.core.errors import PauseTimeout
from fastdeploy.core.request_fields import AddRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.faults import server
from fastdeploy.faults.injection import CURRENT, Injection
from fastdeploy.faults.rules import read_headers
from fastdeploy.inter_communicator import messages as m
from fleet.fake_fleet import fake_fleet


@pytest.fixture
def fleet(tmp_path, monkeypatch):
    """Return a fleet with faults, whose engines say that they are the processes 1000 and 1001. killed: the processes
    that the faults have killed."""
    with fake_fleet(2) as fleet:
        killed: list[int] = []
        monkeypatch.setattr(server, "kill", killed.append)
        server.ServerFaults(ServeConfig(model="fake", faults="on", faults_dir=str(tmp_path)), fleet.client)
        for pid, name in enumerate(fleet.client.membership.replicas, 1000):
            client = fleet.replica(name).client
            client.welcome = replace(client.welcome, pid=pid)
        fleet.killed = killed
        yield fleet


def asked(header: str) -> Injection:
    """Let this task be an HTTP request with the header, and return its faults."""
    injection = Injection("/v1/any", read_headers([header], is_fleet=True), "")
    CURRENT.set(injection)
    return injection


def test_tokens_have_the_faults_of_their_request(fleet):
    async def versions(header: str) -> set[str]:
        asked(header)
        stream = await fleet.client.submit(AddRequest("r", [1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True)))
        outputs = []
        while not outputs or outputs[-1].finish_reason is None:
            await stream.reader.wait()
            outputs += stream.read()
        stream.close()
        return {span.version for output in outputs for span in output.spans}

    assert fleet.run(versions("version_wrong; label=lie")) == {"lie"}
    assert fleet.run(versions("slow_tokens; seconds=0")) == {"0"}


def test_the_engine_that_dies_is_the_one_at_which_the_request_runs(fleet):
    async def places() -> list[int]:
        streams, pids = [], []
        for name, prompt in ("first", [1, 2, 3]), ("second", [4, 5, 6]):  # each has a replica of its own
            asked("death; when=before")
            request = AddRequest(name, prompt, SamplingParams(max_tokens=400, ignore_eos=True))
            streams.append(await fleet.client.submit(request))
            pids += [replica.client.welcome.pid for replica in fleet.client.replicas_of(name)]
        for stream in streams:
            stream.close()
        return pids

    pids = fleet.run(places())
    assert sorted(pids) == [1000, 1001] and pids == fleet.killed


def test_calls_have_the_faults_of_their_request(fleet):
    async def pause(header: str) -> dict:
        asked(header)
        return await fleet.client.call(m.PauseArgs(mode="keep"))

    with pytest.raises(PauseTimeout, match="did not end within"):
        fleet.run(pause("pause_times_out"))
    assert not fleet.http.get("/v1/is_paused").json()["result"]["is_paused"]
