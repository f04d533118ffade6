"""The calls of /v1/weights/chunk: parts of a state as uploads, in shared memory, or in folders."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import urlencode, urlsplit

from fastdeploy.core.errors import InvalidField
from fastdeploy.core.files import SHARED_MEMORY, has_room
from fastdeploy.rl import state_encoding
from fastdeploy.rl.state_encoding import HostTensor

MAX_QUERY_BYTES = 7000  # proxies such as nginx refuse a request line of more than 8 KiB
LOOPBACK_HOSTS = frozenset({"127.0.0.1", "localhost", "::1"})


class Part(NamedTuple):
    """Tensors, or payloads of a delta, that are sent in one call. form: the fields "encoding", "compression" (if they
    are not the default) and "fingerprints" of the call."""

    tensors: Mapping[str, HostTensor]
    form: dict[str, Any]

    @property
    def nbytes(self) -> int:
        return sum(tensor.data.nbytes for tensor in self.tensors.values())


class PartCall(NamedTuple):
    """A call of /v1/weights/chunk. upload: the pieces of a safetensors file, sent as the body; None: ``fields`` name
    the source. tensors, nbytes: sent by the call, or 0 for a folder of the caller."""

    fields: dict[str, Any]
    upload: Sequence[bytes | memoryview] | None = None
    tensors: int = 0
    nbytes: int = 0

    def arguments(self, session_id: str) -> dict[str, Any]:
        """Return the keyword arguments of Replica.call."""
        fields = self.fields | {"session_id": session_id}
        if self.upload is None:
            return {"json": fields}
        query = {name: value if isinstance(value, str) else json.dumps(value) for name, value in fields.items()}
        if len(urlencode(query)) > MAX_QUERY_BYTES:  # then only the fingerprint over all is checked
            query.pop("fingerprints", None)
        return {"upload": self.upload, "params": query}


PartCalls = AsyncGenerator[PartCall, None]


@dataclass(frozen=True)
class Means:
    """The way in which parts are sent. via: auto, upload, shared_memory or folder. folder: for the last of these.
    part_bytes: of one part, unless one tensor is larger. compression of deltas: auto, none or zstd."""

    via: str
    folder: str | None
    part_bytes: int
    compression: str = "auto"

    def __post_init__(self) -> None:
        if self.via not in ("auto", "upload", "shared_memory", "folder"):
            raise InvalidField("via", f"expected auto, upload, shared_memory or folder, got {self.via!r}")
        if self.via == "folder" and self.folder is None:
            raise InvalidField("folder", "expected a folder that all replicas can read")
        if self.compression not in ("auto", "none", "zstd"):
            raise InvalidField("compression", f"expected auto, none or zstd, got {self.compression!r}")

    def compresses(self, urls: Sequence[str]) -> bool:
        """Return whether the payloads of deltas to these replicas are compressed."""
        return self.compression == "zstd" or (self.compression == "auto" and not on_this_host(urls))

    def split_bytes(self, nbytes: int) -> int:
        """Return the size of the parts of ``nbytes``. A folder with the whole model would need a config.json, so at
        least two folders are written."""
        return min(self.part_bytes, nbytes // 2 + 1) if self.via == "folder" else self.part_bytes

    async def calls(self, parts: AsyncGenerator[Part, None], urls: Sequence[str]) -> PartCalls:
        """Yield the call of each part. A part's file is deleted when the next call is asked for."""
        async with aclosing(parts):
            async for part in parts:
                async with self._call(part, urls) as call:
                    yield call

    @asynccontextmanager
    async def _call(self, part: Part, urls: Sequence[str]) -> AsyncIterator[PartCall]:
        sent = len(part.tensors), part.nbytes
        via = choose_via(self.via, urls, part.nbytes)
        if via == "upload":
            yield PartCall(part.form, list(state_encoding.pieces(part.tensors)), *sent)
        elif via == "shared_memory":
            async with state_encoding.shared_memory(part.tensors) as (name, nbytes):
                yield PartCall(part.form | {"shared_memory": name, "nbytes": nbytes}, None, *sent)
        else:
            with tempfile.TemporaryDirectory(prefix="weights-", dir=self.folder) as folder:
                os.chmod(folder, 0o755)
                await asyncio.to_thread(state_encoding.write_folder, part.tensors, folder)
                yield PartCall(part.form | {"model_path": folder}, None, *sent)


def on_this_host(urls: Sequence[str]) -> bool:
    return all(urlsplit(url).hostname in LOOPBACK_HOSTS for url in urls)


def choose_via(via: str, urls: Sequence[str], nbytes: int) -> str:
    """Return ``via``; for "auto", shared memory if all replicas are on this host and there is room, else an upload."""
    if via != "auto":
        return via
    return "shared_memory" if on_this_host(urls) and has_room(SHARED_MEMORY, 2 * nbytes) else "upload"
