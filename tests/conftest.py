"""Fixtures that many tests share. Everything under ``checkpoints`` is read-only: copy a folder before damaging it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.checkpoints import SPECS, write_checkpoint
from support.torch_process import TorchProcess


@pytest.fixture(scope="session")
def torch_process() -> Iterator[TorchProcess]:
    """Computes references in torch, in a process of its own."""
    process = TorchProcess()
    yield process
    process.close()


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folder of every tiny checkpoint of checkpoints.SPECS, by name."""
    root = tmp_path_factory.mktemp("checkpoints")
    return {name: write_checkpoint(root / name, spec) for name, spec in SPECS.items()}
