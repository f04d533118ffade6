"""The id of the machine that this process runs on."""

from __future__ import annotations

import os
import socket
from functools import cache
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# Two processes see each other's ids, shared memory and files only if all of these are the same.
NAMESPACES = ("pid", "ipc", "mnt")


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
