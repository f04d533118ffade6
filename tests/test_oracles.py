"""Check of the references of torch that are stored in tests/support/oracles."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
USERS = ("tests/examples/embedded_model", "tests/worker", "tests/engine/updates/test_update_exactness.py")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_torch_computes_what_is_stored():
    command = (sys.executable, "-m", "pytest", "-q", "-m", "not slow", "--oracles", "check", *USERS)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
