"""The store of adapters: its folder, and what engines that were killed leave behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fastdeploy.core.errors import ModelNotFound, WeightUpdateRefused
from fastdeploy.core.weight_source import FolderSource
from fastdeploy.engine.adapters.store import PREFIX, AdapterStore
from support.fake_runner import write_adapter

MAKE_AND_WAIT = """
import sys
from fastdeploy.core.weight_source import FolderSource
from fastdeploy.engine.adapters.store import AdapterStore
store = AdapterStore(sys.argv[1], 100, len)
store.copy(1, FolderSource(sys.argv[2]), None, ("/",))
print("made", flush=True)
sys.stdin.read()
"""


@pytest.mark.processes
def test_stores_of_killed_engines_are_removed_and_those_of_others_stay(tmp_path):
    source = write_adapter(tmp_path / "source", "a1")
    folder = tmp_path / "store"
    folder.mkdir()
    (folder / f"{PREFIX}a-file").write_text("not a store")
    command = [sys.executable, "-c", MAKE_AND_WAIT, str(folder), source]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout.readline() == "made\n"
        (dead,) = folder.glob(f"{PREFIX}*/")
        store = AdapterStore(str(folder), 100, len)
        store.copy(1, FolderSource(source), None, ("/",))
        assert (dead / "1" / "adapter_model.safetensors").read_text() == "a1", "that engine runs"
        engine.send_signal(signal.SIGKILL)
    other = AdapterStore(str(folder), 100, len)
    other.copy(1, FolderSource(source), None, ("/",))
    assert not dead.exists() and Path(store.path(1)).exists()
    for each in (store, other):
        each.close()
    assert os.listdir(folder) == [f"{PREFIX}a-file"]


def test_a_store_that_was_never_used_makes_no_folder(tmp_path):
    AdapterStore(str(tmp_path), 100, len).close()
    assert os.listdir(tmp_path) == []


def test_a_copy_of_another_store_is_read_from_below_no_other_root(tmp_path):
    source, folder = write_adapter(tmp_path / "source", "a1"), tmp_path / "store"
    folder.mkdir()
    first, second = AdapterStore(str(folder), 100, len), AdapterStore(str(folder), 100, len)
    first.copy(1, FolderSource(source), None, ("/",))
    with pytest.raises(WeightUpdateRefused):
        second.copy(6, FolderSource(first.path(1)), None, (str(tmp_path / "source"),))
    second.copy(7, FolderSource(first.path(1)), None, (), True)
    assert Path(second.path(7), "adapter_model.safetensors").read_text() == "a1"
    os.symlink(source, os.path.join(os.path.dirname(first.path(1)), "2"))
    with pytest.raises(WeightUpdateRefused):
        second.copy(8, FolderSource(first.path(2)), None, (), True)
    first.close()
    with pytest.raises(ModelNotFound):
        second.copy(9, FolderSource(first.path(1)), None, (), True)
    second.close()


def test_an_adapter_whose_config_is_refused_is_not_copied(tmp_path, monkeypatch):
    """A tenant may name such an adapter again and again: that must not cost a copy of its tensors."""

    def refuse(config: bytes) -> None:
        raise WeightUpdateRefused(config.decode())

    monkeypatch.setattr(os, "sendfile", None)
    store = AdapterStore(str(tmp_path), 100, refuse)
    with pytest.raises(WeightUpdateRefused, match="{}"):
        store.copy(1, FolderSource(write_adapter(tmp_path / "source", "a1")), None, ("/",))
    assert not Path(store.path(1)).exists()
    store.close()


@pytest.mark.parametrize(
    "path", ["{0}/x", "{0}/x/1", "{0}/fastdeploy-adapters-a/..", "/fastdeploy-adapters-a/1", "", "1"]
)
def test_only_a_numbered_folder_of_a_store_is_taken_for_a_copy(tmp_path, path):
    store = AdapterStore(str(tmp_path), 100, len)
    assert store.is_copy(f"{tmp_path}/{PREFIX}a/1") and not store.is_copy(path.format(tmp_path))
