"""Declarations of the C interface of the C++ ops (custom_ops/cpu_ops/api.cc, kernels.h, staging.h) for ctypes.

Environment: FASTDEPLOY_CPU_THREADS is the number of threads (default: the cores that the process may use).
FASTDEPLOY_CPU_ISA is the highest instruction set to use: avx2, avx512 or amx (default: the best of the machine).
"""

from __future__ import annotations

import ctypes
import os
from ctypes import c_char_p, c_double, c_float, c_int, c_int64, c_uint64, c_void_p
from pathlib import Path

from fastdeploy.core.errors import InvalidField

LIBRARY = Path(__file__).with_name("libfastdeploy_cpu_ops.so")
ISA_NAMES = ("none", "avx2", "avx512", "amx")

SIGNATURES = {
    "fd_sizeof_attention_args": (c_int64, []),
    "fd_sizeof_block": (c_int64, []),
    "fd_sizeof_step_args": (c_int64, []),
    "fd_sizeof_stage_item": (c_int64, []),
    "fd_sizeof_delta_item": (c_int64, []),
    "fd_sizeof_stage_result": (c_int64, []),
    "fd_last_error": (c_char_p, []),
    "fd_isa": (c_int, []),
    "fd_set_isa": (c_int, [c_int]),
    "fd_num_threads": (c_int, []),
    "fd_set_num_threads": (None, [c_int]),
    "fd_free_scratch": (None, []),
    "fd_new_weight": (c_void_p, [c_int, c_int64, c_int64, c_int]),
    "fd_free_weight": (None, [c_void_p]),
    "fd_weight_bytes": (c_int64, [c_void_p]),
    "fd_pack_rows": (c_int, [c_void_p, c_void_p, c_int, c_int64, c_int64]),
    "fd_stage": (c_int, [c_int, c_void_p, c_int64, c_void_p, c_void_p]),
    "fd_apply_deltas": (c_int, [c_int, c_void_p, c_int64, c_void_p, c_void_p]),
    "fd_copy_rows": (c_int, [c_void_p, c_void_p, c_int64, c_int64]),
    "fd_set_bias": (None, [c_void_p, c_void_p, c_int64, c_int64]),
    "fd_unpack_rows": (None, [c_void_p, c_void_p, c_int64, c_int64]),
    "fd_get_bias": (None, [c_void_p, c_void_p]),
    "fd_new_lora": (c_void_p, [c_int, c_int64, c_int64, c_void_p, c_void_p, c_void_p]),
    "fd_free_lora": (None, [c_void_p]),
    "fd_lora_bytes": (c_int64, [c_void_p]),
    "fd_pack_lora": (c_int, [c_void_p, c_void_p, c_void_p, c_int, c_int64, c_int64, c_int64, c_int64]),
    "fd_gather_loras": (c_int, [c_void_p, c_int64]),
    "fd_run_layers": (c_int, [c_void_p]),
    "fd_linear": (c_int, [c_void_p, c_void_p, c_float, c_int64, c_void_p, c_void_p, c_void_p, c_void_p]),
    "fd_mlp": (c_int, [c_void_p, c_int64, c_void_p, c_void_p, c_void_p]),
    "fd_embedding": (c_int, [c_void_p, c_int64, c_void_p, c_void_p]),
    "fd_new_cache": (c_void_p, [c_int, c_int64, c_int64, c_int64, c_int64, c_int64]),
    "fd_free_cache": (None, [c_void_p]),
    "fd_cache_bytes": (c_int64, [c_void_p]),
    "fd_copy_blocks": (None, [c_void_p, c_void_p, c_void_p, c_int64]),
    "fd_attention": (c_int, [c_void_p]),
    "fd_attention_tasks": (c_int, [c_void_p, c_void_p]),
    "fd_sample": (c_int, [c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p]),
    "fd_logprobs": (c_int, [c_void_p, c_int64, c_int64, c_void_p, c_int64, c_void_p, c_void_p, c_void_p]),
    "fd_probe_read": (c_double, [c_void_p]),
    "fd_probe_peak": (c_int64, [c_int64]),
    "fd_probe_exp2": (None, [c_void_p, c_int64, c_void_p]),
    "fd_probe_silu": (None, [c_void_p, c_int64, c_void_p]),
}


def _integers(names: str) -> list[tuple[str, type[c_int64]]]:
    return [(name, c_int64) for name in names.split()]


