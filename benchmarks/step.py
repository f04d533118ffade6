#!/usr/bin/env python
"""Measure the engine's step without HTTP, and its share of the machine's roofline:

    python -m benchmarks.step [--model ~/.cache/fastdeploy-peers/q05] [--running 1,8,32] [--context 64] [--chunk 512]

A step is ``ModelRunner.execute`` in bfloat16: batch, all layers, logits, sampling. With AVX-512, a decode step is
compared with the time to read its bytes at the machine's read bandwidth. With AMX, a prefill step is compared with the
time of its operations at the tile peak (formulas in ``lib/roofline.py``). Probe and steps alternate, so that a slow
minute of the machine affects both. Medians, with the best time in brackets.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import msgspec

from benchmarks.lib.roofline import Machine, Shape
from benchmarks.ops import Timing, measure, probe_weight, read_roofline, roofline_calls
from fastdeploy.core.plan import NewSequence, ScheduledChunk, StepPlan
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.core.served_weights import ServedWeights
from fastdeploy.model_executor.ops.cpu import CpuOps
from fastdeploy.worker.model_runner import ModelRunner

MODEL = Path.home() / ".cache" / "fastdeploy-peers" / "q05"
BLOCK = 16


def chunk(number: int, start: int, count: int, blocks: int, sample: bool) -> ScheduledChunk:
    """Return a chunk of ``count`` tokens of sequence ``number`` at positions start, ..., in ``blocks`` of its own."""
    tokens = [(number * 31 + i) % 251 for i in range(start + count)]
    table = list(range(number * blocks, (number + 1) * blocks))
    new = NewSequence((f"r{number}", 0), SamplingParams(max_tokens=1, temperature=0.0), start + count)
    return ScheduledChunk(number, start, count, sample, ServedWeights(), tokens, table, new)


def plans(running: list[int], context: int, tokens: int, blocks: int) -> dict[str, StepPlan]:
    """Return a decode step for each count of ``running`` sequences with ``context`` tokens; a prefill of ``tokens``."""
    found = {f"decode {count}": [chunk(row, context, 1, blocks, True) for row in range(count)] for count in running}
    found[f"prefill {tokens}"] = [chunk(max(running), 0, tokens, blocks, False)]
    return {name: StepPlan(0, chunks, []) for name, chunks in found.items()}


def repeated(plan: StepPlan) -> StepPlan:
    """Return the plan of the same step for a runner that knows the sequences of ``plan``."""
    return StepPlan(0, [msgspec.structs.replace(c, token_ids=[], blocks=[], new=None) for c in plan.chunks], [])


def least_seconds(name: str, shape: Shape, tokens: int, machine: Machine) -> float | None:
    """Return the least time of the step of this name on ``machine``; None without the probe that it needs."""
    if name.startswith("prefill"):
        return None if machine.peak is None else shape.prefill_operations(tokens) / machine.peak
    return shape.step_bytes / machine.read


def describe(name: str, timing: Timing, least: float | None) -> dict[str, float | None]:
    """Print one line; return its figures."""
    text, share = f"  {name:14} {timing.median * 1e3:8.2f} ms (best {timing.best * 1e3:.2f})", None
    if least is not None:
        share = least / timing.median
        text += f"   {share:4.0%} of the {'matrix rate' if name.startswith('prefill') else 'bandwidth'}"
    print(text)
    return {"ms": timing.median * 1e3, "best_ms": timing.best * 1e3, "of_roofline": share}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--running", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=64, help="tokens behind each decoding sequence")
    parser.add_argument("--chunk", type=int, default=512, help="tokens of the prefill step")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    longest = max(options.context + 1, options.chunk)
    blocks = -(-longest // BLOCK)
    runner = ModelRunner(
        str(options.model),
        dtype="bfloat16",
        block_size=BLOCK,
        num_blocks=(max(options.running) + 1) * blocks,
        max_model_len=longest,
    )
    shape, ops = Shape.of(options.model), runner.ops
    assert isinstance(ops, CpuOps), "it measures the C++ ops: build them (python custom_ops/build.py)"
    probe = probe_weight(ops)
    steps = plans(options.running, options.context, options.chunk, blocks)
    for plan in steps.values():
        runner.execute(plan)
    again = {name: repeated(plan) for name, plan in steps.items()}
    calls = {name: lambda plan=plan: runner.execute(plan) for name, plan in again.items()}
    timings = measure({**roofline_calls(ops, probe), **calls}, options.repeats)
    machine = read_roofline(ops, probe, timings)
    print(f"{options.model}, {ops.dtype}, {ops.isa}, {ops.num_threads} threads, load average {os.getloadavg()[0]:.2f}")
    report: dict = {"step_bytes": shape.step_bytes, "machine": None if machine is None else machine._asdict()}
    if machine is not None:
        rates = f"reader {machine.read / 1e9:.1f} GB/s"
        if machine.peak is not None:
            rates += f", tiles {machine.peak / 1e12:.2f} TFLOP/s"
        print(f"a decode step reads {shape.step_bytes / 1e9:.3f} GB; {rates}")
    least = {name: machine and least_seconds(name, shape, options.chunk, machine) for name in steps}
    report["steps"] = {name: describe(name, timings[name], least[name]) for name in steps}
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
