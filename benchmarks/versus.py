#!/usr/bin/env python
"""Two running servers, the same prompts, interleaved repeats: medians and ratios of what ``serving.py`` measures.

    python benchmarks/versus.py http://127.0.0.1:8180 http://127.0.0.1:8001 --model q05

Both stay up all the while, so that a machine that drifts does so for both. Each repeat has prompts of its own (give
another --seed when you run it again, or they are in the prefix caches).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

SERVING = Path(__file__).with_name("serving.py")


class Load(NamedTuple):
    """``streams`` clients in a closed loop; tokens in and out of each request; requests in all."""

    streams: int
    input_len: int
    output_len: int
    requests: int


LOADS = (Load(1, 32, 64, 4), Load(8, 32, 64, 16), Load(8, 512, 32, 8))


def measure(url: str, model: str, load: Load, seed: int) -> dict[str, Any]:
    """The ``stats`` of one run of serving.py. Raises CalledProcessError if a request failed."""
    command = [sys.executable, str(SERVING), "--url", url, "--model", model, "--json", "-", "--warmup", "1"]
    for flag, value in zip(("concurrency", "input-len", "output-len", "num-requests"), load, strict=True):
        command += [f"--{flag}", str(value)]
    run = subprocess.run([*command, "--seed", str(seed)], check=True, capture_output=True, text=True)
    return json.loads(run.stdout[run.stdout.index("{") :])["stats"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ours")
    parser.add_argument("peer")
    parser.add_argument("--model", required=True, help="the name that both serve it under")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1, help="of the first repeat")
    args = parser.parse_args()
    urls = (args.ours, args.peer)
    print(f"{'load':>20}  {'tok/s':>15}  {'ratio':>5}  {'ms per token':>13}  {'first token, s':>15}  {'sooner':>6}")
    for load in LOADS:
        runs = [[measure(url, args.model, load, args.seed + i) for url in urls] for i in range(args.repeats)]
        speed, gap, first = (
            [median(run[who][name] if key is None else run[who][name]["at"][key] for run in runs) for who in (0, 1)]
            for name, key in (("tokens_per_s", None), ("tpot", "50"), ("ttft", "50"))
        )
        print(
            f"{load.streams:>3} x {load.input_len:>4} in {load.output_len:>3} out"
            f"  {speed[0]:>6.1f} / {speed[1]:>6.1f}  {speed[0] / speed[1]:>5.2f}"
            f"  {gap[0] * 1e3:>5.1f} / {gap[1] * 1e3:>5.1f}"
            f"  {first[0]:>6.3f} / {first[1]:>6.3f}  {first[1] / first[0]:>6.2f}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
