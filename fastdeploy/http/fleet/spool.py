"""POST, PUT and GET /v1/replicas/spool, and POST /v1/replicas/send: files that pass from host to host, for a gateway
(fleet/chain.py has the protocol).

The body of a PUT begins with ``plan`` bytes of JSON: the list of the hops behind this one. The bytes of the file come
after it. The gateway's key is passed on to the next host with each call.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from fastdeploy.core.config import UPLOAD_PREFIX, ServeConfig
from fastdeploy.core.errors import InvalidField
from fastdeploy.core.weight_source import ADAPTER_TENSORS, FileSource, SourcePolicy
from fastdeploy.fleet.chain import KEEPALIVES, LEAST_BYTES, SEND, SPOOL, GrowingFile, Hop, HostCalls, Reserved, new_http
from fastdeploy.http.body import Body
from fastdeploy.http.calls import read
from fastdeploy.http.context import ServingContext
from fastdeploy.http.control.adapters import open_copy
from fastdeploy.http.control.protocol import LoraName
from fastdeploy.http.control.weights import open_export
from fastdeploy.http.errors import json_response
from fastdeploy.http.guards.body_limit import PLAN_BYTES, upload_limit
from fastdeploy.http.guards.body_receiver import BodyReceiver
from fastdeploy.http.guards.connection_limits import client_left
from fastdeploy.http.openapi import BYTES, JSON, asks, takes
from fastdeploy.http.upload import admitted_upload, is_upload, on_thread
from fastdeploy.http.upload_files import out_of_space, write_at

if TYPE_CHECKING:
    import httpx

Nbytes = Annotated[int, Field(ge=0, le=2**63 - 1)]
Silence = Annotated[float, Field(gt=0, le=86400)]


class ReserveBody(Body):
    """A file to make, for ``nbytes`` bytes. like: the file of another server, which may be of this host. silence_s: the
    client takes this server for dead if it is silent for so long."""

    nbytes: Nbytes
    like: str = ""
    silence_s: Silence = 10.0


class LengthBody(Body):
    path: str


class FillBody(Body):
    """The bytes of the file ``path`` from ``offset`` on. nbytes: of the whole file. plan, silence_s: see above."""

    path: str
    nbytes: Nbytes
    plan: int = Field(ge=0, le=PLAN_BYTES)
    offset: Nbytes = 0
    silence_s: Silence = 10.0


class Receiver(Body):
    """The replica that gets a copy, and its API server."""

    name: str
    url: str = Field(pattern="^https?://")


class SendBody(Body):
    """A copy to send: of the weights that serve, or of the tensors of an adapter."""

    lora_name: LoraName | None = None
    to: Receiver
    silence_s: Silence = 10.0


def spool_router(context: ServingContext) -> APIRouter:
    router = APIRouter()
    policy = SourcePolicy((), context.config.upload_dir)
    http: httpx.AsyncClient | None = None

    async def calls(request: Request, silence_s: float) -> HostCalls:
        """Return the calls to other hosts, with the key of ``request``."""
        nonlocal http
        if http is None:
            http = await asyncio.to_thread(new_http)
        key = request.headers.get("authorization")
        return HostCalls(http, {} if key is None else {"Authorization": key}, silence_s)

    @router.post(SPOOL, openapi_extra=takes(ReserveBody))
    async def reserve(request: Request) -> Response:
        """Make a file for weights or an adapter, which the engine of this server can read. The first line of the answer
        is ``{"path": ..., "is_link": ...}``. The answer does not end: the file is removed when the client closes the
        connection."""
        body = await read(request, ReserveBody)
        limit, too_large = upload_limit(context.config)
        if body.nbytes > limit:
            raise too_large
        await calls(request, body.silence_s)  # the bytes that come next do not wait for this
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(admitted_upload(context, None))
            # A gateway that has died closes its connection while the engine may still read the file.
            file = stack.enter_context(context.upload_files.file(body.nbytes, keep=False))
            file.resize(0)  # its length says what is there
            is_link = bool(body.like) and _link(body.like, Path(file.path))
            never = asyncio.get_running_loop().create_future()
            line = msgspec.json.encode(Reserved(file.path, is_link))
            return _Lines(line, never, stack.pop_all(), _keepalive_s(context.config, body.silence_s))

    @router.get(SPOOL, openapi_extra=asks(LengthBody))
    async def length(request: Request) -> Response:
        """Answer how many bytes of a file are there."""
        path = (await read(request, LengthBody)).path
        fd = _open(path, policy)
        try:
            return json_response({"nbytes": os.fstat(fd).st_size})
        finally:
            os.close(fd)

    upload = {"requestBody": {"required": True, "content": {BYTES: {"schema": {"type": "string", "format": "binary"}}}}}

    @router.put(SPOOL, openapi_extra=upload | asks(FillBody))
    async def fill(request: Request) -> Response:
        """Write the body to a file, and send it on meanwhile. The answer comes when all hosts behind this one have the
        file, or are lost: empty lines, and then ``{"failed": ..., "untried": ...}``."""
        if not is_upload(request):
            raise InvalidField("Content-Type", f"expected {BYTES}")
        body = await read(request, FillBody)
        async with contextlib.AsyncExitStack() as stack:
            fd = _open(body.path, policy)
            stack.callback(os.close, fd)
            parts = _parts(request, body.plan)
            try:
                hops = msgspec.json.decode(await anext(parts), type=list[Hop])
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise InvalidField("plan", f"expected the length of a list of hops: {error}") from error
            content = GrowingFile(fd, body.nbytes, body.offset)
            sender = await calls(request, body.silence_s)
            passing = asyncio.create_task(sender.send_on(content, hops, again=body.offset > 0))
            stack.push_async_callback(_cancel, passing)
            with out_of_space(Path(body.path).parent):
                async for part in parts:
                    await on_thread(write_at, fd, content.written, part)
                    content.advance(len(part))
            if content.written != body.nbytes:
                raise InvalidField("nbytes", f"expected the number of bytes that come, {content.written}")
            return _Lines(b"", passing, stack.pop_all(), _keepalive_s(context.config, body.silence_s))

    @router.post(SEND, openapi_extra=takes(SendBody))
    async def send(request: Request) -> Response:
        """Send a copy of what this server serves to a file on another host. The answer is that of POST
        /v1/replicas/spool there, once the file is complete; the file is removed when the client closes the
        connection."""
        body = await read(request, SendBody)
        name, url = body.to.name, body.to.url
        async with contextlib.AsyncExitStack() as stack:
            if body.lora_name is None:
                file, headers = await open_export(context.client)
            else:
                file, headers = await open_copy(context.client, body.lora_name, ADAPTER_TENSORS)
            stack.enter_context(file)
            nbytes, there = int(headers["Content-Length"]), await calls(request, body.silence_s)
            reserved = await stack.enter_async_context(there.reserved(name, url, nbytes))
            content = GrowingFile(file.fileno(), nbytes, written=nbytes)
            await there.send(content, Hop(name, url, reserved.path), ())
            never, line = asyncio.get_running_loop().create_future(), msgspec.json.encode(reserved)
            return _Lines(line, never, stack.pop_all(), _keepalive_s(context.config, body.silence_s))

    return router


def _keepalive_s(config: ServeConfig, silence_s: float) -> float:
    return min(config.keepalive_s, silence_s / KEEPALIVES)


def _link(like: str, path: Path) -> bool:
    """Let ``path`` be the file ``like``, if that is an upload to another API server of this host."""
    if not os.path.basename(like).startswith(UPLOAD_PREFIX):
        return False
    link = path.with_name(f"{path.name}.link")
    try:
        os.link(like, link, follow_symlinks=False)
    except (OSError, ValueError):  # of another host, or on another file system
        return False
    os.replace(link, path)
    return True


def _open(path: str, policy: SourcePolicy) -> int:
    """Open a file of :func:`reserve`. Raises InvalidField."""
    policy.check(FileSource(path))
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise InvalidField("path", f"expected a file of this server: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise InvalidField("path", "expected a file of this server")
    return fd


async def _parts(request: Request, first: int) -> AsyncIterator[bytes | memoryview]:
    """Yield the first ``first`` bytes of the body, and then the others. Each part is valid until the next one. Raises
    InvalidField for a body of unknown length."""
    if "content-length" not in request.headers:
        raise InvalidField("Content-Length", "expected the length of the body")
    receiver = BodyReceiver.of(request)
    if receiver is None:  # the body is short
        data = await request.body()
        yield data[:first]
        yield data[first:]
        return
    start = memoryview(bytearray(first))
    await receiver.into(start)
    yield bytes(start)
    buffer = memoryview(bytearray(LEAST_BYTES))
    while count := await receiver.into(buffer):
        yield buffer[:count]
    await request.receive()  # tells the middleware that the body is complete


async def _cancel(task: asyncio.Task[object]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


class _Lines(Response):
    """A response of lines: ``first``, and the result of ``last`` when it is there. It ends then, or when the client
    goes away, and closes ``files``. An empty line is sent every ``keepalive_s`` seconds, so that each side notices that
    the other one has vanished."""

    media_type = JSON

    def __init__(
        self,
        first: bytes,
        last: asyncio.Future[Any],
        files: contextlib.AsyncExitStack,
        keepalive_s: float,
    ):
        super().__init__()
        del self.headers["Content-Length"]
        self._first, self._last, self._files, self._keepalive_s = first, last, files, keepalive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._files:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            left = asyncio.ensure_future(client_left(scope, receive))
            line, both = self._first, (left, self._last)
            try:
                while not any(future.done() for future in both):
                    await send({"type": "http.response.body", "body": line + b"\n", "more_body": True})
                    line = b""
                    await asyncio.wait(both, timeout=self._keepalive_s, return_when=asyncio.FIRST_COMPLETED)
            finally:
                left.cancel()
            line = msgspec.json.encode(self._last.result()) + b"\n" if self._last.done() else b""
            await send({"type": "http.response.body", "body": line, "more_body": False})
