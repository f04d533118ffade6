"""``fastdeploy serve``: one engine with its API servers."""

from __future__ import annotations

import argparse

from fastdeploy.entrypoints.cli.command import Commands, Context
from fastdeploy.entrypoints.cli.flags import USAGE, add_serve_flags, announce, read_start
from fastdeploy.entrypoints.cli.settings import SettingsParser
from fastdeploy.entrypoints.supervisor import Supervisor
from fastdeploy.inter_communicator.fleet_key import require_fleet_key


def add_parser(commands: Commands) -> SettingsParser:
    """Add this command."""
    parser = commands.add_parser("serve", help="serve a model over HTTP", allow_abbrev=False, usage=USAGE)
    add_serve_flags(parser)
    parser.take_settings()
    return parser


def run(args: argparse.Namespace, context: Context) -> int:
    """Serve until a signal comes. Return the exit status. Raises InvalidField, which names a setting."""
    start = read_start(args)
    require_fleet_key(start.engine.fleet_endpoint, start.fleet_key)
    supervisor = Supervisor(start.engine, start.serve, context.engine_module, start.keys, fleet_key=start.fleet_key)
    announce(args, "supervisor", start)
    return supervisor.run()
