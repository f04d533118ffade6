"""``fastdeploy check-sync``: the exit status, the text and the JSON. The engine is played by its routes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fastdeploy.embedded import MODEL_DIR
from fastdeploy.entrypoints.cli.main import main
from fastdeploy.testing.checkpoints import Spec, random_tensors, write_checkpoint
from rl.check_sync.played import Played, as_sglang

SPEC = Spec("qwen3", layers=5, head_dim=16, seed=3)


@pytest.fixture
def played() -> Iterator[Played]:
    with Played() as one:
        yield one


def folder_of(folder: Path, factor: float) -> str:
    tensors = {name: one * np.float32(factor) for name, one in random_tensors(SPEC).items()}
    return str(write_checkpoint(folder / str(factor), SPEC, tensors))


def test_the_status_is_the_verdict_and_the_text_says_what_differs(played, tmp_path, capsys):
    as_sglang(played, random_tensors(SPEC))
    flags = ["check-sync", "--url", f"{played.url}/v1", "--no-answers", "--model"]
    mine, next_step = folder_of(tmp_path, 1.0), folder_of(tmp_path, 1.5)
    assert main([*flags, mine]) == 0
    assert capsys.readouterr().out.startswith("EQUAL: All 58 tensors are equal.\n")
    assert main([*flags, next_step, "--previous", mine]) == 1
    text = capsys.readouterr().out
    assert text.startswith("DIFFERS: 58 of 58 tensors differ (58 stale). The first is model.embed_tokens.weight.")
    assert "  stale: the values are those of 1 update before." in text and "and 50 more differences" in text
    assert f"engine    SGLang at {played.url}\nserves    version step-7" in text
    assert all(len(line) <= 120 for line in text.splitlines())
    assert main([*flags, next_step, "--previous", mine, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["verdict"], report["ok"], report["exit_status"]) == ("differs", False, 1)
    assert len(report["differences"]) == 58 and {one["kind"] for one in report["differences"]} == {"stale"}
    played.routes = {}
    assert main([*flags, mine]) == 2
    assert capsys.readouterr().out.startswith("UNKNOWN: ")


def test_the_command_names_the_argument_that_is_wrong(played, tmp_path, capsys):
    as_sglang(played, {})
    (tmp_path / "history").write_text("{}")
    for flags, told in (
        (["--model", "/nowhere"], "argument --model: the folder '/nowhere' cannot be read"),
        (["--model", str(MODEL_DIR), "--history", str(tmp_path / "history")], "argument --history: "),
        (["--model", str(MODEL_DIR), "--previous", "/nowhere"], "argument --previous: there is no folder '/nowhere'"),
        (["--model", str(MODEL_DIR), "--base", "/nowhere"], "argument --base: there is no folder '/nowhere'"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["check-sync", "--url", played.url, "--no-answers", *flags])
        assert ended.value.code == 2 and told in capsys.readouterr().err
