"""Fixtures that many tests share. Everything under ``checkpoints`` is read-only: copy a folder before damaging it."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpoints import SPECS, write_checkpoint


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folder of every tiny checkpoint of checkpoints.SPECS, by name."""
    root = tmp_path_factory.mktemp("checkpoints")
    return {name: write_checkpoint(root / name, spec) for name, spec in SPECS.items()}
