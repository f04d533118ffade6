"""A state dict on its way: which of its tensors are sent, in which chunks, and by which means."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fastdeploy.errors import InvalidField
from fastdeploy.rl import publish
from fastdeploy.rl.publish import HostTensor

HERE = frozenset({"127.0.0.1", "localhost", "::1"})
SHM = Path("/dev/shm")


@dataclass(frozen=True)
class Plan:
    """tensors: what is sent. digests: of all tensors given. is_difference: ``tensors`` are only those that changed."""

    tensors: dict[str, HostTensor]
    digests: dict[str, str]
    is_difference: bool
    chunk_bytes: int
    via: str
    folder: str | None

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        """Arguments of a call of /v1/weights/chunk, one after the other; each is gone when the next is asked for."""
        if self.via == "folder":
            folder = tempfile.mkdtemp(prefix="weights-", dir=self.folder)
            try:
                await asyncio.to_thread(publish.write_folder, self.tensors, folder)
                yield {"json": {"model_path": folder, "checksums": self._checksums(self.tensors)}}
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            return
        for part in publish.chunks(self.tensors, self.chunk_bytes):
            if self.via == "upload":
                content = await asyncio.to_thread(publish.encode, part)
                yield {"content": content, "headers": {"Content-Type": "application/octet-stream"}}
            else:
                with publish.shared(part) as (name, nbytes):
                    yield {"json": {"shared_memory": name, "nbytes": nbytes, "checksums": self._checksums(part)}}

    def _checksums(self, part: Mapping[str, HostTensor]) -> dict[str, str]:
        """Of what was hashed anyway: what travels by another process's file is checked at the other end."""
        return {name: self.digests[name] for name in part if name in self.digests}


class StateSource:
    """Knows what this client published last, by the digest of each tensor."""

    def __init__(self) -> None:
        self._digests: dict[str, str] = {}

    async def plan(
        self,
        state: Mapping[str, Any],
        changed_only: bool,
        chunk_bytes: int,
        via: str,
        folder: str | None,
        urls: Sequence[str],
    ) -> Plan:
        """What to send of ``state``. changed_only: all replicas hold what was published last, so the difference is
        enough. Raises InvalidField for a way that cannot be gone."""
        if not state:
            raise InvalidField("state", "expected at least one tensor")
        tensors = await asyncio.to_thread(publish.host_tensors, state)
        digests = await asyncio.to_thread(publish.digests, tensors)
        sent = tensors
        if changed_only:
            sent = {name: t for name, t in tensors.items() if digests[name] != self._digests.get(name)}
        nbytes = min(sum(t.data.nbytes for t in sent.values()), chunk_bytes)
        return Plan(sent, digests, changed_only, chunk_bytes, _way(via, folder, urls, nbytes), folder)

    def published(self, plan: Plan) -> None:
        self._digests |= plan.digests

    def forget(self) -> None:
        """What the replicas hold is no longer known: the next publication is sent whole."""
        self._digests = {}


def _way(via: str, folder: str | None, urls: Sequence[str], nbytes: int) -> str:
    if via not in ("auto", "upload", "shared_memory", "folder"):
        raise InvalidField("via", f"expected auto, upload, shared_memory or folder, got {via!r}")
    if via == "folder" and folder is None:
        raise InvalidField("folder", "expected a folder that all replicas can read")
    if via != "auto":
        return via
    near = all(urlsplit(url).hostname in HERE for url in urls)
    return "shared_memory" if near and SHM.is_dir() and shutil.disk_usage(SHM).free > 2 * nbytes else "upload"
