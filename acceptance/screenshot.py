#!/usr/bin/env python
"""Take a picture of /ui while a server works: rollouts with weights of several versions, a pause, and a hold.

    make screenshot        (or: python -m acceptance.screenshot --out docs/ui.png)

Needs Chromium and ``pip install -e ".[ui-test]"``. Takes about a minute.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.lib.roofline import Shape
from benchmarks.make_adapters import write_adapter
from fastdeploy.bench.client import Client
from fastdeploy.embedded import MODEL_DIR
from fastdeploy.testing import serve
from fastdeploy.testing.tensors import perturbed_copy

if TYPE_CHECKING:
    from playwright.sync_api import Browser

SIZE = 1280, 860
CLIENTS = 22
FLAGS = ("--max-num-seqs", "20", "--num-gpu-blocks-override", "1024")


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """Give a headless Chromium. Raises FileNotFoundError if it is not installed."""
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium")
    if path is None:
        raise FileNotFoundError("chromium is missing: apt-get install chromium")
    flags = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium's sandbox refuses root
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=flags)
        yield browser
        browser.close()


async def rollouts(client: Client, number: int) -> None:
    """Send requests of very different lengths, one after the other."""
    rng = random.Random(number)
    while True:
        await asyncio.sleep(rng.uniform(0.05, 0.6))
        body = {
            "prompt": [rng.randrange(5, 60) for _ in range(rng.randrange(8, 90))],
            "max_tokens": min(int(250 * rng.paretovariate(1.2)), 2500),
            "request_id": f"rollout-{number}-{rng.randrange(1 << 30)}",
            "model": "math" if number % 6 == 5 else None,
            "ignore_eos": True,
        }
        await client.call("POST", "/v1/completions", body)


async def publish(client: Client, folder: Path, version: str) -> None:
    """Update the weights to slightly changed ones."""
    await asyncio.to_thread(perturbed_copy, MODEL_DIR, folder / version, 0.003)
    await client.post("/v1/update_weights", {"model_path": str(folder / version), "version": version})


async def work(url: str, folder: Path, ready: threading.Event, taken: threading.Event) -> None:
    """Bring the server into the state of the picture, and keep it there until the picture is taken."""
    client = Client(url)
    clients = [asyncio.create_task(rollouts(client, number)) for number in range(CLIENTS)]
    await asyncio.sleep(14)
    await publish(client, folder, "step-41")
    await asyncio.sleep(11)
    await client.post("/v1/pause", {"mode": "keep", "hold_id": "trainer", "ttl_s": 60})
    await publish(client, folder, "step-42")
    await asyncio.sleep(3)
    await client.post("/v1/resume", {"hold_id": "trainer"})
    await asyncio.sleep(9)
    await client.post("/v1/pause", {"mode": "keep", "lora_name": "math", "hold_id": "math-trainer", "ttl_s": 120})
    await asyncio.sleep(4)
    session = (await client.post("/v1/weights/begin", {"version": "step-43"}))["session_id"]
    await client.post("/v1/weights/chunk", {"session_id": session, "model_path": str(folder / "step-42")})
    await asyncio.sleep(4)
    ready.set()
    await asyncio.to_thread(taken.wait)
    for task in clients:
        task.cancel()


def take_pictures(url: str, folder: Path, out: Path) -> None:
    """Open the page, let the server work, and save the picture in both colour schemes."""
    with chromium() as browser:
        page = browser.new_page(viewport={"width": SIZE[0], "height": SIZE[1]})
        page.goto(f"{url}/ui")
        ready, taken = threading.Event(), threading.Event()
        worker = threading.Thread(target=lambda: asyncio.run(work(url, folder, ready, taken)))
        worker.start()
        while worker.is_alive() and not ready.is_set():
            page.wait_for_timeout(200)
        page.screenshot(path=out)
        page.emulate_media(color_scheme="dark")
        page.wait_for_timeout(500)
        page.screenshot(path=out.with_stem(f"{out.stem}-dark"))
        taken.set()
        worker.join()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="PNG; the dark one gets -dark at the end of its name")
    out = parser.parse_args(argv).out
    with tempfile.TemporaryDirectory() as name, serve(None, *FLAGS, "--model-root", name) as server:
        folder = Path(name)
        write_adapter(folder / "math", Shape.of(MODEL_DIR), 8, seed=1)
        load = {"lora_name": "math", "lora_path": str(folder / "math")}
        asyncio.run(Client(server.url).post("/v1/adapters/load", load))
        take_pictures(server.url, folder, out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
