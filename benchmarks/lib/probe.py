"""Measures read bandwidth and bfloat16 matrix rate with the engine's probes, prints them as JSON (null without AMX).

    python -m benchmarks.lib.probe

The buffer, 2 GiB, is several times any last-level cache, and each probe reads all of it once.
"""

from __future__ import annotations

import json

import numpy as np

from benchmarks.ops import PROBE_ROWS, measure, read_roofline, roofline_calls
from fastdeploy.model_executor.ops.cpu import CpuOps

REPEATS = 5


def main() -> None:
    ops = CpuOps("bfloat16")
    weight = ops.pack_linear([np.zeros((PROBE_ROWS, 1024), np.uint16)])
    found = read_roofline(ops, weight, measure(roofline_calls(ops, weight), REPEATS))
    print(json.dumps(None if found is None else found._asdict()))


if __name__ == "__main__":
    main()
