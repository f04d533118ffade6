"""Payloads of deltas: the changes of one tensor as bytes. The trainer's side makes them, the server's side reads them.

A tensor is its values in row-major order, in the serving dtype (``itemsize`` 2 for bfloat16, 4 for float32).

    dense      the bytes of all values
    xor        the bytes of all values, xor those of the base
    overwrite  u4 n, u4 gaps[n], values[n]; little-endian. The first changed value has the flat index gaps[0], each
               later one lies gaps[i] >= 1 behind the one before it. (Gaps compress better than indices.)

With the compression "zstd", the payload is one zstd frame of these bytes. A payload says nothing of its tensor: name,
encoding and compression come with it (weight_source.PartFormat).
"""

from __future__ import annotations

import numpy as np
import zstandard

ENCODINGS = ("dense", "overwrite", "xor")
COMPRESSIONS = ("none", "zstd")
ZSTD_LEVEL = 1
MAX_VALUES = 2**32 - 1  # of a tensor that can be overwritten


def overwrite(index: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the payload (uint8) that sets the values at ``index`` (int64, flat, ascending). values: float32, or
    bfloat16 as uint16 bits."""
    gaps = np.diff(index, prepend=0).astype("<u4")
    count = np.array([index.size], "<u4")
    return np.concatenate([part.view(np.uint8) for part in (count, gaps, np.ascontiguousarray(values))])


def read_overwrite(payload: np.ndarray, size: int, itemsize: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (index, values) of an overwrite of a tensor of ``size`` values. The values are uint16 or uint32 bits.
    Raises ValueError for a payload that is not one."""
    if payload.size < 4:
        raise ValueError(f"expected the number of values in 4 bytes, got {payload.size} bytes")
    count = int(payload[:4].view("<u4")[0])
    if payload.size != overwrite_nbytes(count, itemsize):
        raise ValueError(f"expected {overwrite_nbytes(count, itemsize)} bytes for {count} values, got {payload.size}")
    gaps = payload[4 : 4 + 4 * count].view("<u4").astype(np.int64)
    index = np.cumsum(gaps)
    if count and (index[-1] >= size or not gaps[1:].all()):
        raise ValueError(f"expected ascending indices below {size}")
    return index, payload[4 + 4 * count :].view(f"<u{itemsize}")


def overwrite_nbytes(count: int, itemsize: int) -> int:
    """Return the size of a payload of ``count`` values."""
    return 4 + count * (4 + itemsize)


def compress(payload: np.ndarray) -> np.ndarray:
    """Return one zstd frame, as uint8."""
    frame = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(payload.data)
    return np.frombuffer(frame, np.uint8)


def decompress(frame: np.ndarray, limit: int) -> np.ndarray:
    """Return the payload of one zstd frame, as uint8. Raises ValueError for bytes that are not one whole frame, and for
    a payload of more than ``limit`` bytes, of which no more than that is made."""
    try:
        size = zstandard.frame_content_size(frame.data)
        if size > limit:
            raise ValueError(f"expected at most {limit} bytes, the frame has {size}")
        payload = zstandard.ZstdDecompressor().decompress(frame.data, max_output_size=limit, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ValueError(f"expected one zstd frame of at most {limit} bytes: {error}") from error
    return np.frombuffer(payload, np.uint8)
