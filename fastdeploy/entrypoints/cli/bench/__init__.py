"""``fastdeploy bench``: measure a server, or an engine in this process."""

from __future__ import annotations

import argparse

from fastdeploy.entrypoints.cli.bench import latency, serve, throughput
from fastdeploy.entrypoints.cli.command import Commands, Context
from fastdeploy.entrypoints.cli.settings import SettingsParser

EVAL = "lm-eval is a program of its own: lm_eval --model local-completions --model_args base_url=URL/v1/completions"


def add_parser(commands: Commands) -> SettingsParser:
    """Add this command, with a command for each kind of measurement."""
    parser = commands.add_parser("bench", help="measure a server, or an engine in this process", allow_abbrev=False)
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND", parser_class=SettingsParser)
    for kind in (serve, latency, throughput):
        own = kind.add_parser(kinds)
        own.set_defaults(measure=kind.run, bench_parser=own)
    own = kinds.add_parser("eval", help="refused: lm-eval does it", add_help=False, prefix_chars="\0")
    own.add_argument("words", nargs="*")  # all flags of FastDeploy's
    own.set_defaults(measure=None)
    return parser


def run(args: argparse.Namespace, context: Context) -> int:
    """Measure. Return the exit status: 1 if a request failed, 2 for a server that cannot be driven."""
    if args.measure is None:
        args.parser.error(f"eval is refused here: {EVAL}")
    args.parser = args.bench_parser
    status: int = args.measure(args)
    return status
