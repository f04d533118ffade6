"""Weight updates: the times that the streams saw, the deltas that are sent, and a run of each kind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load, save_file

from benchmarks import weight_update
from benchmarks.lib.checkpoint import Checkpoint, Flips
from benchmarks.lib.update_run import Row, fill, medians
from fastdeploy.bench.timeline import StreamLog, TokenEvent
from fastdeploy.core import delta_format
from fastdeploy.core.fingerprint import fingerprint, over_all
from fastdeploy.core.serving_dtype import in_dtype
from fastdeploy.embedded import MODEL_DIR
from fastdeploy.testing.tensors import write_safetensors
from rl.embedded_weights import embedded_weights

SMALL = ["--engines", "ours", "--streams", "2", "--prompt-tokens", "16", "--quiet-s", "0.2", "--repeats", "2"]


def float32_checkpoint(folder: Path) -> Path:
    shutil.copytree(MODEL_DIR, folder)
    write_safetensors(folder / "model.safetensors", embedded_weights())
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_kind_of_update_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: str):
    model, file = MODEL_DIR if dtype == "bfloat16" else float32_checkpoint(tmp_path / "model"), tmp_path / "out.json"
    arguments = ["--model-path", str(model), "--scratch", str(tmp_path), "--json", str(file), *SMALL]
    status = weight_update.main(arguments)
    out, err = capsys.readouterr()
    assert status in (0, 1), err
    rows = json.loads(file.read_text())["rows"]["ours"]
    assert [len(repeats) for repeats in rows] == [2] * len(weight_update.variants(weight_update.KINDS))
    # A fast machine may reach the end of the context, which is short here. No other error is possible.
    wrong = [line for repeats in rows for row in repeats for line in row["wrong"]]
    assert all(line.endswith(("ended: length", *(f"has no token of update-{n}" for n in range(99)))) for line in wrong)
    assert all("ended" in " ".join(wrong) for line in wrong if "no token" in line)
    whole, *_, delta = [row for repeats in rows for row in repeats]
    assert 0 < delta["nbytes"] < whole["nbytes"] / 5 and delta["source"] == "delta 3%, zstd"
    assert "weight updates: " in out


def test_the_parts_of_a_checkpoint_are_files_of_at_most_so_many_bytes_with_all_tensors(tmp_path):
    tensors = {f"t{i}": np.random.default_rng(i).random(size, np.float32) for i, size in enumerate((9, 100, 5, 5, 1))}
    save_file(tensors, tmp_path / "model.safetensors")
    parts = [load(b"".join(part)) for part in Checkpoint(tmp_path).parts(40)]
    assert all(sum(value.nbytes for value in part.values()) <= 40 or list(part) == ["t1"] for part in parts)
    assert len(parts) == 4
    found = {name: value for part in parts for name, value in part.items()}
    assert found.keys() == tensors.keys()
    for name, value in tensors.items():
        np.testing.assert_array_equal(found[name], value)


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
