"""Weight uploads on their way to the engine. The bytes are written to a file, which is removed at the end of the call.

The file is written and never mapped, so that a full disk raises an error and sends no signal. It is locked while its
API server lives. A file that a killed API server left is not locked, and is removed when the next one starts.
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

BATCH_BYTES = 4 << 20  # written by a thread at once
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def is_upload(request: Request) -> bool:
    """Whether the body is the bytes of tensors; otherwise it is JSON."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower() == "application/octet-stream"


def upload_folder(config: ServeConfig, nbytes: int) -> Path:
    """The folder for a body of ``nbytes``: the configured one, else shared memory if it has room, else the temporary
    folder."""
    first, *others = upload_folders(config.upload_dir)
    return Path(first if not others or has_room(first, nbytes) else others[0])


@contextlib.asynccontextmanager
async def admitted_upload(context: ServingContext, check: m.CheckUpdateArgs) -> AsyncIterator[None]:
    """Enter before the body of an upload is received. Raises the error with which the engine would refuse it already,
    and ServerBusy if --max-uploads others did not end in time."""
    await context.client.call(check)
    async with context.uploads.hold():
        yield


@contextlib.asynccontextmanager
async def spooled_upload(
    request: Request, context: ServingContext, check: m.CheckUpdateArgs
) -> AsyncIterator[FileSource]:
    """Keep the body of ``request`` in a file while the block runs. Raises as :func:`admitted_upload` does; InvalidField
    for an empty body, OutOfSpace if it does not fit, and RequestTooLarge if it is larger than --max-upload-mb."""
    limit = context.config.max_upload_mb << 20
    expected = int(request.headers.get("content-length", limit))
    async with admitted_upload(context, check):
        with _new_file(upload_folder(context.config, expected)) as (file, path):
            await _receive(request, file)
            yield FileSource(str(path))


@contextlib.asynccontextmanager
async def spooled_bytes(data: bytes, context: ServingContext) -> AsyncIterator[FileSource]:
    """As :func:`spooled_upload`, for bytes that are here already."""
    with _new_file(upload_folder(context.config, len(data))) as (file, path):
        await asyncio.to_thread(write_all, file, data)
        yield FileSource(str(path))


def remove_leftovers(config: ServeConfig) -> None:
    """Remove the uploads of API servers that were killed. A pipe or a link of such a name is left alone."""
    for folder in upload_folders(config.upload_dir):
        for path in Path(folder).glob(f"{UPLOAD_PREFIX}*"):
            with contextlib.suppress(OSError), open(open_regular(path), "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails where its server lives
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
