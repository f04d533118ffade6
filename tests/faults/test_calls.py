"""Faults of control calls, around a call that is a list."""

from __future__ import annotations

import pytest

from fastdeploy.core.config import ServeConfig
from fastdeploy.core.errors import EngineDead
from fastdeploy.core.weight_source import FileSource, PartFormat
from fastdeploy.faults.book import FaultBook
from fastdeploy.faults.calls import CallFaults
from fastdeploy.faults.injection import Injection
from fastdeploy.faults.rules import read_headers
from fastdeploy.faults.tensors import Tensor, encode
from fastdeploy.inter_communicator import messages as m

pytestmark = pytest.mark.anyio


class Server:
    """A server whose engine takes every call. log: what happened, in order."""

    def __init__(self, folder):
        self.log: list[str] = []
        self.book = FaultBook(str(folder))
        self.faults = CallFaults(self.book, ServeConfig(model="m"), self)

    def act(self, rule, request_id: str) -> None:
        self.log.append(f"kill {rule.parameters['of']}")

    def signal(self, keep_kv=None) -> None:
        self.log.append(f"keep_kv {keep_kv}")

    async def call(self, args: m.Args, header: str = "") -> Injection:
        async def real(args: m.Args) -> dict:
            self.log.append(type(args).__name__)
            return {"version": "v1"}

        injection = Injection("/v1/any", read_headers([header], False) if header else [], "")
        await self.faults.call(injection, args, real)
        return injection


@pytest.mark.parametrize(
    ("header", "args", "log"),
    [
        ("death_in_call; of=engine", m.ResumeArgs(), ["kill engine", "ResumeArgs"]),
        ("death_in_call; of=api_server", m.ResumeArgs(), ["kill api_server"]),
        ("death_in_call; of=api_server; when=after", m.ResumeArgs(), ["ResumeArgs", "kill api_server"]),
        ("death_in_call; of=engine; when=after", m.SleepArgs(), ["SleepArgs", "kill engine"]),
        ("chunk_doubled", m.UpdatePartArgs("s", FileSource("f")), ["UpdatePartArgs", "UpdatePartArgs"]),
        ("kv_kept", m.CommitUpdateArgs("s"), ["keep_kv True", "CommitUpdateArgs", "keep_kv False"]),
        ("kv_kept", m.ResetCacheArgs(), []),
    ],
)
async def test_a_fault_is_before_around_or_behind_its_call(tmp_path, header, args, log):
    server = Server(tmp_path)
    try:
        injection = await server.call(args, header)
    except EngineDead:
        assert "death_in_call" in header
    else:
        assert [one.fault for one in injection.decided] == [header.partition(";")[0]]
    assert server.log == log
    assert server.book.state.counts == {header.partition(";")[0]: 1}


@pytest.mark.parametrize(
    ("header", "args"),
    [
        ("pause_times_out", m.ResumeArgs()),
        ("death_in_call", m.PauseStatusArgs()),
        ("kv_kept", m.CommitUpdateArgs("s", prepare=True)),
        ("tensors_stale", m.UpdatePartArgs("s", FileSource("/nowhere"))),
    ],
)
async def test_other_calls_have_no_fault(tmp_path, header, args):
    server = Server(tmp_path)
    assert (await server.call(args, header)).decided == []
    assert server.log == [type(args).__name__] and server.book.state.counts == {}


async def test_a_chunk_without_such_tensors_or_of_deltas_is_not_counted(tmp_path):
    server, path = Server(tmp_path), tmp_path / "part.safetensors"
    path.write_bytes(encode({"norm": Tensor("F32", (1,), b"\0" * 4)}))
    source, header = FileSource(str(path)), "bits_flipped; tensors=*.experts.*"
    assert (await server.call(m.UpdatePartArgs("s", source), header)).decided == []
    delta = m.UpdatePartArgs("s", source, form=PartFormat("overwrite"))
    assert (await server.call(delta, "bits_flipped")).decided == []
    assert (await server.call(m.UpdatePartArgs("s", source), "bits_flipped")).decided[0].acted


async def test_a_fault_waits_for_the_call_that_brings_the_tensors(tmp_path):
    server = Server(tmp_path)
    tried = await server.call(m.UpdatePartArgs(None, FileSource("f")), "chunk_doubled")  # no session is open
    assert tried.decided == [] and server.log == ["WeightInfoArgs", "UpdatePartArgs"]
    assert (await server.call(m.UpdateWeightsArgs(FileSource("f")), "chunk_doubled")).decided[0].acted
