"""The parts of our Markdown pages that tests look at: code blocks, tables, links, and code within the text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").rglob("*.md"))


class Block(NamedTuple):
    """One fenced code block. note: the text of an HTML comment on the line before the fence, or ""."""

    page: Path
    note: str
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.stem}: {self.text.strip().splitlines()[0][:60]}"


def blocks(page: Path) -> list[Block]:
    """Every fenced code block of ``page``, in order."""
    found = re.findall(r"(?:^<!-- ([^\n]*) -->\n)?^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    return [Block(page, *parts) for parts in found]


def text_without_blocks(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def code_spans(page: Path) -> list[str]:
    """Everything between single backticks, outside of code blocks."""
    return re.findall(r"`([^`\n]+)`", text_without_blocks(page))


def tables(page: Path) -> dict[str, list[list[str]]]:
    """The rows of each table that has an HTML comment before it, by the text of the comment. A row is its cells."""
    found = re.findall(r"^<!-- (.*) -->\n((?:\|.*\n)+)", page.read_text(), re.MULTILINE)
    return {note: [_cells(line) for line in rows.splitlines()[2:]] for note, rows in found}


def names(cell: str) -> list[str]:
    """The code spans of one cell."""
    return re.findall(r"`([^`]+)`", cell)


def anchors(page: Path) -> set[str]:
    """The names by which links reach the headings of ``page``, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", text_without_blocks(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]
