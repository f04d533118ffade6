"""The cost of the recorder of `fastdeploy record`: for small calls, events of streams, and bytes of an upload.

The engine is a replay that answers at once, so the figures are those of the recorder and not of a model. Each figure is
the median of runs without and with the recorder, in turn. The CPU time is that of all threads of the recorder.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import NamedTuple

from benchmarks.lib.processes import cpu_seconds
from fastdeploy.bench.client import Client
from fastdeploy.testing import ServerProcess
from fastdeploy.traffic.file import Begin, Body, End, Head, Opening, Outcome, Piece, RecordWriter, Side

HOST = "127.0.0.1"
CALLS, ROUNDS = 500, 5
EVENTS = 256  # of a stream, as many as it has tokens
UPLOAD_BYTES = 256 << 20
EVENT = b'data: {"id":"cmpl-1","object":"text_completion","choices":[{"index":0,"text":" word","token_ids":[%d]}]}\n\n'


class Load(NamedTuple):
    """What is measured. scale: from the seconds of a run to the printed figure."""

    name: str
    scale: float
    run: Callable[[ServerProcess], None]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=8, help="at the same time (%(default)s)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_answers(f"{folder}/answers")
        command = (sys.executable, "-m", "fastdeploy")
        engine = ServerProcess((*command, "replay", f"{folder}/answers", "--speed", "0", "--loose"))
        recorder = ServerProcess((*command, "record", "--upstream", engine.url, "--out", f"{folder}/out"))
        try:
            recorder.wait_ready(60, "/health")
            measure(engine, recorder, args.streams)
        finally:
            recorder.close()
            engine.close()
    return 0


def write_answers(path: str) -> None:
    """Write the recording that plays the engine."""
    file = RecordWriter(path, Opening(version="", upstream="http://engine", began=0.0))
    json, data = ("content-type", "application/json"), ("content-type", "application/octet-stream")
    replies = {
        ("GET", "/health"): ([json], [b'{"status": "ok"}']),
        ("POST", "/v1/completions"): (
            [("content-type", "text/event-stream")],
            [*(EVENT % i for i in range(EVENTS)), b"data: [DONE]\n\n"],
        ),
        ("POST", "/upload"): ([json], [b"{}"]),
    }
    for number, ((method, target), (headers, pieces)) in enumerate(replies.items(), 1):
        file.write([Begin(number, 0.0, method, target, [data if target == "/upload" else json])])
        file.write([Body(number, 0.0, Side.REQUEST, 0, "", True), Head(number, 0.0, 200, headers)])
        file.write([Piece(number, 0.0, Side.REPLY, piece) for piece in pieces])
        size = sum(map(len, pieces))
        file.write([Body(number, 0.0, Side.REPLY, size, "", True), End(number, 0.0, Outcome.COMPLETE)])
    file.close()


def measure(engine: ServerProcess, recorder: ServerProcess, streams: int) -> None:
    """Print the table."""
    loads = (
        Load("small call (us)", 1e6 / CALLS, lambda server: make_calls(server.port)),
        Load(f"event, {streams} streams (us)", 1e6 / (streams * EVENTS),
             lambda server: asyncio.run(read_streams(server.url, streams))),
        Load("MB of an upload (us)", 1e12 / UPLOAD_BYTES, lambda server: upload(server.port)),
    )  # fmt: skip
    print(f"{'':28}{'without':>12}{'with':>12}{'CPU of the recorder':>24}")
    for load in loads:
        seconds: list[list[float]] = [[], []]
        cpu = []
        for _ in range(ROUNDS):
            for found, server in enumerate((engine, recorder)):
                cpu_before, begin = cpu_seconds([recorder.pid]), time.perf_counter()
                load.run(server)
                seconds[found].append(time.perf_counter() - begin)
            cpu.append(cpu_seconds([recorder.pid]) - cpu_before)
        figures = [statistics.median(one) * load.scale for one in (*seconds, cpu)]
        print(f"{load.name:28}{figures[0]:12.1f}{figures[1]:12.1f}{figures[2]:24.1f}", flush=True)


def make_calls(port: int) -> None:
    """Make small calls, one after the other on one connection."""
    connection = http.client.HTTPConnection(HOST, port)
    for _ in range(CALLS):
        connection.request("GET", "/health")
        connection.getresponse().read()
    connection.close()


async def read_streams(url: str, streams: int) -> None:
    client = Client(url)
    found = [await client.stream("/v1/completions", {"stream": True}) for _ in range(streams)]
    await asyncio.gather(*(stream.wait_closed() for stream in found))


def upload(port: int) -> None:
    piece = bytes(1 << 20)
    connection = http.client.HTTPConnection(HOST, port)
    headers = {"Content-Type": "application/octet-stream", "Content-Length": str(UPLOAD_BYTES)}
    connection.request("POST", "/upload", (piece for _ in range(UPLOAD_BYTES // len(piece))), headers)
    connection.getresponse().read()
    connection.close()


if __name__ == "__main__":
    sys.exit(main())
