"""The engine process of a measured run: the engine's own main, which also records when tokens are sampled.

    python -m benchmarks.lib.ways.engine_main serve FLAGS      # ``fastdeploy serve`` over this engine

The environment variable TIMES_FILE names the file for the times. With STALE_KV=1 the engine has a fault for the control
run: KV survives a commit of weights, and nothing says so.
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
from fastdeploy.core.served_weights import ServedWeights
from fastdeploy.entrypoints import cli, engine_main
from fastdeploy.metrics.metrics import EngineMetrics
from fastdeploy.scheduler.scheduler import Scheduler

TIMES_FILE, STALE_KV = "WAYS_TIMES_FILE", "WAYS_STALE_KV"


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
            times.append((time.monotonic(), count, step[0].span.weight_epoch))

    try:
        with patch.object(EngineMetrics, "observe_tokens", note):
            yield
    finally:
        path.write_text(json.dumps(times))


@contextlib.contextmanager
def stale_kv() -> Iterator[None]:
    """Let KV survive commits: cached prefixes of old weights are found under new ones, and a request whose KV is of
    several weights shares its blocks. Spans still name the weights that sampled a token."""
    one_namespace = property(lambda served: (0, served.adapter))
    with (
        patch.object(ServedWeights, "kv_namespace", one_namespace),
        patch.object(Scheduler, "weights_changed", lambda self, model, before, recompute: None),
    ):
        yield


def main() -> int:
    if sys.argv[1:2] == ["serve"]:
        return cli.main(sys.argv[1:], engine_module="benchmarks.lib.ways.engine_main")
    with contextlib.ExitStack() as stack:
        stack.enter_context(token_times(Path(os.environ[TIMES_FILE])))
        if os.environ.get(STALE_KV) == "1":
            stack.enter_context(stale_kv())
        return engine_main.main()


if __name__ == "__main__":
    sys.exit(main())
