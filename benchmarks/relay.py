"""Measure weights on their way to many hosts: ``python -m benchmarks.relay [--hosts 8] [--mbit 200]``, as root.

Each host is a network namespace of this machine with one replica (``fastdeploy serve``), and has one link to a bridge.
Two gateways and the trainer have namespaces of their own. Every link carries ``--mbit`` in each direction, by a token
bucket of the kernel (tc, tbf); there is no further delay. The model has random weights.

In each round, in turn: one copy over one link; a chain of all hosts; one source sends a copy to each, all at once.
These three send a file from the gateway's namespace to files of the replicas. Then the trainer uploads the weights to
the gateway that leads, and then to the one that follows, from its first byte to the answer after the commit on all
engines. Bytes are those of the interfaces.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import httpx

from benchmarks.lib.report import plain_table
from fastdeploy.fleet.chain import GrowingFile, Hop, HostCalls, new_http
from fastdeploy.testing.checkpoints import BFLOAT16, Spec, write_checkpoint
from fastdeploy.testing.process import ServerProcess

PREFIX, BRIDGE, NETWORK = "fdrelay", "fdrelay", "10.213.77"
BURST = "256kb"  # of a token bucket: four of the largest packets that the kernel builds
READY_S = 600.0
SILENCE_S = 60.0
KEY = "FASTDEPLOY_CONTROL_KEY"  # all processes have the same one
SPEC = Spec("relay", dtype=BFLOAT16, tied=True, hidden=1024, inner=3072, heads=8, vocab=32768, max_len=512)
WAYS = {"one": "one copy over one link", "chain": "a chain of all hosts", "each": "one source sends every copy"}
UPLOADS = {
    "upload to the gateway that leads, and commit on all": "gateway",
    "upload to the gateway that follows, and commit on all": "follower",
}
WATCHED = ("trainer", "gateway", "follower", "host0")
HEADER = ("way", "s: median", "least", "most", "of one copy", "MB left: trainer", *WATCHED[1:], "load")


class Row(NamedTuple):
    """One measurement: seconds, and the megabytes that left each of WATCHED."""

    way: str
    seconds: float
    megabytes: list[float]
    load: float


class Network:
    """Namespaces with one shaped link each, by name."""

    def __init__(self, names: list[str], mbit: float):
        self.addresses = {name: f"{NETWORK}.{number}" for number, name in enumerate(names, 1)}
        _run("ip", "link", "add", BRIDGE, "type", "bridge")
        _run("ip", "addr", "add", f"{NETWORK}.254/24", "dev", BRIDGE)
        _run("ip", "link", "set", BRIDGE, "up")
        shape = ("root", "tbf", "rate", f"{mbit}mbit", "burst", BURST, "latency", "100ms")
        for number, name in enumerate(names, 1):
            inside, outside = f"{PREFIX}-{name}", f"{PREFIX}{number}"
            _run("ip", "netns", "add", inside)
            _run("ip", "link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", inside)
            _run("ip", "link", "set", outside, "master", BRIDGE, "up")
            _run("tc", "qdisc", "add", "dev", outside, *shape)
            for words in (
                ("ip", "link", "set", "lo", "up"),
                ("ip", "addr", "add", f"{self.addresses[name]}/24", "dev", "eth0"),
                ("ip", "link", "set", "eth0", "up"),
                ("tc", "qdisc", "add", "dev", "eth0", *shape),
            ):
                _run(*inside_of(name), *words)

    def sent(self, name: str) -> int:
        """Return the bytes that have left a namespace."""
        return int(_run(*inside_of(name), "cat", "/sys/class/net/eth0/statistics/tx_bytes"))


def inside_of(name: str) -> tuple[str, ...]:
    """Return the words before a command that runs in a namespace."""
    return ("ip", "netns", "exec", f"{PREFIX}-{name}")


def remove_network() -> None:
    """Remove what this program has made, also an earlier run of it."""
    for line in _run("ip", "netns", "list").splitlines():
        if (name := line.split()[0]).startswith(f"{PREFIX}-"):
            _run("ip", "netns", "del", name)
    if BRIDGE in os.listdir("/sys/class/net"):
        _run("ip", "link", "del", BRIDGE)


def _run(*words: str) -> str:
    return subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout


@contextlib.contextmanager
def network(names: list[str], mbit: float) -> Iterator[Network]:
    remove_network()
    try:
        yield Network(names, mbit)
    finally:
        remove_network()


# ---------------------------------------------------------------------- in a namespace


def bearer() -> dict[str, str]:
    return {"Authorization": f"Bearer {os.environ[KEY]}"}


async def send(way: str, urls: list[str], path: str) -> float:
    """Send a file to new files at ``urls``, and return the seconds from the first call to the last answer."""
    urls = urls[:1] if way == "one" else urls
    calls, fd = HostCalls(new_http(), bearer(), SILENCE_S), os.open(path, os.O_RDONLY)
    nbytes = os.fstat(fd).st_size
    content = GrowingFile(fd, nbytes, written=nbytes)
    began = time.monotonic()
    async with contextlib.AsyncExitStack() as files:
        reserving = [files.enter_async_context(calls.reserved(url, url, nbytes)) for url in urls]
        made = await asyncio.gather(*reserving)
        hops = [Hop(url, url, file.path) for url, file in zip(urls, made, strict=True)]
        if way == "chain":
            passed = await calls.send(content, hops[0], hops[1:])
            assert not passed.failed and not passed.untried, passed
        else:
            await asyncio.gather(*(calls.send(content, hop, ()) for hop in hops))
        return time.monotonic() - began


def upload(url: str, path: str) -> float:
    """Upload a file of weights to the gateway at ``url``, and return the seconds."""
    with open(path, "rb") as file, httpx.Client(base_url=url, timeout=READY_S, headers=bearer()) as client:
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(os.path.getsize(path))}
        began = time.monotonic()
        reply = client.post("/v1/update_weights", content=file, headers=headers)
        seconds = time.monotonic() - began
    assert reply.status_code == 200, reply.text
    assert all(entry["status"] == "done" for entry in reply.json()["result"]["replicas"]), reply.text
    return seconds


# ---------------------------------------------------------------------- all of it


class Fleet:
    """One replica in each namespace of a host, and two gateways, of which the first one leads. gateways: their URLs, by
    the names of their namespaces."""

    def __init__(self, net: Network, folder: Path, hosts: list[str], stack: contextlib.ExitStack):
        key = folder / "key"
        key.write_text(os.urandom(32).hex())
        self.model = write_checkpoint(folder / "model", SPEC)
        common = (str(self.model), "--fleet-key-file", str(key), "--shutdown-s", "5")
        engine = ("--kv-cache-gb", "0.1", "--max-num-seqs", "2", "--workers", "1")
        servers, replicas = [], []
        for name in hosts:
            uploads, address = folder / f"uploads-{name}", net.addresses[name]
            uploads.mkdir()
            endpoint = f"tcp://{address}:9000"
            place = ("--host", address, "--fleet-endpoint", endpoint, "--upload-dir", str(uploads))
            servers.append(stack.enter_context(_server(name, "serve", *common, *engine, *place)))
            replicas += ["--replica", f"{endpoint}=http://{address}:{servers[-1].port}"]
        self.urls = [f"http://{net.addresses[name]}:{s.port}" for name, s in zip(hosts, servers, strict=True)]
        self.gateways: dict[str, str] = {}
        self._servers = servers
        for name in UPLOADS.values():
            uploads, address = folder / f"uploads-{name}", net.addresses[name]
            uploads.mkdir()
            own = ("--host", address, "--upload-dir", str(uploads), "--gateway-endpoint", f"tcp://{address}:9000")
            servers.append(stack.enter_context(_server(name, "fleet", *common, *replicas, *own)))
            self.gateways[name] = f"http://{address}:{servers[-1].port}"
            self.wait_members(name, len(hosts))

    def wait_members(self, gateway: str, num: int) -> None:
        """Wait until ``num`` replicas are members of a gateway."""
        deadline, url = time.monotonic() + READY_S, f"{self.gateways[gateway]}/v1/replicas"
        while time.monotonic() < deadline:
            for server in self._servers:
                server.require_running()
            with contextlib.suppress(httpx.TransportError, KeyError):
                replicas = httpx.get(url, timeout=10, headers=bearer()).json()["replicas"]
                if sum(replica["state"] == "member" for replica in replicas) == num:
                    return
            time.sleep(0.5)
        raise TimeoutError(f"not all {num} replicas have joined; {self._servers[-1].log_end()}")


def _server(name: str, *words: str) -> ServerProcess:
    command = (*inside_of(name), sys.executable, "-m", "fastdeploy.entrypoints.cli", *words)
    return ServerProcess(command, {"FASTDEPLOY_CPU_THREADS": "1"})


def _child(name: str, *words: str) -> float:
    """Run this program in a namespace, and return the seconds that it prints."""
    return float(_run(*inside_of(name), sys.executable, "-m", "benchmarks.relay", *words))


def measure(args: argparse.Namespace) -> list[Row]:
    """Make the network and the fleet, and measure all ways in turn."""
    hosts = [f"host{i}" for i in range(args.hosts)]
    with contextlib.ExitStack() as stack:
        net = stack.enter_context(network(["trainer", *UPLOADS.values(), *hosts], args.mbit))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        fleet = Fleet(net, folder, hosts, stack)
        weights, rows = str(fleet.model / "model.safetensors"), []
        print(f"{args.hosts} hosts, {os.path.getsize(weights) / 1e6:.0f} MB, {args.mbit:g} Mbit/s", file=sys.stderr)
        for _ in range(args.rounds):
            for way in (*WAYS, *UPLOADS):
                before = [net.sent(name) for name in WATCHED]
                if way in UPLOADS:
                    seconds = _child("trainer", "--upload", weights, fleet.gateways[UPLOADS[way]])
                else:
                    seconds = _child("gateway", "--send", way, weights, *fleet.urls)
                sent = [(net.sent(name) - count) / 1e6 for name, count in zip(WATCHED, before, strict=True)]
                rows.append(Row(way, seconds, sent, os.getloadavg()[0]))
                print(json.dumps(rows[-1]), file=sys.stderr)
    return rows


def table(rows: list[Row]) -> str:
    cells, one = [], median(row.seconds for row in rows if row.way == "one")
    for way in (*WAYS, *UPLOADS):
        mine = [row for row in rows if row.way == way]
        seconds = [row.seconds for row in mine]
        middle, sent = median(seconds), [median(row.megabytes[i] for row in mine) for i in range(len(WATCHED))]
        spread = [f"{value:.2f}" for value in (middle, min(seconds), max(seconds))]
        load = max(row.load for row in mine)
        cells.append([WAYS.get(way, way), *spread, f"{middle / one:.2f}", *(f"{mb:.0f}" for mb in sent), f"{load:.1f}"])
    return plain_table(HEADER, cells)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--mbit", type=float, default=200.0, help="of each link, in each direction")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--send", nargs="+", help=argparse.SUPPRESS)  # way, file, and addresses
    parser.add_argument("--upload", nargs=2, help=argparse.SUPPRESS)  # file, and address
    args = parser.parse_args()
    if args.send or args.upload:
        way, path, *urls = args.send or ("", *args.upload)
        print(asyncio.run(send(way, urls, path)) if args.send else upload(urls[0], path))
        return 0
    signal.signal(signal.SIGTERM, _end)
    os.environ[KEY] = secrets.token_hex(16)
    print(table(measure(args)))
    return 0


def _end(*_: Any) -> None:
    raise SystemExit("ended by a signal")


if __name__ == "__main__":
    sys.exit(main())
