"""``fastdeploy bench throughput``: tokens in a second of an engine in this process, with all requests at once."""

from __future__ import annotations

import argparse

from fastdeploy.core.errors import InvalidField
from fastdeploy.entrypoints.cli.bench.checks import require_positive
from fastdeploy.entrypoints.cli.bench.offline import (
    add_engine_flags,
    seconds_of_batch,
    start_engine,
    write,
)
from fastdeploy.entrypoints.cli.command import Commands
from fastdeploy.entrypoints.cli.settings import SettingsParser


def add_parser(kinds: Commands) -> SettingsParser:
    """Add this kind of measurement."""
    parser = kinds.add_parser("throughput", help="tokens/s of an engine in this process", allow_abbrev=False)
    add = parser.add_argument
    add("--backend", choices=("fastdeploy", "fastdeploy-chat"), help=argparse.SUPPRESS)  # no chat in random ids
    add("--dataset-name", default="random", help="random alone; `bench serve` takes files")
    add("--dataset-path", metavar="FILE", help="refused; `bench serve` takes files")
    add("--num-prompts", type=int, default=50, metavar="N", help="(%(default)s)")
    add("--input-len", type=int, default=32, metavar="N", help="tokens of a prompt (%(default)s)")
    add("--output-len", type=int, default=64, metavar="N", help="tokens of an answer (%(default)s)")
    add("--n", type=int, default=1, metavar="N", help="answers for each prompt (%(default)s)")
    add_engine_flags(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Measure and print. Return the exit status. Raises InvalidField."""
    if args.dataset_name != "random":
        raise InvalidField("dataset_name", f"expected random, got {args.dataset_name!r}; `bench serve` takes files")
    if args.dataset_path is not None:
        raise InvalidField("dataset_path", "prompts are random here; `bench serve` takes files")
    require_positive(args, "num_prompts", "input_len", "output_len", "n")
    shape = (args.num_prompts, args.input_len, args.output_len, args.n)
    with start_engine(args) as llm:
        seconds_of_batch(llm, "warm-up", min(args.num_prompts, 8), args.input_len, 8)
        seconds = seconds_of_batch(llm, "0", *shape)
    tokens_in, tokens_out = args.num_prompts * args.input_len, args.num_prompts * args.n * args.output_len
    figures = {
        "elapsed_time": seconds,
        "num_requests": args.num_prompts,
        "requests_per_second": args.num_prompts / seconds,
        "total_num_tokens": tokens_in + tokens_out,
        "tokens_per_second": (tokens_in + tokens_out) / seconds,
        "output_tokens_per_second": tokens_out / seconds,
    }
    for name, value in figures.items():
        print(f"{name.replace('_', ' '):28}{value:.2f}" if isinstance(value, float) else f"{name:28}{value}")
    write(args, figures)
    return 0
