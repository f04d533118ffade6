#!/usr/bin/env python
"""Measure the C++ CPU ops on the shapes of q05 (Qwen2.5-0.5B), and their share of the machine's roofline.

    python -m benchmarks.ops [--rows 1,8,32,256] [--repeats 7]

Roofline: the read bandwidth of all threads, by a plain vector reader, and the peak of the multiplication
of bfloat16, in registers: AMX tiles, else VDPBF16PS (with AMX or AVX512_BF16).
Ops: every linear of a step for several numbers of rows, on the weights of all layers, so that no weight stays in a
cache; attention and sampling. Repeats of ops and roofline alternate. Medians, with the best time in brackets: a large
difference between the two shows that other processes disturbed the measurement.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import paddle

from benchmarks.lib.roofline import Machine, Shape
from fastdeploy.model_executor.ops.blocks import AttentionSpec
from fastdeploy.model_executor.ops.cpu import CpuLinear, CpuOps
from fastdeploy.model_executor.ops.interface import AttentionBatch, KVCache
from fastdeploy.model_executor.ops.vocabulary import LogprobBatch, SampleBatch

Q05 = Shape(hidden=896, inner=4864, layers=24, heads=14, kv_heads=2, head_dim=64, vocab=151936)
BLOCK = 16
PEAK_ROUNDS = 2000
PROBE_ROWS = 1 << 20  # x 1024 bfloat16 = 2 GiB: several times any last-level cache


class Timing(NamedTuple):
    """Seconds of one call over all layers: median and best of the repeats."""

    median: float
    best: float


def time_once(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, Timing]:
    """Time all calls once per repeat, so that a slow minute of the machine affects all. The first round is warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + 1):
        for name, call in calls.items():
            elapsed = time_once(call)
            if repeat > 0:
                seconds[name].append(elapsed)
    return {name: Timing(statistics.median(s), min(s)) for name, s in seconds.items()}


class Model:
    """The linears of a model with random weights."""

    def __init__(self, ops: CpuOps, shape: Shape):
        self.ops = ops
        self.shape, layers = shape, range(shape.layers)
        rng, hidden, inner = np.random.default_rng(1), shape.hidden, shape.inner
        q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.qkv = [self._pack(rng, [q, kv, kv], hidden) for _ in layers]
        self.o = [self._pack(rng, [hidden], q) for _ in layers]
        self.mlp = [(self._pack(rng, [inner, inner], hidden), self._pack(rng, [hidden], inner)) for _ in layers]
        self.head = [self._pack(rng, [shape.vocab], hidden)]
        self.probe = probe_weight(ops)

    def _pack(self, rng: np.random.Generator, sizes: list[int], k: int) -> CpuLinear:
        """Pack random bfloat16 weights of about 2^-6, so that none is zero, denormal or large."""
        return self.ops.pack_linear([rng.integers(0x3C00, 0x3D00, (n, k), dtype=np.uint16) for n in sizes])

    def calls(self, rows: int) -> dict[str, tuple[Callable[[], object], list[CpuLinear]]]:
        """Return (one pass over all layers, the weights that it reads) by name."""
        ops, x = self.ops, paddle.rand([rows, self.shape.hidden])

        def each(weights: list[CpuLinear]) -> tuple[Callable[[], object], list[CpuLinear]]:
            return (lambda: [ops.linear(x, w).shape for w in weights]), weights

        mlp = (
            (lambda: [ops.mlp(x, gate_up, down).shape for gate_up, down in self.mlp]),
            [w for pair in self.mlp for w in pair],
        )
        calls = {"qkv": each(self.qkv), "o": each(self.o), "mlp": mlp}
        if rows <= 64:  # the head computes only the last row of a prefill chunk
            norm = paddle.ones([self.shape.hidden])
            calls["head"] = (lambda: ops.logits(x, norm, 1e-6, self.head[0])), self.head
        return calls


def probe_weight(ops: CpuOps) -> CpuLinear:
    """Make the buffer of 2 GiB that the probe of the read bandwidth reads."""
    return ops.pack_linear([np.zeros((PROBE_ROWS, 1024), np.uint16)])


def roofline_calls(ops: CpuOps, weight: CpuLinear) -> dict[str, Callable[[], object]]:
    """Return the probes of the roofline that run on this machine, for ``measure``."""
    calls: dict[str, Callable[[], object]] = {"read": lambda: ops.probe_read(weight)}
    if ops.isa in ("avx512_bf16", "amx"):
        calls["peak"] = lambda: ops.probe_peak(PEAK_ROUNDS)
    return calls


