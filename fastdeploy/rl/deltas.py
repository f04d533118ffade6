"""The state that a trainer published last, and what changed since: the payloads of a delta. No HTTP here.

All values are in the serving dtype of the server, as flat arrays: float32, or bfloat16 as uint16 bits.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np

from fastdeploy.core import delta_format
from fastdeploy.core.errors import InvalidField
from fastdeploy.core.fingerprint import Fingerprint, change, fingerprint, over_all
from fastdeploy.core.serving_dtype import ITEMSIZE, dtype_of, fits, in_dtype
from fastdeploy.rl.state_encoding import HostTensor

PIECE = 1 << 18  # values that are converted and compared at once: they stay in the cache of a core
SOURCE_DTYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}
WIRE_DTYPES = {"float32": "F32", "bfloat16": "BF16"}
R = TypeVar("R")


class TensorChange(NamedTuple):
    """A tensor of which ``num_changed`` values changed. payload: of the encoding "overwrite"; None: the whole tensor is
    smaller. fingerprint: of the new values."""

    num_changed: int
    payload: np.ndarray | None
    fingerprint: Fingerprint


@dataclass(frozen=True)
class Difference:
    """A state as compared with a snapshot. changes: the tensors that changed. fingerprints: of all new tensors that the
    server counts. nbytes: of the payloads and whole tensors to send."""

    changes: Mapping[str, TensorChange]
    fingerprints: Mapping[str, Fingerprint]
    nbytes: int

    @property
    def changed_values(self) -> int:
        return sum(found.num_changed for found in self.changes.values())

    @property
    def fingerprint(self) -> str:
        """Over all tensors."""
        return over_all(self.fingerprints)


class Snapshot:
    """The last publication, as a server of one dtype serves it. values: flat, by name. fingerprints: of the same
    tensors. alias: (name, target) of a tensor that the server ties to another one, or None."""

    def __init__(
        self,
        dtype: str,
        values: dict[str, np.ndarray],
        fingerprints: Mapping[str, Fingerprint],
        alias: tuple[str, str] | None = None,
    ):
        self.dtype = dtype
        self._values = values
        self._fingerprints = dict(fingerprints)
        self._alias = alias

    @classmethod
    def of(
        cls, dtype: str, values: dict[str, np.ndarray], fingerprints: Mapping[str, Fingerprint], names: Collection[str]
    ) -> Snapshot:
        """Return the snapshot of a state of which the server counts the tensors ``names``; see :func:`counted`. Takes
        the values over."""
        alias = None
        for tied in values.keys() - set(names):
            target = next(name for name in names if fingerprints[name] == fingerprints[tied])
            alias = (tied, target)
            del values[tied]
        return cls(dtype, values, {name: fingerprints[name] for name in names}, alias)

    @property
    def fingerprint(self) -> str:
        """Over all tensors."""
        return over_all(self._fingerprints)

    def fits(self, state: Mapping[str, HostTensor], partial: bool) -> bool:
        """Return whether ``state`` has the tensors of this snapshot, or (partial) some of them, in the same sizes."""
        counted = {name: tensor for name, tensor in state.items() if self._alias is None or name != self._alias[0]}
        names = counted.keys()
        same = names <= self._values.keys() if partial else names == self._values.keys()
        return same and all(size_of(tensor) == self._values[name].size for name, tensor in counted.items())

    def difference(self, state: Mapping[str, HostTensor]) -> Difference:
        """Compare ``state``, which must fit. Raises InvalidField for a tensor whose values do not fit the dtype, and
        for one that differs from the tensor to which the server ties it."""
        self._check_alias(state)
        names = [name for name in state if name in self._values]
        found = in_threads(lambda name: self._compare(name, state[name]), names, lambda name: size_of(state[name]))
        changes = {name: found for name, found in zip(names, found, strict=True) if found is not None}
        fingerprints = self._fingerprints | {name: found.fingerprint for name, found in changes.items()}
        sizes = (
            found.payload.nbytes if found.payload is not None else wire_nbytes(name, state[name], self.dtype)
            for name, found in changes.items()
        )
        return Difference(changes, fingerprints, sum(sizes))

    def advance(self, state: Mapping[str, HostTensor], difference: Difference) -> None:
        """Take over the new values of ``state``, whose ``difference`` the server has committed."""

        def apply(name: str) -> None:
            old, payload = self._values[name], difference.changes[name].payload
            if payload is None:
                for at, values in pieces(name, state[name], self.dtype):
                    old[at : at + values.size] = values
            else:
                index, bits = delta_format.read_overwrite(payload, old.size, old.itemsize)
                old[index] = bits.view(old.dtype)

        in_threads(apply, list(difference.changes), lambda name: self._values[name].size)
        self._fingerprints = dict(difference.fingerprints)

    def _compare(self, name: str, tensor: HostTensor) -> TensorChange | None:
        old = self._values[name]
        most = wire_nbytes(name, tensor, self.dtype) if old.size <= delta_format.MAX_VALUES else 0
        indices: list[np.ndarray] = []
        values: list[np.ndarray] = []
        total, count = self._fingerprints[name], 0
        for at, new in pieces(name, tensor, self.dtype):
            before = old[at : at + new.size]
            index = _differing(new, before)
            if not index.size:
                continue
            count += index.size
            if count * (old.itemsize + 1) < most:  # the least bytes of a payload
                values.append(new[index])
                total += change(index + at, before[index], values[-1])
                indices.append(index + at)
        if not count:
            return None
        if count * (old.itemsize + 1) < most:
            payload = delta_format.overwrite(np.concatenate(indices), np.concatenate(values))
            if payload.nbytes < most:
                return TensorChange(count, payload, total)
        return TensorChange(count, None, fingerprint(serving_values(name, tensor, self.dtype)))

    def _check_alias(self, state: Mapping[str, HostTensor]) -> None:
        """Check that a tied tensor has the values of the other one. Such a tensor is not sent."""
        if self._alias is None or self._alias[0] not in state:
            return
        name, target = self._alias
        if target not in state:
            raise InvalidField(name, f"expected {target} beside it, to which the server ties it")
        if not _same_memory(state[name], state[target]):
            pairs = zip(pieces(name, state[name], self.dtype), pieces(target, state[target], self.dtype), strict=True)
            if not all(np.array_equal(_bits(one), _bits(other)) for (_, one), (_, other) in pairs):
                raise InvalidField(name, f"expected the values of {target}, to which the server ties it")


def counted(fingerprints: Mapping[str, Fingerprint], served: str) -> tuple[str, ...]:
    """Return the names of the tensors that are in the fingerprint ``served`` over all tensors of a server: all of
    ``fingerprints``, or all but one that equals another one (which the server ties to it). () if there is no such
    choice: the server has other values."""
    if over_all(fingerprints) == served:
        return tuple(fingerprints)
    for twin in twins(fingerprints):
        rest = {name: value for name, value in fingerprints.items() if name != twin}
        if over_all(rest) == served:
            return tuple(rest)
    return ()


def twins(fingerprints: Mapping[str, Fingerprint]) -> Iterator[str]:
    """Yield the tensors that have the fingerprint of another one."""
    many: dict[Fingerprint, list[str]] = {}
    for name, value in fingerprints.items():
        many.setdefault(value, []).append(name)
    for names in many.values():
        yield from names if len(names) > 1 else ()


def serving_values(name: str, tensor: HostTensor, dtype: str) -> np.ndarray:
    """Return the values of a tensor, flat, as an engine of ``dtype`` serves them: a view if the tensor has this dtype.
    Raises InvalidField."""
    source, dtype = _source(name, tensor), dtype_of(name, dtype)
    if WIRE_DTYPES[dtype] == tensor.dtype:
        return source
    values = np.empty(source.size, np.uint16 if dtype == "bfloat16" else np.float32)
    for at, converted in pieces(name, tensor, dtype):
        values[at : at + converted.size] = converted
    return values


def pieces(name: str, tensor: HostTensor, dtype: str) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (index of the first value, values as an engine of ``dtype`` serves them) for each piece of a tensor. Raises
    InvalidField for a tensor that no server takes, and for values that are not finite once they are converted."""
    source, dtype = _source(name, tensor), dtype_of(name, dtype)
    for at in range(0, source.size, PIECE):
        piece = source[at : at + PIECE]
        if piece.dtype == np.float16:
            piece = piece.astype(np.float32)
        if not fits(piece, dtype):
            raise InvalidField(name, f"expected values that are finite in {dtype}")
        yield at, in_dtype(piece, dtype)


