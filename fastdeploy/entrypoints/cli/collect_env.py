"""``fastdeploy collect-env``: what a report about a fault should have: versions, CPU, memory, settings."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from fastdeploy.core.process import VERSION, is_secret
from fastdeploy.entrypoints.cli.command import Commands, Context
from fastdeploy.entrypoints.cli.settings import SettingsParser

PACKAGES = ("paddlepaddle", "paddlepaddle-gpu", "numpy", "transformers", "tokenizers", "safetensors", "llguidance",
            "pyzmq", "msgspec", "fastapi", "uvicorn", "ray")  # fmt: skip
INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8")
SHOWN = ("FASTDEPLOY_", "FD_", "OMP_", "FLAGS_")


def add_parser(commands: Commands) -> SettingsParser:
    """Add this command."""
    return commands.add_parser("collect-env", help="print versions, CPU and memory for a report", allow_abbrev=False)


def run(args: argparse.Namespace, context: Context) -> int:
    """Print one line for each fact. Return the exit status."""
    for name, value in facts():
        print(f"{name:24}{value}")
    return 0


def facts() -> Iterator[tuple[str, str]]:
    """Yield each fact with its name. The content of keys is not shown."""
    from fastdeploy.worker.memory import free_memory, total_memory

    yield "fastdeploy", VERSION
    yield "python", platform.python_version()
    for name in PACKAGES:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            yield name, "not installed"
    yield "system", f"{platform.platform()}, {' '.join(platform.libc_ver())}"
    info = _first_cpu()
    yield "CPU", info.get("model name", platform.machine())
    yield "cores", f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}"
    flags = info.get("flags", "").split()
    yield "instruction sets", " ".join(name for name in INSTRUCTIONS if name in flags) or "none of those used"
    yield "C++ ops", _ops()
    yield "memory", f"{free_memory() / 2**30:.1f} of {total_memory() / 2**30:.1f} GiB free"
    shared = os.statvfs("/dev/shm")
    yield "shared memory", f"{shared.f_bavail * shared.f_frsize / 2**30:.1f} GiB free"
    for name in sorted(os.environ):
        if name.startswith(SHOWN):
            yield name, "(set)" if is_secret(name) else os.environ[name]


def _first_cpu() -> dict[str, str]:
    """Return what Linux tells about the first CPU."""
    first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _ops() -> str:
    from fastdeploy.model_executor.ops.cpu import CpuOps
    from fastdeploy.model_executor.ops.cpu_library import load_library

    try:
        return CpuOps("bfloat16", load_library()).isa
    except OSError as error:
        return f"not available: {error}"
