"""Weight uploads: tensors that are the body of a call.

The API server keeps the body in a file of the upload folder (upload_files.py), and the engine reads the file when the
body is complete.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import msgspec
from fastapi import Request

from fastdeploy.client.serving_client import ServingClient
from fastdeploy.core.errors import FastDeployError, InvalidField
from fastdeploy.core.weight_source import FileSource
from fastdeploy.fleet.chain import LEAST_BYTES, GrowingFile
from fastdeploy.fleet.client import FleetClient
from fastdeploy.http.context import ServingContext
from fastdeploy.http.guards.body_receiver import BodyReceiver
from fastdeploy.http.upload_files import UploadFile
from fastdeploy.inter_communicator import messages as m

BATCH_BYTES = 4 << 20  # handed to a thread for one write
WINDOW_BYTES = 16 << 20  # of shared memory that is allocated, and received into, at once
RENEWALS_PER_LEASE = 4  # while a body is received
Result = TypeVar("Result")


def is_upload(request: Request) -> bool:
    """Return whether the body is the bytes of tensors. Any other body is JSON."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower() == "application/octet-stream"


@contextlib.asynccontextmanager
async def admitted_upload(context: ServingContext, check: m.CheckUpdateArgs | None) -> AsyncIterator[None]:
    """Admit an upload before its body is received. check: asked of the engine first, for an upload of base weights. The
    lease of its session does not end while the block runs. Raises the error with which the engine
    would refuse the upload, EngineDead, and ServerBusy if all --max-uploads places stay taken for too long."""
    if check is None:
        await context.client.require_engine()
        async with context.uploads.hold():
            yield
        return
    reply = await context.client.call(check)
    async with context.uploads.hold(), _renewed_lease(context.client, check, reply.get("lease_s")):
        yield


async def upload_update(
    request: Request,
    context: ServingContext,
    check: m.CheckUpdateArgs,
    checksums: dict[str, str],
    verify_checksum: bool,
) -> dict[str, Any]:
    """Make an update whose one part is the body, and return its report. check: with the begin of the update.

    Its session is open from the first byte to the commit, so that no other update comes between. A reset, an abort, the
    end of the client and the death of this process end the session. Raises the error of the call that failed."""
    client = context.client
    await client.call(check)
    session_id = (await client.call(msgspec.structs.replace(check.begin, ends_with_client=True)))["session_id"]
    try:
        part_check = m.CheckUpdateArgs(session_id, form=check.form)
        async with admitted_upload(context, part_check), spooled_upload(request, context) as source:
            fields: dict[str, Any] = {"checksums": checksums, "verify_checksum": verify_checksum, "form": check.form}
            await client.call(m.UpdatePartArgs(session_id, source, **fields))
        return await client.call(m.CommitUpdateArgs(session_id))
    except BaseException:
        await asyncio.shield(asyncio.ensure_future(_abort(client, session_id)))
        raise


@contextlib.asynccontextmanager
async def spooled_upload(request: Request, context: ServingContext) -> AsyncIterator[FileSource]:
    """Keep the body of an admitted upload in a file while the block runs. A gateway sends the body to replicas on other
    hosts as it comes. Raises InvalidField for an empty body, OutOfSpace for a full disk, and RequestTooLarge beyond
    --max-upload-mb."""
    expected, client = int(request.headers.get("content-length", context.config.max_upload_mb << 20)), context.client
    with context.upload_files.file(expected) as file:
        if (receiver := BodyReceiver.of(request)) is None:
            await _write_body(request, file)
            yield FileSource(file.path)
            return
        async with contextlib.AsyncExitStack() as stack:
            content = None
            if isinstance(client, FleetClient):
                content = await stack.enter_async_context(client.sending_early(file.path, expected))
            receive = _map_body if file.in_memory else _receive_body
            await receive(receiver, file, expected, content)
            await request.receive()  # tells the middleware that the body is complete
            yield FileSource(file.path)


@contextlib.asynccontextmanager
async def spooled_bytes(data: bytes, context: ServingContext) -> AsyncIterator[FileSource]:
    """Keep ``data`` in a file while the block runs, as :func:`spooled_upload` does."""
    with context.upload_files.file(len(data)) as file:
        file.resize(len(data))
        await on_thread(file.write, 0, data)
        yield FileSource(file.path)


async def _abort(client: ServingClient, session_id: str) -> None:
    with contextlib.suppress(FastDeployError):
        await client.call(m.AbortUpdateArgs(session_id))


async def _map_body(receiver: BodyReceiver, file: UploadFile, nbytes: int, content: GrowingFile | None) -> None:
    """Receive a long body straight into shared memory. Pages are allocated only shortly before the bytes come, as a
    client may send less than it has declared. content: is told what is written."""
    memory = file.map(nbytes)
    for first in range(0, nbytes, WINDOW_BYTES):
        window = memory[first : first + WINDOW_BYTES]
        if (end := first + len(window)) > file.allocated:
            await on_thread(file.allocate, end)
        at_once = len(window) if content is None else LEAST_BYTES
        for start in range(0, len(window), at_once):
            count = await receiver.into(window[start : start + at_once])
            if content is not None:
                content.advance(count)


async def _receive_body(receiver: BodyReceiver, file: UploadFile, nbytes: int, content: GrowingFile | None) -> None:
    """Receive a long body, and write it to a disk. content: is told what is written."""
    buffer, offset = memoryview(bytearray(min(nbytes, BATCH_BYTES if content is None else LEAST_BYTES))), 0
    while count := await receiver.into(buffer):
        await on_thread(file.write, offset, buffer[:count])
        offset += count
        if content is not None:
            content.advance(count)


async def _write_body(request: Request, file: UploadFile) -> None:
    """Write a body that is short, or of unknown length."""
    batch, size = bytearray(), 0
    async for part in request.stream():
        batch += part
        if len(batch) >= BATCH_BYTES:
            await on_thread(file.write, size, batch)
            size += len(batch)
            batch = bytearray()
    await on_thread(file.write, size, batch)
    file.resize(size + len(batch))
    if not size + len(batch):
        raise InvalidField("body", "expected the bytes of a safetensors file")


@contextlib.asynccontextmanager
async def _renewed_lease(client: ServingClient, check: m.CheckUpdateArgs, lease_s: float | None) -> AsyncIterator[None]:
    """Renew the lease of a weight session while the block runs. lease_s: None = there is no session."""

    async def renew(lease_s: float) -> None:
        while True:
            await asyncio.sleep(lease_s / RENEWALS_PER_LEASE)
            with contextlib.suppress(FastDeployError):  # the call of the part will raise it
                await client.call(check)

    renewing = None if lease_s is None else asyncio.create_task(renew(lease_s))
    try:
        yield
    finally:
        if renewing is not None:
            renewing.cancel()


async def on_thread(work: Callable[..., Result], *args: Any) -> Result:
    """Call ``work`` on a thread. If this coroutine is cancelled, it waits for the end of the work: the caller closes
    the file then."""
    working = asyncio.ensure_future(asyncio.to_thread(work, *args))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait([working])
        raise
