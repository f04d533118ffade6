"""Fingerprints of weights follow their definition, and a sparse change updates them."""

from __future__ import annotations

import numpy as np
import pytest

from fastdeploy.core.fingerprint import (
    BLOCK,
    PIECE_BLOCKS,
    WORD_KEYS,
    ZERO,
    block_keys,
    change,
    fingerprint,
    over_all,
)

SIZES = [0, 1, 2, 3, BLOCK, 2 * BLOCK + 1, 3 * BLOCK - 1, 2 * PIECE_BLOCKS * BLOCK + 77]


def values(size: int, dtype: type, seed: int = 0) -> np.ndarray:
    bits = np.random.default_rng(seed).integers(0, 2**32, size, dtype=np.uint64)
    return bits.astype(np.uint32).view(np.float32) if dtype is np.float32 else (bits >> 7).astype(np.uint16)


@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
@pytest.mark.parametrize("size", SIZES)
def test_a_fingerprint_follows_its_definition(size, dtype):
    tensor = values(size, dtype)
    raw = tensor.tobytes() + bytes(-tensor.nbytes % 4)
    words = np.frombuffer(raw, "<u4").tolist()
    blocks = block_keys(0, len(words) // BLOCK + 1).tolist()
    keys = WORD_KEYS.tolist()
    expected = [
        sum(blocks[t // BLOCK] * keys[s][t % BLOCK] * word for t, word in enumerate(words)) % 2**64 for s in (0, 1)
    ]
    assert list(fingerprint(tensor)) == expected


@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
def test_a_change_of_some_values_updates_the_fingerprint(dtype):
    old = values(5 * BLOCK + 3, dtype)
    index = np.flatnonzero(np.random.default_rng(1).random(old.size) < 0.02)
    new = old.copy()
    new[index] = values(index.size, dtype, seed=2)
    assert fingerprint(old) + change(index, old[index], new[index]) == fingerprint(new) != fingerprint(old)
    none = np.empty(0, np.int64)
    assert change(none, old[none], old[none]) == ZERO


def test_swapped_values_blocks_and_tensors_change_the_fingerprint():
    tensor = values(4 * BLOCK, np.float32)
    swapped = tensor.copy()
    swapped[[7, 8]] = tensor[[8, 7]]
    blocks = np.concatenate([tensor[BLOCK : 2 * BLOCK], tensor[:BLOCK], tensor[2 * BLOCK :]])
    found = {fingerprint(t) for t in (tensor, swapped, blocks, -tensor)}
    assert len(found) == 4
    one, other = fingerprint(tensor), fingerprint(swapped)
    assert over_all({"a": one, "b": other}) != over_all({"a": other, "b": one})
    assert over_all({"a": one, "b": other}) == over_all({"b": other, "a": one})
