"""``fastdeploy serve``: one engine with its API servers."""

from __future__ import annotations

import argparse
import os

from fastdeploy.core.process import setup_logging
from fastdeploy.entrypoints.cli.command import Commands, Context
from fastdeploy.entrypoints.cli.fastdeploy_variables import take_variables
from fastdeploy.entrypoints.cli.flags import (
    USAGE,
    add_serve_flags,
    configs,
    log_without_effect,
    put_fleet_key,
    warn_if_exposed,
)
from fastdeploy.entrypoints.cli.settings import SettingsParser
from fastdeploy.entrypoints.supervisor import Supervisor
from fastdeploy.http.guards.keys import read_keys
from fastdeploy.inter_communicator.fleet_key import pop_fleet_key, require_fleet_key


def add_parser(commands: Commands) -> SettingsParser:
    """Add this command."""
    parser = commands.add_parser("serve", help="serve a model over HTTP", allow_abbrev=False, usage=USAGE)
    add_serve_flags(parser)
    parser.take_settings()
    return parser


def run(args: argparse.Namespace, context: Context) -> int:
    """Serve until a signal comes. Return the exit status. Raises InvalidField, which names a setting."""
    ignored = take_variables(os.environ)
    engine, serve = configs(args)
    keys = read_keys(args.api_key, args.control_key, os.environ)
    put_fleet_key(args.fleet_key_file, os.environ)
    fleet_key = pop_fleet_key(os.environ)
    require_fleet_key(engine.fleet_endpoint, fleet_key)
    supervisor = Supervisor(engine, serve, context.engine_module, keys, fleet_key=fleet_key)
    setup_logging("supervisor")
    warn_if_exposed(serve, keys)
    log_without_effect(args, ignored)
    return supervisor.run()
