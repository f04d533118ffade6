#!/usr/bin/env python
"""Measure the engine's step without HTTP, and its share of the machine's roofline:

    python -m benchmarks.step [--model ~/.cache/fastdeploy-peers/q05] [--running 1,8,32] [--context 64] [--chunk 512]
    python -m benchmarks.step --running 32 --adapters 1,8,32 [--rank 16]
    python -m benchmarks.step --running 8 --context 32700          # long contexts: 3.2 GB of KV

A step is ``ModelRunner.execute`` in bfloat16: batch, all layers, logits, sampling. The time of a step is compared with
the least time: to read its bytes (weights, distinct adapters, and KV; of its attention alone, KV) at the machine's read
bandwidth, or its operations at the peak of AMX or AVX512_BF16, if that is longer. A prefill has only the second one
(formulas in ``lib/roofline.py``). Probe and steps alternate, so that a slow minute of the machine affects all. Medians,
with the best time in brackets. At short contexts, attention is the cost of its calls.

``--adapters`` adds decode steps of the most sequences with random adapters on all linears (make_adapters.py).
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import NamedTuple

import msgspec

from benchmarks.lib.roofline import Machine, Shape
from benchmarks.make_adapters import adapter_bytes, write_adapter
from benchmarks.ops import (
    BLOCK,
    Timing,
    attention_call,
    fill_cache,
    measure,
    probe_weight,
    read_roofline,
    roofline_calls,
)
from fastdeploy.core.plan import NewSequence, ScheduledChunk, StepPlan
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.core.served_weights import ServedWeights
from fastdeploy.model_executor.ops.cpu import CpuOps
from fastdeploy.worker.model_runner import ModelRunner

MODEL = Path.home() / ".cache" / "fastdeploy-peers" / "q05"


class Step(NamedTuple):
    """A step to measure. nbytes: that it reads; 0 for a prefill, whose operations bound it."""

    plan: StepPlan
    nbytes: int = 0
    operations: int = 0

    def least_seconds(self, machine: Machine) -> float | None:
        """Return the least time on ``machine``; None for a prefill without a peak."""
        if not self.nbytes and machine.peak is None:
            return None
        return machine.least_s(self.nbytes, self.operations)

    def repeated(self) -> StepPlan:
        """Return the plan of the same step for a runner that knows its sequences."""
        chunks = [msgspec.structs.replace(c, token_ids=[], blocks=[], new=None) for c in self.plan.chunks]
        return StepPlan(0, chunks, [])


def chunk(number: int, start: int, count: int, blocks: int, sample: bool, adapter: int = 0) -> ScheduledChunk:
    """Return a chunk of ``count`` tokens of sequence ``number`` at positions start, ..., in ``blocks`` of its own."""
    tokens = [(number * 31 + i) % 251 for i in range(start + count)]
    table = list(range(number * blocks, (number + 1) * blocks))
    new = NewSequence((f"r{number}", 0), SamplingParams(max_tokens=1, temperature=0.0), start + count)
    return ScheduledChunk(number, start, count, sample, ServedWeights(adapter=adapter), tokens, table, new)


def make_steps(options: argparse.Namespace, shape: Shape, blocks: int) -> dict[str, Step]:
    """Return a decode step for each of --running and each of --adapters, and a prefill step."""

    def decode(running: int, adapters: int) -> Step:
        """Rows of one adapter are neighbours. Adapters have the numbers from 1 on."""
        numbers = [1 + row * adapters // running if adapters else 0 for row in range(running)]
        chunks = [chunk(row, options.context, 1, blocks, True, number) for row, number in enumerate(numbers)]
        kv = shape.kv_bytes(running * options.context)
        nbytes = shape.step_bytes(running) + kv + adapters * adapter_bytes(shape, options.rank)
        return Step(StepPlan(0, chunks, []), nbytes, shape.step_operations(running))

    most = max(options.running)
    steps = {f"decode {running}": decode(running, 0) for running in options.running}
    steps |= {f"decode {most}, adapters {count}": decode(most, count) for count in options.adapters}
    prefill = StepPlan(0, [chunk(most, 0, options.chunk, blocks, False)], [])
    steps[f"prefill {options.chunk}"] = Step(prefill, operations=shape.prefill_operations(options.chunk))
    return steps


def load_adapters(runner: ModelRunner, shape: Shape, count: int, rank: int) -> None:
    """Give the runner adapters of the numbers 1 to ``count``."""
    for number in range(1, count + 1):
        with tempfile.TemporaryDirectory() as folder:
            write_adapter(Path(folder), shape, rank, number)
            staging = runner.begin_adapter()
            staging.read(folder)
            runner.commit_adapter(number, staging.finish())


def describe(name: str, timing: Timing, least: float | None) -> dict[str, float | None]:
    """Print one line; return its figures."""
    text, share = f"  {name:23} {timing.median * 1e3:8.2f} ms (best {timing.best * 1e3:.2f})", None
    if least is not None:
        share = least / timing.median
        text += f"   least time {least * 1e3:.2f} ms, {share:.0%}"
    print(text)
    return {"ms": timing.median * 1e3, "best_ms": timing.best * 1e3, "of_roofline": share}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, numbers = parser.add_argument, lambda text: [int(n) for n in text.split(",")]
    add("--model", type=Path, default=MODEL)
    add("--running", type=numbers, default=[1, 8, 32])
    add("--adapters", type=numbers, default=[], help="distinct adapters of further decode steps, such as 1,8,32")
    add("--rank", type=int, default=16, help="of the adapters")
    add("--context", type=int, default=64, help="tokens behind each decoding sequence")
    add("--chunk", type=int, default=512, help="tokens of the prefill step")
    add("--repeats", type=int, default=15)
    add("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    options = parse()
    longest = max(options.context + 1, options.chunk)
    blocks = -(-longest // BLOCK)
    runner = ModelRunner(
        str(options.model),
        dtype="bfloat16",
        block_size=BLOCK,
        num_blocks=(max(options.running) + 1) * blocks,
        max_model_len=longest,
        max_lora_rank=options.rank,
    )
    shape, ops = Shape.of(options.model), runner.ops
    assert isinstance(ops, CpuOps), "it measures the C++ ops: build them (python custom_ops/build.py)"
    assert runner.cache is not None
    fill_cache(ops, runner.cache, shape)
    probe = probe_weight(ops)
    load_adapters(runner, shape, max(options.adapters, default=0), options.rank)
    steps = make_steps(options, shape, blocks)
    for step in steps.values():
        runner.execute(step.plan)
    again = {name: step.repeated() for name, step in steps.items()}
    calls = {name: lambda plan=plan: runner.execute(plan) for name, plan in again.items()}
    attention = {
        f"attention {running}": attention_call(ops, shape, [options.context] * running, 1, cache=runner.cache)
        for running in options.running
    }
    timings = measure({**roofline_calls(ops, probe), **calls, **attention}, options.repeats)
    machine = read_roofline(ops, probe, timings)
    print(f"{options.model}, {ops.dtype}, {ops.isa}, {ops.num_threads} threads, load average {os.getloadavg()[0]:.2f}")
    report: dict = {"step_bytes": shape.step_bytes(1), "machine": machine._asdict()}
    rates = f"reader {machine.read / 1e9:.1f} GB/s"
    if machine.peak is not None:
        rates += f", peak {machine.peak / 1e12:.2f} TFLOP/s"
    kv, bytes_each = shape.kv_bytes(options.context), [shape.step_bytes(running) for running in options.running]
    sizes = ", ".join(f"{nbytes / 1e9:.3f}" for nbytes in dict.fromkeys(bytes_each))
    print(f"a decode step reads {sizes} GB, and {kv / 1e9:.3f} GB for each sequence; {rates}")
    least = {name: step.least_seconds(machine) for name, step in steps.items()}
    least |= {
        name: shape.kv_bytes(running * options.context) / machine.read
        for name, running in zip(attention, options.running, strict=True)
    }
    report["steps"] = {name: describe(name, timings[name], least[name]) for name in least}
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
