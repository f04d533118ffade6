"""Files that processes share: those that another program names or writes, and those that carry tensors.

A file that another program names is opened and read with care:

- The file is a regular file. Opening a pipe may block for ever, and opening a device may have effects.
- The file is read up to a limit, which is checked before the first byte is read.
- The file lies beneath one of the allowed folders (the roots) after all links are followed, even if another program
  changes links at the same time.

Every problem is an OSError whose ``strerror`` explains it.

Tensors pass in files in shared memory if there is room. A process that is killed leaves its files. A file is locked
while its process lives, so that another process can tell which files nobody uses any more.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

ANYWHERE = ("/",)
SHARED_MEMORY = "/dev/shm"  # Linux keeps the segments of shm_open in this folder
MAX_PATH_BYTES = 4095  # Linux: PATH_MAX without the zero at the end
MAX_NAME_BYTES = 255  # Linux: NAME_MAX


def path_problem(path: str) -> str | None:
    """Return why ``path`` cannot name a file on any Linux system, or None. The file system is not read."""
    try:
        raw = path.encode()
    except UnicodeEncodeError:
        return "expected a path in valid Unicode"
    if not raw or b"\0" in raw:
        return f"expected a path, got {'a string with a zero byte' if raw else 'an empty string'}"
    if len(raw) > MAX_PATH_BYTES or max(map(len, raw.split(b"/"))) > MAX_NAME_BYTES:
        return f"expected a path of at most {MAX_PATH_BYTES} bytes, each name in it at most {MAX_NAME_BYTES}"
    return None


class Folder:
    """An open folder, which stays the same if its path is renamed or replaced. roots: the folder, and each file that is
    opened in it, must lie beneath one of them after all links are followed. Raises OSError."""

    def __init__(self, path: str | os.PathLike[str], roots: Sequence[str] = ANYWHERE):
        self.path = _real(os.fspath(path))
        self._roots = [os.path.realpath(root) for root in roots]
        self._fd = _open_beneath(self._roots, self.path, directory=True)

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the folder. Files that were opened from it stay open."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def names(self) -> list[str]:
        """Return the names of all entries, sorted."""
        # A descriptor of O_PATH cannot be listed.
        fd = os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return sorted(os.listdir(fd))
        finally:
            os.close(fd)

    def has(self, name: str) -> bool:
        """Return whether the folder has an entry of this name, which may be a link without a target."""
        try:
            os.stat(name, dir_fd=self._fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def open(self, name: str) -> int:
        """Open the regular file ``name`` for reading, and return its descriptor. Raises OSError."""
        if name in ("", ".", "..") or "/" in name:
            raise OSError(errno.EINVAL, "is not the name of a file in this folder")
        fd = _open_path(name, self._fd)
        if not stat.S_ISLNK(os.fstat(fd).st_mode):
            return _reopen_regular(fd)
        os.close(fd)
        fd = _open_beneath(self._roots, _real(os.path.join(self.path, name)), directory=False)
        return _reopen_regular(fd)

    def read(self, name: str, limit: int) -> bytes:
        """Return all bytes of the regular file ``name``. Raises OSError, also for more than ``limit`` bytes."""
        fd = self.open(name)
        try:
            return read_whole(fd, limit)
        finally:
            os.close(fd)


def open_regular(path: str | os.PathLike[str], folder: int | None = None) -> int:
    """Open a regular file for reading, and return its descriptor. The last part of ``path`` must not be a link. folder:
    descriptor of the folder that a relative ``path`` starts from. Raises OSError."""
    return _reopen_regular(_open_path(os.fspath(path), folder))


def read_whole(fd: int, limit: int) -> bytes:
    """Return all bytes of an open regular file. Raises OSError for more than ``limit`` bytes."""
    size = os.fstat(fd).st_size
    if size > limit:
        raise OSError(errno.EFBIG, f"has {size} bytes, expected at most {limit}")
    return os.pread(fd, size, 0)


def make_beneath(root: str, path: str) -> int:
    """Open the folder ``path``, and return its descriptor. Missing folders below ``root`` are made. Raises OSError if
    ``path`` as it is written does not lie beneath ``root``, or leads through a link below ``root``."""
    parts = _parts_below(os.path.normpath(root), os.path.normpath(path))
    if parts is None:
        raise OSError(errno.EXDEV, "is not beneath the folder that is allowed")
    fd = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parts:
            with contextlib.suppress(FileExistsError):
                os.mkdir(part, 0o755, dir_fd=fd)
            fd = _step_into(fd, part, directory=True)
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    finally:
        os.close(fd)


def has_room(folder: str | os.PathLike[str], nbytes: int) -> bool:
    """Return whether ``folder`` exists and its file system has more than ``nbytes`` bytes free."""
    return os.path.isdir(folder) and shutil.disk_usage(folder).free > nbytes


def new_file(path: str | os.PathLike[str], mode: int) -> BinaryIO:
    """Make a file that does not exist yet, and open it for writing without a buffer: another process may read each byte
    at once. A full file system causes OSError and no signal, unless the caller maps the file. mode: permissions."""
    return open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, mode), "wb", buffering=0)


def new_locked_file(path: str | os.PathLike[str], mode: int) -> BinaryIO:
    """Make a file as ``new_file`` does. :func:`remove_abandoned` leaves it alone while this process has it open."""
    while True:
        file = new_file(path, mode)
        fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:  # not removed by another process before it was locked
            return file
        file.close()


def remove_abandoned(folder: str | os.PathLike[str], prefix: str) -> None:
    """Remove the files of ``new_locked_file`` whose processes have ended, and whose names begin with ``prefix``. Pipes
    and links with such names are left alone."""
    for path in Path(folder).glob(f"{prefix}*"):
        with contextlib.suppress(OSError), open(open_regular(path), "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its process lives
            path.unlink()


def write_all(file: BinaryIO, data: bytes | bytearray | memoryview) -> None:
    """Write ``data`` to a file without a buffer, whose ``write`` may take only a part. Raises OSError."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def _real(path: str) -> str:
    if (problem := path_problem(path)) is not None:
        raise OSError(errno.EINVAL, problem)
    return os.path.realpath(path)


