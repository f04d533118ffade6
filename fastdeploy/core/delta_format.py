"""Payloads of deltas: the changes of one tensor as bytes. The trainer's side makes them, the server's side reads them.

A tensor is its values in row-major order, in the serving dtype (``itemsize`` 2 for bfloat16, 4 for float32).

    dense      the bytes of all values
    overwrite  u4 n, values[n], gaps; little-endian. The first changed value has a gap of its flat index, each later one
               a gap of its distance, at least 1, from the one before it. A gap is (gap // 255) bytes of 255, then one
               byte of gap % 255.

Gaps in bytes take half of the space of indices in four bytes, compress better, and five times faster. A tensor of
``size`` values has at most ``size`` bytes of gaps, since each byte stands for at least one value.

With the compression "zstd", the payload is one zstd frame of these bytes, whose header states their number. A payload
says nothing of its tensor: name, encoding and compression come with it (weight_source.PartFormat).
"""

from __future__ import annotations

import numpy as np
import zstandard

ENCODINGS = ("dense", "overwrite")
COMPRESSIONS = ("none", "zstd")
ZSTD_LEVEL = 1
MAX_VALUES = 2**32 - 1  # of a tensor that can be overwritten
SKIP = 255  # the byte of a gap that goes on


def overwrite(index: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the payload (uint8) that sets the values at ``index`` (int64, flat, ascending). values: float32, or
    bfloat16 as uint16 bits."""
    skips, rest = np.divmod(np.diff(index, prepend=0), SKIP)
    ends = np.cumsum(skips + 1)
    gaps = np.full(ends[-1] if ends.size else 0, SKIP, np.uint8)
    gaps[ends - 1] = rest
    count = np.array([index.size], "<u4")
    return np.concatenate([part.view(np.uint8) for part in (count, np.ascontiguousarray(values), gaps)])


def read_overwrite(payload: np.ndarray, size: int, itemsize: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (index, values) of an overwrite of a tensor of ``size`` values. The values are uint16 or uint32 bits.
    Raises ValueError for a payload that is not one."""
    if payload.size < 4:
        raise ValueError(f"expected the number of values in 4 bytes, got {payload.size} bytes")
    count = int(payload[:4].view("<u4")[0])
    if count > size:
        raise ValueError(f"expected at most {size} values, got {count}")
    first_gap = 4 + count * itemsize
    if not first_gap + count <= payload.size <= first_gap + size:
        raise ValueError(
            f"expected {first_gap + count} to {first_gap + size} bytes for {count} values, got {payload.size}"
        )
    gaps = payload[first_gap:]
    ends = np.flatnonzero(gaps != SKIP)
    if ends.size != count or (gaps.size and gaps[-1] == SKIP):
        raise ValueError(f"expected {count} gaps, one for each value, got {ends.size}")
    index = np.cumsum(gaps, dtype=np.int64)[ends]
    if count and (index[-1] >= size or not np.diff(index).all()):
        raise ValueError(f"expected ascending indices below {size}")
    return index, payload[4:first_gap].view(f"<u{itemsize}")


def largest_payload(encoding: str, size: int, itemsize: int) -> int:
    """Return the largest size in bytes of a payload for a tensor of ``size`` values. A dense payload has exactly
    this size."""
    return 4 + size * (itemsize + 1) if encoding == "overwrite" else size * itemsize


def compress(payload: np.ndarray) -> np.ndarray:
    """Return one zstd frame, as uint8."""
    frame = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(payload.data)
    return np.frombuffer(frame, np.uint8)


def largest_frame(limit: int) -> int:
    """Return the largest size of a zstd frame of ``limit`` bytes, by the bound of zstd's own compressor
    (ZSTD_COMPRESSBOUND of zstd.h)."""
    return limit + (limit >> 8) + (((128 << 10) - limit) >> 11 if limit < 128 << 10 else 0)


def decompress(frame: np.ndarray, limit: int) -> np.ndarray:
    """Return the payload of one zstd frame, as uint8. Raises ValueError for bytes that are not one whole frame, and for
    a payload of more than ``limit`` bytes, before memory for it is allocated. Releases the GIL."""
    try:
        size = zstandard.get_frame_parameters(frame.data).content_size
        if size == zstandard.CONTENTSIZE_UNKNOWN:
            raise ValueError("expected one zstd frame that states the size of its content")
        if size > limit:
            raise ValueError(f"expected at most {limit} bytes, the zstd frame has {size}")
        payload = zstandard.ZstdDecompressor().decompress(frame.data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ValueError(f"expected one whole zstd frame of at most {limit} bytes: {error}") from error
    return np.frombuffer(payload, np.uint8)
