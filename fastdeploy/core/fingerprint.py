"""Fingerprints of weights: checksums that a sparse change updates in proportion to its size.

The fingerprint of a tensor is a pair of sums modulo 2**64 over its values in row-major order, in the serving dtype. The
bytes of the values, padded with zeros to whole words, are read as little-endian 32-bit words w[0], w[1], ... Then

    sum[s] = sum over t of BLOCK_KEY(t // 1024) * WORD_KEYS[s][t % 1024] * w[t]    (mod 2**64),  s = 0, 1

Two words differ in their product with an odd key, so a change of one value always changes both sums. The keys are
pseudo-random, so random changes of several values go unnoticed with a probability of about 2**-62 (multilinear hashing:
Lemire and Kaser, "Strongly universal string hashing is fast", 2014). The worst case is a change of nothing but the top
bits of two words at the same offset of two blocks: about 2**-32. This finds errors. It does not stop an attacker, who
can choose tensors with equal fingerprints: `checksums` (sha256) are for that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

BLOCK_BITS = 10
BLOCK = 1 << BLOCK_BITS  # words with a key of their own
PIECE_BLOCKS = 256  # blocks that are multiplied at once: 1 MiB of values, 4 MiB of products
MASK = 2**64 - 1
_FIRST_BLOCK_KEY = 1 << 32


class Fingerprint(NamedTuple):
    """Two sums modulo 2**64. The fingerprint of a tensor of zeros is (0, 0)."""

    first: int
    second: int

    def __add__(self, other: object) -> Fingerprint:
        """Return the fingerprint after a change, or of two parts of one tensor."""
        if not isinstance(other, Fingerprint):
            return NotImplemented
        return Fingerprint((self.first + other.first) & MASK, (self.second + other.second) & MASK)

    @property
    def hex(self) -> str:
        return f"{self.first:016x}{self.second:016x}"


ZERO = Fingerprint(0, 0)


def _split_mix(numbers: np.ndarray) -> np.ndarray:
    """Return pseudo-random 64-bit numbers for 64-bit numbers (splitmix64: Steele, Lea, Flood, 2014)."""
    z = numbers.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = z ^ (z >> np.uint64(31))
    return mixed


# Odd 32-bit keys in 64-bit numbers, [2, BLOCK].
WORD_KEYS = (_split_mix(np.arange(2 * BLOCK)) >> np.uint64(32) | np.uint64(1)).reshape(2, BLOCK)


def block_keys(first: int, last: int) -> np.ndarray:
    """Return the odd 64-bit keys of blocks [first, last)."""
    keys: np.ndarray = _split_mix(np.arange(_FIRST_BLOCK_KEY + first, _FIRST_BLOCK_KEY + last)) | np.uint64(1)
    return keys


def fingerprint(values: np.ndarray) -> Fingerprint:
    """Return the fingerprint of a contiguous tensor: float32, or bfloat16 as uint16 bits, of any shape."""
    raw = values.reshape(-1).view(np.uint8)
    whole = raw[: raw.size // 4 * 4].view("<u4")
    rest = np.zeros(raw.size % 4 and 4, np.uint8)
    rest[: raw.size % 4] = raw[raw.size // 4 * 4 :]
    sums = np.zeros(2, np.uint64)
    for at in range(0, whole.size, PIECE_BLOCKS * BLOCK):
        sums += _sums(whole[at : at + PIECE_BLOCKS * BLOCK], at)
    if rest.size:
        sums += _sums(rest.view("<u4"), whole.size)
    return Fingerprint(int(sums[0]), int(sums[1]))


def change(index: np.ndarray, old: np.ndarray, new: np.ndarray) -> Fingerprint:
    """Return what to add to the fingerprint of a tensor whose values at ``index`` (int64, flat, each at most once)
    change from ``old`` to ``new`` (float32, or bfloat16 as uint16 bits)."""
    if not index.size:
        return ZERO
    position = index.astype(np.uint64)
    if new.dtype == np.uint16:
        word = position >> np.uint64(1)
        difference = new.astype(np.uint64) - old.astype(np.uint64)
        difference <<= (position & np.uint64(1)) << np.uint64(4)
    else:
        word, difference = position, new.view(np.uint32).astype(np.uint64) - old.view(np.uint32).astype(np.uint64)
    blocks = (word >> np.uint64(BLOCK_BITS)).astype(np.intp)
    first = int(blocks.min())
    difference *= block_keys(first, int(blocks.max()) + 1)[blocks - first]
    within = (word & np.uint64(BLOCK - 1)).astype(np.intp)
    return Fingerprint(*(int((difference * WORD_KEYS[s][within]).sum(dtype=np.uint64)) for s in (0, 1)))


def over_all(fingerprints: Mapping[str, Fingerprint]) -> str:
    """Return one fingerprint for all tensors of a model: the sha256, in hex, of the lines "name:fingerprint", sorted by
    name."""
    lines = "".join(f"{name}:{fingerprints[name].hex}\n" for name in sorted(fingerprints))
    return hashlib.sha256(lines.encode()).hexdigest()


def _sums(words: np.ndarray, first: int) -> np.ndarray:
    """Return both sums of the words from index ``first`` on, a multiple of BLOCK unless there is only one word."""
    offset = first % BLOCK
    blocks = -(-(offset + words.size) // BLOCK)
    padded = np.zeros(blocks * BLOCK, np.uint64)
    padded[offset : offset + words.size] = words
    table, keys = padded.reshape(blocks, BLOCK), block_keys(first // BLOCK, first // BLOCK + blocks)
    return np.array([((table * WORD_KEYS[s]).sum(axis=1, dtype=np.uint64) * keys).sum(dtype=np.uint64) for s in (0, 1)])
