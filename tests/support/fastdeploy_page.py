"""The tables of docs/fastdeploy.md that follow from the code. To write them anew:

PYTHONPATH=. python tests/support/fastdeploy_page.py
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from fastdeploy.entrypoints.cli.fastdeploy_flags import FLAGS
from fastdeploy.entrypoints.cli.fastdeploy_variables import VARIABLES
from fastdeploy.entrypoints.cli.foreign import Foreign

PAGE = Path(__file__).resolve().parents[2] / "docs" / "fastdeploy.md"


def flag_rows() -> list[list[str]]:
    """Return the rows of the table of flags."""
    return list(_rows([(f"`{row.flag}`", row) for row in FLAGS]))


def variable_rows() -> list[list[str]]:
    """Return the rows of the table of variables."""
    return list(_rows([(f"`{row.name}`", row) for row in VARIABLES]))


def _rows(named: list[tuple[str, Foreign]]) -> Iterator[list[str]]:
    """Yield a row for each verdict with its text, with all its names, in the order of the first of them."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, row in named:
        groups.setdefault((row.verdict.value, row.told()), []).append(name)
    for (verdict, text), names in groups.items():
        yield [", ".join(names), verdict, text]


def write(page: Path, note: str, title: str, rows: list[list[str]]) -> None:
    """Replace the table behind the comment ``note`` of the page."""
    lines = [f"| {title} | verdict | here |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)]
    table = "\n".join(lines)
    text, number = re.subn(rf"<!-- {note} -->\n(\|.*\n)*", lambda _: f"<!-- {note} -->\n{table}\n", page.read_text())
    assert number == 1, note
    page.write_text(text)


if __name__ == "__main__":
    write(PAGE, "fastdeploy flags", "flag", flag_rows())
    write(PAGE, "fastdeploy variables", "variable", variable_rows())
