"""benchmarks/weight_update.py: a run on the embedded model, and on the same model as a checkpoint in float32."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from benchmarks import weight_update
from fastdeploy.embedded import MODEL_DIR
from rl.embedded_weights import embedded_weights
from support.checkpoints import write_safetensors

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
