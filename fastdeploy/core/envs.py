"""Environment variables of this package. The variables of the C++ ops (FASTDEPLOY_CPU_THREADS, FASTDEPLOY_CPU_ISA) are
in model_executor/ops/cpu_library.py, the variables of API keys in http/guards/keys.py."""

from __future__ import annotations

import os
import tempfile


def log_level() -> str:
    """FASTDEPLOY_LOG_LEVEL: debug, info, warning or error."""
    return os.environ.get("FASTDEPLOY_LOG_LEVEL", "info").lower()


def log_name() -> str:
    """FASTDEPLOY_LOG_NAME: name of the replica that this process belongs to, for the log. Set by replica_main."""
    return os.environ.get("FASTDEPLOY_LOG_NAME", "")


def ipc_root() -> str:
    """FASTDEPLOY_IPC_ROOT: folder in which each server makes its private socket folder. A unix socket's path has at
    most 107 bytes."""
    return os.environ.get("FASTDEPLOY_IPC_ROOT", tempfile.gettempdir())


def check_integrity() -> bool:
    """FASTDEPLOY_CHECK_INTEGRITY: "1" makes the engine check all of its state whenever it becomes idle."""
    return os.environ.get("FASTDEPLOY_CHECK_INTEGRITY", "") == "1"
