"""Payloads of deltas are read as they were written, and no other bytes are."""

from __future__ import annotations

import numpy as np
import pytest

from fastdeploy.core import delta_format

INDEX = np.array([0, 5, 6, 100])


@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
def test_an_overwrite_is_read_as_it_was_written(dtype):
    values = np.array([1, 2, 3, 4], dtype)
    payload = delta_format.overwrite(INDEX, values)
    assert payload.size == delta_format.overwrite_nbytes(4, values.itemsize)
    index, bits = delta_format.read_overwrite(payload, 101, values.itemsize)
    assert index.tolist() == INDEX.tolist() and bits.tobytes() == values.tobytes()
    empty = delta_format.overwrite(INDEX[:0], values[:0])
    assert delta_format.read_overwrite(empty, 101, values.itemsize)[0].size == 0


PAYLOAD = delta_format.overwrite(INDEX, np.arange(4, dtype=np.uint16))


@pytest.mark.parametrize(
    ("payload", "size", "why"),
    [
        (PAYLOAD[:3], 101, "4 bytes"),
        (PAYLOAD[:-1], 101, "for 4 values"),
        (np.append(PAYLOAD, np.uint8(0)), 101, "for 4 values"),
        (PAYLOAD, 100, "below 100"),
        (delta_format.overwrite(np.array([3, 3]), np.zeros(2, np.uint16)), 101, "ascending"),
        (delta_format.overwrite(np.array([3, 2]), np.zeros(2, np.uint16)), 101, "below 101"),
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
