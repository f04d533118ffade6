"""The files of uploads: an API server keeps the body of an upload in a file until the engine has read it.

The system takes long to provide new pages of shared memory, and to free them. So the file of the latest upload to
shared memory stays for KEEP_S seconds, and the next upload is received into its pages.

A file is locked while its API server lives. The file of a killed API server is not locked, and the next API server
removes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import mmap
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

from fastdeploy.core.config import UPLOAD_PREFIX, ServeConfig, upload_folders
from fastdeploy.core.errors import OutOfSpace
from fastdeploy.core.files import SHARED_MEMORY, has_room, new_locked_file, remove_abandoned

KEEP_S = 60.0
KEPT_BYTES = 512 << 20  # the most of one file that stays
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class UploadFile:
    """A new file in ``folder``, which ``close`` removes. Raises OutOfSpace.

    allocated: the bytes from the start of the file that have pages. All of them are written when an upload is complete.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.allocated = 0
        self._path = folder / f"{UPLOAD_PREFIX}{uuid.uuid4().hex}.safetensors"
        self._mapped: mmap.mmap | None = None
        with out_of_space(self.folder):
            self._file = new_locked_file(self._path, 0o600)

    @property
    def path(self) -> str:
        return str(self._path)

    @property
    def in_memory(self) -> bool:
        """Whether the file is in shared memory, so that it may be mapped."""
        return str(self.folder) == SHARED_MEMORY

    @property
    def is_mapped(self) -> bool:
        return self._mapped is not None

    def write(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Write all of ``data``. Raises OutOfSpace if the file system is full; then a part may be written."""
        with out_of_space(self.folder):
            write_at(self._file.fileno(), offset, data)
        self.allocated = max(self.allocated, offset + len(data))

    def resize(self, nbytes: int) -> None:
        """Give the file ``nbytes`` bytes. What it has more is freed, and what it lacks gets no pages yet. Raises
        OutOfSpace."""
        with out_of_space(self.folder):
            os.ftruncate(self._file.fileno(), nbytes)
        self.allocated = min(self.allocated, nbytes)

    def map(self, nbytes: int) -> memoryview:
        """Give the file ``nbytes`` bytes, and return them as memory. Only those below ``allocated`` may be touched: any
        other could end this process by a signal, if the file system is full."""
        self.resize(nbytes)
        if self._mapped is None or len(self._mapped) < nbytes:
            self._mapped = mmap.mmap(self._file.fileno(), nbytes)  # an earlier one ends with its last memoryview
        return memoryview(self._mapped)[:nbytes]

    def allocate(self, end: int) -> None:
        """Provide pages for the bytes below ``end``, which takes some 0.3 ms for each MB. Raises OutOfSpace."""
        with out_of_space(self.folder):
            os.posix_fallocate(self._file.fileno(), self.allocated, end - self.allocated)
        self.allocated = end

    def close(self) -> None:
        self._path.unlink(missing_ok=True)
        self._file.close()
        self._mapped = None


def write_at(fd: int, offset: int, data: bytes | bytearray | memoryview) -> None:
    """Write all of ``data`` to the file ``fd``, from ``offset`` on. Raises OSError; then a part may be written."""
    rest = memoryview(data)
    while rest:
        count = os.pwrite(fd, rest, offset)
        rest, offset = rest[count:], offset + count


@contextlib.contextmanager
def out_of_space(folder: Path) -> Iterator[None]:
    """Raise OutOfSpace for the error of a full file system, in a block that writes an upload to ``folder``."""
    try:
        yield
    except OSError as error:
        if error.errno in NO_SPACE:
            raise OutOfSpace(f"no room for the upload in {folder}: {error.strerror}") from error
        raise


class UploadFiles:
    """The files of one API server. Used on its event loop only."""

    def __init__(self, config: ServeConfig):
        self._config = config
        self._kept: UploadFile | None = None  # no upload uses it
        self._removal: asyncio.TimerHandle | None = None

    @contextlib.contextmanager
    def file(self, nbytes: int, keep: bool = True) -> Iterator[UploadFile]:
        """Yield a file for an upload of at most ``nbytes`` bytes, whose content is undefined. keep: the next upload may
        be written into the file if the block ends without an error, as nobody reads the file any more. Raises
        OutOfSpace."""
        file = self._take(nbytes)
        try:
            yield file
        except BaseException:
            file.close()
            raise
        if keep:
            self._keep(file)
        else:
            file.close()

    def close(self) -> None:
        """Remove the file that no upload uses."""
        if (kept := self._release()) is not None:
            kept.close()

    def _take(self, nbytes: int) -> UploadFile:
        """Return the kept file, or a new one for an upload that is much smaller, as the next one may be large again."""
        if self._kept is not None and 2 * nbytes >= self._kept.allocated:
            kept = self._release()
            assert kept is not None
            if has_room(kept.folder, nbytes - kept.allocated):
                return kept
            kept.close()
        return UploadFile(upload_folder(self._config, nbytes))

    def _keep(self, file: UploadFile) -> None:
        """Keep the file of a long upload to shared memory if it has as much room again, and no larger file is kept."""
        is_larger = self._kept is None or file.allocated > self._kept.allocated
        if not (file.is_mapped and is_larger and has_room(file.folder, file.allocated)):
            file.close()
            return
        self.close()
        if file.allocated > KEPT_BYTES:
            file.resize(KEPT_BYTES)
        self._kept = file
        self._removal = asyncio.get_running_loop().call_later(KEEP_S, self._remove)

    def _remove(self) -> None:
        if (kept := self._release()) is not None:
            asyncio.get_running_loop().run_in_executor(None, kept.close)  # to free its pages takes some 0.1 ms per MB

    def _release(self) -> UploadFile | None:
        kept, self._kept = self._kept, None
        if self._removal is not None:
            self._removal.cancel()
            self._removal = None
        return kept


def upload_folder(config: ServeConfig, nbytes: int) -> Path:
    """Return the folder for ``nbytes`` of uploads: --upload-dir; without it shared memory, or the temporary folder if
    shared memory has no room."""
    first, *others = upload_folders(config.upload_dir)
    return Path(first if not others or has_room(first, nbytes) else others[0])


def remove_leftovers(config: ServeConfig) -> None:
    """Remove the files of API servers that were killed."""
    for folder in upload_folders(config.upload_dir):
        remove_abandoned(folder, UPLOAD_PREFIX)
