from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import load, save

from benchmarks.lib.timeline import StreamLog, TokenEvent
from benchmarks.lib.update import split_safetensors
from benchmarks.weight_update import Row, UpdateBenchmark, medians


@pytest.mark.parametrize("limit", [1, 100, 10_000])
def test_the_chunks_of_an_upload_contain_every_tensor_once(limit):
    tensors = {f"t{i}": np.arange(i + 1, dtype=np.float32) for i in range(12)}
    pieces = [load(piece) for piece in split_safetensors(save(tensors), limit)]
    assert len(pieces) == {1: 12, 10_000: 1}.get(limit, len(pieces))
    together = [(name, array) for piece in pieces for name, array in piece.items()]
    assert sorted(name for name, _ in together) == sorted(tensors)
    for name, array in together:
        np.testing.assert_array_equal(array, tensors[name])


class Seen:
    """A stream with one token per 0.1 s, of version "old" until 1.0 and "new" later, without a token from 1.0 to
    1.5."""

    def __init__(self, labels=("old", "new"), final=None):
        times = [*(0.1 * i for i in range(11)), *(1.5 + 0.1 * i for i in range(5))]
        self.log = StreamLog("s", 0.0, status=200)
        for at in times:
            label = labels[0] if at <= 1.0 else labels[1]
            self.log.tokens.append(TokenEvent(at, [1], weight_versions=[{"version": label, "start": 0, "end": 1}]))
        if final:
            self.log.finals.append((2.0, final))


def fill(*streams) -> Row:
    row = Row("folder", False, "keep", False)
    UpdateBenchmark(None, "m", None, [])._fill(row, list(streams), 0.95, 1.4, "new")
    return row


def test_the_silence_and_the_first_token_are_those_of_the_streams():
    row = fill(Seen(), Seen())
    assert row.silent == pytest.approx(0.5) and row.first_token == pytest.approx(0.1)
    assert row.step == pytest.approx(0.1) and row.tokens_meanwhile == 2 and not row.wrong


def test_a_stream_that_ended_or_has_an_old_version_is_reported():
    assert "ended" in fill(Seen(final="abort")).wrong[0]
    assert "no token of new" in fill(Seen(labels=("old", "old"))).wrong[0]
    late = Seen()
    late.log.tokens[-1].weight_versions = [{"version": "old", "start": 0, "end": 1}]
    assert "old label" in fill(late).wrong[0]


def test_one_row_has_the_medians_of_the_repeats():
    rows = [Row("folder", True, "keep", False, total=t, recomputed=r) for t, r in ((1.0, 5), (3.0, 9), (2.0, 7))]
    assert (medians(rows).total, medians(rows).recomputed) == (2.0, 7)
