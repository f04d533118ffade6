"""Timed weight updates as a trainer makes them: one class per source, and vLLM's reload of a folder."""

from __future__ import annotations

import json
import os
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.lib.client import Client
from benchmarks.lib.dialect import ServerError
from benchmarks.lib.perturb import WEIGHTS

SHM = Path("/dev/shm")
CHUNK_BYTES = 128 << 20  # of one upload


@dataclass
class UpdateTimes:
    """Times of one update, in seconds. transfer: from the trainer to the server. stage: checking and packing at the
    server, while steps go on. commit: the swap of the weights. report: the server's reply to the commit."""

    transfer: float = 0.0
    stage: float = 0.0
    commit: float = 0.0
    report: dict[str, Any] = field(default_factory=dict)


class Source:
    """A way of sending new weights to the server. folder: contains one model.safetensors."""

    name: str

    def __init__(self, client: Client, folder: Path):
        self._client = client
        self._folder = folder

    async def send(self, session_id: str) -> list[dict[str, Any]]:
        """Make the chunk calls of an open session; return their results."""
        raise NotImplementedError

    async def update(self, version: str, kv: str, in_place: bool = False) -> UpdateTimes:
        """Begin a session, send the chunks, commit. Raises ServerError with the server's answer."""
        begin = await self.call("begin", {"version": version, "kv": kv, "in_place": in_place})
        sending = time.perf_counter()
        replies = await self.send(begin["session_id"])
        sent = time.perf_counter() - sending
        report = await self.call("commit", {"session_id": begin["session_id"]})
        timings = report["timings_ms"]
        staged = sum(reply["stage_ms"] for reply in replies) / 1000
        return UpdateTimes(max(sent - staged, 0.0), timings["stage"] / 1000, timings["commit"] / 1000, report)

    async def call(self, action: str, body: Any, query: str = "") -> dict[str, Any]:
        return (await self._post(f"/v1/weights/{action}{query}", body))["result"]

    async def _post(self, path: str, body: Any) -> Any:
        reply = await self._client.call("POST", path, body, timeout=600)
        if reply.status != 200:
            raise ServerError(f"{path}: HTTP {reply.status}: {str(reply.body)[:300]}")
        return reply.body


class Folder(Source):
    """The server reads the folder itself. The time to read is part of ``stage``."""

    name = "folder"

    async def send(self, session_id: str) -> list[dict[str, Any]]:
        return [await self.call("chunk", {"session_id": session_id, "model_path": str(self._folder)})]


class Upload(Source):
    """The trainer uploads safetensors chunks from its memory over HTTP."""

    name = "upload"

    def __init__(self, client: Client, folder: Path):
        super().__init__(client, folder)
        self._chunks = split_safetensors((folder / WEIGHTS).read_bytes(), CHUNK_BYTES)

    async def send(self, session_id: str) -> list[dict[str, Any]]:
        return [await self.call("chunk", chunk, f"?session_id={session_id}") for chunk in self._chunks]


class SharedMemory(Source):
    """The trainer writes a shared memory segment and sends its name. The time to write is part of ``transfer``."""

    name = "shared memory"

    def __init__(self, client: Client, folder: Path):
        super().__init__(client, folder)
        self._data = (folder / WEIGHTS).read_bytes()

    async def send(self, session_id: str) -> list[dict[str, Any]]:
        segment = SHM / f"weight-update-{uuid.uuid4().hex}"
        try:
            fd = os.open(segment, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            with os.fdopen(fd, "wb", buffering=0) as file:
                view = memoryview(self._data)
                while view:
                    view = view[file.write(view) :]
            return [await self.call("chunk", {"session_id": session_id, "shared_memory": segment.name})]
        finally:
            segment.unlink(missing_ok=True)


SOURCES: dict[str, type[Source]] = {kind.name: kind for kind in (Folder, Upload, SharedMemory)}


class VllmReload(Source):
    """vLLM's update (VLLM_SERVER_DEV_MODE=1): reload_weights by /collective_rpc, then a reset of the prefix cache. vLLM
    must be paused, since it loads into the served tensors."""

    async def update(self, version: str, kv: str, in_place: bool = False) -> UpdateTimes:
        began = time.perf_counter()
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(self._folder)}, "timeout": 600}
        await self._post("/collective_rpc", body)
        await self._post("/reset_prefix_cache", None)
        return UpdateTimes(stage=time.perf_counter() - began)


def split_safetensors(data: bytes, limit: int) -> list[bytes]:
    """Split ``data`` into complete safetensors files of at most about ``limit`` bytes each."""
    base = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:base])
    header.pop("__metadata__", None)
    pieces: list[tuple[dict[str, Any], bytearray]] = []
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        if not pieces or len(pieces[-1][1]) + end - start > limit:
            pieces.append(({}, bytearray()))
        entries, tensors = pieces[-1]
        entries[name] = {**entry, "data_offsets": [len(tensors), len(tensors) + end - start]}
        tensors += data[base + start : base + end]
    heads = [json.dumps(entries).encode() for entries, _ in pieces]
    heads = [head + b" " * (-len(head) % 8) for head in heads]
    return [len(h).to_bytes(8, "little") + h + tensors for h, (_, tensors) in zip(heads, pieces, strict=True)]
