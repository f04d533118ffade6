"""``fastdeploy complete``: let a running server go on with texts."""

from __future__ import annotations

import argparse

from fastdeploy.entrypoints.cli.command import Commands, Context
from fastdeploy.entrypoints.cli.prompting import read_lines, show
from fastdeploy.entrypoints.cli.server_calls import ServerCalls, add_server_flags
from fastdeploy.entrypoints.cli.settings import SettingsParser


def add_parser(commands: Commands) -> SettingsParser:
    """Add this command."""
    parser = commands.add_parser("complete", help="let a running server go on with texts", allow_abbrev=False)
    add_server_flags(parser)
    parser.add_argument("-q", "--quick", metavar="PROMPT", help="send one prompt, print what follows and end")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="tokens of an answer (the server's default)")
    return parser


def run(args: argparse.Namespace, context: Context) -> int:
    """Send each line that is typed as a prompt of its own. Return the exit status."""
    server = ServerCalls(args.url, args.api_key, args.model_name)
    options = {} if args.max_tokens is None else {"max_tokens": args.max_tokens}
    lines = iter([args.quick]) if args.quick is not None else read_lines(server.model, "prompt")
    for line in lines:
        show(server.texts("/completions", {"prompt": line, **options}))
    return 0
