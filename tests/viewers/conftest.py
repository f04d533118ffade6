"""A program that people watch the engine with. Run by `make test-prometheus`."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from e2e.server import perturbed


@pytest.fixture(scope="session")
def other_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a checkpoint with other weights."""
    return perturbed(tmp_path_factory.mktemp("weights") / "other")


@pytest.fixture(scope="session")
def prometheus_bin() -> str:
    """Return the path of Prometheus."""
    path = shutil.which(os.environ.get("PROMETHEUS", "prometheus"))
    assert path, "Prometheus is missing: apt-get install prometheus, or set PROMETHEUS to its path"
    return path
