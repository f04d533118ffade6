"""Uploads to real processes that are slow, break off, or lose their API server."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from e2e.server import PROMPT, Server, halves, until
from fastdeploy.embedded import MODEL_DIR


@pytest.fixture
def uploads(start_server: Callable[..., Server], tmp_path: Path) -> Server:
    """Return a server with two API servers and an upload folder of its own."""
    folder = tmp_path / "uploads"
    folder.mkdir()
    server = start_server("--workers", "2", "--upload-dir", str(folder))
    server.upload_dir = folder
    return server


@contextlib.contextmanager
def unfinished_upload(server: Server, path: str, body: bytes, sent: int) -> Iterator[socket.socket]:
    """Send the first ``sent`` bytes of an upload."""
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/octet-stream\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body[:sent])
        yield connection


def checksum(server: Server) -> str:
    return server.weights(checksums=True)["checksum"]


@pytest.mark.slow  # long enough for a busy machine; tests/engine/updates/test_weight_session.py has a clock
def test_an_upload_may_take_longer_than_the_lease(uploads, new_weights):
    session = uploads.post("/v1/weights/begin", {"lease_s": 10.0}).result["session_id"]
    for part in halves(new_weights):
        with unfinished_upload(uploads, f"/v1/weights/chunk?session_id={session}", part, 1000) as connection:
            assert not threading.Event().wait(15.0)
            connection.sendall(part[1000:])
            assert connection.recv(1000).startswith(b"HTTP/1.1 200")
    assert uploads.post("/v1/weights/commit", {"session_id": session}).result["status"] == "committed"


def test_an_api_server_killed_in_an_upload_changes_nothing_and_the_session_goes_on(uploads, new_weights):
    before, first = checksum(uploads), uploads.complete(PROMPT, max_tokens=5, ignore_eos=True)["token_ids"]
    whole = (new_weights / "model.safetensors").read_bytes()
    session = uploads.post("/v1/weights/begin").result["session_id"]
    path = f"/v1/weights/chunk?session_id={session}"
    with unfinished_upload(uploads, path, whole, len(whole) // 2):
        until(lambda: list(uploads.upload_dir.iterdir()), 30, "the upload is received")
        for pid in uploads.api_pids:
            os.kill(pid, signal.SIGKILL)
        uploads.wait_ready()
    assert uploads.weights()["session"]["session_id"] == session and checksum(uploads) == before
    assert uploads.complete(PROMPT, max_tokens=5, ignore_eos=True)["token_ids"] == first
    assert uploads.post(path, whole).result["tensors"] > 0
    assert uploads.post("/v1/weights/commit", {"session_id": session}).result["status"] == "committed"
    uploads.post("/v1/update_weights", {"model_path": str(new_weights)}).ok()
    assert checksum(uploads) != before


@pytest.mark.slow
def test_an_update_in_one_call_that_is_still_received_ends_with_a_reset_and_with_an_abort(uploads):
    before, whole = checksum(uploads), (MODEL_DIR / "model.safetensors").read_bytes()
    for path in ("/v1/reset", "/v1/weights/abort"):
        with unfinished_upload(uploads, "/v1/update_weights", whole, len(whole) // 2) as connection:
            until(lambda: uploads.weights()["session"], 30, "the session is open")
            assert uploads.post("/v1/update_weights", whole).status == 409  # no other update comes between
            uploads.post(path, {}).ok()
            connection.sendall(whole[len(whole) // 2 :])
            assert b"404" in connection.recv(1000)
        assert uploads.weights()["weight_epoch"] == 0 and checksum(uploads) == before


@pytest.mark.slow
def test_an_update_in_one_call_whose_client_or_api_server_dies_leaves_no_session(uploads):
    before, whole = checksum(uploads), (MODEL_DIR / "model.safetensors").read_bytes()
    for die in (lambda: None, lambda: [os.kill(pid, signal.SIGKILL) for pid in uploads.api_pids]):
        with unfinished_upload(uploads, "/v1/update_weights", whole, len(whole) // 2):
            until(lambda: uploads.weights()["session"] and list(uploads.upload_dir.iterdir()), 30, "it is received")
            die()
            uploads.wait_ready()
        until(lambda: not list(uploads.upload_dir.iterdir()), 30, "the file is removed")
        until(lambda: uploads.weights()["session"] is None, 30, "the session has ended")
    assert checksum(uploads) == before
    assert uploads.post("/v1/update_weights", whole).result["status"] == "committed"
    assert uploads.stop() == 0 and not list(uploads.upload_dir.iterdir())
