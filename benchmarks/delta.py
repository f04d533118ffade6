#!/usr/bin/env python
"""Measure deltas at the worker: seconds to stage one, and its bytes, for a model of bfloat16 weights.

    python -m benchmarks.delta FOLDER [--repeats 5] [--changed 0.01 0.03]

Each delta changes so many of the values by one unit in the last place, and is read from a file in shared memory. stage:
``add`` and ``finish``, with a standby copy that holds the weights that serve. refresh: the standby copy catches up
after the commit. Medians, the least in brackets; CPU counts the seconds of all cores. Nothing executes meanwhile.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from fastdeploy.core import delta_format
from fastdeploy.core.weight_source import FileSource, FolderSource, PartFormat
from fastdeploy.model_executor.safetensors_source import open_source
from fastdeploy.worker.model_runner import ModelRunner

FORMS = [("overwrite", "none"), ("overwrite", "zstd")]
State = dict[str, np.ndarray]


def read_state(folder: str) -> State:
    """Return the bits of all bfloat16 tensors, flat."""
    with open_source(FolderSource(folder)) as reader:
        assert all(entry.dtype == "BF16" for entry in reader.entries.values())
        return {name: reader.read_bytes(name).view(np.uint16) for name in reader.entries}


def changes(state: State, share: float) -> dict[str, np.ndarray]:
    """Return the flat indices of the values to change."""
    rng = np.random.default_rng(0)
    return {name: np.unique(rng.integers(0, bits.size, int(share * bits.size))) for name, bits in state.items()}


def make_payload(bits: np.ndarray, index: np.ndarray, form: tuple[str, str]) -> np.ndarray:
    payload = delta_format.overwrite(index, bits[index] ^ 1)
    return delta_format.compress(payload) if form[1] == "zstd" else payload


def write_payloads(path: Path, payloads: Mapping[str, np.ndarray]) -> None:
    header, offset = {}, 0
    for name, payload in payloads.items():
        header[name] = {"dtype": "U8", "shape": [payload.size], "data_offsets": [offset, offset + payload.size]}
        offset += payload.size
    raw = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for payload in payloads.values():
            file.write(payload.data)


class Clock:
    """Seconds of the clock, and of all cores, since it was made."""

    def __init__(self) -> None:
        self._began, self._used = time.perf_counter(), time.process_time()

    def read(self) -> tuple[float, float]:
        return time.perf_counter() - self._began, time.process_time() - self._used


def measure(runner: ModelRunner, source: FileSource, form: PartFormat, repeats: int) -> str:
    """Stage the same delta again and again. A repeated overwrite changes no value, but costs the same."""
    stages, refreshes = [], []
    for _ in range(repeats):
        staging, clock = runner.begin_update(False, False, delta=True), Clock()
        staging.add(source, {}, form=form)
        weights = staging.finish().weights
        stages.append(clock.read())
        runner.commit(weights)
        del staging, weights
        clock = Clock()
        runner.refresh_standby()
        refreshes.append(clock.read())
    found = []
    for name, times in (("stage", stages), ("refresh", refreshes)):
        (seconds, cpu), least = np.median(times, axis=0), np.min(times, axis=0)
        found.append(f"{name} {seconds:.3f} s ({least[0]:.3f}), CPU {cpu:.3f} s")
    return "   ".join(found)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--changed", type=float, nargs="*", default=[0.01, 0.03])
    args = parser.parse_args(arguments)
    runner = ModelRunner(args.folder, num_blocks=64, max_model_len=512, standby_weights="on")
    state = read_state(args.folder)
    session = runner.begin_update(False, False, delta=True)
    session.finish()  # borrows the standby copy: from now on, a refresh copies what is stale
    session.abandon()  # returns it
    runner.refresh_standby()
    full = sum(bits.nbytes for bits in state.values())
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = Path(folder) / "delta"
        for share in args.changed:
            index = changes(state, share)
            for form in FORMS:
                payloads = {name: make_payload(bits, index[name], form) for name, bits in state.items()}
                write_payloads(path, payloads)
                sent = sum(payload.nbytes for payload in payloads.values())
                del payloads
                times = measure(runner, FileSource(str(path)), PartFormat(*form), args.repeats)
                print(
                    f"{share:.0%} {form[0]:9} {form[1]:4} {sent / 1e6:6.1f} MB of {full / 1e6:.0f} MB   {times}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
