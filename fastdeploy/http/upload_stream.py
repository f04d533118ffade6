"""Uploads that the engine reads while they arrive, through a file of two halves.

    body -> half 0 -> engine        one half is filled
            half 1 -> engine        while the engine reads the other half

If both are full, the body is not received until the engine has read one.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, Literal

from fastapi import Request
from msgspec.structs import replace

from fastdeploy.client.serving_client import ServingClient
from fastdeploy.core.errors import FastDeployError
from fastdeploy.core.weight_source import FileSource, Source, StreamSource
from fastdeploy.http.context import ServingContext
from fastdeploy.http.guards.body_receiver import BodyReceiver
from fastdeploy.http.upload import empty_upload, spooled_upload
from fastdeploy.http.upload_files import HalvedFile
from fastdeploy.inter_communicator import messages as m

Fields = Mapping[str, Any]  # of UpdateChunkArgs, without the session and the source
MakePart = Callable[[Source], m.UpdateChunkArgs]


async def upload_part(
    request: Request, context: ServingContext, session_id: str, fields: Fields, streams: bool
) -> dict[str, Any]:
    """Add the body of an admitted upload to a weight session, and return the reply. The lease does not run meanwhile.
    If the body breaks off, the session has no tensor of it. streams: whether the engine may read the body while it
    arrives. Raises InvalidField for an empty body, OutOfSpace for a full disk, and RequestTooLarge."""
    client = context.client

    def part(source: Source) -> m.UpdateChunkArgs:
        return m.UpdateChunkArgs(session_id, source, **fields)

    if not streams:
        async with _opened(UploadStream(client, None, part)), spooled_upload(request, context) as source:
            return await client.call(part(source))
    async with context.upload_files.lend() as halves, _opened(UploadStream(client, halves, part)) as stream:
        if (receiver := BodyReceiver.of(request)) is None:
            async for data in request.stream():
                await stream.write(data)
        else:
            while received := await receiver.into(stream.room):
                await stream.fill(received)
            await request.receive()  # tells the middleware that the body is complete
        return await stream.complete()


async def upload_update(
    request: Request,
    context: ServingContext,
    begin: m.BeginUpdateArgs,
    fields: Fields,
    update: Callable[[FileSource], m.UpdateWeightsArgs],
    streams: bool,
) -> dict[str, Any]:
    """Run a whole update with the body of an admitted upload, and return its report. An update that fails leaves no
    session. fields: of the part. update: the same update with a body that is in a file. Other arguments: see
    :func:`upload_part`."""
    client = context.client
    if not streams:
        async with spooled_upload(request, context) as source:
            return await client.call(update(source))
    session_id = (await client.call(replace(begin, ends_with_client=True)))["session_id"]
    try:
        await upload_part(request, context, session_id, fields, streams)
        return await client.call(m.CommitUpdateArgs(session_id))
    except BaseException:
        await _to_the_end(_ignore_errors(client, m.AbortUpdateArgs(session_id)))
        raise


class UploadStream:
    """The body of one upload on its way to a weight session. From the start until the end of :meth:`close`, the session
    waits for it. halves: None for an upload without content, which only makes the session wait. part: makes the call
    for one piece."""

    def __init__(self, client: ServingClient, halves: HalvedFile | None, part: MakePart):
        self._client, self._part = client, part
        self._path, self._memory = (halves.file.path, halves.memory) if halves else ("", memoryview(b""))
        self._half_bytes = len(self._memory) // 2
        self._id = f"upload-{uuid.uuid4().hex}"
        self._sent = 0  # bytes that were handed to the engine
        self._half = self._filled = 0
        self._stage_ms = 0.0
        self._is_complete = False
        self._in_flight = self._send("open")

    @property
    def room(self) -> memoryview:
        """The rest of the half that is being filled. Never empty."""
        return self._memory[self._half * self._half_bytes :][self._filled : self._half_bytes]

    async def fill(self, nbytes: int) -> None:
        """Note that ``nbytes`` bytes of the body were written to :attr:`room`. Waits if both halves are full. Raises
        the engine's error if it refused a piece."""
        self._filled += nbytes
        if self._filled == self._half_bytes:
            await self._hand_over("open")

    async def write(self, data: bytes) -> None:
        """Copy bytes of the body to the halves, as :meth:`fill`."""
        rest = memoryview(data)
        while rest:
            room = self.room[: len(rest)]
            room[:] = rest[: len(room)]
            rest = rest[len(room) :]
            await self.fill(len(room))

    async def complete(self) -> dict[str, Any]:
        """Hand over the rest, and return the reply of the engine about the whole upload."""
        if not self._sent + self._filled:
            raise empty_upload()
        await self._hand_over("complete")
        reply = await self._reply()
        self._is_complete = True
        return {**reply, "stage_ms": round(self._stage_ms, 3)}

    async def close(self) -> None:
        """Wait until the engine reads no piece any more. Break the upload off, unless it is complete. Then the stream
        does not refer to the memory any more, nor to an error, whose stack frames refer to the stream."""
        with contextlib.suppress(FastDeployError):
            await self._in_flight
        del self._in_flight
        if not self._is_complete:
            self._filled = 0
            with contextlib.suppress(FastDeployError):
                await self._send("broken")
        self._memory = memoryview(b"")

    async def _hand_over(self, state: Literal["open", "complete"]) -> None:
        await self._reply()
        self._in_flight = self._send(state)

    async def _reply(self) -> dict[str, Any]:
        reply = await asyncio.shield(self._in_flight)  # the engine reads the half on if the caller is cancelled
        self._stage_ms += reply.get("stage_ms", 0.0)
        return reply

    def _send(self, state: Literal["open", "complete", "broken"]) -> asyncio.Task[dict[str, Any]]:
        """Send the filled half, and go on with the other one."""
        offset = self._half * self._half_bytes
        source = StreamSource(self._id, self._path, offset, self._filled, self._sent, state)
        self._sent += self._filled
        self._half, self._filled = 1 - self._half, 0
        return asyncio.create_task(self._client.call(self._part(source)))


@contextlib.asynccontextmanager
async def _opened(stream: UploadStream) -> AsyncIterator[UploadStream]:
    """Close the stream after the block."""
    try:
        yield stream
    finally:
        await _to_the_end(stream.close())


async def _ignore_errors(client: ServingClient, args: m.Args) -> None:
    with contextlib.suppress(FastDeployError):
        await client.call(args)


async def _to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Run ``work``. If the caller is cancelled meanwhile, the work goes on without it."""
    await asyncio.shield(asyncio.ensure_future(work))
