"""``fastdeploy roll``: start every process of a fleet again, one at a time, while it serves."""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import httpx

from fastdeploy.core.errors import InvalidField
from fastdeploy.entrypoints.cli.command import Commands, Context
from fastdeploy.entrypoints.cli.server_calls import CONNECT_S, key_header, refusal
from fastdeploy.entrypoints.cli.settings import SettingsParser
from fastdeploy.http.guards.keys import CONTROL_KEY, read_keys

DEFAULT_URL = "http://127.0.0.1:8180"
LOOK_S = 0.5  # between two looks at how far it is
SILENT_S = 60.0  # a fleet that does not answer for so long is lost
ENDS = ("done", "failed")


def add_parser(commands: Commands) -> SettingsParser:
    """Add this command."""
    text = "replace every process of a fleet, one at a time, while it serves"
    parser = commands.add_parser("roll", help=text, allow_abbrev=False)
    parser.add_argument("url", nargs="?", default=DEFAULT_URL, help="of the fleet (%(default)s)")
    text = "a flag of 'fastdeploy fleet' that changes, and its new value; repeatable"
    parser.add_argument("--set", action="append", default=[], metavar="FLAG=VALUE", help=text)
    text = "seconds in which each replica may finish its requests, which then go on elsewhere (%(default)g)"
    parser.add_argument("--drain-s", type=float, default=30.0, help=text)
    text = f"file of keys, one on each line, of which the first is shown to the fleet (or {CONTROL_KEY})"
    parser.add_argument("--control-key", metavar="FILE", help=text)
    return parser


def run(args: argparse.Namespace, context: Context) -> int:
    """Begin the change, and print how far it is until it ends. Return 0 if every process has its new settings, or 1 if
    the fleet went back to the old ones. Raises InvalidField, and OSError for what the fleet refuses."""
    settings = dict(_pair(text) for text in args.set)
    keys = read_keys(None, args.control_key, os.environ)
    key = next(iter(keys.control or keys.data), b"").decode()
    with httpx.Client(base_url=args.url.rstrip("/"), headers=key_header(key), timeout=CONNECT_S) as http:
        try:
            reply = http.post("/v1/replicas/roll", json={"settings": settings, "drain_s": args.drain_s})
        except httpx.HTTPError as error:
            raise OSError(f"{args.url}: {error}") from None
        if reply.status_code != 200:
            raise OSError(refusal(reply))
        return _follow(http)


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip("-"):
        raise InvalidField("set", f"expected FLAG=VALUE, got {text!r}")
    return name.lstrip("-"), value


def _follow(http: httpx.Client) -> int:
    shown, answered = "", time.monotonic()
    while True:
        try:
            reply = http.get("/v1/replicas")
            if reply.status_code == 200:
                status, answered = reply.json(), time.monotonic()
                if (line := _line(status)) != shown:
                    print(line, flush=True)
                    shown = line
                if status["roll"]["phase"] in ENDS:
                    return 0 if status["roll"]["phase"] == "done" else 1
        except httpx.HTTPError as error:  # the process that has this connection may be the one that is replaced
            if time.monotonic() - answered > SILENT_S:
                raise OSError(f"{http.base_url}: {error}") from None
        time.sleep(LOOK_S)


def _line(status: dict[str, Any]) -> str:
    """Return one line about how far the change is."""
    roll, replicas = status["roll"], status["replicas"]
    new = sum(replica["settings"] == roll["settings"] for replica in replicas)
    line = f"{roll['phase']}: {new} of {len(replicas)} replicas have settings {roll['settings']}"
    return f"{line}, back from the new ones: {roll['why']}" if roll["why"] else line
