"""The tables of docs/sync-ways.md, in Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from benchmarks.lib.report import markdown
from benchmarks.lib.ways.figures import accuracy, joined, lag, lengths, mean, silence, smallest
from benchmarks.lib.ways.ledger import DISCARDED, accounts, unexplained
from benchmarks.lib.ways.record import Record, Way

By = dict[Way, list[Record]]
# Columns of the table of ways: the figure of one run, and the form of its cell.
WAYS_COLUMNS: dict[str, tuple[Callable[[Record], float], str]] = {
    "accuracy at the end": (lambda run: 100 * accuracy(run)[0][-1][1], ".1f"),
    "updates": (lambda run: len(run.updates), ".0f"),
    "tokens trained per second": (lambda run: accounts(run)["trained"] / run.seconds, ".0f"),
    "no token, ms per update": (lambda run: 1000 * silence(run.token_times).per_update, ".0f"),
    "longest silence, ms": (lambda run: 1000 * silence(run.token_times).longest, ".0f"),
    "lag, mean": (lambda run: mean(lag(run)), ".2f"),
    "lag, 95 %": (lambda run: smallest(lag(run), 95), ".0f"),
}
LEDGER_HEADER = ("way", "generated", "trained", "discarded", "in flight", "evaluation", "unexplained", "recomputed")
MISMATCH_HEADER = ("way", "tokens of one version", "greatest difference", "mean KL", "greatest ratio",
                   "tokens after a commit", "greatest difference", "mean KL", "greatest ratio")  # fmt: skip
LENGTHS_HEADER = ("way", "answers", "median", "90 %", "99 %", "longest")


def by_way(records: Sequence[Record]) -> By:
    """Return the records of each way, in the order of the ways."""
    found: By = {}
    for record in records:
        found.setdefault(record.way, []).append(record)
    return found


def tables(records: Sequence[Record]) -> dict[str, str]:
    """Return each table by the name that its markers in the page have."""
    ways = by_way(records)
    normal = {way: each for way, each in ways.items() if not way.stale_kv}
    return {
        "ways": markdown(("way", *WAYS_COLUMNS), [_way_row(way, each) for way, each in normal.items()]),
        "ledger": markdown(LEDGER_HEADER, [_ledger_row(way, each) for way, each in ways.items()]),
        "mismatch": markdown(MISMATCH_HEADER, [_mismatch_row(way, each) for way, each in ways.items()]),
        "lengths": markdown(LENGTHS_HEADER, [_lengths_row(way, each) for way, each in normal.items()]),
    }


def _way_row(way: Way, each: Sequence[Record]) -> list[str]:
    cells = [band([of(record) for record in each], form) for of, form in WAYS_COLUMNS.values()]
    return [way.name, f"{cells[0]} %", *cells[1:]]


def _ledger_row(way: Way, each: Sequence[Record]) -> list[str]:
    total = sum(map(accounts, each), Counter[str]())

    def share(name: str) -> str:
        return f"{total[name]:,} ({total[name] / max(total['generated'], 1):.1%})"

    discarded = [
        f"{tokens:,} {name.removeprefix(DISCARDED)}" for name, tokens in sorted(total.items()) if DISCARDED in name
    ]
    cells = [share("trained"), ", ".join(discarded) or "0", share("in_flight"), share("evaluated")]
    return [way.name, f"{total['generated']:,}", *cells, f"{unexplained(total):,}", share("recomputed")]


def _mismatch_row(way: Way, each: Sequence[Record]) -> list[str]:
    cells = [way.name]
    updates = [update for record in each for update in record.updates]
    for found in (joined([update.mismatch for update in updates]), joined([update.mixed for update in updates])):
        if found is None:
            cells += ["0", "-", "-", "-"]
        else:
            cells += [f"{found.tokens:,}", f"{found.max_abs:.3g}", f"{found.kl:.3g}", f"{found.ratio_max:.6g}"]
    return cells


def _lengths_row(way: Way, each: Sequence[Record]) -> list[str]:
    counts = Counter(length for record in each for length in lengths(record))
    return [way.name, f"{counts.total():,}", *(str(smallest(counts, percent)) for percent in (50, 90, 99, 100))]


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
