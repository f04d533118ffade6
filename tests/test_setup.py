"""What the distribution is called, by the Paddle that is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def name_with(paddle_version: str, folder: Path) -> str:
    """The name that setup.py gives where the Paddle to be imported says ``paddle_version`` of itself."""
    (folder / "paddle" / "version").mkdir(parents=True)
    (folder / "paddle" / "__init__.py").write_text("raise ImportError('setup.py must not import Paddle')")
    (folder / "paddle" / "version" / "__init__.py").write_text(paddle_version)
    run = subprocess.run(
        [sys.executable, "setup.py", "--name"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=True,
    )
    return run.stdout.split()[-1]


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("cuda_version     = 'False'", "fastdeploy-cpu"),
        ("cuda_version     = '12.6'", "fastdeploy-gpu"),
        ("full_version = '3.3.1'", "fastdeploy-cpu"),
    ],
)
def test_the_distribution_is_named_after_the_build_of_paddle(tmp_path, line, name):
    assert name_with(line + "\n", tmp_path) == name


def test_ci_runs_the_test_command_of_the_readme():
    assert "make test" in (ROOT / ".ci" / "run").read_text()
    assert "make test " in (ROOT / "README.md").read_text()