def size_of(tensor: HostTensor) -> int:
    """Return the number of values."""
    return int(np.prod(tensor.shape, dtype=np.int64))


def wire_nbytes(name: str, tensor: HostTensor, dtype: str) -> int:
    """Return the bytes of a whole tensor as it is sent: as it is, or in the serving dtype if that is smaller."""
    return min(tensor.data.nbytes, size_of(tensor) * ITEMSIZE[dtype_of(name, dtype)])


def wire_tensor(tensor: HostTensor, values: np.ndarray, dtype: str) -> HostTensor:
    """Return the whole tensor as it is sent. values: its values in the serving dtype."""
    if values.nbytes >= tensor.data.nbytes:
        return tensor
    return HostTensor(WIRE_DTYPES[dtype], tensor.shape, values.view(np.uint8).data)


def in_threads(work: Callable[[str], R], names: Collection[str], size: Callable[[str], int]) -> list[R]:
    """Do ``work`` for each tensor, on all cores that this process may use, the largest tensor first. Return the results
    in the order of ``names``. numpy releases the interpreter's lock."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        running = {name: pool.submit(work, name) for name in sorted(names, key=size, reverse=True)}
        return [running[name].result() for name in names]


def require_served(state: Mapping[str, HostTensor]) -> None:
    """Raise InvalidField for the first tensor of a dtype that no server takes."""
    for name, tensor in state.items():
        _source(name, tensor)


def _source(name: str, tensor: HostTensor) -> np.ndarray:
    dtype = SOURCE_DTYPES.get(tensor.dtype)
    if dtype is None:
        raise InvalidField(name, f"expected one of {', '.join(SOURCE_DTYPES)}, got {tensor.dtype}")
    return np.frombuffer(tensor.data, dtype)


def _differing(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return the indices at which the bits of two arrays differ. Few differ, so eight flags are looked at at once."""
    flags = np.zeros(-(-one.size // 8) * 8, np.bool_)
    np.not_equal(_bits(one), _bits(other), out=flags[: one.size])
    eights = flags.view(np.uint64)
    some = np.flatnonzero(eights != 0)
    index = np.flatnonzero(eights[some].view(np.bool_))
    differing: np.ndarray = (some[index >> 3] << 3) + (index & 7)
    return differing


def _bits(values: np.ndarray) -> np.ndarray:
    """Return the bits of values, since 0.0 == -0.0."""
    return values if values.dtype == np.uint16 else values.view(np.uint32)


def _same_memory(one: HostTensor, other: HostTensor) -> bool:
    first, second = (np.frombuffer(tensor.data, np.uint8) for tensor in (one, other))
    return (one.dtype, first.nbytes, first.ctypes.data) == (other.dtype, second.nbytes, second.ctypes.data)
