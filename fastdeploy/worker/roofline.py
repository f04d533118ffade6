"""Measurement of what bounds a decode step on this machine; see core/roofline.py for the formula."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from fastdeploy.core.roofline import ExpertsCost, Machine, StepRoofline
from fastdeploy.model_executor.models.experts import experts_of_config, of_experts
from fastdeploy.model_executor.models.interface import Model
from fastdeploy.model_executor.ops.blocks import PackedLinear
from fastdeploy.model_executor.ops.cpu import CpuOps
from fastdeploy.model_executor.ops.interface import Ops

PASSES = 3  # over the weights; the fastest counts, since other processes only make one slower
PEAK_ROUNDS = 2000  # of multiplications in registers, some 20 ms on two cores
LINE_BYTES = 1 << 16  # the probe reads whole pieces of this size
COLUMNS = 1024  # of the weight that is made for a probe
TYPE_BYTES = {"float32": 4, "bfloat16": 2}


def measure_machine(ops: Ops, weights: Sequence[PackedLinear], quantization: str | None) -> Machine | None:
    """Read ``weights`` with all threads, and multiply in registers. None without the C++ ops. Small weights stay in the
    caches, and are then read faster than memory. The peak is of bfloat16: float32 and int8 have none."""
    nbytes = sum(weight.nbytes // LINE_BYTES * LINE_BYTES for weight in weights)
    if not isinstance(ops, CpuOps) or not nbytes:
        return None

    def read() -> None:
        for weight in weights:
            ops.probe_read(weight)

    peak = None
    if ops.isa in ("avx512_bf16", "amx") and ops.dtype == "bfloat16" and quantization is None:
        operations = ops.probe_peak(PEAK_ROUNDS)
        peak = operations / _fastest_s(lambda: ops.probe_peak(PEAK_ROUNDS))
    return Machine(nbytes / _fastest_s(read), peak)


def probe_machine(ops: Ops, nbytes: int, quantization: str | None) -> Machine | None:
    """As :func:`measure_machine`, with a weight of about ``nbytes`` that is made for it: the weights are not there."""
    if not isinstance(ops, CpuOps):
        return None
    rows = max(nbytes // (COLUMNS * TYPE_BYTES[ops.dtype]), 1)
    values = np.zeros((rows, COLUMNS), np.uint16 if ops.dtype == "bfloat16" else np.float32)
    return measure_machine(ops, [ops.pack_linear([values])], quantization)


def _fastest_s(call: Callable[[], object]) -> float:
    seconds = []
    for _ in range(PASSES):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return max(min(seconds), 1e-9)


def step_roofline(model: Model, machine: Machine, token_bytes: int) -> StepRoofline:
    """Return the roofline of the decode steps of ``model``. token_bytes: KV of one token in all layers."""
    head = model.adaptable[-1]
    linears = [one for one in model.parameters if not one.is_vector and one.key not in ("embedding", head.key)]
    experts = [one for one in linears if of_experts(one)]
    in_experts = sum(sum(one.rows) * one.columns for one in experts)
    parameters = sum(sum(one.rows) * one.columns for one in (*linears, head)) - in_experts
    bytes_each = 1 if model.quantization else TYPE_BYTES[model.ops.dtype]
    cost = None
    if (info := experts_of_config(model.config)) is not None:
        cost = ExpertsCost(info.num_experts, info.top_k, in_experts, in_experts * bytes_each)
    return StepRoofline(machine, parameters, parameters * bytes_each, token_bytes, cost)
