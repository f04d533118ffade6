"""Tests that hold for every gateway in front of our servers. A module gives its gateway as the fixture ``gateway``."""

from __future__ import annotations

import contextlib
import json
import threading
from typing import Any

import httpx

from e2e.server import SMALL, Server, in_background, until
from gateways.gateway import Gateway, generation, served

LONG = 3000


def check_both_are_workers(gateway: Gateway, servers: list[Server]) -> None:
    """Both servers are listed and healthy, and both get requests."""
    assert gateway.workers == {server.url: True for server in servers}
    assert gateway.get("/health").status_code == 200
    before = [served(server) for server in servers]
    for _ in range(4):
        gateway.generate()
    assert all(served(server) > count for server, count in zip(servers, before, strict=True))


def check_generation_is_that_of_the_server(gateway: Gateway, servers: list[Server]) -> None:
    """SGLang's /generate gives the same through the gateway: complete, and as a stream."""
    through, direct = gateway.generate(20), servers[0].post("/generate", generation(20)).ok()
    assert through["output_ids"] == direct["output_ids"]
    for field in ("output_token_logprobs", "finish_reason", "weight_version"):
        assert through["meta_info"][field] == direct["meta_info"][field]
    stream = gateway.post("/generate", generation(20, stream=True)).text
    assert stream.rstrip().endswith("data: [DONE]")
    last = [line for line in stream.splitlines() if line.startswith("data: {")][-1]
    assert f'"output_ids":{direct["output_ids"]}'.replace(" ", "") in last.replace(" ", "")


def check_kept_server_stays(gateway: Gateway, servers: list[Server]) -> None:
    """A paused server stays a healthy worker, and holds the requests that come."""
    paused = servers[1]
    paused.post("/pause?mode=keep").ok()
    calls = [in_background(gateway.generate) for _ in range(2)]
    until(lambda: paused.get("/v1/loads").ok()["loads"][0]["num_waiting_reqs"] == 1, 30, "a request is held")
    until(lambda: any(call.done() for call in calls), 30, "the other request is served")
    assert gateway.workers[paused.url] and not all(call.done() for call in calls)
    paused.post("/resume").ok()
    assert all(call.result(30)["meta_info"]["finish_reason"]["type"] == "length" for call in calls)


def check_rejecting_server_is_avoided(gateway: Gateway, servers: list[Server]) -> None:
    """Requests that a paused server rejects with 503 go to the other server, and come back after the resume. If all
    reject, the client gets our 503 with its Retry-After."""
    paused = servers[1]
    rejecting = {"mode": "abort", "admission": "reject"}
    paused.post("/v1/pause", rejecting).ok()
    before = served(paused)
    for _ in range(4):
        gateway.generate()
    assert served(paused) == before and gateway.workers[paused.url]
    servers[0].post("/v1/pause", rejecting).ok()
    refused = gateway.post("/generate", generation(6))
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    for server in servers:
        server.post("/v1/resume").ok()
    until(lambda: gateway.generate() and served(paused) > before, 60, "the resumed server gets requests again")


def check_lost_and_found_server(module: str, register: Any, *more: str) -> None:
    """A server that dies breaks its stream, and is no longer asked. One that is added serves."""
    with contextlib.ExitStack() as stack:
        first, second = (stack.enter_context(Server(*SMALL)) for _ in range(2))
        gateway = stack.enter_context(Gateway(module, [first, second], *more))
        streams = [BrokenStream(gateway.url) for _ in range(2)]
        until(lambda: all(stream.tokens > 5 for stream in streams), 60, "both streams run")
        second.kill()
        until(lambda: any(stream.ended.is_set() for stream in streams), 60, "a stream ends")
        broken = next(stream for stream in streams if stream.ended.is_set())
        assert 0 < broken.tokens < LONG, "the gateway went on from the tokens"
        until(lambda: not gateway.workers[second.url], 60, "the dead server is unhealthy")
        assert gateway.generate()["meta_info"]["completion_tokens"] == 6
        third = stack.enter_context(Server(*SMALL))
        register(gateway, third)
        until(lambda: gateway.workers.get(third.url), 60, "the added server is healthy")
        until(lambda: gateway.generate() and served(third) > 0, 60, "the added server gets requests")


class BrokenStream(threading.Thread):
    """A stream of LONG tokens that the end of its server breaks. tokens: that have come. The end of a broken stream may
    look like that of a complete one: smg sends "[DONE]"."""

    def __init__(self, url: str):
        super().__init__(daemon=True)
        self._url, self.tokens = url, 0
        self.ended = threading.Event()
        self.start()

    def run(self) -> None:
        body = generation(LONG, stream=True, return_logprob=False)
        with contextlib.suppress(httpx.TransportError), self._open(body) as response:
            for line in response.iter_lines():
                if '"completion_tokens"' in line:
                    self.tokens = json.loads(line.removeprefix("data: "))["meta_info"]["completion_tokens"]
        self.ended.set()

    def _open(self, body: dict[str, Any]) -> contextlib.AbstractContextManager[httpx.Response]:
        return httpx.stream("POST", f"{self._url}/generate", json=body, timeout=60)
