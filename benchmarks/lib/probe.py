"""Measure read bandwidth and bfloat16 matrix rate with the engine's probes; print them as JSON (null without AMX).

    python -m benchmarks.lib.probe

The buffer has 2 GiB, several times any last-level cache. Each probe reads the whole buffer once.
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
