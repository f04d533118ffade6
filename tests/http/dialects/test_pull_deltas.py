"""Pulls of slime's deltas, below the route. tests/frameworks/test_slime_deltas.py has slime's own writer."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import zstandard
from safetensors.numpy import load_file, save_file

from fastdeploy.core.errors import OutOfSpace, WeightUpdateRefused
from fastdeploy.core.pulled_folder import lock_for_reading
from fastdeploy.http.checkpoint_deltas.formats import SlimeVersions
from fastdeploy.http.checkpoint_deltas.pulls import pull_version
from support.published_deltas import (
    INDEX,
    load_folder,
    make_model,
    next_step,
    publish_slime,
    same,
)


class Host:
    """A host that pulls from ``source`` into ``local``. steps: the tensors of each version, 0 = the model."""

    def __init__(self, folder: Path):
        self.model, self.source, self.root = folder / "model", folder / "published", folder / "root"
        self.local, self.roots = self.root / "local", (str(folder),)
        self.steps = [make_model(self.model)]
        self.source.mkdir()
        self.root.mkdir()

    def pull(self, version: int) -> None:
        versions = SlimeVersions(str(self.model), str(self.source), self.roots)
        pull_version(str(self.root), str(self.local), versions, version, threading.Event())

    def publish(self, encoding: str = "xor", checksum: str = "xxh3-128", **metadata) -> Path:
        """Publish the next version."""
        self.steps.append(next_step(self.steps[-1], len(self.steps)))
        old, new = self.steps[-2:]
        return publish_slime(self.source, len(self.steps) - 1, old, new, encoding, checksum, **metadata)

    def pulled(self, version: int) -> None:
        """Pull a version, and assert that it arrives."""
        self.pull(version)
        assert same(load_folder(self.local), self.steps[version]) and self.state() == f"{version:06d}"

    def state(self) -> str | None:
        path = self.local / ".weight_sync" / "state.json"
        return json.loads(path.read_text())["version"] if path.exists() else None

    def refused(self, version: int, *words: str) -> None:
        with pytest.raises(WeightUpdateRefused) as raised:
            self.pull(version)
        for word in words:
            assert word in raised.value.message


@pytest.fixture
def host(tmp_path) -> Host:
    return Host(tmp_path)


def rewrite(folder: Path, change) -> None:
    """Change the tensors and the metadata of the first file of a delta."""
    path = sorted(folder.glob("*.safetensors"))[0]
    raw = path.read_bytes()
    metadata = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])["__metadata__"]
    tensors = dict(load_file(path))
    change(tensors, metadata)
    save_file(tensors, path, metadata=metadata)


@pytest.mark.parametrize("checksum", ["xxh3-128", "blake3", "adler32"])
@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_deltas_of_each_format_bring_the_folder_to_each_version(host, encoding, checksum):
    host.pulled(0)
    for version in (1, 2, 3):
        host.publish(encoding, checksum)
        host.pulled(version)
    host.pulled(3)


def test_a_chain_is_applied_in_one_pull_and_a_version_without_changes_is_one(host):
    for encoding in ("xor", "overwrite", "xor"):
        host.publish(encoding)
    host.steps.append(host.steps[-1])
    publish_slime(host.source, 4, host.steps[-1], host.steps[-1])
    host.pulled(2)
    host.pulled(4)
    host.pulled(1)
    host.pulled(0)


def test_a_chain_begins_at_the_newest_whole_version(host, tmp_path):
    host.publish()
    whole = host.source / "weight_v000002"
    host.steps += [make_model(whole, {"a": 33, "b": 4}), {}]
    host.steps[3] = next_step(host.steps[2], 3)
    publish_slime(host.source, 3, host.steps[2], host.steps[3])
    (host.source / "weight_v000001" / INDEX).unlink()
    host.pulled(3)
    assert (host.local / INDEX).read_bytes() == (whole / INDEX).read_bytes()


def test_versions_that_were_applied_may_be_removed(host):
    first = host.publish()
    host.pulled(1)
    first.rename(host.source / "gone")
    host.publish()
    host.pulled(2)


def test_a_missing_link_or_a_wrong_base_changes_nothing(host):
    host.publish().rename(host.source / "gone")
    host.publish()
    host.pulled(0)
    host.refused(2, "version 1 cannot be opened")
    (host.source / "gone").rename(host.source / "weight_v000001")
    host.publish(base_version="000001")
    host.refused(3, "base_version", "000002")
    host.publish(version="000009")
    host.refused(4, "version: expected 000004")
    assert host.state() == "000000" and same(load_folder(host.local), host.steps[0])
    host.pulled(2)


@pytest.mark.parametrize(
    ("metadata", "words"),
    [({"delta_encoding": "add"}, ("delta_encoding", "xor or overwrite")),
     ({"compression_format": "lz4"}, ("compression_format", "zstd")),
     ({"checksum_format": "md5"}, ("checksum_format", "xxh3-128")),
     ({"checksum_format": None}, ("checksum_format",)), ({"base_version": "x"}, ("base_version",)),
     ({"base_version": 0}, ("base_version",))],
)  # fmt: skip
def test_an_unknown_format_is_refused_before_the_folder_is_touched(host, metadata, words):
    host.publish()
    host.pulled(1)
    host.publish(**metadata)
    host.refused(2, INDEX, *words)
    assert host.state() == "000001" and same(load_folder(host.local), host.steps[1])


def other_dtype(tensors, _metadata):
    tensors["a"] = tensors["a"].astype(np.uint16)


def no_checksum(_tensors, metadata):
    del metadata["a"]


def other_name(tensors, metadata):
    tensors["z"], metadata["z"] = tensors.pop("a"), "0"


def one_more(tensors, metadata):
    tensors["z"], metadata["z"] = tensors["a"], "0"


def test_tensors_of_a_published_file_that_share_bytes_are_refused_by_name(host):
    folder = host.publish()
    path = sorted(folder.glob("*.safetensors"))[0]
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header["z"] = header["a"]
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
    host.refused(1, path.name, "shares bytes")


@pytest.mark.parametrize(
    ("change", "words"),
    [(other_dtype, ("tensor a", "U8")), (no_checksum, ("tensor a", "no checksum")), (other_name, ("tensor a",)),
     (one_more, ("tensor z", "the file alone"))],
)  # fmt: skip
def test_a_delta_whose_lists_are_wrong_is_refused_before_the_folder_is_touched(host, change, words):
    rewrite(host.publish(), change)
    host.pulled(0)
    host.refused(1, *words)
    assert host.state() == "000000" and same(load_folder(host.local), host.steps[0])


def test_a_tensor_that_the_model_does_not_have_is_refused_by_name(host):
    host.pulled(0)
    old = {**host.steps[0], "extra": np.zeros(4, np.uint16)}
    publish_slime(host.source, 1, old, {**old, "extra": np.ones(4, np.uint16)})
    host.refused(1, "tensor extra", "not in the local checkpoint")
    assert host.state() == "000000"


def frame(data: bytes) -> np.ndarray:
    return np.frombuffer(zstandard.compress(data), np.uint8)


def truncated(payload: np.ndarray, _nbytes: int) -> np.ndarray:
    return payload[: payload.size // 2]


def no_frame(payload: np.ndarray, _nbytes: int) -> np.ndarray:
    return np.zeros(8, np.uint8)


def one_value_too_many(_payload: np.ndarray, nbytes: int) -> np.ndarray:
    return frame(bytes(nbytes + 1))


def too_short(_payload: np.ndarray, nbytes: int) -> np.ndarray:
    return frame(bytes(nbytes - 1))


def out_of_range(_payload: np.ndarray, nbytes: int) -> np.ndarray:
    return frame(np.array([1, nbytes], "<u4").tobytes() + b"x")


def not_ascending(_payload: np.ndarray, nbytes: int) -> np.ndarray:
    return frame(np.array([2, 3, 3], "<u4").tobytes() + b"xy")


def count_without_values(_payload: np.ndarray, nbytes: int) -> np.ndarray:
    return frame(np.array([7], "<u4").tobytes())


def empty(_payload: np.ndarray, nbytes: int) -> np.ndarray:
    return frame(b"")


def other_values(payload: np.ndarray, _nbytes: int) -> np.ndarray:
    data = bytearray(zstandard.decompress(payload.tobytes()))
    data[-1] ^= 1
    return frame(bytes(data))


@pytest.mark.parametrize(
    ("encoding", "spoil", "word"),
    [("xor", truncated, "frame"), ("overwrite", truncated, "frame"), ("xor", no_frame, "zstd"),
     ("overwrite", no_frame, "zstd"), ("xor", one_value_too_many, "more than"), ("xor", too_short, "ends after"),
     ("overwrite", out_of_range, "positions"), ("overwrite", not_ascending, "positions"),
     ("overwrite", count_without_values, "positions"), ("overwrite", empty, "positions"), ("xor", empty, "ends after"),
     ("xor", other_values, "xxh3-128"), ("overwrite", other_values, "xxh3-128")],
)  # fmt: skip
def test_wrong_bytes_are_refused_by_tensor_and_the_folder_cannot_be_loaded_until_the_next_pull(
    host, encoding, spoil, word
):
    folder = host.publish(encoding)
    host.pulled(0)
    good = {path: path.read_bytes() for path in folder.iterdir()}
    rewrite(folder, lambda tensors, _: tensors.update(a=spoil(tensors["a"], host.steps[0]["a"].nbytes)))
    host.refused(1, "tensor a", word)
    assert host.state() is None
    with pytest.raises(OSError, match="pull again"):
        lock_for_reading(str(host.local))
    for path, raw in good.items():
        path.write_bytes(raw)
    host.pulled(1)
    os.close(lock_for_reading(str(host.local)))


def test_a_full_disk_leaves_an_unfinished_folder_that_the_next_pull_builds_anew(host, monkeypatch):
    host.pulled(0)
    host.publish()
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", lambda _fd, _data, _offset: 7)  # as much as had room
        with pytest.raises(OutOfSpace, match="local_checkpoint_dir"):
            host.pull(1)
    assert host.state() is None
    host.pulled(1)


def test_a_folder_that_is_not_what_its_state_says_is_built_anew(host):
    host.pulled(0)
    path = host.local / "model-0.safetensors"
    save_file({name: tensor * 0 for name, tensor in load_file(path).items()}, path)
    host.publish()
    host.pulled(1)


def test_the_versions_of_a_second_run_are_not_mistaken_for_those_of_the_first(host):
    host.publish()
    host.pulled(1)
    (host.source / "weight_v000001").rename(host.source / "run-1")
    first, host.steps[1] = host.steps[1], next_step(host.steps[0], 77)
    publish_slime(host.source, 1, host.steps[0], host.steps[1])
    assert not same(first, host.steps[1])
    host.pulled(1)


def test_a_state_of_before_a_crash_of_the_system_is_not_trusted(host):
    host.pulled(0)
    path = host.local / ".weight_sync" / "state.json"
    for path_state in ({"boot_id": "other"}, {"model": "other"}):
        path.write_text(json.dumps(json.loads(path.read_text()) | path_state))
        (host.local / "model-0.safetensors").write_bytes(b"")
        host.pulled(0)


def test_a_linked_or_foreign_file_is_not_patched(host, tmp_path):
    host.pulled(0)
    host.publish()
    secret = tmp_path / "secret.safetensors"
    (host.local / "model-0.safetensors").rename(secret)
    kept = secret.read_bytes()
    for link in (os.link, os.symlink):
        link(secret, host.local / "model-0.safetensors")
        host.refused(1, "cannot be copied")
        assert secret.read_bytes() == kept
        (host.local / "model-0.safetensors").unlink()


def test_a_reader_keeps_pulls_out_and_is_refused_while_a_pull_writes(host, tmp_path):
    assert lock_for_reading(str(tmp_path / "model")) is None, "a folder that no pull has made"
    host.pulled(0)
    reader = lock_for_reading(str(host.local))
    with open(host.local / ".weight_sync" / "lock") as lock:
        with pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(reader)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with pytest.raises(OSError, match="is writing"):
            lock_for_reading(str(host.local))


CHILD = """
import os, signal, sys, threading
from fastdeploy.http.checkpoint_deltas import local, patch, pulls
from fastdeploy.http.checkpoint_deltas.formats import SlimeVersions
root, folder, model, source, left = sys.argv[1:]
left = int(left)
def count(real):
    def call(*args, **kwargs):
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)
    return call
