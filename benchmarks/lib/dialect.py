"""Control routes and gauges of a server in its dialect: native (ours) or vLLM's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastdeploy.bench.client import Client, ServerError


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


class Dialect:
    """Base of the dialects. rejects: a pause can reject new requests; False: a pause always holds them. prefix: of the
    names of metrics."""

    name: str
    rejects: bool
    prefix: str

    def __init__(self, client: Client) -> None:
        self.client = client

    async def gauges(self) -> Gauges:
        values = await self.client.metrics()
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
        cards = (await self.client.get("/v1/models"))["data"]
        for card in cards:
            if wanted in (None, card["id"]):
                return card["id"], card.get("max_model_len")
        raise ServerError(f"model {wanted!r} is not served: {[card['id'] for card in cards]}")

    async def capacity(self) -> int | None:
        """Return how many sequences run at once (max_num_seqs); None if the server has no route for it."""
        raise NotImplementedError

    async def pause(self, mode: str, *, clear_cache: bool, admission: str | None = None, timeout_s: float) -> None:
        """Pause the server; return once it is quiesced."""
        raise NotImplementedError

    async def resume(self) -> None:
        raise NotImplementedError

    async def flags(self) -> Flags:
        raise NotImplementedError


class Native(Dialect):
    name, rejects, prefix = "native", True, "fastdeploy"

    async def pause(self, mode: str, *, clear_cache: bool, admission: str | None = None, timeout_s: float) -> None:
        body: dict[str, Any] = {"mode": mode, "clear_cache": clear_cache, "timeout_s": timeout_s}
        await self.client.post("/v1/pause", body | ({"admission": admission} if admission else {}), timeout_s + 30)

    async def resume(self) -> None:
        await self.client.post("/v1/resume")

    async def capacity(self) -> int | None:
        return (await self.client.get("/server_info")).get("max_num_seqs")

    async def flags(self) -> Flags:
        result = await self.client.get("/v1/is_paused")
        return Flags(result["is_paused"], result["rejecting_new_requests"])


class Vllm(Dialect):
    name, rejects, prefix = "vllm", False, "vllm"

    async def pause(self, mode: str, *, clear_cache: bool, admission: str | None = None, timeout_s: float) -> None:
        path = f"/pause?mode={mode}&clear_cache={str(clear_cache).lower()}"
        (await self.client.call("POST", path, timeout=timeout_s + 30)).checked(path)

    async def resume(self) -> None:
        (await self.client.call("POST", "/resume")).checked("/resume")

    async def capacity(self) -> int | None:
        return None

    async def flags(self) -> Flags:
        return Flags((await self.client.get("/is_paused"))["is_paused"], None)


DIALECTS: dict[str, type[Dialect]] = {"native": Native, "vllm": Vllm}
