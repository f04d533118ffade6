"""Weight uploads: tensors that are the body of a call.

The engine reads plain tensors while they arrive (upload_stream.py). Everything else is kept in a file of its own, for
the engine to read when the body is complete.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from fastapi import Request

from fastdeploy.core.errors import InvalidField
from fastdeploy.core.weight_source import FileSource
from fastdeploy.http.context import ServingContext
from fastdeploy.http.upload_files import UploadFile, upload_folder
from fastdeploy.inter_communicator import messages as m

BATCH_BYTES = 4 << 20  # handed to a thread for one write


def empty_upload() -> InvalidField:
    return InvalidField("body", "expected the bytes of a safetensors file")


def is_upload(request: Request) -> bool:
    """Return whether the body is the bytes of tensors. Any other body is JSON."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower() == "application/octet-stream"


@contextlib.asynccontextmanager
async def admitted_upload(context: ServingContext, check: m.CheckUpdateArgs | None) -> AsyncIterator[dict[str, Any]]:
    """Admit an upload before its body is received. check: asked of the engine first, for an upload of base weights. Its
    reply is yielded. Raises the error with which the engine would refuse the upload, EngineDead, and ServerBusy if all
    --max-uploads places stay taken for too long."""
    reply = {}
    if check is None:
        await context.client.require_engine()
    else:
        reply = await context.client.call(check)
    async with context.uploads.hold():
        yield reply


@contextlib.asynccontextmanager
async def spooled_upload(request: Request, context: ServingContext) -> AsyncIterator[FileSource]:
    """Keep the body of an admitted upload in a file while the block runs. Raises InvalidField for an empty body,
    OutOfSpace for a full disk, and RequestTooLarge beyond --max-upload-mb."""
    expected = int(request.headers.get("content-length", context.config.max_upload_mb << 20))
    with contextlib.closing(UploadFile(upload_folder(context.config, expected))) as file:
        await _receive(request, file)
        yield FileSource(file.path)


@contextlib.asynccontextmanager
async def spooled_bytes(data: bytes, context: ServingContext) -> AsyncIterator[FileSource]:
    """Keep ``data`` in a file while the block runs, as :func:`spooled_upload` does."""
    with contextlib.closing(UploadFile(upload_folder(context.config, len(data)))) as file:
        await asyncio.to_thread(file.write, 0, data)
        yield FileSource(file.path)


async def _receive(request: Request, file: UploadFile) -> None:
    batch, size = bytearray(), 0
    async for part in request.stream():
        batch += part
        if len(batch) >= BATCH_BYTES:
            await asyncio.to_thread(file.write, size, batch)
            size += len(batch)
            batch = bytearray()
    await asyncio.to_thread(file.write, size, batch)
    if not size + len(batch):
        raise empty_upload()
