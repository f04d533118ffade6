"""The server of a run, as a process of its own."""

from __future__ import annotations

import os
import re
from pathlib import Path

import httpx

from examples.async_grpo.config import Settings
from fastdeploy.testing import Server, ServerFailed, serve

READY_S = 120.0
CPU_THREADS = "1"  # of the server: beside a trainer on two cores, one thread takes least CPU time per token


def served(settings: Settings, log: Path) -> Server:
    """Return a server for the run, which is ready in a ``with`` block, and ends with this process."""
    flags = ["--dtype", settings.dtype, "--max-num-seqs", str(settings.concurrency * settings.group)]
    if settings.is_mixture:
        flags.append("--enable-return-routed-experts")
    threads = {"FASTDEPLOY_CPU_THREADS": os.environ.get("FASTDEPLOY_CPU_THREADS", CPU_THREADS)}
    return serve(settings.model, *flags, environment=threads, ready_s=READY_S, log=log)


def sampled_tokens(url: str) -> int:
    """Return how many tokens the server has sampled since its start."""
    try:
        text = httpx.get(url + "/metrics", timeout=30, trust_env=False).text
    except httpx.TransportError as error:
        raise ServerFailed(f"no server answers at {url}: {error}") from error
    found = re.search(r"^fastdeploy:generation_tokens_total\S* (\S+)", text, re.MULTILINE)
    return int(float(found[1])) if found else 0
