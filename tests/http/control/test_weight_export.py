"""GET /v1/weights/export: the bytes, the headers, and no file that stays behind."""

from __future__ import annotations

import os
import socket
from urllib.parse import unquote

import httpx
import pytest

from e2e.server import until
from fastdeploy.http.guards.keys import Keys
from fastdeploy.inter_communicator import messages as m

CONTENT = os.urandom(3 << 20)


@pytest.fixture
def upload_dir(tmp_path):
    folder = tmp_path / "uploads"
    folder.mkdir()
    return folder


@pytest.fixture
def stack(make_stack, upload_dir):
    """Server whose engine exports CONTENT as version "v 1/ü"."""
    stack = make_stack(upload_dir=str(upload_dir))
    path = upload_dir / "fastdeploy-upload-1.safetensors"

    def export(call: m.Call) -> m.Reply:
        path.write_bytes(CONTENT)
        result = {
            "path": str(path),
            "nbytes": len(CONTENT),
            "version": "v 1/ü",
            "weight_epoch": 3,
            "fingerprint": "f",
            "eos_token_ids": [7, 9],
        }
        return m.Reply(call.call_id, result)

    stack.engine.replies[m.ExportWeightsArgs] = export
    return stack


def test_the_reply_is_the_file_and_its_headers_name_the_weights(stack, upload_dir):
    reply = stack.http.get("/v1/weights/export")
    assert reply.status_code == 200 and reply.content == CONTENT
    assert reply.headers["Content-Length"] == str(len(CONTENT))
    assert reply.headers["Content-Type"] == "application/octet-stream"
    names = ("Epoch", "Version", "Fingerprint", "EOS-Token-Ids")
    assert [reply.headers[f"X-Weight-{name}"] for name in names] == ["3", "v 1/%C3%BC", "f", "7,9"]
    assert unquote(reply.headers["X-Weight-Version"]) == "v 1/ü"
    assert os.listdir(upload_dir) == []


def test_the_engine_is_asked_for_the_tensors_of_the_query(stack):
    assert stack.http.get("/v1/weights/export?tensors=a.weight&tensors=b.weight").status_code == 200
    assert stack.engine.expect(m.ExportWeightsArgs).args == m.ExportWeightsArgs(tensors=("a.weight", "b.weight"))


def test_a_client_that_goes_away_leaves_no_file(stack, upload_dir):
    url = httpx.URL(stack.server.url)
    before = set(os.listdir("/proc/self/fd"))
    with socket.create_connection((url.host, url.port)) as connection:
        connection.sendall(b"GET /v1/weights/export HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert connection.recv(100)
    until(lambda: set(os.listdir("/proc/self/fd")) <= before, 20, "the file is closed")
    assert os.listdir(upload_dir) == []
    assert stack.http.get("/v1/weights/export").content == CONTENT


def test_an_update_in_the_middle_is_a_conflict(stack):
    failure = m.Failure("update_in_progress", "other weights were committed during the export")
    stack.engine.replies[m.ExportWeightsArgs] = lambda call: m.Reply(call.call_id, {}, failure)
    reply = stack.http.get("/v1/weights/export")
    assert (reply.status_code, reply.json()["error"]["code"]) == (409, "update_in_progress")


def test_an_exported_file_that_is_gone_is_a_conflict(stack, upload_dir):
    result = {
        "path": f"{upload_dir}/gone",
        "nbytes": 1,
        "version": "v",
        "weight_epoch": 3,
        "fingerprint": "f",
        "eos_token_ids": [7, 9],
    }
    stack.engine.replies[m.ExportWeightsArgs] = lambda call: m.Reply(call.call_id, result)
    assert stack.http.get("/v1/weights/export").status_code == 409


def test_the_route_needs_the_control_key(make_stack):
    stack = make_stack(keys=Keys(data=(b"data",), control=(b"control",)))
    for key, status in (("wrong", 401), ("data", 403)):
        reply = stack.http.get("/v1/weights/export", headers={"Authorization": f"Bearer {key}"})
        assert reply.status_code == status
