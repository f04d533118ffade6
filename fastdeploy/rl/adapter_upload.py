"""The upload of an adapter: one part, or a folder that the replicas read."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fastdeploy.core.errors import InvalidField
from fastdeploy.rl import state_encoding
from fastdeploy.rl.part_calls import choose_via


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
    if via not in ("auto", "upload", "shared_memory"):
        raise InvalidField("via", f"expected auto, upload or shared_memory, got {via!r}")
    tensors = await asyncio.to_thread(state_encoding.host_tensors, adapter)
    nbytes = sum(tensor.data.nbytes for tensor in tensors.values())
    via = choose_via(via, urls, nbytes)
    try:
        encoded = json.dumps(dict(config), default=_sorted_set)
    except (TypeError, ValueError) as error:
        raise InvalidField("config", f"expected the content of an adapter_config.json: {error}") from error
    if via == "upload":
        arguments = {"upload": list(state_encoding.pieces(tensors)), "params": fields | {"config": encoded}}
        yield Upload(arguments, len(tensors), nbytes)
    else:
        async with state_encoding.shared_memory(tensors) as (name, size):
            source = {"shared_memory": name, "nbytes": size, "config": json.loads(encoded)}
            yield Upload({"json": fields | source}, len(tensors), nbytes)


def _sorted_set(value: Any) -> list[Any]:
    """Return a set as a list: PEFT's LoraConfig holds target_modules as a set."""
    if not isinstance(value, set | frozenset):
        raise TypeError(f"{type(value).__name__} is not JSON")
    return sorted(value)
