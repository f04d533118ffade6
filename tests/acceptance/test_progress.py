"""Lines of progress."""

from __future__ import annotations

import re
import sys
import threading

from acceptance.lib import progress as module
from acceptance.lib.progress import main, progress


def test_lines_come_until_the_block_ends(monkeypatch):
    monkeypatch.setattr(module, "LINE_S", 0.001)
    said, three = [], threading.Event()

    def say(line: str) -> None:
        said.append(line)
        if len(said) == 3:
            three.set()

    with progress(lambda: f"line {len(said)}", say):
        assert three.wait(30)
    assert said[:3] == ["line 0", "line 1", "line 2"]
    assert not [thread for thread in threading.enumerate() if "repeat" in thread.name]


def test_a_command_keeps_its_exit_status_and_its_time_left_is_told(monkeypatch, capsys):
    monkeypatch.setattr(module, "LINE_S", 0.01)
    wait = "import time; time.sleep(0.5); raise SystemExit(3)"
    assert main("packages", "60", sys.executable, "-c", wait) == 3
    assert re.match(r"packages: \d+ s, about \d+ s left\n", capsys.readouterr().out)
