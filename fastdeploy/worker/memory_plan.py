"""The plan of memory for a model and its settings, before a weight is read: dtype, length and KV blocks."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from fastdeploy.core.errors import InvalidField
from fastdeploy.model_executor.model_config import ModelConfig
from fastdeploy.model_executor.models import build_model, load_config
from fastdeploy.model_executor.models.experts import experts_of_config
from fastdeploy.model_executor.models.interface import Model, new_kv_cache
from fastdeploy.model_executor.ops import get_ops
from fastdeploy.model_executor.ops.interface import Ops
from fastdeploy.worker.memory import free_memory, total_memory
from fastdeploy.worker.roofline import TYPE_BYTES

# Without a setting, the KV cache takes at most this much, and at most this share of the memory free at start-up.
DEFAULT_KV_BYTES = 2 << 30
KV_MEMORY_SHARE = 0.25
QUANTIZED = 1.53  # bytes of weights with their 8-bit values, for each byte of the weights
HEADROOM = 1 << 30  # bytes that a share of the memory leaves free, for prompts, replies and the API servers


class MemoryPlan(NamedTuple):
    """max_model_len: tokens of the longest sequence. block_bytes: of one KV block in all layers, with the routing of
    its tokens if that is kept."""

    max_model_len: int
    num_blocks: int
    block_size: int
    block_bytes: int

    @property
    def kv_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV fits."""
        return self.num_blocks * self.block_size

    @property
    def token_bytes(self) -> int:
        """KV of one token in all layers, and its routing."""
        return self.block_bytes // self.block_size


def resolve_dtype(dtype: str, config: ModelConfig) -> str:
    """Return the dtype of weights and KV for the setting ``dtype``. Raises InvalidField."""
    if dtype == "auto":
        return "bfloat16" if config.dtype == "bfloat16" else "float32"
    if dtype not in ("float32", "bfloat16"):
        raise InvalidField("dtype", f"expected auto, float32 or bfloat16, got {dtype!r}")
    return dtype


def plan_memory(
    config: ModelConfig,
    ops: Ops,
    *,
    block_size: int,
    num_blocks: int | None,
    kv_cache_bytes: int | None,
    max_model_len: int | None,
    max_num_seqs: int,
    engines_on_host: int,
    memory_share: float | None = None,
    quantization: str | None = None,
    enable_return_routed_experts: bool = False,
) -> MemoryPlan:
    """Return the plan for these settings of ModelRunner. Raises InvalidField, which names the setting."""
    check_block_size(block_size)
    wanted_len = _wanted_len(max_model_len, config)
    block_bytes = new_kv_cache(ops, config, 1, block_size).nbytes
    if enable_return_routed_experts:
        experts = experts_of_config(config)
        if experts is None:
            raise InvalidField("enable_return_routed_experts", "expected a Mixture of Experts: this model is dense")
        block_bytes += block_size * experts.row_bytes
    if num_blocks is not None:
        _check_fits("num_gpu_blocks_override", num_blocks * block_bytes)
    elif kv_cache_bytes is not None:
        _check_fits("kv_cache_gb", kv_cache_bytes)
        num_blocks = kv_cache_bytes // block_bytes
    else:
        full = max_num_seqs * -(-wanted_len // block_size)
        most = _default_kv_bytes(engines_on_host)
        if memory_share is not None:
            most = _shared_kv_bytes(
                memory_share, weight_bytes(build_model(config, ops, 1, quantization)), engines_on_host
            )
        num_blocks = min(full, most // block_bytes)
    if max_model_len is None:
        wanted_len = min(wanted_len, num_blocks * block_size)
    if num_blocks < 1 or wanted_len > num_blocks * block_size:
        text = f"{wanted_len} tokens do not fit a KV cache of {num_blocks} blocks of {block_size}"
        raise InvalidField("max_model_len", text)
    return MemoryPlan(wanted_len, num_blocks, block_size, block_bytes)


def num_parameters(model: Model) -> int:
    """Return how many numbers the tensors of the model have. A tied output layer counts once."""
    return sum(math.prod(shape) for parameter in model.parameters for shape in parameter.shapes.values())


def weight_bytes(model: Model) -> int:
    """Return about how many bytes the weights take in memory, without the padding of each."""
    factor = 1.0 if model.quantization is None else QUANTIZED
    return int(num_parameters(model) * TYPE_BYTES[model.ops.dtype] * factor)


def check_block_size(block_size: int) -> None:
    """Raise InvalidField unless the ops can use KV blocks of this many tokens."""
    if block_size < 1 or block_size % 16:
        raise InvalidField("block_size", f"expected a multiple of 16, got {block_size}")


def _wanted_len(max_model_len: int | None, config: ModelConfig) -> int:
    if max_model_len is None:
        return config.max_position_embeddings
    if not 1 <= max_model_len <= config.max_position_embeddings:
        raise InvalidField(
            "max_model_len", f"expected 1 to {config.max_position_embeddings} (the model's own), got {max_model_len}"
        )
    return max_model_len


def _check_fits(setting: str, kv_cache_bytes: int) -> None:
    free = free_memory()
    if kv_cache_bytes > free:
        asked = f"a KV cache of {kv_cache_bytes / 2**30:.1f} GiB"
        raise InvalidField(setting, f"{asked} is more than the memory that is free, {free / 2**30:.1f} GiB")


def _default_kv_bytes(engines_on_host: int) -> int:
    return min(DEFAULT_KV_BYTES, int(KV_MEMORY_SHARE * free_memory() / engines_on_host))


def _shared_kv_bytes(share: float, weights: int, engines_on_host: int) -> int:
    """Return the bytes of a KV cache that, with ``weights`` bytes beside it, has ``share`` of the machine's memory, or
    of what is free if that is less. Each engine of the host has an equal part."""
    most = min(share * total_memory(), free_memory() - HEADROOM) / engines_on_host - weights
    if most <= 0:
        have, need = total_memory() / 2**30, weights / 2**30
        text = f"the weights, {need:.1f} GiB, leave no memory for a KV cache in {share:g} of {have:.1f} GiB"
        raise InvalidField("gpu_memory_utilization", text)
    return int(most)


class ModelPlan(NamedTuple):
    """The model of a folder with its settings, before a weight is read."""

    config: ModelConfig
    ops: Ops
    model: Model
    memory: MemoryPlan


def plan_model(
    model_path: str, *, dtype: str, quantization: str | None, block_size: int, ops: Ops | None = None, **limits: Any
) -> ModelPlan:
    """Read the config of the folder ``model_path``, and plan the model for these settings of ModelRunner. limits: see
    ``plan_memory``. ops: None = the best ones for this machine. Raises InvalidField, which names a setting or a key of
    the config."""
    check_block_size(block_size)
    config = load_config(model_path)
    dtype = resolve_dtype(dtype, config)
    ops = ops or get_ops(dtype)
    memory = plan_memory(config, ops, block_size=block_size, quantization=quantization, **limits)
    return ModelPlan(config, ops, build_model(config, ops, memory.max_model_len, quantization), memory)
