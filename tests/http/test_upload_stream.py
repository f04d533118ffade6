"""The calls that one upload makes to the engine while its body arrives."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from fastdeploy.http.upload_files import HalvedFile
from fastdeploy.http.upload_stream import UploadStream
from fastdeploy.inter_communicator import messages as m


class SlowClient:
    """Answers a call when ``reads`` is set. states: of the pieces, as they were sent; answered: as they were read."""

    def __init__(self) -> None:
        self.reads = asyncio.Event()
        self.states: list[str] = []
        self.answered: list[str] = []

    async def call(self, args: m.UpdateChunkArgs) -> dict[str, Any]:
        self.states.append(args.source.state)
        await self.reads.wait()
        self.answered.append(args.source.state)
        return {}


async def test_an_upload_whose_caller_is_cancelled_waits_for_the_engine_and_is_broken_off():
    client = SlowClient()
    halves = HalvedFile(SimpleNamespace(path="/dev/shm/halves"), memoryview(bytearray(8)))
    stream = UploadStream(client, halves, lambda source: m.UpdateChunkArgs("s-1", source))
    filling = asyncio.create_task(stream.fill(4))
    await asyncio.sleep(0)
    filling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await filling
    closing = asyncio.create_task(stream.close())
    await asyncio.sleep(0)
    assert client.states == ["open"], "the engine may still read the half"
    client.reads.set()
    await closing
    assert client.answered == ["open", "broken"]
