"""The terminal of ``chat`` and ``complete``."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator


def read_lines(model: str, what: str) -> Iterator[str]:
    """Ask for lines until the input ends or Ctrl-C comes, and yield those that are not empty."""
    print(f"{model}: type a {what}; Ctrl-D ends", file=sys.stderr)
    while True:
        try:
            line = input("> ")
        except (EOFError, KeyboardInterrupt):
            print(file=sys.stderr)
            return
        if line.strip():
            yield line


def show(pieces: Iterable[str]) -> str:
    """Print the pieces of a text as they come, and return the text."""
    text = ""
    for piece in pieces:
        text += piece
        print(piece, end="", flush=True)
    print()
    return text
