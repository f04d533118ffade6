#!/usr/bin/env python
"""Measure oneDNN on the linears of q05 that `benchmarks/ops.py` measures, with the torch of vLLM's environment.

    ~/.cache/fastdeploy-peers/vllm/bin/python benchmarks/peers/onednn_linears.py [--rows 512,4096] [--repeats 7]

bfloat16 inputs and results, weights in oneDNN's own order, all layers, so that no weight stays in a cache. "mlp" is
gate and up in one product, SiLU and the multiplication as two operations of torch, and down. Medians, with the best
time in brackets.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import torch

HIDDEN, INNER, QKV, LAYERS = 896, 4864, 1152, 24


def pack(out_features: int, in_features: int, rows: int) -> torch.Tensor:
    weight = torch.randn(out_features, in_features).bfloat16()
    return torch.ops.mkldnn._reorder_linear_weight(weight, rows)


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


def mlp(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    gate, up = linear(x, gate_up).chunk(2, dim=-1)
    return linear(torch.nn.functional.silu(gate) * up, down)


def report(rows: int, repeats: int) -> None:
    x = torch.randn(rows, HIDDEN).bfloat16()
    qkv = [pack(QKV, HIDDEN, rows) for _ in range(LAYERS)]
    o = [pack(HIDDEN, HIDDEN, rows) for _ in range(LAYERS)]
    layers = [(pack(2 * INNER, HIDDEN, rows), pack(HIDDEN, INNER, rows)) for _ in range(LAYERS)]
    calls = {
        "qkv": (lambda: [linear(x, w).shape for w in qkv], QKV * HIDDEN),
        "o": (lambda: [linear(x, w).shape for w in o], HIDDEN * HIDDEN),
        "mlp": (lambda: [mlp(x, *weights).shape for weights in layers], 3 * INNER * HIDDEN),
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + 1):  # the first one is warm-up
        for name, (call, _) in calls.items():
            began = time.perf_counter()
            call()
            if repeat > 0:
                seconds[name].append(time.perf_counter() - began)
    for name, (_, products) in calls.items():
        median, best, work = statistics.median(seconds[name]), min(seconds[name]), 2 * rows * products * LAYERS
        rate = work / median / 1e12
        print(f"M={rows:<5} {name:4} {median * 1e3:8.2f} ms (best {best * 1e3:.2f})  {rate:5.2f} TFLOP/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="512,4096")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, load average {os.getloadavg()[0]:.2f}")
    with torch.no_grad():
        for rows in options.rows.split(","):
            report(int(rows), options.repeats)


if __name__ == "__main__":
    main()
