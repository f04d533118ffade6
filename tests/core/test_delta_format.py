"""Payloads of deltas are read as they were written, and no other bytes are."""

from __future__ import annotations

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from fastdeploy.core import delta_format

INDEX = np.array([0, 5, 6, 260, 261, 516, 1300])  # gaps below, at and above 255


@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
def test_an_overwrite_is_read_as_it_was_written(dtype):
    values = np.arange(1, 8).astype(dtype)
    payload = delta_format.overwrite(INDEX, values)
    index, bits = delta_format.read_overwrite(payload, 1301, values.itemsize)
    assert index.tolist() == INDEX.tolist() and bits.tobytes() == values.tobytes()
    empty = delta_format.overwrite(INDEX[:0], values[:0])
    assert delta_format.read_overwrite(empty, 1301, values.itemsize)[0].size == 0


@given(st.sets(st.integers(0, 3000)), st.integers(0, 1000))
def test_gaps_of_all_sizes_are_read_as_they_were_written(chosen, more):
    index = np.array(sorted(chosen), np.int64)
    size = int(index.max(initial=-1)) + 1 + more
    payload = delta_format.overwrite(index, index.astype(np.uint16))
    assert payload.size <= delta_format.largest_payload("overwrite", size, 2)
    found, values = delta_format.read_overwrite(payload, size, 2)
    assert found.tolist() == index.tolist() == values.tolist()


@given(st.binary(max_size=40), st.integers(0, 700))
def test_any_bytes_are_an_overwrite_in_one_way_only_or_are_refused(raw, size):
    payload = np.frombuffer(raw, np.uint8)
    try:
        index, values = delta_format.read_overwrite(payload, size, 2)
    except ValueError:
        return
    assert (np.diff(index) > 0).all() and (index < size).all() and (index >= 0).all()
    assert delta_format.overwrite(index, values).tobytes() == raw


PAYLOAD = delta_format.overwrite(INDEX, np.arange(7, dtype=np.uint16))


def gaps(*raw: int) -> np.ndarray:
    """Return an overwrite of two values with these bytes as gaps."""
    return np.array([2, 0, 0, 0, 9, 9, 9, 9, *raw], np.uint8)


@pytest.mark.parametrize(
    ("payload", "size", "why"),
    [
        (PAYLOAD[:3], 1301, "4 bytes"),
        (PAYLOAD[:-1], 1301, "7 gaps"),
        (PAYLOAD[:20], 1301, "for 7 values"),
        (np.append(PAYLOAD, np.uint8(0)), 1301, "7 gaps"),
        (PAYLOAD, 1300, "below 1300"),
        (PAYLOAD, 6, "at most 6 values"),
        (gaps(3), 1301, "for 2 values"),
        (gaps(3, 1, 1), 1301, "2 gaps"),
        (gaps(3, 1, 255), 1301, "2 gaps"),
        (gaps(255, 255), 1301, "2 gaps"),
        (gaps(3, 0), 1301, "ascending"),
        (gaps(255, 45, 1), 301, "below 301"),
        (gaps(*[255] * 20, 1, 1), 20, "for 2 values"),
    ],
)
def test_a_payload_that_is_no_overwrite_is_refused(payload, size, why):
    with pytest.raises(ValueError, match=why):
        delta_format.read_overwrite(payload, size, 2)


def test_a_compressed_payload_is_bounded_and_whole():
    payload = np.zeros(1 << 20, np.uint8)
    frame = delta_format.compress(payload)
    assert (delta_format.decompress(frame, payload.size) == payload).all()
    for broken in (frame[:-1], frame[1:], np.append(frame, np.uint8(7)), frame[:0]):
        with pytest.raises(ValueError, match="zstd frame"):
            delta_format.decompress(broken, payload.size)
    with pytest.raises(ValueError, match="at most 1048575 bytes"):
        delta_format.decompress(frame, payload.size - 1)
    endless = zstandard.ZstdCompressor(write_content_size=False).compress(payload.data)
    with pytest.raises(ValueError, match="states the size"):
        delta_format.decompress(np.frombuffer(endless, np.uint8), payload.size)


@pytest.mark.parametrize("size", [0, 1, 1000, 200_000])
def test_a_frame_of_bytes_that_do_not_compress_is_within_the_bound(size):
    payload = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    assert delta_format.compress(payload).size <= delta_format.largest_frame(size)
