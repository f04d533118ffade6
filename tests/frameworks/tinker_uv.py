"""A stand-in for ``uv run [FLAGS] -m MODULE [ARGUMENTS]``: runs the module in this environment.

SkyRL's Tinker server has to be started by uv, and starts its trainer by uv. uv would install both anew."""

from __future__ import annotations

import signal
import subprocess
import sys

# SkyRL 0.4 requires Python 3.12, only since pydantic accepts typing's TypedDict there.
START = """
import runpy, sys, typing, typing_extensions
if sys.version_info < (3, 12):
    typing.TypedDict = typing_extensions.TypedDict
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


def main() -> int:
    arguments = sys.argv[sys.argv.index("-m") + 1 :]
    child = subprocess.Popen([sys.executable, "-c", START, *arguments])
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    return child.wait()


if __name__ == "__main__":
    sys.exit(main())
