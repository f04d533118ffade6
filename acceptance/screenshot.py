#!/usr/bin/env python
"""Take a picture of /ui while a server works: rollouts with weights of several versions, a pause, and a hold.

    make screenshot        (or: python -m acceptance.screenshot --out docs/ui.png)

Needs Chromium and ``pip install -e ".[ui-test]"``. Takes about a minute.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx

from acceptance.lib.chromium import chromium
from benchmarks.lib.perturb import perturbed_copy
from benchmarks.lib.roofline import Shape
from benchmarks.lib.server import ServerProcess
from benchmarks.make_adapters import write_adapter
from fastdeploy.embedded import MODEL_DIR

SIZE = 1280, 860
CLIENTS = 22
FLAGS = ("--max-num-seqs", "20", "--num-gpu-blocks-override", "1024")


class Rollouts:
    """Clients that send requests of very different lengths, one after the other."""

    def __init__(self, url: str):
        self._url = url
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(i,), daemon=True) for i in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def _run(self, client: int) -> None:
        rng = random.Random(client)
        model = "math" if client % 6 == 5 else None
        with httpx.Client(base_url=self._url, timeout=120) as http:
            for number in range(10_000):
                if self._ended.wait(rng.uniform(0.05, 0.6)):
                    return
                body = {
                    "prompt": [rng.randrange(5, 60) for _ in range(rng.randrange(8, 90))],
                    "max_tokens": min(int(250 * rng.paretovariate(1.2)), 2500),
                    "request_id": f"rollout-{client}-{number}",
                    "model": model,
                    "ignore_eos": True,
                }
                http.post("/v1/completions", json=body)

    def end(self) -> None:
        self._ended.set()


def publish(http: httpx.Client, folder: Path, version: str) -> None:
    """Update the weights to slightly changed ones."""
    target = folder / version
    perturbed_copy(MODEL_DIR, target, 0.003)
    http.post("/v1/update_weights", json={"model_path": str(target), "version": version}).raise_for_status()


def work(url: str, folder: Path) -> None:
    """Bring the server into the state of the picture."""
    with httpx.Client(base_url=url, timeout=120) as http:

        def post(path: str, **body: Any) -> None:
            http.post(path, json=body).raise_for_status()

        time.sleep(14)
        publish(http, folder, "step-41")
        time.sleep(11)
        post("/v1/pause", mode="keep", hold_id="trainer", ttl_s=60)
        publish(http, folder, "step-42")
        time.sleep(3)
        post("/v1/resume", hold_id="trainer")
        time.sleep(9)
        post("/v1/pause", mode="keep", lora_name="math", hold_id="math-trainer", ttl_s=120)
        time.sleep(4)
        session = http.post("/v1/weights/begin", json={"version": "step-43"}).json()["result"]["session_id"]
        post("/v1/weights/chunk", session_id=session, model_path=str(folder / "step-42"))
        time.sleep(4)


def take_pictures(url: str, folder: Path, out: Path) -> None:
    """Open the page, let the server work, and save the picture in both colour schemes."""
    with chromium() as browser:
        page = browser.new_page(viewport={"width": SIZE[0], "height": SIZE[1]})
        page.goto(f"{url}/ui")
        rollouts = Rollouts(url)
        work(url, folder)
        page.screenshot(path=out)
        page.emulate_media(color_scheme="dark")
        page.wait_for_timeout(500)
        page.screenshot(path=out.with_stem(f"{out.stem}-dark"))
        rollouts.end()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="PNG; the dark one gets -dark at the end of its name")
    out = parser.parse_args(argv).out
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_adapter(folder / "math", Shape.of(MODEL_DIR), 8, seed=1)
        command = [sys.executable, "-m", "fastdeploy.entrypoints.cli", "serve", "--model-root", name, *FLAGS]
        server = ServerProcess(command, folder)
        try:
            asyncio.run(server.wait_ready(120))
            load = {"lora_name": "math", "lora_path": str(folder / "math")}
            httpx.post(f"{server.url}/v1/adapters/load", json=load, timeout=60).raise_for_status()
            take_pictures(server.url, folder, out)
        finally:
            server.stop(30)
    return 0


if __name__ == "__main__":
    sys.exit(main())
