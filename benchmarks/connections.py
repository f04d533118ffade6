"""How evenly new connections go to the processes at one port: ``python -m benchmarks.connections``.

Two ways: all processes accept from one socket ("shared"), or each has a socket of its own ("own", as in
fastdeploy/entrypoints/ports.py). A process uses 1 ms of CPU for the first request of a connection. Prints the medians
of 5 rounds: the most connections that one process got, and the fewest, as a multiple of an even share.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
import statistics
import time
from collections import Counter
from typing import Any

import uvloop

from fastdeploy.core.listener import BACKLOG, bind
from fastdeploy.entrypoints.ports import Port

PROCESSES = 2, 4
BURSTS = (64, 0.0), (512, 0.0), (256, 0.005)  # connections, seconds between two
ROUNDS, REQUEST_S = 5, 0.001


def serve(listener: socket.socket, number: int) -> None:
    """Answer each connection with the number of this process, until this process is ended."""

    class Answer(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            self.transport = transport

        def data_received(self, data: bytes) -> None:
            end = time.thread_time() + REQUEST_S
            while time.thread_time() < end:
                continue
            self.transport.write(b"%d\n" % number)

    async def run() -> None:
        await asyncio.get_running_loop().create_server(Answer, sock=listener, backlog=BACKLOG)
        await asyncio.Event().wait()

    uvloop.run(run())


async def shares(port: int, processes: int, connections: int, gap_s: float) -> tuple[float, float]:
    """Open connections, and return the largest and the smallest share of a process."""

    async def connect(after_s: float) -> tuple[int, asyncio.StreamWriter]:
        await asyncio.sleep(after_s)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"?")
        return int(await reader.readline()), writer

    answers = await asyncio.gather(*(connect(i * gap_s) for i in range(connections)))
    for _, writer in answers:
        writer.close()
    counts = Counter(number for number, _ in answers)
    even = connections / processes
    return max(counts.values()) / even, min(counts[i] for i in range(processes)) / even


def main() -> None:
    fork = multiprocessing.get_context("fork")
    for processes in PROCESSES:
        for way in ("shared", "own"):
            port = Port.open("127.0.0.1", 0, processes) if way == "own" else Port([bind("127.0.0.1", 0)])
            port.give_to(range(processes))
            servers = [
                fork.Process(target=serve, args=(port.sockets[i % len(port.sockets)], i)) for i in range(processes)
            ]
            for server in servers:
                server.start()
            for connections, gap_s in BURSTS:
                rounds = [asyncio.run(shares(port.number, processes, connections, gap_s)) for _ in range(ROUNDS)]
                most, fewest = (statistics.median(values) for values in zip(*rounds, strict=True))
                what = f"{connections} connections, {gap_s * 1000:g} ms between two"
                print(f"{processes} processes, {way}: {what}: most {most:.2f}, fewest {fewest:.2f}", flush=True)
            for server in servers:
                server.terminate()
                server.join()
            port.close()


if __name__ == "__main__":
    main()