def read_roofline(ops: CpuOps, weight: CpuLinear, timings: dict[str, Timing]) -> Machine:
    peak = ops.probe_peak(PEAK_ROUNDS) / timings["peak"].median if "peak" in timings else None
    return Machine(weight.nbytes / timings["read"].median, peak)


def report_linears(model: Model, rows: int, repeats: int) -> None:
    calls = model.calls(rows)
    probes = roofline_calls(model.ops, model.probe)
    timings = measure({**probes, **{name: call for name, (call, _) in calls.items()}}, repeats)
    roofline = read_roofline(model.ops, model.probe, timings)
    total, total_bytes, operations = 0.0, 0, 0
    for name, (_, weights) in calls.items():
        size = sum(w.nbytes for w in weights)
        work = sum(2 * rows * w.out_features * w.in_features for w in weights)
        print(line(f"  {name:8}", timings[name], size, work, roofline))
        total, total_bytes, operations = total + timings[name].median, total_bytes + size, operations + work
    best = sum(timings[name].best for name in calls)
    print(line(f"M={rows:<5} step", Timing(total, best), total_bytes, operations, roofline), flush=True)


def line(label: str, timing: Timing, size: int, work: int, roofline: Machine) -> str:
    """Return one line about reading ``size`` bytes and doing ``work`` operations."""
    rate, speed = size / timing.median, work / timing.median
    text = f"{label} {timing.median * 1e3:8.2f} ms (best {timing.best * 1e3:.2f})"
    text += f"  {rate / 1e9:6.1f} GB/s  {speed / 1e12:5.2f} TFLOP/s"
    text += f"   {rate / roofline.read:4.0%} of {roofline.read / 1e9:.1f} GB/s"
    if roofline.peak is not None:
        text += f", {speed / roofline.peak:4.0%} of {roofline.peak / 1e12:.1f} TFLOP/s"
    return text


