"""Weight uploads. The API server writes the bytes to a file for the engine, and removes the file after the call.

The file is written and not mapped into memory: a full disk then raises an error instead of a signal. The file is locked
while its API server lives. The file of a killed API server is not locked, and the next API server removes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import BinaryIO

from fastapi import Request

from fastdeploy.core.config import UPLOAD_PREFIX, ServeConfig, upload_folders
from fastdeploy.core.errors import InvalidField, OutOfSpace
from fastdeploy.core.safe_files import open_regular
from fastdeploy.core.shared_files import has_room, new_file, write_all
from fastdeploy.core.weight_source import FileSource
from fastdeploy.http.context import ServingContext
from fastdeploy.inter_communicator import messages as m

BATCH_BYTES = 4 << 20  # handed to a thread for one write
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def is_upload(request: Request) -> bool:
    """Return whether the body is the bytes of tensors. Any other body is JSON."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower() == "application/octet-stream"


def upload_folder(config: ServeConfig, nbytes: int) -> Path:
    """Return the folder for a body of ``nbytes``: --upload-dir; without it shared memory, or the temporary folder if
    shared memory has no room."""
    first, *others = upload_folders(config.upload_dir)
    return Path(first if not others or has_room(first, nbytes) else others[0])


@contextlib.asynccontextmanager
async def admitted_upload(context: ServingContext, check: m.CheckUpdateArgs | None) -> AsyncIterator[None]:
    """Admit an upload before its body is received. check: asked of the engine first, for an upload of base weights.
    Raises the error with which the engine would refuse the upload, EngineDead, and ServerBusy if all --max-uploads
    places stay taken for too long."""
    await (context.client.require_engine() if check is None else context.client.call(check))
    async with context.uploads.hold():
        yield


@contextlib.asynccontextmanager
async def spooled_upload(
    request: Request, context: ServingContext, check: m.CheckUpdateArgs | None
) -> AsyncIterator[FileSource]:
    """Keep the body of ``request`` in a file while the block runs. Raises the errors of :func:`admitted_upload`,
    InvalidField for an empty body, OutOfSpace for a full disk, and RequestTooLarge beyond --max-upload-mb."""
    limit = context.config.max_upload_mb << 20
    expected = int(request.headers.get("content-length", limit))
    async with admitted_upload(context, check):
        with _new_file(upload_folder(context.config, expected)) as (file, path):
            await _receive(request, file)
            yield FileSource(str(path))


@contextlib.asynccontextmanager
async def spooled_bytes(data: bytes, context: ServingContext) -> AsyncIterator[FileSource]:
    """Keep ``data`` in a file while the block runs, as :func:`spooled_upload` does."""
    with _new_file(upload_folder(context.config, len(data))) as (file, path):
        await asyncio.to_thread(write_all, file, data)
        yield FileSource(str(path))


def remove_leftovers(config: ServeConfig) -> None:
    """Remove the files of API servers that were killed. Pipes and links with such names are left alone."""
    for folder in upload_folders(config.upload_dir):
        for path in Path(folder).glob(f"{UPLOAD_PREFIX}*"):
            with contextlib.suppress(OSError), open(open_regular(path), "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its API server lives
                path.unlink()


@contextlib.contextmanager
def _new_file(folder: Path) -> Iterator[tuple[BinaryIO, Path]]:
    """Yield a new file and its path. The file is removed when the block ends. A full file system raises OutOfSpace."""
    path = folder / f"{UPLOAD_PREFIX}{uuid.uuid4().hex}.safetensors"
    try:
        with new_file(path, 0o600) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file, path
    except OSError as error:
        if error.errno in NO_SPACE:
            raise OutOfSpace(f"no room for the upload in {folder}: {error.strerror}") from error
        raise
    finally:
        path.unlink(missing_ok=True)


async def _receive(request: Request, file: BinaryIO) -> None:
    batch, size = bytearray(), 0
    async for part in request.stream():
        batch += part
        size += len(part)
        if len(batch) >= BATCH_BYTES:
            await asyncio.to_thread(write_all, file, batch)
            batch = bytearray()
    await asyncio.to_thread(write_all, file, batch)
    if not size:
        raise InvalidField("body", "expected the bytes of a safetensors file")
