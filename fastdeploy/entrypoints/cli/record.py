"""``fastdeploy record``: write the traffic between a trainer and an engine to a file."""

from __future__ import annotations

import argparse

from fastdeploy.entrypoints.cli.command import Commands, Context
from fastdeploy.entrypoints.cli.settings import SettingsParser
from fastdeploy.traffic.record import record

PORT = 8181


def add_parser(commands: Commands) -> SettingsParser:
    """Add this command."""
    parser = commands.add_parser("record", help="record the traffic of an engine in a file", allow_abbrev=False)
    parser.add_argument("--upstream", metavar="URL", required=True, help="the engine: http://HOST:PORT")
    parser.add_argument("--out", metavar="FILE", required=True, help="a new file")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    parser.add_argument("--port", type=int, default=PORT, help="port to listen on; 0: a free one (%(default)s)")
    text = "all: keep uploads and other data, too, which are kept as size and hash without it"
    parser.add_argument("--bodies", choices=("text", "all"), default="text", help=text)
    return parser


def run(args: argparse.Namespace, context: Context) -> int:
    """Record until a stop signal. Return the exit status."""
    return record(args.upstream, args.host, args.port, args.out, args.bodies == "all")
