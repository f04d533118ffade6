"""Weight uploads on their way to the engine: a request body becomes a file, which is gone when the call is over."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

from fastapi import Request

from fastdeploy.config import UPLOAD_PREFIX, ServeConfig, upload_folders
from fastdeploy.entrypoints.openai.context import ServingContext
from fastdeploy.errors import InvalidField, OutOfSpace
from fastdeploy.inter_communicator import messages as m

BATCH_BYTES = 4 << 20  # written by a thread at once


def is_upload(request: Request) -> bool:
    """Whether the body is tensors, and not JSON."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower() == "application/octet-stream"


def upload_folder(config: ServeConfig, nbytes: int) -> Path:
    """Where a body of ``nbytes`` is spooled: as configured, or shared memory if it has room, or the temporary one."""
    first, *others = upload_folders(config.upload_dir)
    roomy = not others or (os.path.isdir(first) and shutil.disk_usage(first).free > nbytes)
    return Path(first if roomy else others[0])


@contextlib.asynccontextmanager
async def spooled_upload(request: Request, context: ServingContext) -> AsyncIterator[m.FileSource]:
    """The body of ``request`` in a file, for as long as the block lasts. Raises InvalidField for an empty body and
    OutOfSpace where it does not fit."""
    declared = int(request.headers.get("content-length", 0))
    path = upload_folder(context.config, declared) / f"{UPLOAD_PREFIX}{uuid.uuid4().hex}.safetensors"
    try:
        try:
            await _spool(request, path)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise OutOfSpace(f"no room for the upload in {path.parent}") from error
            raise
        yield m.FileSource(str(path))
    finally:
        path.unlink(missing_ok=True)


async def _spool(request: Request, path: Path) -> None:
    size = 0
    batch = bytearray()
    with path.open("wb") as file:
        async for part in request.stream():
            batch += part
            size += len(part)
            if len(batch) >= BATCH_BYTES:
                await asyncio.to_thread(file.write, batch)
                batch = bytearray()
        await asyncio.to_thread(file.write, batch)
    if not size:
        raise InvalidField("body", "expected the bytes of a safetensors file")
