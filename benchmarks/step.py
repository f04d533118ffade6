#!/usr/bin/env python
"""How far the engine's own step is from what the machine allows, without HTTP:

    python -m benchmarks.step [--model ~/.cache/fastdeploy-peers/q05] [--running 1,8,32] [--context 64] [--chunk 512]

A step is ``ModelRunner.execute``: batch, all layers, logits, sampling. Decode steps are held against the time in which
a plain reader on all threads reads as many bytes as the weights have; prefill steps against the time of their linears'
operations at the tile peak. Probe and steps take turns, so that a slow minute of the machine hits both; medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from array import array
from pathlib import Path

import numpy as np

from fastdeploy.engine.sampling_params import SamplingParams
from fastdeploy.model_executor.ops.cpu import CpuLinear, CpuOps
from fastdeploy.scheduler.interface import ScheduledChunk, StepPlan
from fastdeploy.worker.model_runner import ModelRunner

MODEL = Path.home() / ".cache" / "fastdeploy-peers" / "q05"
PROBE_ROWS = 1 << 20  # x 1024 bfloat16 = 2 GiB: several times any last-level cache
PEAK_ROUNDS = 2000


def chunk(runner: ModelRunner, row: int, start: int, count: int, blocks: int, sample: bool) -> ScheduledChunk:
    """``count`` tokens of sequence ``row`` at positions start, ..., in blocks of its own."""
    tokens = [(row * 31 + i) % 251 for i in range(count)]
    table = array("i", range(row * blocks, (row + 1) * blocks))
    params = SamplingParams(max_tokens=1, temperature=0.0)
    return ScheduledChunk((f"r{row}", 0), tokens, start, table, sample, params, tokens, count, ())


def plans(runner: ModelRunner, options: argparse.Namespace) -> dict[str, StepPlan]:
    size = runner.info.block_size
    blocks = -(-max(options.context + 1, options.chunk) // size)
    found = {
        f"decode {running}": [chunk(runner, row, options.context, 1, blocks, True) for row in range(running)]
        for running in options.running
    }
    found[f"prefill {options.chunk}"] = [chunk(runner, 0, 0, options.chunk, blocks, False)]
    return {name: StepPlan(0, 0, "0", chunks, []) for name, chunks in found.items()}


def timed(call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--running", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=64, help="tokens behind each decoding sequence")
    parser.add_argument("--chunk", type=int, default=512, help="tokens of the prefill step")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    blocks = (max(options.running) + 1) * (-(-max(options.context + 1, options.chunk) // 16))
    runner = ModelRunner(options.model, num_blocks=blocks, max_model_len=max(options.context + 2, options.chunk + 1))
    ops = runner.ops
    assert isinstance(ops, CpuOps) and ops.isa == "amx", "the probes are written for AMX"
    linears = {id(v): v for v in runner.weights.values.values() if isinstance(v, CpuLinear)}.values()
    weight_bytes = sum(v.nbytes for v in linears)
    body = sum(v.out_features * v.in_features for v in linears) - runner.weights.lm_head.out_features * (
        runner.weights.lm_head.in_features
    )
    probe = ops.pack_linear([np.zeros((PROBE_ROWS, 1024), np.uint16)])
    seconds: dict[str, list[float]] = {}
    reads, peaks = [], []
    for repeat in range(options.repeats + 1):
        read = probe.nbytes / timed(lambda: ops.probe_read(probe))
        start = time.perf_counter()
        peak = ops.probe_peak(PEAK_ROUNDS) / (time.perf_counter() - start)
        for name, plan in plans(runner, options).items():
            elapsed = timed(lambda plan=plan: runner.execute(plan))
            if repeat > 0:
                seconds.setdefault(name, []).append(elapsed)
        if repeat > 0:
            reads.append(read)
            peaks.append(peak)
    bandwidth, rate = statistics.median(reads), statistics.median(peaks)
    print(f"{options.model}, {ops.dtype}, {ops.isa}, {ops.num_threads} threads, load average {os.getloadavg()[0]:.2f}")
    print(f"weights {weight_bytes / 1e9:.3f} GB; reader {bandwidth / 1e9:.1f} GB/s, tiles {rate / 1e12:.2f} TFLOP/s")
    report: dict = {"bandwidth": bandwidth, "rate": rate, "weight_bytes": weight_bytes, "steps": {}}
    for name, found in seconds.items():
        median = statistics.median(found)
        least = 2 * body * options.chunk / rate if name.startswith("prefill") else weight_bytes / bandwidth
        what = "matrix rate" if name.startswith("prefill") else "bandwidth"
        text = f"  {name:14} {median * 1e3:8.2f} ms ({min(found) * 1e3:.2f} to {max(found) * 1e3:.2f})"
        print(f"{text}   {least / median:4.0%} of the {what}")
        report["steps"][name] = {"ms": median * 1e3, "min_ms": min(found) * 1e3, "of_roofline": least / median}
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
