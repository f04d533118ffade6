"""The command line: ``fastdeploy COMMAND``, or ``python -m fastdeploy`` with the same."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from fastdeploy.core.errors import InvalidField
from fastdeploy.core.process import VERSION
from fastdeploy.entrypoints.cli.command import Command, Context
from fastdeploy.entrypoints.cli.settings import SettingsParser, named_source
from fastdeploy.entrypoints.supervisor import ENGINE_MODULE
from fastdeploy.inter_communicator.fleet_key import FLEET_KEY

COMMANDS = (
    "serve",
    "fleet",
    "roll",
    "check",
    "check-sync",
    "bench",
    "run-batch",
    "record",
    "replay",
    "chat",
    "complete",
    "tokenizer",
    "collect-env",
)


def make_parser(names: Sequence[str] = COMMANDS) -> argparse.ArgumentParser:
    """Return the parser of these commands. The defaults of flags are those of the configs."""
    parser = argparse.ArgumentParser(prog="fastdeploy", description="An LLM serving engine for RL rollouts.")
    parser.add_argument("--version", action="version", version=VERSION)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=SettingsParser)
    for name in names:
        command: Command = importlib.import_module(f"{__package__}.{name.replace('-', '_')}")
        own = command.add_parser(commands)
        own.set_defaults(run=command.run, parser=own)
    return parser


def main(argv: Sequence[str] | None = None, engine_module: str = ENGINE_MODULE) -> int:
    """Run the command line ``argv`` and return the exit status. engine_module: see Supervisor."""
    argv = sys.argv[1:] if argv is None else argv
    # The modules of the other commands would take as long again as those of a server.
    args = make_parser(argv[:1] if argv and argv[0] in COMMANDS else COMMANDS).parse_args(argv)
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
