"""benchmarks/fleet_pauses.py: pauses of a few idle replicas, and of many."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks import fleet_pauses


def test_an_idle_fleet_is_paused_and_resumed_and_killed_replicas_come_back():
    row = asyncio.run(fleet_pauses.measure(4, 3, idle_s=0.01))
    assert len(row.pauses_ms) == 3 and min(row.cpu_ms) > 0 and row.killed == 1
    assert len(row.cells()) == len(fleet_pauses.HEADER) and row.cells()[0] == "4"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_256_replicas_are_paused_killed_and_back(capsys: pytest.CaptureFixture[str]):
    assert fleet_pauses.main(["--replicas", "256", "--rounds", "50"]) == 0
    assert "26" in capsys.readouterr().out.splitlines()[-1].split()
