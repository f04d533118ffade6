"""Checkpoints of the fake runner."""

from __future__ import annotations

import pytest


@pytest.fixture
def folders(tmp_path):
    for name in ("w1", "w2", "w3", "w1-recompute", "bad", "garbage"):
        (tmp_path / name).mkdir()
    return tmp_path
