"""What all programs in benchmarks/ and acceptance/ share: tables, JSON, percentiles, lists in flags, and exit codes."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fastdeploy.bench.client import FAILURES


def plain_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table with left-aligned columns, two spaces apart."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def markdown(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Format a table as Markdown. Each line ends with a newline."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def optional(value: float | None, form: str, scale: float = 1.0) -> str:
    """Format a cell; "-" for a value that is not known."""
    return "-" if value is None else format(value * scale, form)


class Printer:
    """Tables go to stdout, as plain text unless it is a terminal. Progress lines go to stderr."""

    def __init__(self) -> None:
        self._console = Console()
        self._progress = Console(stderr=True, highlight=False)

    def say(self, line: str) -> None:
        self._progress.print(Text(line, "dim"), soft_wrap=True)

    def table(
        self, title: str, header: Sequence[str], rows: Sequence[Sequence[str]], styles: Sequence[str] = ()
    ) -> None:
        """Print a table. styles: a rich style for the last cell of each row."""
        if not self._console.is_terminal:
            print(f"\n{title}\n{plain_table(header, rows)}", flush=True)
            return
        table = Table(*header, title=title, title_justify="left")
        for row, style in zip(rows, styles or [""] * len(rows), strict=True):
            table.add_row(*map(Text, row[:-1]), Text(row[-1], style))
        self._console.print(table)

    def failed(self, errors: Sequence[str], word: str = "failed") -> int:
        """Say each error. Return the exit code: 1 if there is one."""
        for error in errors:
            self.say(f"{word}: {error[:300]}")
        return 1 if errors else 0

    def exit_code(self, work: Callable[[], int]) -> int:
        """Return what ``work`` returns; 2, after saying why, if a server cannot be started or driven. A SIGTERM ends
        ``work`` as Ctrl-C does, so that it stops the servers that it started."""
        before = signal.signal(signal.SIGTERM, _exit)
        try:
            return work()
        except (*FAILURES, ValueError, subprocess.SubprocessError) as error:
            self.say(f"cannot go on: {type(error).__name__}: {error}")
            return 2
        finally:
            signal.signal(signal.SIGTERM, before)


def _exit(number: int, frame: object) -> None:
    """End the program after a signal. Further ones do not disturb the end."""
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + number)


def machine() -> dict[str, Any]:
    """Describe the machine of a measurement: ratios can be compared between machines, seconds cannot."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cpu = names[0] if names else platform.processor()
    return {"cpu": cpu, "cores": os.cpu_count(), "python": platform.python_version()}


def write_json(args: argparse.Namespace, content: dict[str, Any]) -> None:
    """Write the content, the machine and all options to ``args.json``, if it is given; to stdout for "-"."""
    if not args.json:
        return
    options = {name: str(value) for name, value in vars(args).items()}
    text = json.dumps({"machine": machine(), "options": options} | content, indent=2) + "\n"
    if str(args.json) == "-":
        sys.stdout.write(text)
    else:
        Path(args.json).write_text(text)


def some_of(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Return the parser of a comma-separated list of known names, each once."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        if not set(names) <= set(known) or len(set(names)) < len(names):
            raise argparse.ArgumentTypeError(f"expected some of {','.join(known)}, each once; got {text!r}")
        return names

    return parse


def numbers(text: str) -> list[int]:
    """Parse a comma-separated list of different numbers above 0. Raises ArgumentTypeError."""
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) for part in parts) or len({*map(int, parts)}) < len(parts):
        raise argparse.ArgumentTypeError(f"expected numbers above 0, each once, such as 1,8,32; got {text!r}")
    return [int(part) for part in parts]


def json_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", metavar="FILE", help="write everything seen; - for stdout")