def _parts_below(root: str, path: str) -> list[str] | None:
    """Return the names that lead from ``root`` to ``path``, both absolute, or None if ``path`` is not beneath it."""
    if not os.path.isabs(path) or os.path.commonpath([root, path]) != root:
        return None
    return [part for part in os.path.relpath(path, root).split("/") if part != "."]


def _open_beneath(roots: Sequence[str], path: str, directory: bool) -> int:
    """Return an O_PATH descriptor of ``path``. The caller has resolved all links in the roots and in ``path``. A link
    that is found now was put there since, and is an error."""
    for root in roots:
        if (parts := _parts_below(root, path)) is not None:
            break
    else:
        raise OSError(errno.EXDEV, "leads out of the folders that are allowed (--model-root)")
    fd = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for i, part in enumerate(parts):
            fd = _step_into(fd, part, directory or i + 1 < len(parts))
    except BaseException:
        os.close(fd)
        raise
    return fd


def _step_into(fd: int, name: str, directory: bool) -> int:
    """Return an O_PATH descriptor of ``name`` in the folder ``fd``, and close ``fd``. An error leaves ``fd`` open."""
    inner = _open_path(name, fd)
    mode = os.fstat(inner).st_mode
    if stat.S_ISLNK(mode) or (directory and not stat.S_ISDIR(mode)):
        os.close(inner)
        why = "is a link that was put there just now" if stat.S_ISLNK(mode) else os.strerror(errno.ENOTDIR)
        raise OSError(errno.ENOTDIR, why)
    os.close(fd)
    return inner


def _open_path(name: str, folder: int | None = None) -> int:
    """Return an O_PATH descriptor: the file is found, but not opened. A link is not followed."""
    if (problem := path_problem(name)) is not None:
        raise OSError(errno.EINVAL, problem)
    return os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)


def _reopen_regular(fd: int) -> int:
    """Open the regular file of an O_PATH descriptor for reading, and close ``fd``. Raises OSError."""
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "is not a regular file")
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(fd)
