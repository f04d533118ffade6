"""acceptance/soak.py: fifteen cycles with one kill of each kind of process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from acceptance import soak


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(900)
def test_a_short_soak_finds_nothing_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "soak.json"
    status = soak.main(["--cycles", "15", "--audit-every", "5", "--out", str(file)])
    assert status == 0, capsys.readouterr().out
    report = json.loads(file.read_text())
    seen, ledger = report["seen"], report["ledger"]
    assert seen["cycles"] == 15 and all(seen[f"{victim} killed"] == 1 for victim in ("trainer", "engine", "api"))
    assert ledger["engines"] == 2 and ledger["rollouts"] > 0 and seen["tokens compared"] > 0
