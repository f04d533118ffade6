"""A state dict on its way: which of its tensors are sent, in which chunks, and by which means."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from fastdeploy.core.errors import InvalidField
from fastdeploy.core.shared_files import SHARED_MEMORY, has_room
from fastdeploy.rl import state_encoding
from fastdeploy.rl.state_encoding import HostTensor

HERE = frozenset({"127.0.0.1", "localhost", "::1"})


Pairs = Iterable[tuple[str, Any]] | AsyncIterable[tuple[str, Any]]


@dataclass(frozen=True)
class Plan:
    """parts: what is sent, in order. digests: of the tensors, in full when all parts have been sent. is_difference:
    only what changed is sent."""

    parts: AsyncIterable[dict[str, HostTensor]]
    digests: dict[str, str]
    is_difference: bool
    via: str
    folder: str | None

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        """Arguments of a call of /v1/weights/chunk, one after the other; each is gone when the next is asked for."""
        async for part in self.parts:
            self.digests.update(
                await asyncio.to_thread(state_encoding.digests, part) if part.keys() - self.digests else {}
            )
            # What travels by another process's file is checked at the other end.
            checksums = {name: self.digests[name] for name in part}
            if self.via == "upload":
                content = await asyncio.to_thread(state_encoding.encode, part)
                yield {"content": content, "headers": {"Content-Type": "application/octet-stream"}}
            elif self.via == "shared_memory":
                with state_encoding.shared(part) as (name, nbytes):
                    yield {"json": {"shared_memory": name, "nbytes": nbytes, "checksums": checksums}}
            else:
                with tempfile.TemporaryDirectory(prefix="weights-", dir=self.folder) as folder:
                    os.chmod(folder, 0o755)
                    await asyncio.to_thread(state_encoding.write_folder, part, folder)
                    yield {"json": {"model_path": folder, "checksums": checksums}}


class StateSource:
    """Knows what this client published last, by the digest of each tensor."""

    def __init__(self) -> None:
        self._digests: dict[str, str] = {}

    async def plan(
        self,
        state: Mapping[str, Any] | Pairs,
        changed_only: bool,
        chunk_bytes: int,
        via: str,
        folder: str | None,
        urls: Sequence[str],
    ) -> Plan:
        """What to send of ``state``. changed_only: all replicas hold what was published last, so the difference is
        enough. Raises InvalidField for a way that cannot be gone."""
        if not isinstance(state, Mapping):
            way = _way(via, folder, urls, chunk_bytes)
            if changed_only or way == "folder":
                raise InvalidField("state", "a stream of tensors is sent whole, and as an upload or in shared memory")
            return Plan(_gathered(state, chunk_bytes), {}, False, way, None)
        if not state:
            raise InvalidField("state", "expected at least one tensor")
        tensors = await asyncio.to_thread(state_encoding.host_tensors, state)
        digests = await asyncio.to_thread(state_encoding.digests, tensors)
        if changed_only:
            tensors = {name: t for name, t in tensors.items() if digests[name] != self._digests.get(name)}
        nbytes = sum(t.data.nbytes for t in tensors.values())
        way = _way(via, folder, urls, min(nbytes, chunk_bytes))
        if way == "folder":  # one that holds the whole model needs a config.json, its parts do not
            chunk_bytes = min(chunk_bytes, nbytes // 2 + 1)
        return Plan(_split(tensors, chunk_bytes), digests, changed_only, way, folder)

    def published(self, plan: Plan) -> None:
        self._digests |= plan.digests

    def forget(self) -> None:
        """What the replicas hold is no longer known: the next publication is sent whole."""
        self._digests = {}


async def _split(tensors: Mapping[str, HostTensor], chunk_bytes: int) -> AsyncIterator[dict[str, HostTensor]]:
    for part in state_encoding.chunks(tensors, chunk_bytes):
        yield part


async def _gathered(pairs: Pairs, chunk_bytes: int) -> AsyncIterator[dict[str, HostTensor]]:
    """Tensors that come one by one, in groups of about ``chunk_bytes``. They are copied: the next may take the place of
    the last, as where shards are gathered into one buffer."""
    part: dict[str, HostTensor] = {}
    async for name, value in each_pair(pairs):
        tensor = state_encoding.host_tensors({name: value})[name]
        part[name] = tensor._replace(data=memoryview(bytes(tensor.data)))
        if sum(t.data.nbytes for t in part.values()) >= chunk_bytes:
            yield part
            part = {}
    if part:
        yield part


async def each_pair(pairs: Pairs) -> AsyncIterator[tuple[str, Any]]:
    """All pairs, one by one, whether their iterator is asynchronous or not."""
    if isinstance(pairs, AsyncIterable):
        async for pair in pairs:
            yield pair
    else:
        for pair in pairs:
            yield pair


def _way(via: str, folder: str | None, urls: Sequence[str], nbytes: int) -> str:
    if via not in ("auto", "upload", "shared_memory", "folder"):
        raise InvalidField("via", f"expected auto, upload, shared_memory or folder, got {via!r}")
    if via == "folder" and folder is None:
        raise InvalidField("folder", "expected a folder that all replicas can read")
    if via != "auto":
        return via
    near = all(urlsplit(url).hostname in HERE for url in urls)
    return "shared_memory" if near and has_room(SHARED_MEMORY, 2 * nbytes) else "upload"
