"""The command line: ``fastdeploy COMMAND``, or ``python -m fastdeploy`` with the same."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from fastdeploy.core.errors import InvalidField
from fastdeploy.core.process import VERSION
from fastdeploy.entrypoints.cli import bench, chat, check, collect_env, complete, fleet, run_batch, serve, tokenizer
from fastdeploy.entrypoints.cli.command import Command, Context
from fastdeploy.entrypoints.cli.settings import SettingsParser, named_source
from fastdeploy.entrypoints.supervisor import ENGINE_MODULE
from fastdeploy.inter_communicator.fleet_key import FLEET_KEY

COMMANDS: tuple[Command, ...] = (serve, fleet, check, bench, run_batch, chat, complete, tokenizer, collect_env)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands. The defaults of flags are those of the configs."""
    parser = argparse.ArgumentParser(prog="fastdeploy", description="An LLM serving engine for RL rollouts.")
    parser.add_argument("--version", action="version", version=VERSION)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=SettingsParser)
    for command in COMMANDS:
        own = command.add_parser(commands)
        own.set_defaults(run=command.run, parser=own)
    return parser


def main(argv: Sequence[str] | None = None, engine_module: str = ENGINE_MODULE) -> int:
    """Run the command line ``argv`` and return the exit status. engine_module: see Supervisor."""
    args = make_parser().parse_args(argv)
    try:
        status: int = args.run(args, Context(engine_module))
    except InvalidField as error:
        place = "argument --fleet-key-file" if error.field == FLEET_KEY else named_source(args, error.field)
        args.parser.error(f"{place}: {_without_flag(error)}")
    except OSError as error:
        print(f"fastdeploy: {error}", file=sys.stderr)
        return 1
    return status


def _without_flag(error: InvalidField) -> str:
    """Return the message, without the name of a setting that has a flag."""
    return error.message if error.field == FLEET_KEY else error.message.removeprefix(error.field + ": ")
