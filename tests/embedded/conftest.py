"""Access to transformers, which lives in a child process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fastdeploy.embedded import MODEL_DIR

CHILD = Path(__file__).parent / "transformers_child.py"


@pytest.fixture(scope="session")
def transformers() -> Callable[..., Any]:
    """``transformers(task, **arguments)``: see transformers_child.py."""

    def call(task: str, folder: Path = MODEL_DIR, **arguments: Any) -> Any:
        request = json.dumps({"task": task, "folder": str(folder), **arguments})
        done = subprocess.run([sys.executable, str(CHILD)], input=request, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    return call