os.pwrite, os.rename, os.unlink = count(os.pwrite), count(os.rename), count(os.unlink)
pulls.pull_version(root, folder, SlimeVersions(model, source, ["/"]), 2, threading.Event())
print("done")
"""


@pytest.mark.parametrize("start", [None, 1])
@pytest.mark.processes
def test_a_pull_that_is_killed_anywhere_leaves_a_whole_version_or_an_unfinished_folder(host, tmp_path, start):
    host.publish("overwrite")
    host.publish()
    outcomes = set()
    for left in range(0, 40, 3):
        if start is not None:
            host.pulled(start)
        args = [str(tmp_path / "root"), str(host.local), str(tmp_path / "model"), str(host.source), str(left)]
        child = subprocess.run([sys.executable, "-c", CHILD, *args], capture_output=True, text=True, timeout=60)
        done = child.returncode == 0
        assert done or child.returncode == -signal.SIGKILL, child.stderr
        state = host.state()
        outcomes.add(state)
        if state is not None:
            assert same(load_folder(host.local), host.steps[int(state)])
        elif (host.local / ".weight_sync" / "lock").exists():
            with pytest.raises(OSError, match="pull again"):
                lock_for_reading(str(host.local))
        if done:
            break
    assert done and None in outcomes and "000002" in outcomes
    host.pulled(2)
