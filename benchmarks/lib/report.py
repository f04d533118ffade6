"""Output of results: tables (rich on a terminal, plain text in a pipe) and JSON."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.lib.acceptance import Outcome
from benchmarks.lib.verdicts import Check, PauseRun, token_gap

VERDICT = {True: "pass", False: "FAIL", None: "n/a"}
COLOUR = {True: "green", False: "bold red", None: "dim"}


# (item, scenario, beginning of the promise, what FastDeploy reported on its own machine and model)
ACCEPTANCE = (
    ("running streams", "abort", "running streams return partial", "8 streams, about 157 tokens each"),
    ("waiting streams", "abort", "waiting streams return 0", "12 at once"),
    ("KV blocks, before and after", "abort", "KV blocks", "11472 -> 11472"),
    ("requests while paused", "abort", "refused while paused", "refused, 0 tokens"),
    ("requests between the two flags", "wait", "refused in the window", "refused"),
    ("new requests after the resume", "after", "resume and", "5 of 5"),
    ("metrics", "after", "metrics at zero", "0 running, 0 waiting"),
    ("no token while kept", "keep", "no token in the gap", "-"),
    ("gap while kept", "keep", "the token gap equals", "-"),
    ("text after keep", "against an undisturbed run of the same prompts", "keep: ", "-"),
)


def plain_table(rows: Sequence[Sequence[str]], header: Sequence[str]) -> str:
    """Format a table with left-aligned columns, two spaces apart."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [header, *rows]
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


class Printer:
    """Tables go to stdout, progress lines to stderr."""

    def __init__(self) -> None:
        self.console = Console()
        self._progress = Console(stderr=True, highlight=False)

    def say(self, line: str) -> None:
        self._progress.print(Text(line, "dim"), soft_wrap=True)

    def table(
        self, title: str, header: Sequence[str], rows: Sequence[Sequence[str]], styles: Sequence[str] = ()
    ) -> None:
        """Print a table. styles: a rich style for the last cell of each row."""
        if not self.console.is_terminal:
            print(f"\n{title}\n{plain_table(rows, header)}", flush=True)
            return
        table = Table(title=title, title_justify="left")
        for name in header:
            table.add_column(name)
        for row, style in zip(rows, styles or [""] * len(rows), strict=True):
            table.add_row(*map(Text, row[:-1]), Text(row[-1], style))
        self.console.print(table)

    def checks(self, checks: Sequence[Check]) -> None:
        for scenario in dict.fromkeys(check.scenario for check in checks):
            mine = [check for check in checks if check.scenario == scenario]
            rows = [(check.promise, check.seen, VERDICT[check.ok]) for check in mine]
            self.table(f"{scenario}", ("promise", "seen", "verdict"), rows, [COLOUR[check.ok] for check in mine])

    def acceptance(self, outcome: Outcome) -> None:
        """Print the acceptance table of FastDeploy's own pause, with its figures and those seen here."""
        rows = [
            (item, theirs, check.seen, VERDICT[check.ok])
            for item, scenario, promise, theirs in ACCEPTANCE
            for check in outcome.checks
            if check.scenario == scenario and check.promise.startswith(promise)
        ]
        paused = "; ".join(f"{run.scenario} {run.pause_s:.3f} s" for run in outcome.runs)
        rows.insert(0, ("pause time", "abort 0.342 s", paused, "-"))
        self.table("acceptance", ("item", "FastDeploy", "seen", "verdict"), rows)

    def measurements(self, runs: Sequence[PauseRun]) -> None:
        header = ("scenario", "pause s", "in steps", "step ms", "all answered s", "resume ms", "next token ms")
        rows = [[_show(value) for value in measure(run).values()][: len(header)] for run in runs]
        self.table("pause times", header, rows)

    def peer_comparison(self, ours: Sequence[PauseRun], theirs: Sequence[PauseRun]) -> None:
        """Print the medians over the repeats of each scenario, ours and the peer's. The ratio is the peer's over ours,
        above 1 if ours is faster."""
        rows = []
        for scenario in dict.fromkeys(run.scenario for run in ours):
            for figure in ("pause_s", "pause_steps", "all_answered_s", "resume_ms", "next_token_ms"):
                found = [
                    [value for run in runs if run.scenario == scenario and (value := measure(run)[figure]) is not None]
                    for runs in (ours, theirs)
                ]
                if all(found):
                    mine, other = map(statistics.median, found)
                    rows.append((scenario, figure, f"{mine:g}", f"{other:g}", f"{other / mine:.2f}" if mine else "-"))
        self.table("beside the peer", ("scenario", "figure", "ours", "peer", "peer / ours"), rows)


def measure(run: PauseRun) -> dict[str, Any]:
    """Return the figures of one run, in seconds unless the name says otherwise; None for a figure it does not have."""
    nexts = [
        min(event.at for event in log.tokens if event.at > run.resume_called_at) - run.resume_called_at
        for log in run.started
        if token_gap(log, run.resume_called_at) is not None
    ]
    return {
        "scenario": run.scenario,
        "pause_s": round(run.pause_s, 4),
        "pause_steps": round(run.pause_steps, 2) if run.step_s else None,
        "step_ms": round(run.step_s * 1000, 3),
        "all_answered_s": round(run.answered_s, 4) if run.scenario.startswith("abort") else None,
        "resume_ms": round((run.resume_replied_at - run.resume_called_at) * 1000, 2),
        "next_token_ms": round(max(nexts) * 1000, 1) if nexts else None,
        "streams": len(run.streams),
        "running_tokens": [log.num_tokens for log in run.started],
        "waiting_tokens": sum(log.num_tokens for log in run.waiting),
        "free_blocks": [run.before.free_blocks, run.loaded.free_blocks, run.paused.free_blocks],
    }


def _show(value: Any) -> str:
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def machine() -> dict[str, Any]:
    """Describe the machine of a measurement: ratios can be compared between machines, seconds cannot."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cpu = names[0] if names else platform.processor()
    return {"cpu": cpu, "cores": os.cpu_count(), "python": platform.python_version()}


def write_json(path: str, content: dict[str, Any]) -> None:
    """Write to ``path``, or to stdout for "-"."""
    text = json.dumps(content, indent=2) + "\n"
    if path == "-":
        sys.stdout.write(text)
    else:
        Path(path).write_text(text)
