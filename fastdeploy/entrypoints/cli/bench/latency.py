"""``fastdeploy bench latency``: the time of one batch in an engine of this process."""

from __future__ import annotations

import argparse

from fastdeploy.bench.stats import percentile
from fastdeploy.entrypoints.cli.bench.checks import require_positive
from fastdeploy.entrypoints.cli.bench.offline import (
    add_engine_flags,
    seconds_of_batch,
    start_engine,
    write,
)
from fastdeploy.entrypoints.cli.command import Commands
from fastdeploy.entrypoints.cli.settings import SettingsParser

PERCENTS = (10, 25, 50, 75, 90, 99)


def add_parser(kinds: Commands) -> SettingsParser:
    """Add this kind of measurement."""
    parser = kinds.add_parser("latency", help="time of one batch in an engine of this process", allow_abbrev=False)
    add = parser.add_argument
    add("--input-len", type=int, default=32, metavar="N", help="tokens of a prompt (%(default)s)")
    add("--output-len", type=int, default=128, metavar="N", help="tokens of an answer (%(default)s)")
    add("--batch-size", type=int, default=8, metavar="N", help="prompts (%(default)s)")
    add("--num-iters-warmup", type=int, default=3, metavar="N", help="batches before the measured ones (%(default)s)")
    add("--num-iters", type=int, default=10, metavar="N", help="measured batches (%(default)s)")
    add_engine_flags(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Measure and print. Return the exit status. Raises InvalidField."""
    require_positive(args, "input_len", "output_len", "batch_size", "num_iters")
    shape = (args.batch_size, args.input_len, args.output_len)
    with start_engine(args) as llm:
        for number in range(args.num_iters_warmup):
            seconds_of_batch(llm, f"warm-up {number}", *shape)
        latencies = [seconds_of_batch(llm, str(number), *shape) for number in range(args.num_iters)]
    mean = sum(latencies) / len(latencies)
    print(f"{'latency of a batch s':24}mean {mean:.4f}")
    percentiles = {str(percent): percentile(latencies, percent) for percent in PERCENTS}
    for percent, value in percentiles.items():
        print(f"{'p' + percent:24}{value:.4f}")
    write(args, {"avg_latency": mean, "latencies": latencies, "percentiles": percentiles})
    return 0
