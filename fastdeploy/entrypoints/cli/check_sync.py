"""``fastdeploy check-sync``: are the weights that serve those of the trainer?"""

from __future__ import annotations

import argparse
import logging

import msgspec

from fastdeploy.core.weight_source import AUTO, LAYOUTS
from fastdeploy.entrypoints.cli.command import Commands, Context
from fastdeploy.entrypoints.cli.settings import SettingsParser
from fastdeploy.http.guards.keys import API_KEY, CONTROL_KEY

DEFAULT_URL = "http://127.0.0.1:8180"
STATUS = "The exit status is 0 if the weights are equal, 1 if they differ, and 2 if that could not be found out."


def add_parser(commands: Commands) -> SettingsParser:
    """Add this command."""
    text = "compare the weights that serve with those of a trainer"
    parser = commands.add_parser("check-sync", help=text, allow_abbrev=False, epilog=STATUS)
    parser.add_argument("--url", default=DEFAULT_URL, help="of the engine: ours, SGLang, vLLM, any other (%(default)s)")
    text = "the trainer's weights: safetensors, or .pdparams of Paddle"
    parser.add_argument("--model", metavar="FOLDER", required=True, help=text)
    text = "earlier weights of the trainer; repeated, the latest first"
    parser.add_argument("--previous", metavar="FOLDER", action="append", default=[], help=text)
    parser.add_argument("--base", metavar="FOLDER", help="the weights that the training began with")
    text = "keep fingerprints of the weights of each check there, and find weights that are as old as these"
    parser.add_argument("--history", metavar="FILE", help=text)
    parser.add_argument("--layout", choices=LAYOUTS, default=AUTO, help="of the weights (%(default)s)")
    parser.add_argument("--no-answers", action="store_true", help="send no prompts: compare tensors only")
    parser.add_argument("--api-key", metavar="KEY", help=f"key of the server (or {API_KEY})")
    text = f"key of the control routes (or {CONTROL_KEY}); none = the API key"
    parser.add_argument("--control-key", metavar="KEY", help=text)
    parser.add_argument("--control-url", metavar="URL", help="of the control routes, if they have a port of their own")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def run(args: argparse.Namespace, context: Context) -> int:
    """Print the report, and return its exit status."""
    from fastdeploy.rl.check_sync import check_sync  # imports Paddle

    logging.getLogger("httpx").setLevel(logging.WARNING)  # Paddle shows what others log
    report = check_sync(
        args.url,
        args.model,
        previous=args.previous,
        base=args.base,
        history=args.history,
        layout=args.layout,
        answers=not args.no_answers,
        api_key=args.api_key,
        control_key=args.control_key,
        control_url=args.control_url,
    )
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(report.as_dict()), indent=1).decode())
    else:
        print(report.text())
    return report.exit_status
