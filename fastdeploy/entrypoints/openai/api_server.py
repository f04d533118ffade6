"""``python -m fastdeploy.entrypoints.openai.api_server FLAGS``: ``fastdeploy serve --fastdeploy-form FLAGS``.

Who starts the server by this name has clients of PaddlePaddle/FastDeploy.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from fastdeploy.entrypoints.cli.main import main as run_command


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``fastdeploy serve`` with the flags ``argv`` and return the exit status."""
    return run_command(["serve", "--fastdeploy-form", *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    sys.exit(main())
