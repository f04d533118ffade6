"""``fastdeploy replay``: answer from a recording, and say what is different in the new run."""

from __future__ import annotations

import argparse
import math

from fastdeploy.core.errors import InvalidField
from fastdeploy.entrypoints.cli.command import Commands, Context
from fastdeploy.entrypoints.cli.record import PORT
from fastdeploy.entrypoints.cli.settings import SettingsParser
from fastdeploy.traffic.file import read_recording
from fastdeploy.traffic.replay import replay
from fastdeploy.traffic.summary import summary


def add_parser(commands: Commands) -> SettingsParser:
    """Add this command."""
    parser = commands.add_parser("replay", help="answer from a recording of `fastdeploy record`", allow_abbrev=False)
    parser.add_argument("file", metavar="FILE", help="the recording")
    parser.add_argument("--show", action="store_true", help="print what the recording has, and serve nothing")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    parser.add_argument("--port", type=int, default=PORT, help="port to listen on; 0: a free one (%(default)s)")
    text = "recorded: as fast as recorded; 2: twice as fast; 0: at once (%(default)s)"
    parser.add_argument("--speed", type=_speed, default="recorded", metavar="SPEED", help=text)
    text = "answer a request that was not recorded with the next recorded one of its route"
    parser.add_argument("--loose", action="store_true", help=text)
    text = "do not compare fields of this name, in queries and in JSON bodies at every depth; can be repeated"
    parser.add_argument("--ignore", action="append", default=[], metavar="NAME", help=text)
    return parser


def run(args: argparse.Namespace, context: Context) -> int:
    """Answer until a stop signal, and print the report. Return the exit status: 1 if the new run is different."""
    try:
        if args.show:
            print(summary(read_recording(args.file)))
            return 0
        return replay(args.file, args.host, args.port, args.speed, args.loose, frozenset(args.ignore))
    except InvalidField as error:
        message = f"FILE: {error.message.removeprefix('file: ')}"
    except OSError as error:
        message = str(error)
    args.parser.error(message)  # exits with status 2, since 1 is that of a run that is different
    return 2


def _speed(text: str) -> float:
    try:
        speed = 1.0 if text == "recorded" else float(text)
    except ValueError:
        speed = -1.0
    if not 0 <= speed < math.inf:
        raise argparse.ArgumentTypeError(f"expected recorded, or a number from 0, got {text!r}")
    return speed
