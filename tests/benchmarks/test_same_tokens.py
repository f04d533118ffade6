from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import same_tokens


def test_equal_tokens_exit_zero_and_different_or_missing_ones_exit_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(same_tokens, "EMBEDDED_PROMPTS", 3)
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    assert same_tokens.main([str(first)]) == 0
    assert same_tokens.main([str(second), "--against", str(first)]) == 0
    found = json.loads(first.read_text())
    assert json.loads(second.read_text()) == found and len(set(found.values())) == 2
    found["embedded float32"] = "another"
    first.write_text(json.dumps(found))
    assert same_tokens.main([str(second), "--against", str(first)]) == 1
    first.write_text("{}")
    capsys.readouterr()
    assert same_tokens.main([str(second), "--against", str(first)]) == 1
    assert capsys.readouterr().out.count("DIFFERENT") == 2
