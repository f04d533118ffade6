"""What a publication sends: tensors that are whole, or payloads with their difference from the last publication."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np

from fastdeploy.core import delta_format
from fastdeploy.core.fingerprint import Fingerprint, fingerprint
from fastdeploy.rl import state_encoding
from fastdeploy.rl.deltas import Difference, Snapshot, counted, in_threads, serving_values, size_of, wire_tensor
from fastdeploy.rl.state_encoding import HostTensor
from fastdeploy.rl.tensor_names import TensorNames
from fastdeploy.rl.uploads import Part, SendOptions

Tensors = Mapping[str, HostTensor]
NamedTensors = Iterable[tuple[str, Any]] | AsyncIterable[tuple[str, Any]]
T = TypeVar("T")


class WholeTensors:
    """The tensors that are sent whole: it makes parts of them, and remembers their fingerprints.

    dtype: in which the server serves. names: of its tensors. known: fingerprints that need not be computed. keeps:
    remember the values too."""

    def __init__(self, dtype: str, names: TensorNames, known: Mapping[str, Fingerprint], keeps: bool = False):
        self._dtype = dtype
        self._names = names
        self._known = known
        self._keeps = keeps
        self._fingerprints: dict[str, Fingerprint] = {}
        self._values: dict[str, np.ndarray] = {}

    async def parts(self, groups: Iterable[Tensors] | AsyncIterable[Tensors]) -> AsyncGenerator[Part, None]:
        """Yield a part for each group of tensors. Raises InvalidField."""
        async for tensors in each_item(groups):
            if mine := self._names.counted(tensors):
                yield await asyncio.to_thread(self._part, mine)

    def _part(self, tensors: Tensors) -> Part:
        """Return a part with its fingerprints. Each tensor is in its own or in the serving dtype, if that is
        smaller."""

        def convert(name: str) -> HostTensor:
            values = serving_values(name, tensors[name], self._dtype)
            self._fingerprints[name] = self._known[name] if name in self._known else fingerprint(values)
            if self._keeps:  # a copy, as the trainer will change its tensor
                self._values[name] = values if values.flags.owndata else values.copy()
            return wire_tensor(tensors[name], values, self._dtype)

        converted = in_threads(convert, list(tensors), lambda name: size_of(tensors[name]))
        fields = {"fingerprints": {name: self._fingerprints[name].hex for name in tensors}}
        return Part(dict(zip(tensors, converted, strict=True)), fields)

    def are_all_of(self, served: str) -> bool:
        """Return whether ``served``, the fingerprint over all of a server, is that of these tensors."""
        return bool(counted(self._fingerprints, served))

    def snapshot(self, served: str) -> Snapshot:
        """Return the values that were kept, of which the server counts those that ``served`` is over. Takes them
        over."""
        return Snapshot.of(self._dtype, self._values, self._fingerprints, counted(self._fingerprints, served))


async def delta_parts(
    tensors: Tensors, difference: Difference, whole: WholeTensors, sending: SendOptions
) -> AsyncGenerator[Part, None]:
    """Yield the changed tensors that are sent whole, then the payloads of the others."""
    split_bytes = sending.split_bytes(difference.nbytes)
    changes = difference.changes
    dense = {name: tensors[name] for name, found in changes.items() if found.payload is None}
    async for part in whole.parts(state_encoding.split(dense, split_bytes)):
        yield part
    payloads = {
        name: HostTensor("U8", found.payload.shape, found.payload.data)
        for name, found in changes.items()
        if found.payload is not None
    }
    for group in state_encoding.split(payloads, split_bytes):
        fields: dict[str, Any] = {"encoding": "overwrite"}
        fields["fingerprints"] = {name: changes[name].fingerprint.hex for name in group}
        if sending.compresses:
            fields["compression"] = "zstd"
            group = await asyncio.to_thread(_compressed, group)
        yield Part(group, fields)


def split_state(tensors: Tensors, sending: SendOptions) -> Iterator[dict[str, HostTensor]]:
    """Yield the parts of a state."""
    return state_encoding.split(tensors, sending.split_bytes(sum(tensor.data.nbytes for tensor in tensors.values())))


async def split_pairs(pairs: NamedTensors, part_bytes: int) -> AsyncIterator[dict[str, HostTensor]]:
    """Yield the parts of a stream of tensors. Each tensor is copied, since the trainer may gather the next one into the
    same buffer."""
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


def _compressed(payloads: Tensors) -> dict[str, HostTensor]:
    def compress(name: str) -> HostTensor:
        frame = delta_format.compress(np.frombuffer(payloads[name].data, np.uint8))
        return HostTensor("U8", frame.shape, frame.data)

    frames = in_threads(compress, list(payloads), lambda name: payloads[name].data.nbytes)
    return dict(zip(payloads, frames, strict=True))
