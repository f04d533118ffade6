"""Measured weight updates: the times that the streams saw, and the deltas that are sent."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import load, save_file

from benchmarks.lib.checkpoint import Checkpoint, Flips
from benchmarks.lib.timeline import StreamLog, TokenEvent
from benchmarks.lib.update_run import Row, fill, medians
from fastdeploy.core import delta_format
from fastdeploy.core.fingerprint import fingerprint, over_all
from fastdeploy.core.serving_dtype import in_dtype


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_two_flips_give_the_checkpoint_in_bfloat16_again(tmp_path, compression):
    tensors = {f"t{i}": np.random.default_rng(i).random((i + 1, 500), np.float32) for i in range(3)}
    save_file(tensors, tmp_path / "model.safetensors")
    flips = Flips(Checkpoint(tmp_path), 0.1, compression)
    state = {name: in_dtype(array.reshape(-1), "bfloat16") for name, array in tensors.items()}
    for frame, reached in zip(flips.frames, reversed(flips.fingerprints), strict=True):
        for name, payload in load(frame).items():
            if compression == "zstd":
                payload = delta_format.decompress(payload, 1 << 20)
            index, values = delta_format.read_overwrite(payload, state[name].size, 2)
            assert 0 < index.size < 0.15 * state[name].size
            state[name][index] = values
        assert over_all({name: fingerprint(bits) for name, bits in state.items()}) == reached
    assert flips.fingerprints[0] != flips.fingerprints[1]


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


def filled(*streams) -> Row:
    row = Row("folder", False, "keep")
    fill(row, list(streams), 0.0, 0.95, 1.4, "new")
    return row


def test_the_silence_and_the_first_token_are_those_of_the_streams():
    row = filled(Seen(), Seen())
    assert row.silent == pytest.approx(0.5) and row.first_token == pytest.approx(0.1)
    assert row.step == pytest.approx(0.1) and not row.wrong
    assert row.speed_before == pytest.approx(20) and row.speed_meanwhile == pytest.approx(20)


def test_a_stream_that_ended_or_has_an_old_version_is_reported():
    assert "ended" in filled(Seen(final="abort")).wrong[0]
    assert "no token of new" in filled(Seen(labels=("old", "old"))).wrong[0]
    late = Seen()
    late.log.tokens[-1].weight_versions = [{"version": "old", "start": 0, "end": 1}]
    assert "old label" in filled(late).wrong[0]


def test_one_row_has_the_medians_of_the_repeats():
    rows = [Row("folder", True, "keep", total=t, recomputed=r) for t, r in ((1.0, 5), (3.0, 9), (2.0, 7))]
    assert (medians(rows).total, medians(rows).recomputed) == (2.0, 7)
