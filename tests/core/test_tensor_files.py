"""Files that are locked while their process lives."""

from __future__ import annotations

import fcntl

import pytest

from fastdeploy.core import files


def test_a_file_that_is_removed_before_it_is_locked_is_made_again(monkeypatch: pytest.MonkeyPatch, tmp_path):
    """Another process takes the new file for one that nobody uses any more."""
    lock, calls = fcntl.flock, []

    def late_lock(file, operation):
        if not calls:
            calls.append(file)
            path.unlink()
        lock(file, operation)

    path = tmp_path / "upload"
    monkeypatch.setattr(files.fcntl, "flock", late_lock)
    with files.new_locked_file(path, 0o600):
        assert calls and path.exists()
        files.remove_abandoned(tmp_path, "up")
        assert path.exists()
    files.remove_abandoned(tmp_path, "up")
    assert not path.exists()
