"""The private folder that holds the engine's socket: made by the supervisor, removed by whoever leaves last."""

from __future__ import annotations

import os
import shutil
import tempfile

from fastdeploy.core import envs

PREFIX = "fastdeploy-"
SOCKET = "engine.sock"


def create() -> str:
    """Make a new folder that only this user may enter (mode 0700) and return its path."""
    return tempfile.mkdtemp(prefix=PREFIX, dir=envs.ipc_root())


def endpoint(path: str) -> str:
    """ZMQ address of the engine's socket inside ``path``."""
    return f"ipc://{os.path.join(path, SOCKET)}"


def remove(path: str) -> None:
    """Remove the folder and what is in it; no error if another process was faster. Refuses any other folder."""
    assert os.path.basename(path).startswith(PREFIX), path
    shutil.rmtree(path, ignore_errors=True)
