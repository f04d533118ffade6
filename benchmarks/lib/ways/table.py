"""The tables of docs/sync-ways.md, in Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import reduce
from operator import add
from pathlib import Path
from statistics import median

from benchmarks.lib.report import markdown
from benchmarks.lib.ways.figures import Figures, figures, joined, mean, percentile
from benchmarks.lib.ways.ledger import Ledger, ledger
from benchmarks.lib.ways.record import Record, Way

By = dict[Way, list[Record]]


def by_way(records: Sequence[Record]) -> By:
    """Return the records of each way, in the order of the ways."""
    found: By = {}
    for record in records:
        found.setdefault(record.way, []).append(record)
    return found


def tables(records: Sequence[Record]) -> dict[str, str]:
    """Return each table by the name that its markers in the page have."""
    ways = by_way(records)
    shown = {way: [figures(record) for record in each] for way, each in ways.items()}
    normal = {way: each for way, each in shown.items() if not way.stale_kv}
    return {
        "ways": markdown(WAYS_HEADER, [_way_row(way, each) for way, each in normal.items()]),
        "ledger": markdown(LEDGER_HEADER, [_ledger_row(way, each) for way, each in ways.items()]),
        "mismatch": markdown(MISMATCH_HEADER, [_mismatch_row(way, each) for way, each in shown.items()]),
        "lengths": markdown(LENGTHS_HEADER, [_lengths_row(way, each) for way, each in normal.items()]),
    }


WAYS_HEADER = ("way", "accuracy at the end", "updates", "tokens trained per second", "no token, ms per update",
               "longest silence, ms", "lag, mean", "lag, 95 %")  # fmt: skip
LEDGER_HEADER = ("way", "generated", "trained", "discarded", "in flight", "evaluation", "unexplained", "recomputed")
MISMATCH_HEADER = ("way", "tokens of one version", "greatest difference", "mean KL", "greatest ratio",
                   "tokens after a commit", "greatest difference", "mean KL", "greatest ratio")  # fmt: skip
LENGTHS_HEADER = ("way", "answers", "median", "90 %", "99 %", "longest")


def _way_row(way: Way, each: Sequence[Figures]) -> list[str]:
    def cell(of: Callable[[Figures], float], form: str) -> str:
        return band([of(one) for one in each], form)

    return [
        way.name,
        cell(lambda one: 100 * one.last_accuracy, ".1f") + " %",
        cell(lambda one: one.updates, ".0f"),
        cell(lambda one: one.goodput, ".0f"),
        cell(lambda one: 1000 * one.silence.per_update, ".0f"),
        cell(lambda one: 1000 * one.silence.longest, ".0f"),
        cell(lambda one: mean(one.lag), ".2f"),
        cell(lambda one: percentile(one.lag, 0.95), ".0f"),
    ]


def _ledger_row(way: Way, each: Sequence[Record]) -> list[str]:
    total = reduce(add, map(ledger, each))

    def share(tokens: int) -> str:
        return f"{tokens:,} ({tokens / max(total.generated, 1):.1%})"

    return [
        way.name,
        f"{total.generated:,}",
        share(total.trained),
        _discarded(total),
        share(total.in_flight),
        share(total.evaluated),
        f"{total.generated - total.explained:,}",
        share(total.recomputed),
    ]


def _discarded(total: Ledger) -> str:
    reasons = ", ".join(f"{tokens:,} {why}" for why, tokens in sorted(total.discarded.items()))
    return reasons or "0"


def _mismatch_row(way: Way, each: Sequence[Figures]) -> list[str]:
    cells = [way.name]
    for found in (joined([one.mismatch for one in each]), joined([one.mixed for one in each])):
        if found is None:
            cells += ["0", "-", "-", "-"]
        else:
            cells += [f"{found.tokens:,}", f"{found.max_abs:.3g}", f"{found.kl:.3g}", f"{found.ratio_max:.6g}"]
    return cells


def _lengths_row(way: Way, each: Sequence[Figures]) -> list[str]:
    lengths = sum((one.lengths for one in each), Counter[int]())
    shares = (str(percentile(lengths, share)) for share in (0.5, 0.9, 0.99))
    return [way.name, f"{sum(lengths.values()):,}", *shares, str(max(lengths, default=0))]


def band(values: Sequence[float], form: str) -> str:
    """Return "median (smallest to greatest)", or the value alone if there is no other."""
    middle, low, high = (format(value, form) for value in (median(values), min(values), max(values)))
    return middle if low == high else f"{middle} ({low} to {high})"


def fill_in(page: Path, found: dict[str, str]) -> None:
    """Replace what the page has between ``<!-- NAME begins -->`` and ``<!-- NAME ends -->``. Raises ValueError if the
    page lacks a marker."""
    text = page.read_text()
    for name, content in found.items():
        begin, end = f"<!-- {name} begins -->\n", f"<!-- {name} ends -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"{page}: expected each of the markers {begin.strip()!r} and {end!r} once")
        before, _, rest = text.partition(begin)
        text = before + begin + content + end + rest.partition(end)[2]
    page.write_text(text)
