"""The plots of docs/sync-ways.md. Needs matplotlib: ``pip install -e ".[plots]"``.

A line is the median over the seeds, and the band around it goes from the smallest to the greatest value.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from benchmarks.lib.ways.figures import Series, accuracy, goodput, lag, lengths
from benchmarks.lib.ways.record import Record, Way
from benchmarks.lib.ways.table import By, by_way

COLOURS = {"synchronous": "black", "wait": "tab:orange", "abort": "tab:red", "keep": "tab:blue", "live": "tab:green"}
PREFIX = "sync-ways-"
BUCKET_S = 5.0
POINTS = 200  # of a band
NO_DIFFERENCE = 1e-9  # where a logarithmic axis shows a difference of exactly 0


def write_plots(records: Sequence[Record], folder: Path) -> dict[str, Path]:
    """Write the PNG files, and return their paths by the names of the plots."""
    matplotlib.use("agg")
    ways = by_way(records)
    normal = {way: each for way, each in ways.items() if not way.stale_kv}
    made = {
        "accuracy": _accuracy(normal),
        "goodput": _goodput(normal),
        "lag": _lag(normal),
        "mismatch": _mismatch(ways),
    }
    paths = {name: folder / f"{PREFIX}{name}.png" for name in made}
    for name, figure in made.items():
        figure.savefig(paths[name], dpi=110, metadata={"Software": ""})
    return paths


def _figure(columns: int, width: float = 5.5) -> tuple[Figure, list[Axes]]:
    """Return a figure of panels side by side, each ``width`` inches wide."""
    figure = Figure(figsize=(width * columns, 4.2), layout="constrained")
    return figure, list(figure.subplots(1, columns, squeeze=False)[0])


def _style(way: Way) -> dict[str, Any]:
    dashed = "--" if way.kv == "recompute" else "-"
    return {"label": way.name, "color": "tab:purple" if way.stale_kv else COLOURS[way.sync], "linestyle": dashed}


def _draw_band(axes: Axes, way: Way, each: Sequence[Series]) -> None:
    """Draw median and band over the range that all seeds have."""
    each = [series for series in each if series]
    if not each:
        return
    grid = np.linspace(max(s[0][0] for s in each), min(s[-1][0] for s in each), POINTS)
    values = np.array([np.interp(grid, *np.transpose(series)) for series in each])
    axes.plot(grid, np.median(values, 0), **_style(way))
    if len(each) > 1:
        axes.fill_between(grid, values.min(0), values.max(0), color=_style(way)["color"], alpha=0.12, linewidth=0)


def _accuracy(ways: By) -> Figure:
    figure, panels = _figure(2)
    for axes, part, label in zip(panels, (0, 1), ("seconds", "trained tokens"), strict=True):
        for way, each in ways.items():
            _draw_band(axes, way, [accuracy(record)[part] for record in each])
        axes.set(xlabel=label, ylabel="held-out accuracy")
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.grid(alpha=0.3)
    panels[0].legend()
    return figure


def _goodput(ways: By) -> Figure:
    figure, (axes,) = _figure(1, width=9.0)
    for way, each in ways.items():
        _draw_band(axes, way, [goodput(record, BUCKET_S) for record in each])
    axes.set(xlabel="seconds", ylabel="tokens per second that are trained", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(ncols=2)
    return figure


def _lag(ways: By) -> Figure:
    """Draw the share of trained tokens by version lag, and of answers by their length."""
    figure, (left, right) = _figure(2)
    for way, each in ways.items():
        counts = sum((lag(record) for record in each), Counter[int]())
        values = range(max(counts, default=0) + 1)
        left.plot(values, [counts[value] / max(counts.total(), 1) for value in values], marker="o", **_style(way))
        tokens = sorted(length for record in each for length in lengths(record))
        right.step(tokens, 1 - np.arange(len(tokens)) / max(len(tokens), 1), **_style(way))
    left.set(xlabel="version lag, publications", ylabel="share of trained tokens")
    left.yaxis.set_major_formatter(PercentFormatter(1.0))
    left.legend()
    right.set(xlabel="tokens of an answer", ylabel="share of answers at least so long", yscale="log")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    return figure


def _mismatch(ways: By) -> Figure:
    """Draw the greatest difference of each update: of answers of one version, and of tokens after a commit."""
    figure, panels = _figure(2)
    for way, each in ways.items():
        of_one = [[(u.update, u.mismatch) for u in record.updates] for record in each]
        after = [[(u.update, u.mixed) for u in record.updates] for record in each]
        for axes, found in zip(panels, (of_one, after), strict=True):
            series: list[list[tuple[float, float]]] = [
                [(at, max(m.max_abs, NO_DIFFERENCE)) for at, m in one if m is not None] for one in found
            ]
            _draw_band(axes, way, series)
    for axes, title in zip(panels, ("answers of one version", "tokens after a commit, in older answers"), strict=True):
        axes.axhline(NO_DIFFERENCE, color="grey", linewidth=0.5)
        axes.annotate("exactly 0", (0.01, NO_DIFFERENCE), xycoords=("axes fraction", "data"),
                      xytext=(0, 3), textcoords="offset points", fontsize=8)  # fmt: skip
        axes.set(
            title=title, xlabel="update", ylabel="greatest difference of a logprob", yscale="log", ylim=(3e-10, 30)
        )
    panels[0].legend(ncols=2, loc="center right")
    return figure
