"""Medians, ranges and ratios of several engines' runs, and the rows of their table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from benchmarks.lib.loads import Figures, Load
from benchmarks.lib.roofline import Machine, Shape, middle

HEADER = ("load", "engine", "tok/s", "from - to", "ratio", "ms per token", "in the engine", "first token s: mean",
          "p50", "p99", "sooner", "of the roofline")  # fmt: skip


@dataclass(frozen=True)
class EngineRuns:
    """The runs of one engine under one load, in order. engine_token_s: mean time between tokens of each run by the
    engine's own metric; empty if there is no metric."""

    engine: str
    runs: tuple[Figures, ...]
    engine_token_s: tuple[float, ...] = ()

    def values(self, figure: str) -> list[float]:
        """Return a figure of all runs, by its name in Figures; empty if the load does not have it."""
        return [value for run in self.runs if (value := getattr(run, figure)) is not None]

    def median(self, figure: str) -> float | None:
        values = self.values(figure)
        return median(values) if values else None


@dataclass(frozen=True)
class LoadComparison:
    """All engines under one load. The first engine is the base of the ratios. probes: of the machine, before, between
    and after the repeats."""

    load: Load
    engines: tuple[EngineRuns, ...]
    probes: tuple[Machine, ...]

    @property
    def machine(self) -> Machine | None:
        return middle(list(self.probes))

    @property
    def errors(self) -> list[str]:
        return sorted({f"{m.engine}: {error}" for m in self.engines for run in m.runs for error in run.errors})

    def ratio(self, measured: EngineRuns, figure: str) -> float | None:
        """Return the median over the repeats of (first engine's figure / this engine's): a slow minute affects both."""
        base, other = self.engines[0].values(figure), measured.values(figure)
        if not base or len(base) != len(other) or 0 in other:
            return None
        return median(a / b for a, b in zip(base, other, strict=True))

    def share(self, measured: EngineRuns, shape: Shape) -> float | None:
        """Return the median of the runs' shares of the roofline; None if a share is unknown."""
        machine = self.machine
        if machine is None or any(run.errors for run in measured.runs):
            return None
        shares = [self.load.share(shape, machine, run) for run in measured.runs]
        known = [share for share in shares if share is not None]
        return median(known) if len(known) == len(shares) else None

    def rows(self, shape: Shape) -> list[tuple[str, ...]]:
        """Return one row of the table per engine; see HEADER. ratio: tokens per second, first engine over this one.
        sooner: mean time to the first token, this engine over the first."""
        return [self._row(measured, shape) for measured in self.engines]

    def _row(self, measured: EngineRuns, shape: Shape) -> tuple[str, ...]:
        speeds = measured.values("tokens_per_s")
        sooner = self.ratio(measured, "first_mean_s")
        share = self.share(measured, shape)
        engine_s = median(measured.engine_token_s) if measured.engine_token_s else None
        return (
            self.load.name,
            measured.engine,
            _text(measured.median("tokens_per_s"), ".1f"),
            f"{min(speeds):.1f} - {max(speeds):.1f}",
            _text(self.ratio(measured, "tokens_per_s"), ".2f"),
            _text(measured.median("token_s"), ".1f", 1e3),
            _text(engine_s, ".1f", 1e3),
            *(_text(measured.median(f"first_{name}_s"), ".3f") for name in ("mean", "p50", "p99")),
            _text(1 / sooner if sooner else None, ".2f"),
            "-" if share is None else f"{share:.0%} of {self.load.bound}",
        )

    def to_json(self, shape: Shape) -> dict[str, Any]:
        return {
            "load": asdict(self.load) | {"kind": type(self.load).__name__, "bound": self.load.bound},
            "probes": [probe._asdict() for probe in self.probes],
            "engines": {
                m.engine: {
                    "runs": [asdict(run) for run in m.runs],
                    "engine_token_s": m.engine_token_s,
                    "median": {name: m.median(name) for name in asdict(m.runs[0]) if name != "errors"},
                    "ratio_tokens_per_s": self.ratio(m, "tokens_per_s"),
                    "ratio_first_mean_s": self.ratio(m, "first_mean_s"),
                    "of_roofline": self.share(m, shape),
                }
                for m in self.engines
            },
        }


def machine_line(probes: Sequence[Machine]) -> str:
    """Describe the probes: median and range."""
    if not probes:
        return "no probe of the machine here (it needs AVX-512): no roofline"
    reads = sorted(probe.read / 1e9 for probe in probes)
    text = f"the machine reads {median(reads):.1f} GB/s ({reads[0]:.1f} to {reads[-1]:.1f})"
    peaks = sorted(probe.peak / 1e12 for probe in probes if probe.peak is not None)
    if peaks:
        text += f" and multiplies {median(peaks):.2f} TFLOP/s in bfloat16 ({peaks[0]:.2f} to {peaks[-1]:.2f})"
    return text


def _text(value: float | None, form: str, scale: float = 1.0) -> str:
    return "-" if value is None else format(value * scale, form)
