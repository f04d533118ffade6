"""Transfer of a state dict to the replicas: which tensors are sent, in which parts, and by which means. An adapter is
sent as one part, or read by the replicas from its folder."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

from fastdeploy.core.errors import InvalidField
from fastdeploy.core.shared_files import SHARED_MEMORY, has_room
from fastdeploy.rl import state_encoding
from fastdeploy.rl.state_encoding import HostTensor

LOOPBACK_HOSTS = frozenset({"127.0.0.1", "localhost", "::1"})
NamedTensors = Iterable[tuple[str, Any]] | AsyncIterable[tuple[str, Any]]
T = TypeVar("T")


@dataclass(frozen=True)
class Transfer:
    """The tensors of one publication. parts: tensors to send, in order. digests: sha256 of each tensor, complete when
    all parts have been sent. is_difference: unchanged tensors are left out. via: upload, shared_memory or folder."""

    parts: Iterable[dict[str, HostTensor]] | AsyncIterable[dict[str, HostTensor]]
    digests: dict[str, str]
    is_difference: bool
    via: str
    folder: str | None

    async def part_calls(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the arguments of each call of /v1/weights/chunk. A part's file is deleted when the next part is asked
        for."""
        async for part in each_item(self.parts):
            if part.keys() - self.digests:
                self.digests.update(await asyncio.to_thread(state_encoding.digests, part))
            # The server checks tensors that it reads from a file.
            checksums = {name: self.digests[name] for name in part}
            if self.via == "upload":
                content = await asyncio.to_thread(state_encoding.encode, part)
                yield {"content": content, "headers": {"Content-Type": "application/octet-stream"}}
            elif self.via == "shared_memory":
                with state_encoding.shared_memory(part) as (name, nbytes):
                    yield {"json": {"shared_memory": name, "nbytes": nbytes, "checksums": checksums}}
            else:
                with tempfile.TemporaryDirectory(prefix="weights-", dir=self.folder) as folder:
                    os.chmod(folder, 0o755)
                    await asyncio.to_thread(state_encoding.write_folder, part, folder)
                    yield {"json": {"model_path": folder, "checksums": checksums}}


@dataclass(frozen=True)
class Upload:
    """An adapter on its way. arguments: of Replica.call for /v1/adapters/load. tensors, nbytes: sent to each replica; 0
    for a folder, which each replica reads."""

    arguments: dict[str, Any]
    tensors: int = 0
    nbytes: int = 0


@asynccontextmanager
async def adapter_upload(
    adapter: str | os.PathLike[str] | Mapping[str, Any],
    config: Mapping[str, Any] | None,
    fields: dict[str, Any],
    via: str,
    urls: Sequence[str],
) -> AsyncIterator[Upload]:
    """Yield the upload of a PEFT folder, or of a state dict with the ``config`` of its adapter_config.json. Shared
    memory is freed when the block ends. fields: further fields of the call. Raises InvalidField."""
    if not isinstance(adapter, Mapping):
        if config is not None:
            raise InvalidField("config", "expected only with a state dict, since a folder has its adapter_config.json")
        yield Upload({"json": fields | {"lora_path": os.fspath(adapter)}})
        return
    if config is None or not adapter:
        raise InvalidField("config", "expected a state dict with at least one tensor, and its adapter_config.json")
    if via == "folder":
        raise InvalidField("via", "expected auto, upload or shared_memory, got 'folder'")
    tensors = await asyncio.to_thread(state_encoding.host_tensors, adapter)
    nbytes = sum(tensor.data.nbytes for tensor in tensors.values())
    via = _choose_via(via, None, urls, nbytes)
    try:
        encoded = json.dumps(dict(config), default=_sorted_set)
    except (TypeError, ValueError) as error:
        raise InvalidField("config", f"expected the content of an adapter_config.json: {error}") from error
    if via == "upload":
        content = await asyncio.to_thread(state_encoding.encode, tensors)
        headers = {"Content-Type": "application/octet-stream"}
        arguments = {"content": content, "headers": headers, "params": fields | {"config": encoded}}
        yield Upload(arguments, len(tensors), nbytes)
    else:
        with state_encoding.shared_memory(tensors) as (name, size):
            source = {"shared_memory": name, "nbytes": size, "config": json.loads(encoded)}
            yield Upload({"json": fields | source}, len(tensors), nbytes)


