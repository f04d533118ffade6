"""The private folder of the engine's socket and log. The supervisor makes it; the last process to end removes it."""

from __future__ import annotations

import os
import shutil
import tempfile

from fastdeploy.core.process import ipc_root

PREFIX = "fastdeploy-"
SOCKET = "engine.sock"
RETAINED_LOG = "retained.log"
LOADING = "loading.json"


def create() -> str:
    """Make a new folder that only this user may enter (mode 0700), and return its path."""
    return tempfile.mkdtemp(prefix=PREFIX, dir=ipc_root())


def endpoint(path: str) -> str:
    """Return the ZMQ address of the engine's socket inside ``path``."""
    return f"ipc://{os.path.join(path, SOCKET)}"


def retained_log(path: str) -> str:
    """Return the file in which an engine names its retained requests for the next engine."""
    return os.path.join(path, RETAINED_LOG)


def loading_file(path: str) -> str:
    """Return the file in which an engine that starts says how far it is."""
    return os.path.join(path, LOADING)


def remove(path: str) -> None:
    """Remove the folder and its content. No error if another process has removed it already."""
    assert os.path.basename(path).startswith(PREFIX), path
    shutil.rmtree(path, ignore_errors=True)
