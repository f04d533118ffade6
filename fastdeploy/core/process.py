"""The start of each process of this package, and facts about itself, other processes and its machine.

The environment variables of the C++ ops (FASTDEPLOY_CPU_THREADS, FASTDEPLOY_CPU_ISA) are in
model_executor/ops/cpu_library.py, those of keys in http/guards/keys.py and inter_communicator/fleet_key.py.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import re
import socket
import tempfile
from functools import cache
from pathlib import Path

VERSION = "0.17.0"  # of this package; setup.py reads it here
COLLECT_AFTER = 50_000  # new objects that can be part of a reference cycle
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# Two processes see each other's ids, shared memory and files only if all of these are the same.
NAMESPACES = ("pid", "ipc", "mnt")
ANSWER_COUNTS_FOLDER = "PROMETHEUS_MULTIPROC_DIR"  # see http/answer_counts.py; the library reads it, too


def is_secret(variable: str) -> bool:
    """Return whether the value of a variable of the environment must not be shown: a key, a token or a password."""
    return re.search(r"KEY|TOKEN$|SECRET|PASSW|CREDENTIAL", variable.upper()) is not None


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


def setup_logging(process: str) -> logging.Logger:
    """Log one line per event to stderr, with the name of this process; in a fleet that of its replica comes first.
    Return the logger of this package."""
    process = "/".join(filter(None, (log_name(), process)))
    logging.basicConfig(
        level=log_level().upper(),
        format=f"%(asctime)s %(levelname).1s {process}[%(process)d] %(name)s: %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )
    for library in ("httpx", "uvicorn.error"):
        logging.getLogger(library).setLevel(logging.WARNING)
    return logging.getLogger("fastdeploy")


def collect_rarely() -> None:
    """Make garbage collections rare, and leave out the objects that exist now. Call when all modules are imported.

    A step makes thousands of objects and hardly any reference cycle. With Python's defaults the collector would search
    the objects several times a step, and sometimes all imported modules too. Such a collection took 75 to 156 ms."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER)


@cache
def host_id() -> str:
    """Return an id that two processes share if they run on one machine, and in one container. Another one after each
    boot."""
    try:
        boot = BOOT_ID.read_text().strip()
    except OSError:
        boot = socket.gethostname()
    return "-".join((boot, *(_namespace(name) for name in NAMESPACES)))


def _namespace(name: str) -> str:
    try:
        return str(os.stat(f"/proc/self/ns/{name}").st_ino)
    except OSError:
        return "0"


def stat_of(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat behind the name (see proc(5)): the state, the parent, ... Raises OSError if
    there is no such process."""
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()


def is_alive(pid: int) -> bool:
    """Return whether the process exists and is no zombie."""
    with contextlib.suppress(OSError):
        return stat_of(pid)[0] not in "ZX"
    return False


def descendants(pid: int) -> list[int]:
    """Return the living descendants of a process, without itself."""
    children: list[int] = []
    with contextlib.suppress(OSError):  # the process has just ended
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                children += map(int, (thread / "children").read_text().split())
    living = [child for child in children if is_alive(child)]
    return living + [pid for child in living for pid in descendants(child)]
