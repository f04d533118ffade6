"""Build the CPU ops: ``python custom_ops/build.py``.

The result is one shared library for every x86-64: kernels are compiled once per instruction set and chosen at run time.
Without a compiler the script prints one line and succeeds, and the Paddle reference ops run instead. A second run with
the same sources and flags does nothing.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "custom_ops" / "cpu_ops"
PROGRESS_S = 8.0  # seconds between two lines of progress
LIBRARY = ROOT / "fastdeploy" / "model_executor" / "ops" / "libfastdeploy_cpu_ops.so"

# -ffp-contract=off: the compiler never fuses a product and a sum on its own, so that two paths through a kernel cannot
# differ in the last bit.
COMMON = ["-std=c++17", "-O3", "-fPIC", "-ffp-contract=off", "-fvisibility-inlines-hidden"]
COMMON += ["-Wall", "-Wextra", "-pthread"]
AVX2 = ["-DFD_ISA=avx2", "-mavx2", "-mfma"]
AVX512 = ["-DFD_ISA=avx512", "-mavx2", "-mfma", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
AVX512_BF16 = ["-DFD_ISA=avx512_bf16", *AVX512[1:], "-mavx512bf16"]
AVX512_VNNI = ["-DFD_ISA=avx512_vnni", *AVX512[1:], "-mavx512vnni"]
AMX = ["-DFD_ISA=amx", *AVX512_BF16[1:], "-mamx-tile", "-mamx-bf16", "-mamx-int8"]


class Unit(NamedTuple):
    """One object file: a source and the flags of its instruction set."""

    source: str
    flags: list[str]

    @property
    def object_name(self) -> str:
        return f"{Path(self.source).stem}_{self.flags[0].removeprefix('-DFD_ISA=') if self.flags else 'any'}.o"


# Files with kernels, once for each instruction set. All others are compiled once.
ATTENTION = ("attention/attention.cc", "attention/prepare.cc")
LAYER = ("layer.cc", "experts/experts.cc")
VOCABULARY = ("vocabulary/sampling.cc", "vocabulary/logprobs.cc")
VECTOR = ("linear/linear.cc", *ATTENTION, *LAYER, "weights/rows.cc", "weights/quantize.cc", *VOCABULARY)
VECTOR += ("runtime/probe_read.cc",)
INT8 = ("linear/linear_int8.cc",)
TILED = ("linear/linear_amx.cc", "attention/attention_amx.cc", *LAYER, "runtime/roofline_probes.cc")
PAIRED = ("linear/linear_bf16.cc", "attention/attention.cc", *LAYER, "runtime/probe_bf16.cc")
FILES = sorted(path.relative_to(SOURCES).as_posix() for path in SOURCES.rglob("*.cc"))
UNITS = (
    [Unit(name, []) for name in FILES if name not in (*VECTOR, *PAIRED, *INT8, *TILED)]
    + [Unit(name, flags) for name in VECTOR for flags in (AVX2, AVX512)]
    + [Unit(name, AVX512_BF16) for name in PAIRED]
    + [Unit(name, flags) for name in INT8 for flags in (AVX2, AVX512_VNNI, AMX)]
    + [Unit(name, AMX) for name in TILED]
)


def find_compiler() -> str | None:
    """Return $CXX, or the first of g++, clang++ and c++ that is on the PATH."""
    for name in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        if name and shutil.which(name):
            return name
    return None


def build_stamp() -> str:
    """Return a hash of the sources and flags. The library contains its own (``fd_build_stamp``)."""
    digest = hashlib.sha256(repr((COMMON, UNITS)).encode())
    for path in sorted([*SOURCES.rglob("*.cc"), *SOURCES.rglob("*.h")]):
        digest.update(path.relative_to(SOURCES).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def compile_library(compiler: str, target: Path, stamp: str) -> None:
    """Compile all units in parallel and link them to ``target``. Raises CalledProcessError with the output."""
    run = partial(subprocess.run, check=True, capture_output=True, text=True)
    with tempfile.TemporaryDirectory(prefix="cpu_ops_") as folder:

        def compile_unit(unit: Unit) -> str:
            out = os.path.join(folder, unit.object_name)
            flags = [*COMMON, *unit.flags, f"-I{SOURCES}", f'-DFD_BUILD_STAMP="{stamp}"']
            run([compiler, *flags, "-c", str(SOURCES / unit.source), "-o", out])
            return out

        began = time.monotonic()
        with ThreadPoolExecutor(os.cpu_count()) as executor:
            compiling = [executor.submit(compile_unit, unit) for unit in UNITS]
            while wait(compiling, PROGRESS_S).not_done:
                done = sum(future.done() for future in compiling)
                took = time.monotonic() - began
                left = f", about {took * (len(UNITS) - done) / done:.0f} s left" if done else ""
                print(f"cpu_ops: {done} of {len(UNITS)} files compiled{left}", flush=True)
            objects = [future.result() for future in compiling]
        # Link under another name, then rename: a process that has mapped the old library keeps its file.
        staged = target.with_suffix(f".{os.getpid()}.tmp")
        run([compiler, "-shared", "-pthread", *objects, "-o", str(staged)])
        staged.replace(target)


def build(target: Path = LIBRARY) -> bool:
    """Bring ``target`` up to date. Returns False where that cannot be done (no compiler, not x86-64)."""
    if platform.machine() not in ("x86_64", "AMD64"):
        print(f"cpu_ops: not built, {platform.machine()} has no C++ kernels yet; the Paddle reference ops will run")
        return False
    stamp = build_stamp()
    if target.exists() and stamp.encode() in target.read_bytes():
        print(f"cpu_ops: {target.name} is up to date")
        return True
    target.unlink(missing_ok=True)  # built from other sources: the reference ops are better than such a library
    compiler = find_compiler()
    if compiler is None:
        print("cpu_ops: not built, no C++ compiler found (g++ or clang++); the Paddle reference ops will run")
        return False
    try:
        compile_library(compiler, target, stamp)
    except subprocess.CalledProcessError as error:
        print(
            f"cpu_ops: not built, {compiler} failed; the Paddle reference ops will run\n{error.stderr}", file=sys.stderr
        )
        return False
    print(f"cpu_ops: built {target.name} with {compiler}")
    return True


if __name__ == "__main__":
    build()
