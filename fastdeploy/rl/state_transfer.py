"""What a publication sends: a folder, the whole state, or its difference from the last publication."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

import numpy as np

from fastdeploy.core import delta_format
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
from fastdeploy.rl.state_encoding import HostTensor
from fastdeploy.rl.uploads import Means, Part, PartCall, PartCalls

# A delta is sent if its bytes are less than this share of the whole: servers take whole tensors faster than changes.
MAX_DELTA_SHARE = 0.8
Parts = Iterable[dict[str, HostTensor]] | AsyncIterable[dict[str, HostTensor]]
NamedTensors = Iterable[tuple[str, Any]] | AsyncIterable[tuple[str, Any]]
T = TypeVar("T")


class Transfer(Protocol):
    """The content of one publication. base: fingerprint of the weights for which a delta can be sent; None: the whole
    only. expected: the fingerprint over all that the server must have after the commit. full_nbytes: of the whole.
    changed_values: since the last publication. These are None if not known."""

    base: str | None
    full_nbytes: int | None
    changed_values: int | None

    @property
    def expected(self) -> str | None: ...

    def begin(self, dtype: str, is_delta: bool) -> None:
        """Record what the server said at the begin. dtype: in which it serves. is_delta: it serves the base."""

    def calls(self) -> PartCalls:
        """Yield the calls that stage the new weights. Raises InvalidField."""

    def confirm(self, served: str) -> bool:
        """Return whether ``served``, the fingerprint over all after the commit, is that of the published weights."""


class FolderTransfer:
    """A checkpoint folder that the server can read."""

    base: str | None = None
    expected: str | None = None
    full_nbytes: int | None = None
    changed_values: int | None = None

    def __init__(self, path: str):
        self._path = path

    def begin(self, dtype: str, is_delta: bool) -> None:
        """Do nothing: the server reads the folder as it is."""

    async def calls(self) -> PartCalls:
        yield PartCall({"model_path": self._path})

    def confirm(self, served: str) -> bool:
        return True


class WholeTransfer:
    """A state that is sent whole.

    parts: the tensors. is_partial: the server keeps the values of other tensors. keeps: make a snapshot of the state
    while it is sent."""

    base: str | None = None
    changed_values: int | None = None

    def __init__(self, parts: Parts, means: Means, is_partial: bool, keeps: bool, full_nbytes: int | None = None):
        self.full_nbytes = full_nbytes
        self._parts = parts
        self._means = means
        self._is_partial = is_partial
        self._keeps = keeps and not is_partial
        self._fingerprints: dict[str, Fingerprint] = {}
        self._values: dict[str, np.ndarray] = {}
        self._snapshot: Snapshot | None = None

    def begin(self, dtype: str, is_delta: bool) -> None:
        """See ``Transfer.begin``."""
        self._dtype = dtype

    def calls(self) -> PartCalls:
        """See ``Transfer.calls``."""
        return self._means.calls(self._whole())

    @property
    def expected(self) -> str | None:
        """See ``Transfer``. Not known: the server does not count a tensor that it ties to another one."""
        return None

    def confirm(self, served: str) -> bool:
        """See ``Transfer.confirm``."""
        if self._is_partial:
            return True
        names = counted(self._fingerprints, served)
        if names and self._values:
            self._snapshot = Snapshot.of(self._dtype, self._values, self._fingerprints, names)
        return bool(names)

    def next_snapshot(self) -> Snapshot | None:
        """Return the snapshot of what the server serves now, if it is known."""
        return self._snapshot

    def forget_snapshot(self) -> None:
        """Record that the snapshot may be wrong."""
        self._snapshot = None

    async def _whole(self) -> AsyncGenerator[Part, None]:
        async for tensors in each_item(self._parts):
            yield await asyncio.to_thread(self._convert, tensors, {})

    def _convert(self, tensors: Mapping[str, HostTensor], known: Mapping[str, Fingerprint]) -> Part:
        """Return a part with its fingerprints. Each tensor is in its own or in the serving dtype, if that is smaller.
        known: fingerprints that need not be computed."""

        def convert(name: str) -> HostTensor:
            values = serving_values(name, tensors[name], self._dtype)
            self._fingerprints[name] = known[name] if name in known else fingerprint(values)
            if self._keeps:  # a copy, as the trainer will change its tensor
                self._values[name] = values if values.flags.owndata else values.copy()
            return wire_tensor(tensors[name], values, self._dtype)

        converted = in_threads(convert, list(tensors), lambda name: size_of(tensors[name]))
        fields = {"fingerprints": {name: self._fingerprints[name].hex for name in tensors}}
        return Part(dict(zip(tensors, converted, strict=True)), fields)


class DeltaTransfer(WholeTransfer):
    """A state of which only the difference from ``snapshot`` is sent, if the server serves the snapshot. in_place: the
    server gives the old values up, so a delta cannot be sent."""

    def __init__(
        self,
        tensors: Mapping[str, HostTensor],
        snapshot: Snapshot,
        difference: Difference,
        means: Means,
        is_partial: bool,
        in_place: bool,
    ):
        nbytes = sum(wire_nbytes(tensor, snapshot.dtype) for tensor in tensors.values())
        super().__init__(split_state(tensors, means), means, is_partial, False, nbytes)
        self._tensors = tensors
        self._snapshot: Snapshot | None = snapshot
        self._difference = difference
        self._is_delta = self._is_known = self._is_confirmed = False
        self.changed_values = difference.changed_values
        if not in_place and difference.nbytes < MAX_DELTA_SHARE * nbytes:
            self.base = snapshot.fingerprint

    def begin(self, dtype: str, is_delta: bool) -> None:
        """See ``Transfer.begin``. A snapshot in another dtype than the server's is of no use."""
        super().begin(dtype, is_delta)
        self._is_delta = is_delta
        self._is_known = self._snapshot is not None and self._snapshot.dtype == dtype
        if not self._is_known:
            self._snapshot = None

    def calls(self) -> PartCalls:
        """See ``Transfer.calls``."""
        return self._means.calls(self._delta()) if self._is_delta else super().calls()

    @property
    def expected(self) -> str | None:
        """See ``Transfer``."""
        return self._difference.fingerprint if self._is_delta or (self._is_known and not self._is_partial) else None

    def confirm(self, served: str) -> bool:
        """See ``Transfer.confirm``."""
        if self.expected is None:
            return super().confirm(served)
        self._is_confirmed = served == self.expected
        return self._is_confirmed

    def next_snapshot(self) -> Snapshot | None:
        """See ``WholeTransfer.next_snapshot``. Without a confirmation, the one of the last publication stays."""
        if self._is_confirmed and self._snapshot is not None:
            self._snapshot.advance(self._tensors, self._difference)
        return self._snapshot

    async def _whole(self) -> AsyncGenerator[Part, None]:
        known = self._difference.fingerprints if self._is_known else {}
        async for tensors in each_item(self._parts):
            yield await asyncio.to_thread(self._convert, tensors, known)

    async def _delta(self) -> AsyncGenerator[Part, None]:
        """Yield the changed tensors that are sent whole, then the payloads of the others."""
        split_bytes = self._means.split_bytes(self._difference.nbytes)
        changes = self._difference.changes
        whole = {name: self._tensors[name] for name, found in changes.items() if found.payload is None}
        for tensors in state_encoding.split(whole, split_bytes):
            yield await asyncio.to_thread(self._convert, tensors, self._difference.fingerprints)
        payloads = {
            name: HostTensor("U8", found.payload.shape, found.payload.data)
            for name, found in changes.items()
            if found.payload is not None
        }
        for tensors in state_encoding.split(payloads, split_bytes):
            fields: dict[str, Any] = {"encoding": "overwrite"}
            fields["fingerprints"] = {name: changes[name].fingerprint.hex for name in tensors}
            if self._means.compresses:
                fields["compression"] = "zstd"
                tensors = await asyncio.to_thread(_compressed, tensors)
            yield Part(tensors, fields)


def split_state(tensors: Mapping[str, HostTensor], means: Means) -> Iterator[dict[str, HostTensor]]:
    """Yield the parts of a state."""
    return state_encoding.split(tensors, means.split_bytes(sum(tensor.data.nbytes for tensor in tensors.values())))


async def split_stream(pairs: NamedTensors, part_bytes: int) -> AsyncIterator[dict[str, HostTensor]]:
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


def _compressed(payloads: Mapping[str, HostTensor]) -> dict[str, HostTensor]:
    def compress(name: str) -> HostTensor:
        frame = delta_format.compress(np.frombuffer(payloads[name].data, np.uint8))
        return HostTensor("U8", frame.shape, frame.data)

    frames = in_threads(compress, list(payloads), lambda name: payloads[name].data.nbytes)
    return dict(zip(payloads, frames, strict=True))
