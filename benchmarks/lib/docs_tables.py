"""The results of ``compare.py`` as the tables of docs/benchmarks.md, ready to be copied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from benchmarks.lib.comparison import EngineRuns, LoadComparison, machine_line
from benchmarks.lib.costs import Costs
from benchmarks.lib.engines import cpu_flags
from benchmarks.lib.loads import Prefill
from benchmarks.lib.report import machine, markdown, optional
from benchmarks.lib.roofline import Shape

NAMES = {"ours": "FastDeploy", "vllm": "vLLM", "openvino": "OpenVINO", "llamacpp": "llama.cpp"}
# The kinds of machines that have tables of their own, by a flag in /proc/cpuinfo; the first that fits.
KINDS = {"amx_bf16": "AMX", "avx512_bf16": "AVX512-BF16", "avx512f": "AVX-512", "avx2": "AVX2"}


def machine_kind(flags: set[str]) -> str:
    return next((kind for flag, kind in KINDS.items() if flag in flags), "no vectors")


def document(done: Sequence[LoadComparison], costs: Sequence[Costs], shape: Shape, model: Path, command: str) -> str:
    """Return the Markdown of a whole run: machine, versions, command, and both tables."""
    found = machine()
    versions = ", ".join(f"{NAMES.get(c.engine, c.engine)} {c.version}" for c in costs)
    weights = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    lines = [
        f"### {machine_kind(cpu_flags())}",
        f"{found['cpu']}, {found['cores']} cores; {model.name}, {weights / 1e9:.2f} GB of weights. {versions}.",
        f"In this run {machine_line([probe for compared in done for probe in compared.probes])}.",
        f"```bash\n{command}\n```",
        speed_table(done, shape),
        cost_table(costs),
    ]
    return "\n\n".join(line.rstrip("\n") for line in lines) + "\n"


def speed_table(done: Sequence[LoadComparison], shape: Shape) -> str:
    """Return a row for each load. over the best peer: the first engine's tokens per second over those of the peer that
    is fastest in this load, median (least to greatest) of the rounds."""
    names = [runs.engine for runs in done[0].engines]
    header = ["load", *(NAMES.get(name, name) for name in names), "over the best peer", "of the roofline"]
    return markdown(header, [_speed_row(compared, shape, names) for compared in done])


def _speed_row(compared: LoadComparison, shape: Shape, names: Sequence[str]) -> list[str]:
    measured = {runs.engine: runs for runs in compared.engines}
    shares = [compared.share(measured[name], shape) if name in measured else None for name in names]
    cells = [_speed(compared, measured[name]) if name in measured else "-" for name in names]
    used = ", ".join(optional(share, ".0f", 100) for share in shares)
    bound = f"{used} % of {compared.load.bound}" if any(shares) else "-"
    return [compared.load.described, *cells, _over_best(compared), bound]


def _speed(compared: LoadComparison, runs: EngineRuns) -> str:
    text = f"{optional(runs.median(), '.3g')} tok/s"
    if isinstance(compared.load, Prefill):
        return f"{text}, first token {optional(runs.median('first_mean_s'), '.2f')} s"
    token_s = runs.median("token_s")
    return text if token_s is None else f"{text}, {token_s * 1e3:.1f} ms"


def _over_best(compared: LoadComparison) -> str:
    first, *peers = compared.engines
    if not peers:
        return "-"
    best = max(peers, key=lambda peer: peer.median() or 0.0)
    ratios = first.ratios(best)
    if not ratios:
        return "-"
    text = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    if isinstance(compared.load, Prefill) and (sooner := first.over(best, "first_mean_s")):
        text += f"; first token {1 / sooner:.2f} sooner"
    return text


def cost_table(costs: Sequence[Costs]) -> str:
    """Return the rows of start, memory and update, with a column for each engine."""
    rows: dict[str, Callable[[Costs], str]] = {
        "ready after": lambda c: f"{c.ready_s:.1f} s",
        "most memory until ready": lambda c: _gigabytes(c.start_bytes),
        "memory after the loads": lambda c: _gigabytes(c.serving_bytes),
        "update from a folder, paused": lambda c: "-" if c.update_s is None else f"{c.update_s:.2f} s",
        "most memory in an update": lambda c: "-" if c.update_bytes is None else _gigabytes(c.update_bytes),
    }
    header = ["", *(NAMES.get(c.engine, c.engine) for c in costs)]
    return markdown(header, [[name, *map(cell, costs)] for name, cell in rows.items()])


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.2f} GB"
