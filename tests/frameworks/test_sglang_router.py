"""A real sglang-router (from PyPI) in front of one of our servers, as in slime."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from e2e.server import PROMPT, free_port, in_background, until
from frameworks.conftest import PYTHON

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def router(live) -> Iterator[str]:
    """Return the address of a router. Our server joins the router as slime registers an engine."""
    port, metrics = free_port(), free_port()
    command = [PYTHON, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port),
               "--prometheus-port", str(metrics)]  # fmt: skip
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            url = f"http://127.0.0.1:{port}"
            until(lambda: answered(f"{url}/workers"), 60, "the router answers")
            call(f"{url}/workers", {"url": live.url, "worker_type": "regular"})
            until(lambda: registered(url) == [live.url], 60, "our server is a healthy worker")
            yield url
        finally:
            process.terminate()
            process.wait(30)


def call(url: str, body: Any = None) -> Any:
    return httpx.request("GET" if body is None else "POST", url, json=body, timeout=60).raise_for_status().json()


def answered(url: str) -> bool:
    try:
        return bool(call(url))
    except httpx.HTTPError:
        return False


def registered(url: str) -> list[str]:
    return [worker["url"] for worker in call(f"{url}/workers")["workers"] if worker["is_healthy"]]


def generate(url: str, tokens: int) -> Any:
    """Generate without custom_params, which this router drops; slime has a build of the router that forwards it."""
    sampling = {"max_new_tokens": tokens, "temperature": 1.0, "top_p": 0.9, "sampling_seed": 5, "ignore_eos": True}
    return call(f"{url}/generate", {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True})


def test_a_generation_through_the_router_is_that_of_the_server(router, live):
    through, direct = generate(router, 20), generate(live.url, 20)
    assert through["output_ids"] == direct["output_ids"]
    for field in ("output_token_logprobs", "finish_reason", "weight_version"):
        assert through["meta_info"][field] == direct["meta_info"][field]


def test_a_paused_server_stays_in_the_router_and_holds_new_requests(router, live):
    live.post("/pause_generation").ok()
    waiting = in_background(generate, router, 5)
    until(lambda: live.get("/v1/loads").ok()["loads"][0]["num_waiting_reqs"] == 1, 30, "the request is held")
    assert registered(router) == [live.url] and not waiting.done()
    live.post("/continue_generation").ok()
    assert waiting.result(30)["meta_info"]["finish_reason"] == {"type": "length", "length": 5}
