"""The engines that ``compare.py`` runs, each with the settings that are best for it on this machine.

Same for all: bfloat16 weights, KV in 16 bits, prefix caching, the same ``Limits``, and the cores that this process may
use. Exceptions: on a CPU without bfloat16 instructions, OpenVINO runs in float32; llama.cpp has room for the longest
KV of every sequence.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

# Instruction sets that multiply bfloat16.
BF16_FLAGS = {"avx512_bf16", "amx_bf16", "avx_ne_convert"}
PEERS = Path(__file__).resolve().parents[1] / "peers"
REPOSITORY = PEERS.parents[1]


@dataclass(frozen=True)
class Limits:
    """What an engine gets. sequences: at once. context: most tokens of a sequence. kv_gb: size of the KV cache."""

    sequences: int = 32
    context: int = 4096
    kv_gb: int = 2


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True)
class Engine:
    """An engine and the way to start it.

    command: starts the server; ``--port N`` is appended. ready: the path that answers 200 when the server is ready.
    token_metric: histogram of the time between tokens, in seconds, in the engine's /metrics, or None.
    missing: why the engine cannot be started here, or None. dialect: of its pause and its update of weights (a key of
    ``dialect.DIALECTS``); None if it cannot update them.
    """

    name: str
    version: str
    command: tuple[str, ...]
    ready: str
    token_metric: str | None = None
    missing: str | None = None
    dialect: str | None = None


def peers_dir() -> Path:
    return Path(os.environ.get("PEERS_DIR") or Path.home() / ".cache" / "fastdeploy-peers")


def ours(model: Path, served: str, limits: Limits = DEFAULT_LIMITS) -> Engine:
    names = ("--model", str(model), "--served-model-name", served, "--dtype", "bfloat16")
    sizes = ("--max-num-seqs", limits.sequences, "--max-model-len", limits.context, "--kv-cache-gb", limits.kv_gb)
    command = (sys.executable, "-m", "fastdeploy.entrypoints.cli", "serve", *names, *map(str, sizes))
    metric = "fastdeploy:time_per_output_token_seconds"
    return Engine("ours", _revision(), command, "/ready", metric, dialect="native")


def vllm(model: Path, served: str, limits: Limits = DEFAULT_LIMITS) -> Engine:
    # vLLM v1 caches prefixes by default.
    sizes = ("--max-num-seqs", str(limits.sequences), "--max-model-len", str(limits.context))
    options = ("--served-model-name", served, *sizes)
    command = _script("vllm", model, options, KV_GB=limits.kv_gb)
    return replace(_peer("vllm", command, "vllm:inter_token_latency_seconds"), dialect="vllm")


def openvino(model: Path, served: str, limits: Limits = DEFAULT_LIMITS) -> Engine:
    precision = "bf16" if cpu_flags() & BF16_FLAGS else "f32"
    kv_gb = limits.kv_gb if precision == "bf16" else 2 * limits.kv_gb  # room for as many tokens as in the others
    sizes = ("--max-num-seqs", str(limits.sequences), "--precision", precision, "--kv-gb", str(kv_gb))
    engine = _peer("openvino", _script("openvino", model, ("--served-model-name", served, *sizes)))
    return engine if precision == "bf16" else replace(engine, version=f"{engine.version} (float32)")


def llamacpp(model: Path, served: str, limits: Limits = DEFAULT_LIMITS) -> Engine:
    command = _script("llamacpp", model, ("--alias", served), SEQUENCES=limits.sequences, CONTEXT=limits.context)
    return _peer("llamacpp", command)


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> set[str]:
    """Return the instruction sets of the CPU, by Linux's names; empty if ``cpuinfo`` does not exist. With
    ``FASTDEPLOY_CPU_ISA=avx512``, which limits this engine and vLLM, those for bfloat16 are left out."""
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    flags = {flag for line in lines if line.startswith("flags") for flag in line.partition(":")[2].split()}
    return flags - BF16_FLAGS if os.environ.get("FASTDEPLOY_CPU_ISA") == "avx512" else flags


ENGINES = {"ours": ours, "vllm": vllm, "openvino": openvino, "llamacpp": llamacpp}


def installed(
    names: Iterable[str], model: Path, served: str, say: Callable[[str], None], limits: Limits = DEFAULT_LIMITS
) -> list[Engine]:
    """Return the engines of these names that can be started here. ``say`` gets how to install each of the others."""
    engines = [ENGINES[name](model, served, limits) for name in names]
    for engine in engines:
        if engine.missing:
            say(f"without {engine.name}: {engine.missing}")
    return [engine for engine in engines if not engine.missing]


def _script(name: str, model: Path, options: tuple[str, ...], **environment: int) -> tuple[str, ...]:
    """Return the command that serves ``model`` by the script of a peer, with variables for the script."""
    variables = [f"{key}={value}" for key, value in environment.items()]
    return ("env", *variables, str(PEERS / f"{name}.sh"), "serve", str(model), "0", *options)


def _peer(name: str, command: tuple[str, ...], token_metric: str | None = None) -> Engine:
    complete = peers_dir() / name / ".complete"  # the script writes the version into it when all is installed
    if not complete.exists():
        missing = f"not installed: benchmarks/peers/{name}.sh install"
        return Engine(name, "", command, "/health", token_metric, missing)
    return Engine(name, complete.read_text().strip(), command, "/health", token_metric)


def _revision() -> str:
    """Return the commit of this tree, with a + if files have changed since."""
    run = subprocess.run(
        ["git", "describe", "--always", "--dirty=+"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    return run.stdout.strip() or "unknown"
