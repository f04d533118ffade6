"""The engine process of a measured run: the engine's own main, which also records when tokens are sampled.

    python -m benchmarks.lib.ways.engine_main serve FLAGS      # ``fastdeploy serve`` over this engine

The environment variable TIMES_FILE names the file for the times.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

from fastdeploy.core.request import NewTokens
from fastdeploy.entrypoints import cli, engine_main
from fastdeploy.metrics.metrics import EngineMetrics

TIMES_FILE = "WAYS_TIMES_FILE"


@contextlib.contextmanager
def token_times(path: Path) -> Iterator[None]:
    """Record (seconds on the monotonic clock, number of tokens, weight_epoch) of each step with tokens. Write them as a
    JSON list at the end. All tokens of a step have one weight_epoch."""
    times: list[tuple[float, int, int]] = []
    observe = EngineMetrics.observe_tokens

    def note(self: EngineMetrics, step: list[NewTokens]) -> None:
        observe(self, step)
        if step:
            count = sum(len(new.token_ids) for new in step)
            times.append((time.monotonic(), count, step[0].served.weight_epoch))

    try:
        with patch.object(EngineMetrics, "observe_tokens", note):
            yield
    finally:
        path.write_text(json.dumps(times))


def main() -> int:
    if sys.argv[1:2] == ["serve"]:
        return cli.main(sys.argv[1:], engine_module="benchmarks.lib.ways.engine_main")
    with token_times(Path(os.environ[TIMES_FILE])):
        return engine_main.main()


if __name__ == "__main__":
    sys.exit(main())
