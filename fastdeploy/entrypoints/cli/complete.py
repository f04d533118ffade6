"""``fastdeploy complete``: let a running server go on with texts."""

from __future__ import annotations

import argparse

from fastdeploy.entrypoints.cli.command import Commands, Context
from fastdeploy.entrypoints.cli.prompting import add_prompt_flags, options_of, read_lines, show
from fastdeploy.entrypoints.cli.server_calls import ServerCalls, add_server_flags
from fastdeploy.entrypoints.cli.settings import SettingsParser


def add_parser(commands: Commands) -> SettingsParser:
    """Add this command."""
    parser = commands.add_parser("complete", help="let a running server go on with texts", allow_abbrev=False)
    add_server_flags(parser)
    add_prompt_flags(parser, "prompt")
    return parser


def run(args: argparse.Namespace, context: Context) -> int:
    """Send each line that is typed as a prompt of its own. Return the exit status."""
    server = ServerCalls(args.url, args.api_key, args.model_name)
    for line in read_lines(args, server.model, "prompt"):
        show(server.texts("/completions", {"prompt": line, **options_of(args)}))
    return 0
