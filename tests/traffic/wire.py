"""A recorder in this process, between a scripted engine and raw clients."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Set
from pathlib import Path

from fastdeploy.core.listener import bind, url_of
from fastdeploy.traffic.bodies import IGNORED
from fastdeploy.traffic.file import Opening, Recording, RecordWriter, read_recording
from fastdeploy.traffic.http import make_server
from fastdeploy.traffic.record import Recorder
from fastdeploy.traffic.replay import Replay
from fastdeploy.traffic.upstream import Upstream
from fastdeploy.traffic.writer import BackgroundWriter
from support.uvicorn_ticks import shorten_ticks

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def read_head(reader: asyncio.StreamReader) -> bytes:
    return await reader.readuntil(b"\r\n\r\n")


class Wire:
    """url: of the recorder. upstream: of the scripted engine. connections: that the engine got."""

    def __init__(self, path: Path):
        self.path = path
        self.url = self.upstream = ""
        self.connections = 0

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    async def ask(self, request: bytes) -> bytes:
        """Send raw bytes, and return all that comes until the connection is closed."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(request)
        answer = await reader.read()
        writer.close()
        return answer

    def recording(self) -> Recording:
        """Return what the file has. To be called when the recorder has stopped."""
        return read_recording(str(self.path))


@contextlib.asynccontextmanager
async def recorder(path: Path, script: Script, user: str = "", keep_all: bool = False) -> AsyncIterator[Wire]:
    """Run a recorder before an engine that answers each connection by ``script``."""
    wire = Wire(path)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire.connections += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await script(reader, writer)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as engine:
        port = engine.sockets[0].getsockname()[1]
        wire.upstream = f"http://127.0.0.1:{port}"
        upstream = Upstream(f"http://{user}127.0.0.1:{port}")
        file = RecordWriter(str(path), Opening(version="test", upstream=upstream.url, began=time.time()))
        writer = BackgroundWriter(file, lambda reason: None)
        app = Recorder(upstream, writer, keep_all)
        async with served(app) as wire.url:
            yield wire
        writer.close(app.now())


@contextlib.asynccontextmanager
async def served(app: Recorder | Replay) -> AsyncIterator[str]:
    """Serve an application and give its URL."""
    shorten_ticks()
    with bind("127.0.0.1", 0) as listener:
        server = make_server(app)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        yield url_of(listener)
        server.should_exit = True
        await serving


@contextlib.asynccontextmanager
async def replayed(
    recording: Recording, loose: bool = False, speed: float = 0.0, ignored: Set[str] = IGNORED
) -> AsyncIterator[tuple[str, Replay]]:
    """Serve a recording. Give the URL and the application."""
    app = Replay(recording, speed, loose, ignored)
    async with served(app) as url:
        yield url, app
