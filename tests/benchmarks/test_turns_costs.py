"""benchmarks/turns.py: a short run, and its arithmetic."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import turns


def test_a_run_compares_equal_prompts_and_tells_the_ratio(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(turns, "VOCABULARY", 300)
    assert turns.main(["--history", "200", "--repeats", "1", "--json", str(tmp_path / "turns.json")]) == 0
    (result,) = json.loads((tmp_path / "turns.json").read_text())["turns"]
    assert result["history"] > 200 and result["messages"] == 4
    assert "one more turn" in capsys.readouterr().out
    assert turns.row(result | {"whole_ms": 6.0, "extended_ms": 2.0})[2:] == ("6.0", "2.0", "3.0")


@pytest.mark.slow
def test_different_prompts_exit_one(monkeypatch: pytest.MonkeyPatch):
    async def nothing(*args, **options):
        return None

    monkeypatch.setattr(turns, "VOCABULARY", 300)
    monkeypatch.setattr(turns, "extend", nothing)
    assert turns.main(["--history", "200", "--repeats", "1"]) == 1
