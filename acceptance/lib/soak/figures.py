"""The figures of a soak as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from acceptance.lib.soak.flat import BOUNDS
from benchmarks.lib.report import markdown as table

NAMES = {
    "rss_mb": "resident memory, MB",
    "pss_mb": "proportional memory, MB",
    "threads": "threads",
    "files": "open files",
    "sockets": "open sockets",
    "folder_files": "files",
    "folder_mb": "bytes of files, MB",
    "shm_files": "segments",
    "shm_mb": "bytes of segments, MB",
    "kv_blocks": "KV blocks in use",
}


def markdown(report: dict[str, Any]) -> str:
    """Return the tables of a report: what happened, the ledger, and what the processes held while idle."""
    seen, ledger = report["seen"], report["ledger"]
    facts = [
        ("minutes", f"{report['seconds'] / 60:.1f}"),
        ("seed", report["options"]["seed"]),
        *sorted(seen.items()),
        ("problems", len(report["problems"])),
    ]
    tokens = [
        ("engines", ledger["engines"]),
        ("rollouts, each with one final output", ledger["rollouts"]),
        ("tokens that the engines counted; killed ones: just before", ledger["generated"]),
        ("tokens in the clients' hands", ledger["received"]),
        ("read back from broken attempts", ledger["undelivered"]),
        ("of that count, missing after a kill", ledger["missing"]),
        ("results that a killed engine took along", ledger["lost_results"]),
    ]
    return "\n".join(
        [
            table(("what happened", "count"), facts),
            table(("ledger", "count"), tokens),
            table(
                ("process", "quantity", "least", "greatest", "growth in 1,000 cycles", "bound", "over cycles"),
                [_row(row) for row in report["resources"]],
            ),
        ]
    )


def _row(row: dict[str, Any]) -> Sequence[Any]:
    slope = "too short" if row["slope_per_1000"] is None else f"{round(row['slope_per_1000'], 1) + 0.0:+.1f}"
    bound = f"{BOUNDS[row['quantity']].per_1000:g}"
    name = f"{row['role']} ({row['processes']})" if row["processes"] > 1 else row["role"]
    least, greatest = f"{row['least']:.4g}", f"{row['greatest']:.4g}"
    return name, NAMES[row["quantity"]], least, greatest, slope, bound, row["longest_cycles"]
