"""Control routes and gauges of a server in its dialect: native (ours) or vLLM's."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from benchmarks.lib.client import Client, Reply
from benchmarks.lib.http_reader import WireError


class ServerError(Exception):
    """A control call failed, or its answer breaks the contract."""


FAILURES = (ServerError, WireError, OSError, TimeoutError)  # of a server that cannot be driven


@dataclass(frozen=True)
class Flags:
    """The two flags of a pause. ``rejecting`` is None if the dialect has no such flag."""

    is_paused: bool
    rejecting: bool | None


@dataclass(frozen=True)
class Gauges:
    """Load of a server. free_blocks: None if the server does not count blocks. kv_usage: a fraction of 1, or None."""

    running: int
    waiting: int
    free_blocks: int | None
    kv_usage: float | None


def read_metrics(text: str) -> dict[str, float]:
    """Sum each metric of a Prometheus text over its labels."""
    values: dict[str, float] = {}
    for name, value in re.findall(r"^([a-zA-Z_:][\w:]*)(?:\{[^\n]*\})?[ \t]+(\S+)", text, re.MULTILINE):
        values[name] = values.get(name, 0.0) + float(value)
    return values


class Dialect:
    """Base of the dialects. rejects: a pause can reject new requests; False: a pause always holds them. prefix: of the
    names of metrics."""

    name: str
    rejects: bool
    prefix: str

    def __init__(self, client: Client) -> None:
        self.client = client

    async def gauges(self) -> Gauges:
        reply = self._checked(await self.client.call("GET", "/metrics"), "/metrics")
        values = read_metrics(reply.body)
        try:
            running = values[f"{self.prefix}:num_requests_running"]
            waiting = values[f"{self.prefix}:num_requests_waiting"]
        except KeyError as missing:
            raise ServerError(f"/metrics has no {missing}; is --dialect {self.name} right?") from None
        blocks = values.get(f"{self.prefix}:available_gpu_block_num")
        usage = values.get(f"{self.prefix}:kv_cache_usage_perc")
        return Gauges(int(running), int(waiting), None if blocks is None else int(blocks), usage)

    async def model(self, wanted: str | None) -> tuple[str, int | None]:
        """Return (name, max_model_len) of the model ``wanted``; None: of the first one listed."""
        reply = self._checked(await self.client.call("GET", "/v1/models"), "/v1/models")
        for card in reply.body["data"]:
            if wanted in (None, card["id"]):
                return card["id"], card.get("max_model_len")
        raise ServerError(f"model {wanted!r} is not served: {[card['id'] for card in reply.body['data']]}")

    async def capacity(self) -> int | None:
        """Return how many sequences run at once (max_num_seqs); None if the server has no route for it."""
        raise NotImplementedError

    async def pause(self, mode: str, *, clear_cache: bool, admission: str | None = None, timeout_s: float) -> dict:
        """Pause the server; return its report once it is quiesced ({} if the dialect has none)."""
        raise NotImplementedError

    async def resume(self) -> None:
        raise NotImplementedError

    async def flags(self) -> Flags:
        raise NotImplementedError

    def _checked(self, reply: Reply, what: str) -> Reply:
        if reply.status != 200:
            raise ServerError(f"{what}: HTTP {reply.status}: {str(reply.body)[:300]}")
        return reply


class Native(Dialect):
    name, rejects, prefix = "native", True, "fastdeploy"

    async def pause(self, mode: str, *, clear_cache: bool, admission: str | None = None, timeout_s: float) -> dict:
        body: dict[str, Any] = {"mode": mode, "clear_cache": clear_cache, "timeout_s": timeout_s}
        if admission:
            body["admission"] = admission
        return await self._envelope("POST", "/v1/pause", body, timeout_s + 30)

    async def resume(self) -> None:
        await self._envelope("POST", "/v1/resume")

    async def capacity(self) -> int | None:
        return self._checked(await self.client.call("GET", "/server_info"), "/server_info").body.get("max_num_seqs")

    async def flags(self) -> Flags:
        result = await self._envelope("GET", "/v1/is_paused")
        return Flags(result["is_paused"], result["rejecting_new_requests"])

    async def update_weights(self, model_path: str, version: str, timeout_s: float = 120.0) -> dict:
        body = {"model_path": model_path, "version": version}
        return await self._envelope("POST", "/v1/update_weights", body, timeout_s)

    async def _envelope(self, method: str, path: str, body: Any = None, timeout: float = 60.0) -> dict:
        reply = self._checked(await self.client.call(method, path, body, timeout), path)
        if not isinstance(reply.body, dict) or reply.body.get("status") != "success":
            raise ServerError(f"{path}: not a success envelope: {str(reply.body)[:300]}")
        return reply.body["result"]


class Vllm(Dialect):
    name, rejects, prefix = "vllm", False, "vllm"

    async def pause(self, mode: str, *, clear_cache: bool, admission: str | None = None, timeout_s: float) -> dict:
        path = f"/pause?mode={mode}&clear_cache={str(clear_cache).lower()}"
        reply = self._checked(await self.client.call("POST", path, timeout=timeout_s + 30), path)
        return reply.body if isinstance(reply.body, dict) else {}

    async def resume(self) -> None:
        self._checked(await self.client.call("POST", "/resume"), "/resume")

    async def capacity(self) -> int | None:
        return None

    async def flags(self) -> Flags:
        reply = self._checked(await self.client.call("GET", "/is_paused"), "/is_paused")
        return Flags(reply.body["is_paused"], None)


DIALECTS: dict[str, type[Dialect]] = {"native": Native, "vllm": Vllm}