def _pointers(names: str) -> list[tuple[str, type[c_void_p]]]:
    return [(name, c_void_p) for name in names.split()]


class Batch(ctypes.Structure):
    """Batch of kernels.h."""

    _fields_ = [*_integers("tokens sequences table_width"), *_pointers("cu_tokens starts tables positions")]


class AttentionArgs(Batch):
    """AttentionArgs of kernels.h."""

    _fields_ = [*_pointers("qkv out cache"), *_integers("layer heads"), ("scale", c_float)]
    _fields_ += [*_pointers("rope_cos rope_sin q_norm k_norm"), ("eps", c_float)]


class AttentionBlockArgs(ctypes.Structure):
    """AttentionBlock of kernels.h."""

    _fields_ = [*_pointers("norm qkv o"), ("norm_eps", c_float), ("attention", AttentionArgs)]


class MlpBlockArgs(ctypes.Structure):
    """MlpBlock of kernels.h."""

    _fields_ = [*_pointers("norm gate_up down"), ("norm_eps", c_float)]


class _AnyBlockArgs(ctypes.Union):
    _fields_ = [("attention", AttentionBlockArgs), ("mlp", MlpBlockArgs)]


class BlockArgs(ctypes.Structure):
    """Block of kernels.h. The kind says which of the members counts."""

    ATTENTION, MLP = range(2)
    _anonymous_ = ("args",)
    _fields_ = [("kind", c_int64), ("ends_layer", c_int64), ("args", _AnyBlockArgs)]


BetweenLayers = ctypes.CFUNCTYPE(c_int)


class StepArgs(ctypes.Structure):
    """StepArgs of kernels.h."""

    _fields_ = [("batch", Batch), ("bf16", c_int64), *_pointers("residual rows"), ("num_rows", c_int64)]
    _fields_ += [("blocks", c_void_p), ("count", c_int64), *_pointers("adapters adapter_rows")]
    _fields_ += [("between_layers", BetweenLayers)]


class RegionArgs(ctypes.Structure):
    """Region of staging.h."""

    _fields_ = [*_integers("rows columns"), ("linear", c_void_p), ("first_row", c_int64), ("vector", c_void_p)]


class StageItemArgs(ctypes.Structure):
    """StageItem of staging.h."""

    _fields_ = [("region", RegionArgs), *_integers("kind offset fd"), ("memory", c_void_p), *_integers("memory_bytes")]


class DeltaItemArgs(ctypes.Structure):
    """DeltaItem of staging.h."""

    _fields_ = [("region", RegionArgs), ("payload", c_void_p), ("payload_bytes", c_int64)]


class StageResultArgs(ctypes.Structure):
    """StageResult of staging.h."""

    _fields_ = [("first", c_uint64), ("second", c_uint64), *_integers("problem error")]


STRUCTS: dict[str, type[ctypes.Structure]] = {
    "fd_sizeof_attention_args": AttentionArgs,
    "fd_sizeof_block": BlockArgs,
    "fd_sizeof_step_args": StepArgs,
    "fd_sizeof_stage_item": StageItemArgs,
    "fd_sizeof_delta_item": DeltaItemArgs,
    "fd_sizeof_stage_result": StageResultArgs,
}


def load_library(path: Path = LIBRARY) -> ctypes.CDLL:
    """Load the shared library and declare its functions.

    Raises OSError if the library is missing, does not load, was built from other sources, or needs an instruction set
    that this CPU does not have; InvalidField if FASTDEPLOY_CPU_ISA names no instruction set.
    """
    wanted = os.environ.get("FASTDEPLOY_CPU_ISA")
    if wanted is not None and wanted not in ISA_NAMES[1:]:
        raise InvalidField("FASTDEPLOY_CPU_ISA", f"expected one of {', '.join(ISA_NAMES[1:])}, got {wanted!r}")
    library = ctypes.CDLL(str(path))
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(library, name, None)
        if function is None:
            raise OSError(f"{path.name} is of another version: it has no {name}")
        function.restype, function.argtypes = result, arguments
    for name, struct in STRUCTS.items():
        theirs, ours = getattr(library, name)(), ctypes.sizeof(struct)
        if theirs != ours:
            what = f"{struct.__name__} has {theirs} bytes there and {ours} here"
            raise OSError(f"{path.name} is of another version: {what}")
    if library.fd_isa() == 0:
        raise OSError(f"{path.name} needs a CPU with AVX2 and FMA")
    return library
