"""The marks that pulls leave in a local folder, by which readers tell a whole checkpoint from a half-written one.

A pull copies a published checkpoint into a local folder, or changes the files there in place. The marks have the names
and the meaning that they have in SGLang:

- ``.weight_sync/lock`` is locked (flock) while a pull writes.
- ``.weight_sync/state.json`` names the version in the folder. The file is absent while the folder holds no whole
  version: a pull is writing, or was killed.

A reader locks the folder with :func:`lock_for_reading`. Pulls into the folder then wait until the reader has ended.
"""

from __future__ import annotations

import errno
import fcntl
import os

import msgspec

from fastdeploy.core.files import open_regular, read_whole

SYNC, LOCK, STATE = ".weight_sync", "lock", "state.json"
MAX_STATE_BYTES = 1 << 16


class _State(msgspec.Struct):
    version: str


def pulled_version(folder: str) -> int | None:
    """Return the version that a pull has put into ``folder``, or None if the folder holds no whole one."""
    try:
        fd = open_regular(os.path.join(folder, SYNC, STATE))
        try:
            return int(msgspec.json.decode(read_whole(fd, MAX_STATE_BYTES), type=_State).version)
        finally:
            os.close(fd)
    except (OSError, ValueError):
        return None


def lock_for_reading(folder: str) -> int | None:
    """Keep pulls out of ``folder`` until the descriptor that is returned is closed. Returns None for a folder that no
    pull has made. Raises OSError if the folder holds no whole checkpoint now."""
    sync = os.path.join(folder, SYNC)
    try:
        fd = open_regular(os.path.join(sync, LOCK))
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        os.stat(os.path.join(sync, STATE), follow_symlinks=False)
    except BlockingIOError as error:
        os.close(fd)
        raise OSError(errno.EBUSY, "a pull is writing to it") from error
    except FileNotFoundError as error:
        os.close(fd)
        raise OSError(errno.EINPROGRESS, "the last pull into it did not end: pull again") from error
    except BaseException:
        os.close(fd)
        raise
    return fd
