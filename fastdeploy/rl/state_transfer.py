"""Choice of what a publication sends to each replica: the whole state, or its difference from the last publication."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from fastdeploy.core import delta_format
from fastdeploy.core.errors import InvalidField
from fastdeploy.core.fingerprint import Fingerprint, fingerprint
from fastdeploy.rl import state_encoding
from fastdeploy.rl.deltas import (
    Difference,
    Snapshot,
    counted,
    in_threads,
    serving_values,
    size_of,
    wire_nbytes,
    wire_tensor,
)
from fastdeploy.rl.part_calls import Means, Part, PartCall, PartCalls
from fastdeploy.rl.state_encoding import HostTensor

# A delta is sent if its bytes are less than this share of the whole: servers take whole tensors faster than changes.
MAX_DELTA_SHARE = 0.8
Parts = Callable[[Means], Iterable[dict[str, HostTensor]] | AsyncIterable[dict[str, HostTensor]]]
NamedTensors = Iterable[tuple[str, Any]] | AsyncIterable[tuple[str, Any]]
T = TypeVar("T")


class Group(NamedTuple):
    """Replicas that are sent the same. dtype: in which they serve. is_delta: they serve the base of the delta."""

    dtype: str
    is_delta: bool
    urls: tuple[str, ...]


class Transfer(Protocol):
    """The content of one publication. base: fingerprint of the weights for which a delta can be sent; None: the whole
    only. full_nbytes: of the whole. changed_values: since the last publication. Both are None if not known."""

    base: str | None
    full_nbytes: int | None
    changed_values: int | None

    def calls(self, group: Group) -> PartCalls:
        """Yield the calls that stage the new weights on a group of replicas. Raises InvalidField."""

    def expected(self, group: Group) -> str | None:
        """Return the fingerprint over all that the replicas of a group must have after the commit, if it is known."""

    def confirm(self, group: Group, served: str) -> bool:
        """Return whether ``served``, the fingerprint over all of a replica of the group after the commit, is that of
        the published weights."""


class FolderTransfer:
    """A checkpoint folder that all replicas can read."""

    base: str | None = None
    full_nbytes: int | None = None
    changed_values: int | None = None

    def __init__(self, path: str):
        self._path = path

    async def calls(self, group: Group) -> PartCalls:
        yield PartCall({"model_path": self._path})

    def expected(self, group: Group) -> str | None:
        return None

    def confirm(self, group: Group, served: str) -> bool:
        return True


class WholeTransfer:
    """A state that is sent whole.

    parts: makes an iterator of the tensors, in parts. is_partial: the replicas keep the values of other tensors. keeps:
    make a snapshot of the state while it is sent."""

    base: str | None = None
    changed_values: int | None = None

    def __init__(self, parts: Parts, means: Means, is_partial: bool, keeps: bool, full_nbytes: int | None = None):
        self.full_nbytes = full_nbytes
        self._parts = parts
        self._means = means
        self._is_partial = is_partial
        self._keeps = keeps and not is_partial
        self._fingerprints: dict[str, dict[str, Fingerprint]] = {}  # by dtype, by name
        self._values: dict[str, np.ndarray] = {}
        self._snapshot: Snapshot | None = None

    def calls(self, group: Group) -> PartCalls:
        """See ``Transfer.calls``."""
        return self._means.calls(self._whole(group), group.urls)

    def expected(self, group: Group) -> str | None:
        """See ``Transfer.expected``. Not known: a replica does not count a tensor that it ties to another one."""
        return None

    def confirm(self, group: Group, served: str) -> bool:
        """See ``Transfer.confirm``."""
        if self._is_partial:
            return True
        fingerprints = self._fingerprints[group.dtype]
        names = counted(fingerprints, served)
        if names and self._values and self._snapshot is None and group.dtype == next(iter(self._fingerprints)):
            self._snapshot = Snapshot.of(group.dtype, self._values, fingerprints, names)
        return bool(names)

    def next_snapshot(self, old: Snapshot | None) -> Snapshot | None:
        """Return the snapshot of what the replicas serve now. old: the one of the publication before."""
        return self._snapshot

    async def _whole(self, group: Group) -> AsyncGenerator[Part, None]:
        keeps = self._keeps and not self._fingerprints
        self._fingerprints[group.dtype] = {}
        async for tensors in each_item(self._parts(self._means)):
            yield await asyncio.to_thread(self._convert, tensors, group.dtype, keeps)

    def _convert(self, tensors: Mapping[str, HostTensor], dtype: str, keeps: bool) -> Part:
        """Return a part with its fingerprints. Each tensor is in its own or in the serving dtype, if that is
        smaller."""
        known, fingerprints = self._known(dtype), self._fingerprints.setdefault(dtype, {})

        def convert(name: str) -> HostTensor:
            values = serving_values(name, tensors[name], dtype)
            fingerprints[name] = known[name] if name in known else fingerprint(values)
            if keeps:  # a copy, as the trainer will change its tensor
                self._values[name] = values if values.flags.owndata else values.copy()
            return wire_tensor(tensors[name], values, dtype)

        converted = in_threads(convert, list(tensors), lambda name: size_of(tensors[name]))
        form = {"fingerprints": {name: fingerprints[name].hex for name in tensors}}
        return Part(dict(zip(tensors, converted, strict=True)), form)

    def _known(self, dtype: str) -> Mapping[str, Fingerprint]:
        """Return the fingerprints that need not be computed."""
        return {}


class DeltaTransfer(WholeTransfer):
    """A state of which only the difference from ``snapshot`` is sent to the replicas that serve the snapshot. in_place:
    the replicas give the old values up, so a delta cannot be sent."""

    def __init__(
        self,
        tensors: Mapping[str, HostTensor],
        snapshot: Snapshot,
        difference: Difference,
        means: Means,
        is_partial: bool,
        in_place: bool,
    ):
        super().__init__(state_parts(tensors), means, is_partial, False, whole_nbytes(tensors, snapshot.dtype))
        self._tensors = tensors
        self._difference = difference
        self._dtype, self._expected = snapshot.dtype, difference.fingerprint
        self._is_confirmed = False
        self.changed_values = difference.changed_values
        if not in_place and difference.nbytes < MAX_DELTA_SHARE * whole_nbytes(tensors, snapshot.dtype):
            self.base = snapshot.fingerprint

    def calls(self, group: Group) -> PartCalls:
        """See ``Transfer.calls``."""
        return self._means.calls(self._delta(group), group.urls) if group.is_delta else super().calls(group)

    def expected(self, group: Group) -> str | None:
        """See ``Transfer.expected``."""
        is_known = group.is_delta or (group.dtype == self._dtype and not self._is_partial)
        return self._expected if is_known else None

    def confirm(self, group: Group, served: str) -> bool:
        """See ``Transfer.confirm``."""
        if self.expected(group) is None:
            return super().confirm(group, served)
        self._is_confirmed |= served == self._expected
        return served == self._expected

    def next_snapshot(self, old: Snapshot | None) -> Snapshot | None:
        """See ``WholeTransfer.next_snapshot``. The old one stays if no replica has confirmed this publication."""
        if self._is_confirmed and old is not None:
            old.advance(self._tensors, self._difference)
        return old

    async def _delta(self, group: Group) -> AsyncGenerator[Part, None]:
        """Yield the changed tensors that are sent whole, then the payloads of the others."""
        split_bytes = self._means.split_bytes(self._difference.nbytes)
        changes = self._difference.changes
        whole = {name: self._tensors[name] for name, found in changes.items() if found.payload is None}
        for tensors in state_encoding.split(whole, split_bytes):
            yield await asyncio.to_thread(self._convert, tensors, group.dtype, False)
        payloads = {
            name: HostTensor("U8", found.payload.shape, found.payload.data)
            for name, found in changes.items()
            if found.payload is not None
        }
        compresses = self._means.compresses(group.urls)
        for tensors in state_encoding.split(payloads, split_bytes):
            form: dict[str, Any] = {"encoding": "overwrite"}
            form["fingerprints"] = {name: changes[name].fingerprint.hex for name in tensors}
            if compresses:
                form["compression"] = "zstd"
                tensors = await asyncio.to_thread(_compressed, tensors)
            yield Part(tensors, form)

    def _known(self, dtype: str) -> Mapping[str, Fingerprint]:
        return self._difference.fingerprints if dtype == self._dtype else {}


def whole_nbytes(tensors: Mapping[str, HostTensor], dtype: str) -> int:
    """Return the bytes of a whole state as it is sent."""
    return sum(wire_nbytes(tensor, dtype) for tensor in tensors.values())


def state_parts(tensors: Mapping[str, HostTensor]) -> Parts:
    """Return the parts of a state, which may be iterated many times."""
    nbytes = sum(tensor.data.nbytes for tensor in tensors.values())
    return lambda means: state_encoding.split(tensors, means.split_bytes(nbytes))


def stream_parts(pairs: NamedTensors) -> Parts:
    """Return the parts of a stream of tensors, which can be read once: by replicas of one dtype. Each tensor is copied,
    since the trainer may gather the next one into the same buffer."""
    is_read = False

    async def parts(means: Means) -> AsyncIterator[dict[str, HostTensor]]:
        nonlocal is_read
        if is_read:
            raise InvalidField("state", "expected a state dict, since the replicas have different dtypes")
        is_read = True
        part: dict[str, HostTensor] = {}
        async for name, value in each_item(pairs):
            tensor = state_encoding.host_tensors({name: value})[name]
            part[name] = tensor._replace(data=memoryview(bytes(tensor.data)))
            if sum(t.data.nbytes for t in part.values()) >= means.part_bytes:
                yield part
                part = {}
        if part:
            yield part

    return parts


async def each_item(items: Iterable[T] | AsyncIterable[T]) -> AsyncIterator[T]:
    """Yield all items of an iterable, asynchronous or not."""
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield item
    else:
        for item in items:
            yield item


def _compressed(payloads: Mapping[str, HostTensor]) -> dict[str, HostTensor]:
    def compress(name: str) -> HostTensor:
        frame = delta_format.compress(np.frombuffer(payloads[name].data, np.uint8))
        return HostTensor("U8", frame.shape, frame.data)

    frames = in_threads(compress, list(payloads), lambda name: payloads[name].data.nbytes)
    return dict(zip(payloads, frames, strict=True))
