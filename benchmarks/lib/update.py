"""Timed weight updates as a trainer makes them: whole, by three sources, and as deltas. Also vLLM's reload."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

from benchmarks.lib.checkpoint import Checkpoint, Flips
from fastdeploy.bench.client import Client, ServerError

UPLOAD_PART_BYTES = 256 << 20  # the default of RolloutClient.publish


@dataclass
class UpdateTimes:
    """Times of one update, in seconds. transfer: from the trainer to the server. stage: checking and packing at the
    server, while steps go on. commit: the swap of the weights. nbytes: sent, or read by the server. report: the
    server's reply to the commit."""

    transfer: float = 0.0
    stage: float = 0.0
    commit: float = 0.0
    nbytes: int = 0
    report: dict[str, Any] = field(default_factory=dict)


class Source:
    """A way of sending new weights to the server. ``checkpoints`` are sent in turn, so that each update changes the
    weights."""

    name: str

    def __init__(self, client: Client, checkpoints: Sequence[Checkpoint]):
        self._client = client
        self._checkpoints = checkpoints
        self._sent = 0

    async def prepare(self) -> None:
        """Bring the server to the weights that the next update starts from. Not measured."""

    async def update(self, version: str, kv: str) -> UpdateTimes:
        """Begin a session, send the weights, commit. Raises ServerError with the server's answer."""
        checkpoint = self._next
        self._sent += 1
        return await self._session({"version": version, "kv": kv}, checkpoint)

    @property
    def _next(self) -> Checkpoint:
        """The checkpoint of the next update."""
        return self._checkpoints[(self._sent + 1) % len(self._checkpoints)]

    async def _session(self, options: dict[str, Any], checkpoint: Checkpoint) -> UpdateTimes:
        begin = await self.call("begin", options)
        sending = time.perf_counter()
        reply = await self.send(begin["session_id"], checkpoint)
        sent = time.perf_counter() - sending
        report = await self.call("commit", {"session_id": begin["session_id"]})
        timings = report["timings_ms"]
        transfer = max(sent - reply["stage_ms"] / 1000, 0.0)
        return UpdateTimes(transfer, timings["stage"] / 1000, timings["commit"] / 1000, reply["nbytes"], report)

    async def send(self, session_id: str, checkpoint: Checkpoint) -> dict[str, Any]:
        """Make the chunk calls of an open session; return the sums of their ``stage_ms`` and ``nbytes``."""
        raise NotImplementedError

    async def upload(self, pieces: Sequence[bytes | memoryview], query: dict[str, Any]) -> dict[str, Any]:
        """Make a chunk call with a body, on a thread and a connection of its own."""
        path = f"/v1/weights/chunk?{urlencode(query)}"
        status, body = await asyncio.to_thread(self._client.upload, path, pieces)
        if status != 200:
            raise ServerError(f"{path}: HTTP {status}: {str(body)[:300]}")
        return body["result"]

    async def call(self, action: str, body: Any) -> dict[str, Any]:
        found: dict[str, Any] = await self._client.post(f"/v1/weights/{action}", body)
        return found


class Folder(Source):
    """The server reads the folder itself, from the page cache: a trainer has just written it. The time to read is part
    of ``stage``."""

    name = "folder"

    async def prepare(self) -> None:
        """Read the folder: some systems take back pages of files that nobody maps, even with free memory."""
        await asyncio.to_thread(self._next.read_file)

    async def send(self, session_id: str, checkpoint: Checkpoint) -> dict[str, Any]:
        return await self.call("chunk", {"session_id": session_id, "model_path": str(checkpoint.folder)})


class FolderOnDisk(Folder):
    """The server reads the folder from the disk."""

    name = "folder, on disk"

    async def prepare(self) -> None:
        """Remove the folder from the page cache."""
        await asyncio.to_thread(self._next.drop_file)


class OneSet(Folder):
    """The server gives its weights up before it reads the folder, so it needs memory for one set of weights."""

    name = "folder, one set"

    async def update(self, version: str, kv: str) -> UpdateTimes:
        await self._client.post("/v1/sleep", {"tags": ["weight"], "discard": True, "mode": "keep"})
        await self._client.post("/v1/wakeup", {"tags": ["weight"]})
        return await super().update(version, kv)


class Upload(Source):
    """The trainer uploads the file from its memory over HTTP, in parts as ``RolloutClient`` does."""

    name = "upload"

    async def send(self, session_id: str, checkpoint: Checkpoint) -> dict[str, Any]:
        replies = [await self.upload(part, {"session_id": session_id}) for part in checkpoint.parts(UPLOAD_PART_BYTES)]
        return {name: sum(reply[name] for reply in replies) for name in ("stage_ms", "nbytes")}


class SharedMemory(Source):
    """The trainer has its weights in a shared memory segment, and sends its name."""

    name = "shared memory"

    async def send(self, session_id: str, checkpoint: Checkpoint) -> dict[str, Any]:
        with checkpoint.segment() as name:
            return await self.call("chunk", {"session_id": session_id, "shared_memory": name})


class Delta(Source):
    """The trainer uploads the values that changed since its last publication: a share of all values, at random places.
    Each update flips the lowest bit of the same values, so two updates give the first weights again."""

    def __init__(self, client: Client, checkpoints: Sequence[Checkpoint], share: float, compression: str):
        super().__init__(client, checkpoints)
        self.name = f"delta {share:.0%}" + (f", {compression}" if compression != "none" else "")
        self._flips = Flips(checkpoints[0], share, compression)
        self._compression = compression

    async def prepare(self) -> None:
        """Publish the whole base, unless the server has it or the other state of this delta already."""
        serves = (await self._client.get("/v1/weights"))["fingerprint"]
        if serves not in self._flips.fingerprints:
            body = {"model_path": str(self._checkpoints[0].folder)}
            serves = (await self._client.post("/v1/update_weights", body))["fingerprint"]
        self._sent = self._flips.fingerprints.index(serves)

    async def update(self, version: str, kv: str) -> UpdateTimes:
        base, self._sent = self._sent % 2, self._sent + 1
        options = {
            "version": version,
            "kv": kv,
            "base_fingerprint": self._flips.fingerprints[base],
            "fingerprint": self._flips.fingerprints[1 - base],
        }
        times = await self._session(options, self._checkpoints[0])
        times.nbytes = len(self._flips.frames[base])
        return times

    async def send(self, session_id: str, checkpoint: Checkpoint) -> dict[str, Any]:
        query = {"session_id": session_id, "encoding": "overwrite", "compression": self._compression}
        return await self.upload([self._flips.frames[(self._sent - 1) % 2]], query)


class VllmReload(Folder):
    """vLLM's update (VLLM_SERVER_DEV_MODE=1): reload_weights by /collective_rpc, then a reset of the prefix cache. vLLM
    must be paused, since it loads into the served tensors."""

    async def update(self, version: str, kv: str) -> UpdateTimes:
        checkpoint = self._next
        self._sent += 1
        began = time.perf_counter()
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(checkpoint.folder)}, "timeout": 600}
        await self._client.post("/collective_rpc", body)
        await self._client.post("/reset_prefix_cache", None)
        return UpdateTimes(stage=time.perf_counter() - began, nbytes=checkpoint.nbytes)
