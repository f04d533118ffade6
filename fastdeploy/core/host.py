"""The identity of a machine, as far as processes can share memory and files there."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path


@cache
def host_id() -> str:
    """Return an id that two processes share if they see the same files: of one boot of one machine, and of one
    container there."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}-{os.stat('/proc/self/ns/mnt').st_ino}"
