"""How tensors go to the server: as the body of a call, in shared memory, or in a folder."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args
from urllib.parse import urlencode

from fastdeploy.core.errors import InvalidField
from fastdeploy.core.files import SHARED_MEMORY, has_room
from fastdeploy.rl import state_encoding
from fastdeploy.rl.state_encoding import HostTensor

MAX_QUERY_BYTES = 7000  # proxies such as nginx refuse a request line of more than 8 KiB


class Part(NamedTuple):
    """Tensors, or payloads of a delta, that are sent in one call. fields: of the call, beside those that say where the
    tensors are. For a part of an update: "encoding", "compression" (if not the default) and "fingerprints"."""

    tensors: Mapping[str, HostTensor]
    fields: dict[str, Any]

    @property
    def nbytes(self) -> int:
        return sum(tensor.data.nbytes for tensor in self.tensors.values())


class PartCall(NamedTuple):
    """A call of /v1/weights/chunk or /v1/adapters/load. upload: the pieces of a safetensors file, sent as the body;
    None: ``fields`` name the source. tensors, nbytes: sent by the call, or 0 for a folder of the caller."""

    fields: dict[str, Any]
    upload: Sequence[bytes | memoryview] | None = None
    tensors: int = 0
    nbytes: int = 0

    def arguments(self, **fields: Any) -> dict[str, Any]:
        """Return the keyword arguments of Connection.call. fields: further ones of the call."""
        fields = self.fields | fields
        if self.upload is None:
            return {"json": fields}
        query = {name: value if isinstance(value, str) else json.dumps(value) for name, value in fields.items()}
        if len(urlencode(query)) > MAX_QUERY_BYTES:  # then only the fingerprint over all is checked
            query.pop("fingerprints", None)
        return {"upload": self.upload, "params": query}


PartCalls = AsyncGenerator[PartCall, None]


# How tensors reach the server; auto: shared memory, if the server is on this host and there is room, else an upload.
MemoryVia = Literal["auto", "upload", "shared_memory"]
Via = Literal[MemoryVia, "folder"]


@dataclass(frozen=True)
class SendOptions:
    """Options of sending tensors. is_local: the server is on this host.
    folder: where the folder of each part is made, for via "folder". part_bytes: limit of one part, unless one tensor is
    larger. compression: of deltas, which is auto, none or zstd."""

    is_local: bool
    via: Via
    folder: str | None = None
    part_bytes: int = 0
    compression: str = "auto"

    def __post_init__(self) -> None:
        if self.via not in get_args(Via):
            raise InvalidField("via", f"expected one of {', '.join(get_args(Via))}, got {self.via!r}")
        if self.via == "folder" and self.folder is None:
            raise InvalidField("folder", "expected a folder that the server can read")
        if self.compression not in ("auto", "none", "zstd"):
            raise InvalidField("compression", f"expected auto, none or zstd, got {self.compression!r}")

    @property
    def compresses(self) -> bool:
        """Whether the payloads of deltas are compressed."""
        return self.compression == "zstd" or (self.compression == "auto" and not self.is_local)

    def split_bytes(self, nbytes: int) -> int:
        """Return the size of the parts of ``nbytes``. A folder with the whole model would need a config.json, so at
        least two folders are written."""
        return min(self.part_bytes, nbytes // 2 + 1) if self.via == "folder" else self.part_bytes

    async def calls(self, parts: AsyncGenerator[Part, None]) -> PartCalls:
        """Yield the call of each part. A part's file is deleted when the next call is asked for."""
        async with aclosing(parts):
            async for part in parts:
                async with self.call(part) as call:
                    yield call

    @asynccontextmanager
    async def call(self, part: Part) -> AsyncIterator[PartCall]:
        """Yield the call of one part, whose file is deleted when the block ends."""
        sent = len(part.tensors), part.nbytes
        via = self._choose_via(part.nbytes)
        if via == "upload":
            yield PartCall(part.fields, list(state_encoding.pieces(part.tensors)), *sent)
        elif via == "shared_memory":
            async with state_encoding.shared_memory(part.tensors) as (name, nbytes):
                yield PartCall(part.fields | {"shared_memory": name, "nbytes": nbytes}, None, *sent)
        else:
            with tempfile.TemporaryDirectory(prefix="weights-", dir=self.folder) as folder:
                os.chmod(folder, 0o755)
                await asyncio.to_thread(state_encoding.write_folder, part.tensors, folder)
                yield PartCall(part.fields | {"model_path": folder}, None, *sent)

    def _choose_via(self, nbytes: int) -> str:
        """Return ``via``; for "auto", shared memory if the server is on this host and there is room, else an upload."""
        if self.via != "auto":
            return self.via
        return "shared_memory" if self.is_local and has_room(SHARED_MEMORY, 2 * nbytes) else "upload"


@asynccontextmanager
async def adapter_call(
    adapter: str | os.PathLike[str] | Mapping[str, Any],
    config: Mapping[str, Any] | None,
    fields: dict[str, Any],
    via: MemoryVia,
    is_local: bool,
) -> AsyncIterator[PartCall]:
    """Yield the call of a PEFT folder, or of a state dict with the ``config`` of its adapter_config.json. Shared memory
    is freed when the block ends. fields: further fields of the call. Raises InvalidField."""
    if not isinstance(adapter, Mapping):
        if config is not None:
            raise InvalidField("config", "expected only with a state dict, since a folder has its adapter_config.json")
        yield PartCall(fields | {"lora_path": os.fspath(adapter)})
        return
    if config is None or not adapter:
        raise InvalidField("config", "expected a state dict with at least one tensor, and its adapter_config.json")
    if via not in get_args(MemoryVia):
        raise InvalidField("via", f"expected one of {', '.join(get_args(MemoryVia))}, got {via!r}")
    tensors = await asyncio.to_thread(state_encoding.host_tensors, adapter)
    try:
        plain = json.loads(json.dumps(dict(config), default=_sorted_set))
    except (TypeError, ValueError) as error:
        raise InvalidField("config", f"expected the content of an adapter_config.json: {error}") from error
    async with SendOptions(is_local, via).call(Part(tensors, fields | {"config": plain})) as call:
        yield call


def _sorted_set(value: Any) -> list[Any]:
    """Return a set as a list: PEFT's LoraConfig holds target_modules as a set."""
    if not isinstance(value, set | frozenset):
        raise TypeError(f"{type(value).__name__} is not JSON")
    return sorted(value)
