"""Files through which processes pass tensors, in shared memory if there is room."""

from __future__ import annotations

import os
import shutil
from typing import BinaryIO

SHARED_MEMORY = "/dev/shm"  # Linux keeps the segments of shm_open in this folder


def has_room(folder: str | os.PathLike[str], nbytes: int) -> bool:
    """Return whether ``folder`` exists and its file system has more than ``nbytes`` bytes free."""
    return os.path.isdir(folder) and shutil.disk_usage(folder).free > nbytes


def new_file(path: str | os.PathLike[str], mode: int) -> BinaryIO:
    """Make a file that does not exist yet, and open it for writing without a buffer: another process may read each byte
    at once. A full file system causes OSError and no signal, unless the caller maps the file. mode: permissions."""
    return open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, mode), "wb", buffering=0)


def write_all(file: BinaryIO, data: bytes | bytearray | memoryview) -> None:
    """Write ``data`` to a file without a buffer, whose ``write`` may take only a part. Raises OSError."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]
