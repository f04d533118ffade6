"""The common part of ``chat`` and ``complete``: flags, reading of what is typed, printing of the answer."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from fastdeploy.entrypoints.cli.settings import SettingsParser


def add_prompt_flags(parser: SettingsParser, what: str) -> None:
    """Add the flags of what is sent. what: a line that is typed, in words."""
    text = f"send one {what}, print the answer and end"
    parser.add_argument("-q", "--quick", metavar=what.upper(), help=text)
    parser.add_argument("--max-tokens", type=int, metavar="N", help="tokens of an answer (the server's default)")


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of a request beside what was typed."""
    return {} if args.max_tokens is None else {"max_tokens": args.max_tokens}


def read_lines(args: argparse.Namespace, model: str, what: str) -> Iterator[str]:
    """Yield the text of ``--quick`` alone. Without it, ask for lines until the input ends or Ctrl-C comes, and yield
    those that are not empty."""
    if args.quick is not None:
        yield args.quick
        return
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
