"""Files through which processes pass tensors, in shared memory if there is room.

A process that is killed leaves its files. A file is locked while its process lives, so that another process can tell
which files nobody uses any more.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from pathlib import Path
from typing import BinaryIO

from fastdeploy.core.safe_files import open_regular

SHARED_MEMORY = "/dev/shm"  # Linux keeps the segments of shm_open in this folder


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
