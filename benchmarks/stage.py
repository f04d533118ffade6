#!/usr/bin/env python
"""Measure the staging of a checkpoint by the C++ ops: GB/s, CPU seconds, and the ratio to a plain copy.

    python -m benchmarks.stage FOLDER/model.safetensors [--dtype bfloat16|float32] [--repeats 5] [--changed 0.03]

read: pread of the file into 256 KiB, on one thread. check: convert, check and fingerprint what is in a core's cache.
stage: all of it, from the file into packed weights. copy: of packed weights (``copy_rows``). overwrite: a delta of
all weights. The file should be in the page cache. GB/s count the bytes of the file. Medians, the best in brackets.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fastdeploy.core import delta_format
from fastdeploy.model_executor.ops.cpu import CpuLinear, CpuOps
from fastdeploy.model_executor.ops.interface import DeltaItem, Region, StageItem, StageResult

CHUNK = 256 << 10
GO_ON = np.zeros(1, np.int32)


class Tensor(NamedTuple):
    """A tensor of the file. offset, nbytes: of its values."""

    dtype: str
    rows: int
    columns: int
    offset: int
    nbytes: int


def tensors_of(path: Path) -> list[Tensor]:
    """Read the header of a safetensors file. A vector is one row."""
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    found = []
    for entry in header.values():
        first, last = entry["data_offsets"]
        rows, columns = entry["shape"] if len(entry["shape"]) == 2 else (1, *entry["shape"])
        found.append(Tensor(entry["dtype"], rows, columns, 8 + size + first, last - first))
    return found


def read_all(fd: int, size: int) -> None:
    buffer = bytearray(CHUNK)
    for offset in range(0, size, CHUNK):
        os.preadv(fd, [buffer], offset)


def checked(results: list[StageResult]) -> None:
    problems = {result.problem for result in results} - {None}
    assert not problems, problems


def delta_items(ops: CpuOps, regions: list[Region], changed: float) -> list[DeltaItem]:
    """Return deltas that set random values."""
    rng, kind = np.random.default_rng(0), np.uint16 if ops.dtype == "bfloat16" else np.uint32
    items = []
    for region in regions:
        size = region.rows * region.columns
        index = np.flatnonzero(rng.random(size, np.float32) < changed)
        values = rng.integers(0, 0x3F80 if kind is np.uint16 else 0x3F800000, index.size).astype(kind)
        items.append(DeltaItem(region, delta_format.overwrite(index, values)))
    return items


def measure(calls: dict[str, Callable[[], object]], repeats: int, size: int) -> None:
    """Time all calls once per repeat, so that a slow minute of the machine affects all, and print the table."""
    wall: dict[str, list[float]] = {name: [] for name in calls}
    cpu: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + 1):  # the first round is warm-up
        for name, call in calls.items():
            start, cpu_start = time.perf_counter(), time.process_time()
            call()
            if repeat > 0:
                wall[name].append(time.perf_counter() - start)
                cpu[name].append(time.process_time() - cpu_start)
    plain = statistics.median(wall["memcpy"])
    print(f"{'':10} {'seconds':>16} {'CPU s':>7} {'GB/s':>7} {'x memcpy':>9}")
    for name, seconds in wall.items():
        median = statistics.median(seconds)
        cells = f"{median:7.3f} [{min(seconds):6.3f}] {statistics.median(cpu[name]):7.3f}"
        print(f"{name:10} {cells} {size / median / 1e9:7.1f} {median / plain:9.2f}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--changed", type=float, default=0.03, help="share of the values that a delta changes")
    args = parser.parse_args(arguments)
    ops = CpuOps(args.dtype)
    tensors = tensors_of(args.file)
    size = sum(tensor.nbytes for tensor in tensors)
    weights = [[ops.new_linear(t.rows, t.columns, False) for t in tensors] for _ in range(2)]
    regions = [Region(t.rows, t.columns, w) for t, w in zip(tensors, weights[0], strict=True)]
    fd = os.open(args.file, os.O_RDONLY)
    staged = [StageItem(r, t.dtype, t.offset, fd) for t, r in zip(tensors, regions, strict=True)]
    cached = np.zeros(CHUNK, np.uint8)
    itemsize = 4 if tensors[0].dtype == "F32" else 2
    part = StageItem(Region(1, CHUNK // itemsize), tensors[0].dtype, 0, memory=cached)
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    deltas = delta_items(ops, regions, args.changed)

    def copy(pairs: list[tuple[CpuLinear, CpuLinear]]) -> None:
        for one, other in pairs:
            ops.copy_rows(one, other, 0, one.out_features)

    calls: dict[str, Callable[[], object]] = {
        "memcpy": lambda: np.copyto(target, source),
        "read": lambda: read_all(fd, size),
        "check": lambda: checked(ops.stage([part] * (size // CHUNK), GO_ON)),
        "stage": lambda: checked(ops.stage(staged, GO_ON)),
        "copy": lambda: copy(list(zip(weights[1], weights[0], strict=True))),
        "overwrite": lambda: checked(ops.apply_deltas(deltas, GO_ON)),
    }
    print(f"{size / 1e9:.2f} GB to {args.dtype}, {ops.isa}, {ops.num_threads} threads, {args.changed:.1%} changed")
    measure(calls, args.repeats, size)


if __name__ == "__main__":
    main()
