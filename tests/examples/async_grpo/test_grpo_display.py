"""The output of a run while it trains."""

from __future__ import annotations

import time

from examples.async_grpo import records
from examples.async_grpo.records import Display


def test_without_a_terminal_lines_tell_the_last_values_and_the_time_left(monkeypatch, capsys):
    monkeypatch.setattr(records, "LINE_S", 0.001)
    with Display(minutes=15) as display:
        out = wait_for(capsys, "the server starts  at most 900 s left")
        display.set_time_left(40, is_most=False)
        display.show(20, updates=3)
        out = wait_for(capsys, "    20 s  updates 3  about 40 s left")
    capsys.readouterr()
    assert not display._lines.is_alive() and out


def wait_for(capsys, text: str) -> str:
    out, deadline = "", time.monotonic() + 30
    while text not in out:
        assert time.monotonic() < deadline, out
        out += capsys.readouterr().out
        time.sleep(0.005)
    return out
