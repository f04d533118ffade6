"""The facts that a classifier may look at: of all tensors on both sides, and the values of one that differs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from fastdeploy.core.serving_dtype import dtype_of, widen
from fastdeploy.model_executor.model_config import ModelConfig

Read = Callable[[str], np.ndarray]  # of a tensor, by name: float32, or bfloat16 as uint16 bits
PARTS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # tensors that engines keep in one


class Earlier(NamedTuple):
    """Weights that the trainer had before. label: how a sentence names them, after "those of". digests: of each tensor,
    by name. read: None if the values are not known, but only the digests."""

    label: str
    digests: Mapping[str, str]
    read: Read | None = None


@dataclass(frozen=True)
class Sides:
    """All that is known of both sides.

    expected, served: the digests of the trainer's tensors and of those that serve, by name; equal digests are equal
    values. earlier: weights that the trainer had before, the latest first. read: reads a tensor of the trainer in the
    serving dtype; read_wide: before it is rounded, as float32. dtype: "float32" or "bfloat16", which serves. config: of
    the model. base: the weights before the training, None if not known. zero: the digest of zeros of any shape, None if
    there is none."""

    expected: Mapping[str, str]
    served: Mapping[str, str]
    earlier: Sequence[Earlier]
    read: Read
    read_wide: Read
    dtype: str
    config: ModelConfig
    base: Earlier | None = None
    zero: str | None = None

    @cached_property
    def likely(self) -> list[Earlier]:
        """The earlier weights, those first that have the values of the most tensors that differ: a tensor that did not
        change from one update to the next has the values of both."""

        def matches(one: Earlier) -> int:
            return sum(digest == one.digests.get(name) for name, digest in differing.items())

        differing = {name: digest for name, digest in self.served.items() if digest != self.expected.get(name)}
        return sorted(self.earlier, key=matches, reverse=True)

    @cached_property
    def _by_digest(self) -> Mapping[str, list[str]]:
        found: dict[str, list[str]] = {}
        for name, one in self.expected.items():
            found.setdefault(one, []).append(name)
        return found

    def named(self, digest: str) -> list[str]:
        """Return the trainer's tensors of this digest."""
        return self._by_digest.get(digest, [])


@dataclass(frozen=True)
class Case:
    """A tensor whose values are known on both sides, and differ. expected_bits, served_bits: the trainer's values and
    those that serve, in the shape of the tensor: the bits of the serving dtype, uint32 or uint16."""

    name: str
    sides: Sides
    expected_bits: np.ndarray
    served_bits: np.ndarray

    @cached_property
    def expected(self) -> np.ndarray:
        """The trainer's values, float32."""
        return values_of(self.expected_bits)

    @cached_property
    def served(self) -> np.ndarray:
        """The values that serve, float32."""
        return values_of(self.served_bits)

    @cached_property
    def wide(self) -> np.ndarray:
        """The trainer's values before they are rounded, float32."""
        return self.sides.read_wide(self.name).reshape(self.expected.shape)

    @cached_property
    def changed(self) -> np.ndarray:
        """Flat indices of the values that differ in a bit, ascending."""
        return np.flatnonzero(self.expected_bits.reshape(-1) != self.served_bits.reshape(-1))

    @cached_property
    def difference(self) -> np.ndarray:
        """Served minus expected, float32. NaN or infinite where the served value is not finite."""
        with np.errstate(all="ignore"):
            return self.served - self.expected

    @property
    def dtype(self) -> str:
        """The serving dtype of this tensor."""
        return dtype_of(self.name, self.sides.dtype)

    @property
    def step(self) -> float:
        """The largest relative error of rounding to the serving dtype: half a unit of the last place."""
        return 2.0**-9 if self.dtype == "bfloat16" else 2.0**-24

    def earlier(self) -> Iterator[tuple[Earlier, np.ndarray]]:
        """Yield earlier weights whose values are known, with the bits of this tensor of them."""
        known = [*self.sides.likely, *([] if self.sides.base is None else [self.sides.base])]
        for one in known:
            if one.read is not None and self.name in one.digests:
                yield one, bits_of(one.read(self.name)).reshape(self.expected_bits.shape)

    def relatives(self) -> list[str]:
        """Return the other tensors that an engine keeps in one with this one: q, k and v; gate and up."""
        for parts in PARTS:
            for part in parts:
                if f".{part}." in self.name:
                    names = [self.name.replace(f".{part}.", f".{other}.") for other in parts if other != part]
                    return [name for name in names if name in self.sides.expected]
        return []


def bits_of(values: np.ndarray) -> np.ndarray:
    """Return the bits of values in a serving dtype: float32, or bfloat16 as uint16, which are its bits already."""
    return values.view(np.uint32) if values.dtype == np.float32 else values


def values_of(bits: np.ndarray) -> np.ndarray:
    """Return the float32 values of bits, uint32 or uint16."""
    return bits.view(np.float32) if bits.dtype == np.uint32 else widen(bits)
