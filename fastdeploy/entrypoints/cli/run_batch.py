"""``fastdeploy run-batch``: answer a file of requests in OpenAI's format of batches, by a server of its own.

Each line of the input is ``{"custom_id", "method": "POST", "url", "body"}``, and each line of the output
``{"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error"}``, in the same order.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fastdeploy.bench.client import Client, Reply, WireError
from fastdeploy.core.errors import InvalidField
from fastdeploy.entrypoints.cli.command import Commands, Context
from fastdeploy.entrypoints.cli.flags import add_serve_flags, configs
from fastdeploy.entrypoints.cli.settings import SettingsParser
from fastdeploy.http.guards.keys import read_keys

URLS = ("/v1/chat/completions", "/v1/completions")
AT_ONCE = 256  # requests; those that the engine cannot compute yet wait in it
ADDRESS = " at http://"  # in the line that a server prints when it serves
TIMEOUT_S = 86400.0


class BatchRequest(NamedTuple):
    """One line of the input."""

    custom_id: str
    url: str
    body: dict[str, Any]


def add_parser(commands: Commands) -> SettingsParser:
    """Add this command."""
    parser = commands.add_parser("run-batch", help="answer a file of requests", allow_abbrev=False)
    parser.add_argument("-i", "--input-file", metavar="FILE", help="requests, a JSON object on each line")
    parser.add_argument("-o", "--output-file", metavar="FILE", help="where the answers are written, in the same order")
    parser.add_argument("--output-tmp-dir", metavar="PATH", help=argparse.SUPPRESS)  # the output is a local file
    add_serve_flags(parser)
    parser.take_settings()
    return parser


def run(args: argparse.Namespace, context: Context) -> int:
    """Start a server, send all requests, and write the answers. Return 1 if an answer has no status 200. Raises
    InvalidField, also for a line of the input."""
    for name in ("input_file", "output_file"):
        if getattr(args, name) is None:
            raise InvalidField(name, "expected a file")
    requests = read_requests(args.input_file)
    configs(args)
    keys = read_keys(args.api_key, args.control_key, os.environ)
    headers = {"Authorization": f"Bearer {keys.data[0].decode()}"} if keys.data else {}
    command = [sys.executable, "-m", "fastdeploy", "serve", *serve_flags(args.argv), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            url = _url_of(server)
            if url is None:  # it has told why
                return server.wait() or 1
            replies = asyncio.run(_answer(Client(url, headers), requests))
        finally:
            if server.poll() is None:
                server.send_signal(signal.SIGTERM)
    lines = [json.dumps(entry(*pair), ensure_ascii=False) + "\n" for pair in zip(requests, replies, strict=True)]
    Path(args.output_file).write_text("".join(lines), encoding="utf-8")
    failed = sum(not isinstance(reply, Reply) or reply.status != 200 for reply in replies)
    print(f"{args.output_file}: {len(replies)} answers, {failed} of them failed")
    return int(failed > 0)


def serve_flags(argv: Sequence[str]) -> list[str]:
    """Return the flags of this command that ``serve`` gets."""
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("-i", "--input-file")
    own.add_argument("-o", "--output-file")
    own.add_argument("--output-tmp-dir")
    return own.parse_known_args(list(argv))[1]


def read_requests(path: str) -> list[BatchRequest]:
    """Return the requests of a file. Raises InvalidField, which names the line."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "no UTF-8"
        raise InvalidField("input_file", f"expected a local file, got {path!r}: {why}") from None
    requests = [_read(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    times = Counter(request.custom_id for request in requests)
    if twice := next((name for name, number in times.items() if number > 1), None):
        raise InvalidField("input_file", f"expected a custom_id once, got {twice!r} in several lines of {path}")
    return requests


def _read(line: str, where: str) -> BatchRequest:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise InvalidField("input_file", f"{where}: expected a JSON object: {error}") from None
    if not isinstance(found, dict) or not isinstance(found.get("custom_id"), str):
        raise InvalidField("input_file", f"{where}: expected an object with custom_id, a text")
    if found.get("method") != "POST" or found.get("url") not in URLS:
        raise InvalidField("input_file", f"{where}: expected method POST and url {' or '.join(URLS)}")
    if not isinstance(found.get("body"), dict) or found["body"].get("stream"):
        raise InvalidField("input_file", f"{where}: expected body, an object without stream")
    return BatchRequest(found["custom_id"], found["url"], found["body"])


def entry(request: BatchRequest, reply: Reply | str) -> dict[str, Any]:
    """Return a line of the output. reply: of the server, or why there is none."""
    name = f"fastdeploy-{uuid.uuid4().hex}"
    if isinstance(reply, str):
        return {"id": name, "custom_id": request.custom_id, "response": None, "error": {"message": reply}}
    answer = reply.body if isinstance(reply.body, dict) else {"text": reply.body}
    response = {"status_code": reply.status, "request_id": answer.get("id", name), "body": answer}
    error = None if reply.status == 200 else answer.get("error", answer)
    return {"id": name, "custom_id": request.custom_id, "response": response, "error": error}


async def _answer(client: Client, requests: Sequence[BatchRequest]) -> list[Reply | str]:
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(request: BatchRequest) -> Reply | str:
        async with gate:
            try:
                return await client.call("POST", request.url, request.body, TIMEOUT_S)
            except (WireError, OSError) as error:
                return str(error)

    return list(await asyncio.gather(*map(one, requests)))


def _url_of(server: subprocess.Popen[str]) -> str | None:
    """Return the address of a server when it serves; None if it ends before."""
    assert server.stdout is not None
    for line in server.stdout:
        if ADDRESS in line:
            return "http://" + line.partition(ADDRESS)[2].split(",")[0].strip()
    return None
