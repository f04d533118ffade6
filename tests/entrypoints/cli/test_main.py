"""The list of commands."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fastdeploy.entrypoints.cli.main import COMMANDS, main

STARTED = """
import contextlib, sys
from fastdeploy.entrypoints.cli.main import main
with contextlib.suppress(SystemExit):
    main(["serve", "--version-of-nothing"])
print(*(name for name in sys.modules if name.startswith("fastdeploy.entrypoints.cli.")))
"""


def test_the_help_lists_all_commands(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    first_words = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert set(COMMANDS) <= set(first_words)


def test_a_word_that_is_no_command_is_refused_with_all_of_them(capsys):
    with pytest.raises(SystemExit):
        main(["server"])
    assert "invalid choice: 'server'" in (told := capsys.readouterr().err) and all(name in told for name in COMMANDS)


@pytest.mark.processes
def test_a_server_does_not_load_the_other_commands():
    done = subprocess.run([sys.executable, "-c", STARTED], capture_output=True, text=True, timeout=60)
    loaded = {name.rpartition(".")[2] for name in done.stdout.split()}
    assert "serve" in loaded and not loaded & {"fleet", "check", "bench", "run_batch", "chat", "collect_env"}
