"""The server of a run, as a process of its own."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from examples.async_grpo.config import Settings

READY_S, STOP_S = 120.0, 20.0
CPU_THREADS = "1"  # of the server: beside a trainer on two cores, one thread takes least CPU time per token
PR_SET_PDEATHSIG = 1  # of prctl(2): the signal that a process gets when its parent dies


class ServerFailed(Exception):
    """The server did not become ready, or does not answer."""


@contextlib.contextmanager
def served(settings: Settings, log: Path) -> Iterator[str]:
    """Start ``fastdeploy serve`` on a free port, yield its URL when it is ready, and stop it at the end. The server
    stops also when this process is killed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url, libc = f"http://127.0.0.1:{port}", ctypes.CDLL(None)
    seats = settings.concurrency * settings.group
    command = [sys.executable, "-m", "fastdeploy.entrypoints.cli", "serve", "--model", settings.model]
    command += ["--dtype", settings.dtype, "--port", str(port), "--max-num-seqs", str(seats)]
    if settings.is_mixture:
        command.append("--enable-return-routed-experts")
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=file, env={"FASTDEPLOY_CPU_THREADS": CPU_THREADS} | os.environ,
            start_new_session=True, preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGINT),
        )  # fmt: skip
    try:
        deadline = time.monotonic() + READY_S
        while not _is_ready(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise ServerFailed(f"the server did not become ready; see {log}")
            time.sleep(0.1)
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()


def _is_ready(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(url + "/ready", timeout=5, trust_env=False).status_code == 200
    return False


def sampled_tokens(url: str) -> int:
    """Return how many tokens the server has sampled since its start."""
    try:
        text = httpx.get(url + "/metrics", timeout=30, trust_env=False).text
    except httpx.TransportError as error:
        raise ServerFailed(f"no server answers at {url}: {error}") from error
    found = re.search(r"^fastdeploy:generation_tokens_total\S* (\S+)", text, re.MULTILINE)
    return int(float(found[1])) if found else 0