def attention_call(
    ops: CpuOps,
    shape: Shape,
    contexts: list[int],
    tokens: int,
    shared: int = 0,
    cache: KVCache | None = None,
    window: int = 0,
) -> Callable[[], object]:
    """Make a call of attention over all layers: ``tokens`` new tokens per sequence, after ``contexts`` cached ones.
    Each group of 8 sequences shares the blocks of its first ``shared`` tokens. cache: blocks of BLOCK tokens, enough
    for all sequences; None: a new one. window: see ``AttentionSpec``. Results are not kept: new pages for those of all
    layers take longer than some of the calls."""
    sequences, blocks = len(contexts), [-(-(context + tokens) // BLOCK) for context in contexts]
    if cache is None:
        cache = ops.new_kv_cache(shape.layers, sum(blocks), BLOCK, shape.kv_heads, shape.head_dim)
        fill_cache(ops, cache, shape)
    specs = [spec._replace(window=window) for spec in attention_specs(shape, max(contexts) + tokens)]
    firsts = np.cumsum([0, *blocks[:-1]], dtype=np.int32)
    tables = np.minimum(firsts[:, None] + np.arange(max(blocks), dtype=np.int32), sum(blocks) - 1)
    leaders = np.arange(sequences) // 8 * 8
    tables[:, : shared // BLOCK] = tables[leaders, : shared // BLOCK]
    starts = np.array(contexts, np.int32)
    batch = AttentionBatch(
        np.arange(0, (sequences + 1) * tokens, tokens, dtype=np.int32),
        starts,
        tables,
        (starts[:, None] + np.arange(tokens, dtype=np.int32)).reshape(-1),
    )
    qkv = paddle.rand([sequences * tokens, (shape.heads + 2 * shape.kv_heads) * shape.head_dim])

    def attend_all_layers() -> None:
        for spec in specs:
            ops.attention(qkv, cache, batch, spec)

    return attend_all_layers


def attention_specs(shape: Shape, positions: int) -> list[AttentionSpec]:
    """Return the attention of each layer, with random tables of rotary embedding for ``positions``."""
    dim = shape.head_dim
    cos, sin = paddle.rand([positions, dim // 2]), paddle.rand([positions, dim // 2])
    return [
        AttentionSpec(layer, shape.heads, shape.kv_heads, dim, dim**-0.5, cos, sin, None, None, 1e-6)
        for layer in range(shape.layers)
    ]


def fill_cache(ops: CpuOps, cache: KVCache, shape: Shape) -> None:
    """Write every block: all blocks that were never written are one page of zeros, which stays in the CPU's cache."""
    tokens = np.arange(BLOCK, dtype=np.int32)
    batch = AttentionBatch(np.array([0, BLOCK], np.int32), np.zeros(1, np.int32), np.zeros((1, 1), np.int32), tokens)
    qkv = paddle.rand([BLOCK, (shape.heads + 2 * shape.kv_heads) * shape.head_dim])
    for spec in attention_specs(shape, BLOCK):
        ops.attention(qkv, cache, batch, spec)
    ops.copy_blocks(cache, [0] * (cache.num_blocks - 1), list(range(1, cache.num_blocks)))


def sample_call(ops: CpuOps, rows: int, temperature: float, top_k: int, top_p: float) -> Callable[[], object]:
    logits = paddle.randn([rows, Q05.vocab]) * 3
    batch = SampleBatch(
        np.full(rows, temperature, np.float32),
        np.full(rows, top_k, np.int32),
        np.full(rows, top_p, np.float32),
        np.zeros(rows, np.float32),
        np.linspace(0, 0.999, rows),
    )
    return lambda: ops.sample(logits, batch)


def report_others(ops: CpuOps, repeats: int) -> None:
    tiny = ops.pack_linear([np.ones((32, 32), np.float32)])
    small = paddle.rand([1, 32])
    logits = paddle.randn([8, Q05.vocab])
    calls = {
        "attention, 1 stream at 512, all layers": attention_call(ops, Q05, [512], 1),
        "attention, 8 streams at 512, all layers": attention_call(ops, Q05, [512] * 8, 1),
        "attention, 32 streams at 1024, all layers": attention_call(ops, Q05, [1024] * 32, 1),
        "attention, 32 streams at 544, all layers": attention_call(ops, Q05, [544] * 32, 1),
        "attention, 32 streams at 544, 8 share 512, all layers": attention_call(ops, Q05, [544] * 32, 1, shared=512),
        "attention, 1 stream at 8192 beside 7 at 64, all layers": attention_call(ops, Q05, [8192, *[64] * 7], 1),
        "attention, 8 streams at 8192, all layers": attention_call(ops, Q05, [8192] * 8, 1),
        "attention, 8 streams at 8192, window of 512, all layers": attention_call(ops, Q05, [8192] * 8, 1, window=512),
        "attention, 512 tokens of prefill, all layers": attention_call(ops, Q05, [0], 512),
        "attention, 4096 tokens of prefill, all layers": attention_call(ops, Q05, [0], 4096),
        "attention, 256 tokens behind 768, all layers": attention_call(ops, Q05, [768], 256),
        "linear of 1 row, 32 x 32: cost of a call, x 100": lambda: [ops.linear(small, tiny) for _ in range(100)],
        "sample 8 rows, greedy": sample_call(ops, 8, 0.0, 0, 1.0),
        "sample 8 rows, temperature 1": sample_call(ops, 8, 1.0, 0, 1.0),
        "sample 8 rows, top_k 50, top_p 0.9": sample_call(ops, 8, 1.0, 50, 0.9),
        "sample 8 rows, top_p 0.95": sample_call(ops, 8, 1.0, 0, 0.95),
        "logprobs of 8 rows, top 5": lambda: ops.logprobs(logits, LogprobBatch(np.zeros(8, np.int32), 5)),
        "logprobs of 8 rows, top 256": lambda: ops.logprobs(logits, LogprobBatch(np.zeros(8, np.int32), 256)),
    }
    timings = measure(calls, repeats)
    for name, timing in timings.items():
        print(f"  {name:55} {timing.median * 1e3:8.3f} ms (best {timing.best * 1e3:.3f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,8,16,32,64,128,256,512,1024")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--probe", action="store_true", help="print only the roofline, as JSON")
    options = parser.parse_args()
    ops = CpuOps("bfloat16")
    if options.probe:
        weight = probe_weight(ops)
        found = read_roofline(ops, weight, measure(roofline_calls(ops, weight), options.repeats))
        print(json.dumps(found._asdict()))
        return
    print(f"{ops.dtype}, {ops.isa}, {ops.num_threads} threads, load average {os.getloadavg()[0]:.2f}")
    model = Model(ops, Q05)
    for rows in options.rows.split(","):
        report_linears(model, int(rows), options.repeats)
    report_others(ops, options.repeats)


if __name__ == "__main__":
    main()
