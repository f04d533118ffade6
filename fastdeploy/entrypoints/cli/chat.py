"""``fastdeploy chat``: talk to a running server."""

from __future__ import annotations

import argparse
from typing import Any

from fastdeploy.entrypoints.cli.command import Commands, Context
from fastdeploy.entrypoints.cli.prompting import add_prompt_flags, options_of, read_lines, show
from fastdeploy.entrypoints.cli.server_calls import ServerCalls, add_server_flags
from fastdeploy.entrypoints.cli.settings import SettingsParser


def add_parser(commands: Commands) -> SettingsParser:
    """Add this command."""
    parser = commands.add_parser("chat", help="talk to a running server", allow_abbrev=False)
    add_server_flags(parser)
    add_prompt_flags(parser, "message")
    parser.add_argument("--system-prompt", metavar="TEXT", help="the first message, of the role system")
    return parser


def run(args: argparse.Namespace, context: Context) -> int:
    """Send what is typed, with all that was said before. Return the exit status."""
    server = ServerCalls(args.url, args.api_key, args.model_name)
    messages: list[dict[str, Any]] = []
    if args.system_prompt is not None:
        messages.append({"role": "system", "content": args.system_prompt})
    for line in read_lines(args, server.model, "message"):
        messages.append({"role": "user", "content": line})
        answer = show(server.texts("/chat/completions", {"messages": messages, **options_of(args)}))
        messages.append({"role": "assistant", "content": answer})
    return 0
