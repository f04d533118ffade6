"""Files through which uploads reach the engine, in the upload folder.

A file is locked while its API server lives. The file of a killed API server is not locked, and the next API server
removes it. A file is mapped into memory only after all of its blocks were allocated: a full disk then raises an error
instead of a signal.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import mmap
import os
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import NamedTuple

from fastdeploy.core.config import UPLOAD_PREFIX, ServeConfig, upload_folders
from fastdeploy.core.errors import OutOfSpace
from fastdeploy.core.files import has_room, new_locked_file, remove_abandoned

# Of a file of two halves: one is filled while the engine reads the other. The engine takes a half between two steps, so
# an upload beside steps takes at least one step for each half.
HALF_BYTES = 64 << 20
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class UploadFile:
    """A new file in ``folder``, which ``close`` removes. Raises OutOfSpace."""

    def __init__(self, folder: Path):
        self._path = folder / f"{UPLOAD_PREFIX}{uuid.uuid4().hex}.safetensors"
        with self._out_of_space():
            self._file = new_locked_file(self._path, 0o600)

    @property
    def path(self) -> str:
        return str(self._path)

    def write(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Write all of ``data``. Raises OutOfSpace if the file system is full; then a part may be written."""
        rest = memoryview(data)
        with self._out_of_space():
            while rest:
                count = os.pwrite(self._file.fileno(), rest, offset)
                rest, offset = rest[count:], offset + count

    def map(self, nbytes: int) -> memoryview:
        """Return the first ``nbytes`` bytes of the file, as memory. Raises OutOfSpace."""
        with self._out_of_space():
            os.posix_fallocate(self._file.fileno(), 0, nbytes)
        return memoryview(mmap.mmap(self._file.fileno(), nbytes))

    def close(self) -> None:
        self._path.unlink(missing_ok=True)
        self._file.close()

    @contextlib.contextmanager
    def _out_of_space(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in NO_SPACE:
                raise OutOfSpace(f"no room for the upload in {self._path.parent}: {error.strerror}") from error
            raise


class HalvedFile(NamedTuple):
    """A file of two halves of HALF_BYTES, through which one upload after the other reaches the engine. memory: of both
    halves. A copy of this object keeps the memory valid, also when the file is closed."""

    file: UploadFile
    memory: memoryview


class UploadFiles:
    """Files of two halves, which later uploads use again: the system provides fresh pages more slowly than an upload
    arrives. ``close`` removes the files."""

    def __init__(self, config: ServeConfig):
        self._config = config
        self._free: list[HalvedFile] = []
        self._closed = False

    @contextlib.asynccontextmanager
    async def lend(self) -> AsyncIterator[HalvedFile]:
        """Lend a file that no other upload uses. After an error the file is removed, to make room. Raises
        OutOfSpace."""
        halves = self._free.pop() if self._free else await self._new()
        try:
            yield halves
        except BaseException:
            halves.file.close()
            raise
        if self._closed:
            halves.file.close()
        else:
            self._free.append(halves)

    def close(self) -> None:
        self._closed = True
        while self._free:
            self._free.pop().file.close()

    async def _new(self) -> HalvedFile:
        """Make a file on a thread: the system takes 10 ms for its pages, and longer on a disk."""
        made = asyncio.ensure_future(asyncio.to_thread(self._make))
        try:
            return await asyncio.shield(made)
        except asyncio.CancelledError:
            made.add_done_callback(_remove)
            raise

    def _make(self) -> HalvedFile:
        file = UploadFile(upload_folder(self._config, 2 * HALF_BYTES))
        try:
            return HalvedFile(file, file.map(2 * HALF_BYTES))
        except BaseException:
            file.close()
            raise


def _remove(made: asyncio.Future[HalvedFile]) -> None:
    """Remove a file whose upload was cancelled before the file was made."""
    if not made.cancelled() and made.exception() is None:
        made.result().file.close()


def upload_folder(config: ServeConfig, nbytes: int) -> Path:
    """Return the folder for ``nbytes`` of uploads: --upload-dir; without it shared memory, or the temporary folder if
    shared memory has no room."""
    first, *others = upload_folders(config.upload_dir)
    return Path(first if not others or has_room(first, nbytes) else others[0])


def remove_leftovers(config: ServeConfig) -> None:
    """Remove the files of API servers that were killed."""
    for folder in upload_folders(config.upload_dir):
        remove_abandoned(folder, UPLOAD_PREFIX)
