"""Opening and reading files of other programs."""

from __future__ import annotations

import os
import socket

import pytest

from fastdeploy.core import files
from fastdeploy.core.files import Folder, make_beneath, open_regular, path_problem, read_whole


@pytest.mark.parametrize("path", ["", "a\0b", "/" + "a/" * 2500, "/" + "x" * 256, "/\ud800", "\udc80"], ids=repr)
def test_an_impossible_path_is_refused(path):
    assert path_problem(path).startswith("expected a path")
    with pytest.raises(OSError, match="expected a path"):
        Folder(path)


@pytest.mark.parametrize("path", ["/", "~", "a b", "/" + "x" * 255, "ü" * 127])
def test_a_possible_path_has_no_problem(path):
    assert path_problem(path) is None


@pytest.fixture
def odd(tmp_path):
    """Return a folder with one regular file, and one entry of every other kind."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "device").symlink_to("/dev/zero")
    (tmp_path / "pipe-link").symlink_to("pipe")
    (tmp_path / "loop").symlink_to("loop")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        (tmp_path / "file").write_bytes(b"content")
        yield tmp_path


def test_only_a_regular_file_is_opened_and_nothing_stays_open(odd):
    before = sorted(os.listdir("/proc/self/fd"))
    with Folder(odd) as folder:
        for name in ("pipe", "folder", "device", "pipe-link", "loop", "socket"):
            with pytest.raises(OSError):
                folder.open(name)
            with pytest.raises(OSError, match="not a regular file"):
                open_regular(odd / name)
        for name in ("", ".", "..", "../x", "folder/x", "absent"):
            with pytest.raises(OSError):
                folder.open(name)
        assert folder.read("file", 7) == b"content" and folder.has("loop") and not folder.has("absent")
        assert folder.names() == sorted(os.listdir(odd))
        with pytest.raises(OSError, match="has 7 bytes, expected at most 6"):
            folder.read("file", 6)
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_a_kernel_file_of_size_0_is_read_as_empty():
    """A read of some kernel files would block for ever."""
    fd = open_regular("/proc/self/status")
    try:
        assert read_whole(fd, 100) == b""
    finally:
        os.close(fd)


def test_a_link_put_in_place_after_the_check_is_not_followed(tmp_path, monkeypatch):
    root, secret = tmp_path / "root", tmp_path / "secret"
    for folder in (root / "a" / "b", secret / "b"):
        folder.mkdir(parents=True)
    (secret / "b" / "file").write_text("secret")
    realpath = os.path.realpath

    def resolve_then_swap(path):
        real = realpath(path)
        if str(path).endswith("/a/b") and not (root / "a").is_symlink():
            (root / "a").rename(root / "moved")
            (root / "a").symlink_to(secret)
        return real

    monkeypatch.setattr(files.os.path, "realpath", resolve_then_swap)
    with pytest.raises(OSError, match="put there just now"):
        Folder(root / "a" / "b", [str(root)])


def test_an_open_folder_stays_the_same_after_its_path_is_replaced(tmp_path):
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "x").write_text("old")
    with Folder(tmp_path / "f") as folder:
        (tmp_path / "f").rename(tmp_path / "g")
        (tmp_path / "f").mkdir()
        (tmp_path / "f" / "x").write_text("new")
        assert folder.read("x", 10) == b"old"


def test_folders_are_made_only_below_the_root(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    os.close(make_beneath(str(root), str(root / "a" / "b")))
    os.close(make_beneath(str(root), str(root)))
    assert (root / "a" / "b").is_dir()
    (root / "out").symlink_to(tmp_path)
    (root / "file").write_text("x")
    for path in (root / "out" / "x", root / "out", root / "file" / "x", root / ".." / "x", tmp_path, "x", "/rootx"):
        with pytest.raises(OSError):
            make_beneath(str(root), str(path))
    assert sorted(os.listdir(tmp_path)) == ["root"]
