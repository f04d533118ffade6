"""Checks of weight sources: nothing is opened outside of the allowed roots."""

from __future__ import annotations

import os

import pytest

from engine.weight_calls import begin, chunk
from fastdeploy.core.weight_source import FileSource, FolderSource, SharedMemorySource, SourcePolicy
from fastdeploy.inter_communicator import messages as m
from support.harness import Harness


@pytest.mark.parametrize("name", ["", "/", "..", "a/b", "/a/b", "x\0y", "x" * 256])
def test_the_name_of_shared_memory_has_no_slashes(name):
    Harness().assert_refused(m.UpdateWeightsArgs(SharedMemorySource(name)), "shared_memory")


@pytest.mark.parametrize(("roots", "allowed"), [(("/",), True), (("/dev/shm",), True), (("/srv",), False), ((), False)])
def test_shared_memory_is_allowed_if_its_folder_is(roots, allowed):
    h = Harness(model_roots=roots)
    reply = h.ask(m.UpdateWeightsArgs(SharedMemorySource("/w1")), rounds=3)
    assert (reply.failure is None) == allowed and h.runner.weights == int(allowed)
    if not allowed:
        assert reply.failure.detail["param"] == "shared_memory"


def test_uploads_are_read_from_the_upload_folder_only(tmp_path):
    uploads, other = tmp_path / "uploads", tmp_path / "other"
    for folder in (uploads, other):
        folder.mkdir()
    (other / "fastdeploy-upload-secret").write_text("s")
    (uploads / "secret").write_text("s")
    h = Harness(model_roots=(), upload_dir=str(uploads))
    for path in (
        other / "fastdeploy-upload-secret",
        uploads / "secret",
        uploads / ".." / "other" / "fastdeploy-upload-secret",
        uploads,
    ):
        refused = h.failure(m.UpdateWeightsArgs(FileSource(str(path))))
        assert refused.code == "invalid_field", path
    (uploads / "fastdeploy-upload-1").write_text("allowed, but no checkpoint of the fake runner")
    refused = h.failure(m.UpdateWeightsArgs(FileSource(str(uploads / "fastdeploy-upload-1"))), rounds=3)
    assert refused.code == "weight_update_refused"


def test_a_part_with_an_empty_path_is_refused_and_the_session_goes_on():
    h = Harness(model_roots=("/srv",))
    session = begin(h)
    refused = chunk(h, session, "").failure
    assert (refused.code, refused.detail["param"]) == ("invalid_field", "model_path")
    assert chunk(h, session, "/w1").failure is None


@pytest.mark.parametrize("nbytes", [-1, 2**63, 2**70])
def test_an_invalid_size_of_shared_memory_is_refused(nbytes):
    Harness().assert_refused(m.UpdateWeightsArgs(SharedMemorySource("w1", nbytes)), "nbytes")


def test_the_check_of_a_source_opens_no_file(monkeypatch):
    """A dead mount would block the loop."""
    policy = SourcePolicy(("/",), "")
    for name in ("stat", "lstat", "open", "readlink"):
        monkeypatch.setattr(os, name, lambda *args, **kwargs: pytest.fail("a file was opened"))
    upload = FileSource("/dev/shm/fastdeploy-upload-1")
    for source in (FolderSource("/dead/mount"), SharedMemorySource("w1"), upload):
        policy.check(source)
