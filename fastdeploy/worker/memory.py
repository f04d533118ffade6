"""Memory of this process and of the machine, as Linux reports it."""

from __future__ import annotations

import ctypes
from pathlib import Path

from fastdeploy.model_executor.model_config import ModelConfig

CGROUP = Path("/sys/fs/cgroup")
QUANTIZED = 1.53  # bytes of weights with their 8-bit values, for each byte of the weights


def free_memory() -> int:
    """Return the bytes that this process may still allocate: those free on the machine, or in its cgroup if fewer."""
    free = _of_machine("MemAvailable")
    in_cgroup = _free_in_cgroup(CGROUP)
    return free if in_cgroup is None else min(free, in_cgroup)


def total_memory() -> int:
    """Return the bytes of the machine's memory, or the limit of this cgroup if that is less."""
    limit = CGROUP / "memory.max"
    text = limit.read_text().strip() if limit.exists() else "max"
    total = _of_machine("MemTotal")
    return total if text == "max" else min(total, int(text))


def _of_machine(name: str) -> int:
    meminfo = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(meminfo[name].split()[0]) * 1024


def _free_in_cgroup(folder: Path) -> int | None:
    """Return the bytes that a cgroup (version 2) may still allocate; None without a limit. Files that were read count
    as used memory, but those that are not in use (inactive_file) give way."""
    limit = folder / "memory.max"
    text = limit.read_text().strip() if limit.exists() else "max"
    if text == "max":
        return None
    stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    used = int((folder / "memory.current").read_text()) - int(stat["inactive_file"])
    return max(int(text) - max(used, 0), 0)


def weight_bytes(config: ModelConfig, dtype: str, quantization: str | None = None) -> int:
    """Return the bytes of the weights of a dense model, without norms and biases. dtype: "float32" or "bfloat16"."""
    hidden = config.hidden_size
    heads = (config.num_attention_heads + config.num_key_value_heads) * config.head_dim
    layer = 2 * hidden * heads + 3 * hidden * config.intermediate_size
    tables = 1 if config.tie_word_embeddings else 2
    count = config.num_hidden_layers * layer + tables * config.vocab_size * hidden
    return int(count * (4 if dtype == "float32" else 2) * (1 if quantization is None else QUANTIZED))


def resident_memory() -> int:
    """Return the bytes of this process that are in memory."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Rss:"))


def give_back_freed_memory() -> None:
    """Return freed memory that the C allocator kept, mostly of small tensors, to the system. Needs glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
