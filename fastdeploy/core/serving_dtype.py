"""Conversion of tensors to the dtype in which an engine serves them. The engine and the trainer's side share this rule,
since fingerprints and deltas are of the converted values.

A dtype is "float32" or "bfloat16". Arrays hold float32, or bfloat16 as uint16 bits.
"""

from __future__ import annotations

import numpy as np

# The smallest float32 that rounds to infinity in bfloat16.
BFLOAT16_OVERFLOW = np.array(0x7F7F8000, np.uint32).view(np.float32)
ITEMSIZE = {"float32": 4, "bfloat16": 2}
# Tensors that stay float32 in every engine, by how their names end: the bias of a router. Its values lie so close
# together, and so far from 0, that bfloat16 makes many of them equal: in GLM-5.2, 238 values between 6.817 and 7.063
# become 8, and nearly every token gets other experts (github.com/sgl-project/sglang/pull/31213).
FLOAT32_TENSORS = ("e_score_correction_bias",)


def dtype_of(name: str, dtype: str) -> str:
    """Return the dtype of the tensor ``name`` in an engine that serves ``dtype``."""
    return "float32" if name.endswith(FLOAT32_TENSORS) else dtype


def in_dtype(array: np.ndarray, dtype: str) -> np.ndarray:
    """Convert an array to ``dtype``. float32 is rounded to the nearest bfloat16, ties to even. Values that are not
    finite, or that :func:`fits` refuses, give undefined bits."""
    if dtype == "float32":
        return widen(array)
    if array.dtype == np.uint16:
        return array
    bits: np.ndarray = np.ascontiguousarray(array).view(np.uint32)
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded >>= np.uint32(16)
    return rounded.astype(np.uint16)


def fits(array: np.ndarray, dtype: str) -> bool:
    """Return whether the values stay finite in ``dtype``. Conversion to a dtype as wide as the array's always does."""
    if dtype == "float32" or array.dtype == np.uint16 or array.size == 0:
        return True
    return bool(array.max() < BFLOAT16_OVERFLOW and array.min() > -BFLOAT16_OVERFLOW)


def widen(array: np.ndarray) -> np.ndarray:
    """Return float32 values."""
    return (array.astype(np.uint32) << 16).view(np.float32) if array.dtype == np.uint16 else array
