"""``fastdeploy chat``: talk to a running server."""

from __future__ import annotations

import argparse
from typing import Any

from fastdeploy.entrypoints.cli.command import Commands, Context
from fastdeploy.entrypoints.cli.prompting import read_lines, show
from fastdeploy.entrypoints.cli.server_calls import ServerCalls, add_server_flags
from fastdeploy.entrypoints.cli.settings import SettingsParser


def add_parser(commands: Commands) -> SettingsParser:
    """Add this command."""
    parser = commands.add_parser("chat", help="talk to a running server", allow_abbrev=False)
    add_server_flags(parser)
    parser.add_argument("--system-prompt", metavar="TEXT", help="the first message, of the role system")
    parser.add_argument("-q", "--quick", metavar="MESSAGE", help="send one message, print the answer and end")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="tokens of an answer (the server's default)")
    return parser


def run(args: argparse.Namespace, context: Context) -> int:
    """Send what is typed, with all that was said before. Return the exit status."""
    server = ServerCalls(args.url, args.api_key, args.model_name)
    messages: list[dict[str, Any]] = []
    if args.system_prompt is not None:
        messages.append({"role": "system", "content": args.system_prompt})
    options = {} if args.max_tokens is None else {"max_tokens": args.max_tokens}
    lines = iter([args.quick]) if args.quick is not None else read_lines(server.model, "message")
    for line in lines:
        messages.append({"role": "user", "content": line})
        answer = show(server.texts("/chat/completions", {"messages": messages, **options}))
        messages.append({"role": "assistant", "content": answer})
    return 0
