"""Lines of progress while something takes long. As a program, for the Makefile:

    python acceptance/lib/progress.py "installing packages" 60 COMMAND ...

runs the command, which usually takes 60 s. Needs the standard library only, since it runs before packages are there.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

LINE_S = 8.0  # between two lines


@contextlib.contextmanager
def progress(line: Callable[[], str], say: Callable[[str], object]) -> Iterator[None]:
    """Say ``line()`` every LINE_S seconds until the block ends."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(LINE_S):
            say(line())

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def main(what: str, usual_s: str, *command: str) -> int:
    """Run ``command`` with lines of progress. Returns its exit status."""
    began = time.monotonic()

    def line() -> str:
        took = time.monotonic() - began
        left = float(usual_s) - took
        return f"{what}: {took:.0f} s, " + (f"about {left:.0f} s left" if left > 0 else "longer than usual")

    with progress(line, lambda text: print(text, flush=True)):
        return subprocess.run(command).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
