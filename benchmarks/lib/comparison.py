"""Medians, ranges and ratios of several engines' runs, and the rows of their table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from benchmarks.lib.loads import Figures, Load
from benchmarks.lib.report import optional
from benchmarks.lib.roofline import Machine, Shape, middle

HEADER = ("load", "engine", "tok/s", "from - to", "ratio", "ms per token", "in the engine", "first token s: mean",
          "p50", "p99", "sooner", "of the roofline")  # fmt: skip


@dataclass(frozen=True)
class EngineRuns:
    """The runs of one engine under one load, in order. engine_token_s: mean time between tokens of each run by the
    engine's own metric; empty if there is no metric. Runs with the same index of two engines were made one after the
    other, so that a slow minute of the machine affects both sides of a ratio."""

    engine: str
    runs: tuple[Figures, ...]
    engine_token_s: tuple[float, ...] = ()

    def values(self, figure: str) -> list[float]:
        """Return a figure of all runs, by its name in Figures; empty if the load does not have it."""
        return [value for run in self.runs if (value := getattr(run, figure)) is not None]

    def median(self, figure: str = "tokens_per_s") -> float | None:
        values = self.values(figure)
        return median(values) if values else None

    def range(self) -> str:
        """Return the lowest and the highest speed, as a cell."""
        speeds = self.values("tokens_per_s")
        return f"{min(speeds):.1f} - {max(speeds):.1f}"

    def ratios(self, other: EngineRuns, figure: str = "tokens_per_s") -> list[float]:
        """Return this figure over that of the other engine, run by run; empty if a run does not have it."""
        mine, theirs = self.values(figure), other.values(figure)
        if len(mine) != len(theirs) or 0 in theirs:
            return []
        return [a / b for a, b in zip(mine, theirs, strict=True)]

    def over(self, other: EngineRuns, figure: str = "tokens_per_s") -> float | None:
        """Return the median of the ratios; None without any."""
        ratios = self.ratios(other, figure)
        return median(ratios) if ratios else None


@dataclass(frozen=True)
class LoadComparison:
    """All engines under one load. The first engine is the base of the ratios. probes: of the machine, before, between
    and after the repeats."""

    load: Load
    engines: tuple[EngineRuns, ...]
    probes: tuple[Machine, ...]

    def joined(self, other: LoadComparison) -> LoadComparison:
        """Return this comparison with the engines of another run of the same load."""
        return LoadComparison(self.load, (*self.engines, *other.engines), (*self.probes, *other.probes))

    @property
    def errors(self) -> list[str]:
        return sorted({f"{m.engine}: {error}" for m in self.engines for run in m.runs for error in run.errors})

    def share(self, measured: EngineRuns, shape: Shape) -> float | None:
        """Return the median of the runs' shares of the roofline; None if a share is unknown."""
        if any(run.errors for run in measured.runs):
            return None
        machine = middle(self.probes)
        shares = [self.load.share(shape, machine, run) for run in measured.runs]
        known = [share for share in shares if share is not None]
        return median(known) if len(known) == len(shares) else None

    def rows(self, shape: Shape) -> list[tuple[str, ...]]:
        """Return one row of the table per engine; see HEADER. ratio: tokens per second, first engine over this one.
        sooner: mean time to the first token, this engine over the first."""
        return [self._row(measured, shape) for measured in self.engines]

    def _row(self, measured: EngineRuns, shape: Shape) -> tuple[str, ...]:
        first, share = self.engines[0], self.share(measured, shape)
        sooner = first.over(measured, "first_mean_s")
        return (
            self.load.name,
            measured.engine,
            optional(measured.median(), ".1f"),
            measured.range(),
            optional(first.over(measured), ".2f"),
            optional(measured.median("token_s"), ".1f", 1e3),
            optional(median(measured.engine_token_s) if measured.engine_token_s else None, ".1f", 1e3),
            *(optional(measured.median(f"first_{name}_s"), ".3f") for name in ("mean", "p50", "p99")),
            optional(1 / sooner if sooner else None, ".2f"),
            "-" if share is None else f"{share:.0%} of {self.load.bound}",
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "load": asdict(self.load) | {"kind": type(self.load).__name__, "bound": self.load.bound},
            "probes": [probe._asdict() for probe in self.probes],
            "engines": {
                m.engine: {"runs": [asdict(run) for run in m.runs], "engine_token_s": m.engine_token_s}
                for m in self.engines
            },
        }


def machine_line(probes: Sequence[Machine]) -> str:
    """Describe the probes: median and range."""
    reads = sorted(probe.read / 1e9 for probe in probes)
    text = f"the machine reads {median(reads):.1f} GB/s ({reads[0]:.1f} to {reads[-1]:.1f})"
    peaks = sorted(probe.peak / 1e12 for probe in probes if probe.peak is not None)
    if peaks:
        text += f" and multiplies {median(peaks):.2f} TFLOP/s in bfloat16 ({peaks[0]:.2f} to {peaks[-1]:.2f})"
    return text