def _sorted_set(value: Any) -> list[Any]:
    """Return a set as a list: PEFT's LoraConfig holds target_modules as a set."""
    if not isinstance(value, set | frozenset):
        raise TypeError(f"{type(value).__name__} is not JSON")
    return sorted(value)


class PublishedState:
    """Remembers the digest of each tensor of this client's last publication."""

    def __init__(self) -> None:
        self._digests: dict[str, str] = {}

    async def transfer(
        self,
        state: Mapping[str, Any] | NamedTensors,
        changed_only: bool,
        part_bytes: int,
        via: str,
        folder: str | None,
        urls: Sequence[str],
    ) -> Transfer:
        """Return the transfer of ``state``. changed_only: leave out tensors that the last publication had with the same
        bytes. Raises InvalidField for a state that cannot be sent by ``via``."""
        if not isinstance(state, Mapping):
            via = _choose_via(via, folder, urls, part_bytes)
            if changed_only or via == "folder":
                raise InvalidField("state", "a stream of tensors is sent whole, and as an upload or in shared memory")
            return Transfer(_split_stream(state, part_bytes), {}, False, via, None)
        if not state:
            raise InvalidField("state", "expected at least one tensor")
        tensors = await asyncio.to_thread(state_encoding.host_tensors, state)
        digests = await asyncio.to_thread(state_encoding.digests, tensors)
        if changed_only:
            tensors = {name: t for name, t in tensors.items() if digests[name] != self._digests.get(name)}
        nbytes = sum(t.data.nbytes for t in tensors.values())
        via = _choose_via(via, folder, urls, min(nbytes, part_bytes))
        if via == "folder":  # at least two folders: a folder with the whole model would need a config.json
            part_bytes = min(part_bytes, nbytes // 2 + 1)
        return Transfer(state_encoding.split(tensors, part_bytes), digests, changed_only, via, folder)

    def remember(self, transfer: Transfer) -> None:
        """Note that all replicas have committed ``transfer``."""
        self._digests |= transfer.digests

    def forget(self) -> None:
        """Note that the tensors on the replicas are unknown: the next publication is sent whole."""
        self._digests = {}


async def _split_stream(pairs: NamedTensors, part_bytes: int) -> AsyncIterator[dict[str, HostTensor]]:
    """Yield the tensors of a stream in parts of about ``part_bytes``. Each tensor is copied, since the trainer may
    gather the next one into the same buffer."""
    part: dict[str, HostTensor] = {}
    async for name, value in each_item(pairs):
        tensor = state_encoding.host_tensors({name: value})[name]
        part[name] = tensor._replace(data=memoryview(bytes(tensor.data)))
        if sum(t.data.nbytes for t in part.values()) >= part_bytes:
            yield part
            part = {}
    if part:
        yield part


async def each_item(items: Iterable[T] | AsyncIterable[T]) -> AsyncIterator[T]:
    """Yield all items of an iterable, asynchronous or not."""
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield item
    else:
        for item in items:
            yield item


def _choose_via(via: str, folder: str | None, urls: Sequence[str], nbytes: int) -> str:
    if via not in ("auto", "upload", "shared_memory", "folder"):
        raise InvalidField("via", f"expected auto, upload, shared_memory or folder, got {via!r}")
    if via == "folder" and folder is None:
        raise InvalidField("folder", "expected a folder that all replicas can read")
    if via != "auto":
        return via
    is_local = all(urlsplit(url).hostname in LOOPBACK_HOSTS for url in urls)
    return "shared_memory" if is_local and has_room(SHARED_MEMORY, 2 * nbytes) else "upload"
