"""Uploads as files: there while the call lasts, gone afterwards, whatever happened; no room is an error."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import shutil
import socket
import threading
import time

import pytest

from fastdeploy.core.config import UPLOAD_PREFIX, ServeConfig, upload_folders
from fastdeploy.core.errors import InvalidField
from fastdeploy.http import upload
from fastdeploy.inter_communicator import messages as m

OCTETS = {"content-type": "application/octet-stream"}
PATHS = ["/v1/update_weights", "/v1/weights/chunk?session_id=s"]


@pytest.fixture
def spool(tmp_path):
    folder = tmp_path / "uploads"
    folder.mkdir()
    return folder


@pytest.fixture
def spooling(make_stack, spool):
    """A stack whose engine tells what lay in the file it was sent."""
    stack = make_stack(upload_dir=str(spool), max_upload_mb=2, max_body_mb=1)

    def take(call: m.Call) -> m.Reply:
        path = call.args.source.path
        assert os.stat(path).st_mode & 0o077 == 0, "nobody else may read it"
        return m.Reply(call.call_id, {"path": path, "content": open(path, "rb").read().hex()[:64]})

    for kind in (m.UpdateWeightsArgs, m.UpdateChunkArgs):
        stack.engine.replies[kind] = take
    return stack


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("declared", [True, False])
def test_an_upload_is_a_file_in_the_upload_folder_until_the_reply(spooling, spool, path, declared):
    body = b"tensors"
    content = body if declared else iter([body[:3], body[3:]])
    reply = spooling.http.post(path, content=content, headers=OCTETS)
    result = reply.json()["result"]
    assert bytes.fromhex(result["content"]) == body
    assert os.path.dirname(result["path"]) == str(spool) and os.path.basename(result["path"]).startswith(UPLOAD_PREFIX)
    assert not list(spool.iterdir())


def test_an_upload_may_be_larger_than_any_other_body(spooling, spool):
    body = os.urandom(3 << 19)
    reply = spooling.http.post("/v1/update_weights", content=body, headers=OCTETS)
    assert bytes.fromhex(reply.json()["result"]["content"]) == body[:32]
    assert spooling.http.post("/v1/update_weights", content=body).status_code == 413, "JSON is not"
    assert spooling.http.post("/v1/completions", content=body, headers=OCTETS).status_code == 413


@pytest.mark.parametrize("declared", [True, False])
def test_an_upload_beyond_its_bound_is_a_413_and_leaves_nothing(spooling, spool, declared):
    part = bytes(1 << 20)
    reply = spooling.http.post("/v1/update_weights", content=part * 3 if declared else iter([part] * 3), headers=OCTETS)
    assert reply.status_code == 413 and "--max-upload-mb" in reply.json()["error"]["message"]
    assert not list(spool.iterdir())


def test_an_empty_upload_names_the_body(spooling, spool):
    reply = spooling.http.post("/v1/update_weights", headers=OCTETS)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "body" and not list(spool.iterdir())


@pytest.mark.parametrize("refusal", [m.Failure("weight_update_refused", "no"), m.Failure("engine_error", "gone")])
def test_a_refused_upload_leaves_no_file(spooling, spool, refusal):
    spooling.engine.replies[m.UpdateWeightsArgs] = lambda call: m.Reply(call.call_id, {}, refusal)
    assert spooling.http.post("/v1/update_weights", content=b"x", headers=OCTETS).status_code >= 400
    assert not list(spool.iterdir())


HALF = "content-type: application/octet-stream\r\ncontent-length: 2000000\r\n\r\n"


@pytest.mark.parametrize("path", PATHS)
def test_an_upload_that_the_engine_would_refuse_is_refused_before_its_body_is_read(spooling, spool, path):
    """The client sends no byte of the body, and the file is never made."""
    refusal = m.Failure("session_not_found", "there is no weight session")
    spooling.engine.replies[m.CheckUpdateArgs] = lambda call: m.Reply(call.call_id, {}, refusal)
    address = spooling.http.base_url
    with socket.create_connection((address.host, address.port), timeout=20) as client:
        client.sendall(f"POST {path} HTTP/1.1\r\nhost: localhost\r\n{HALF}".encode())
        reply = b"".join(iter(lambda: client.recv(65536), b""))
    assert reply.startswith(b"HTTP/1.1 404") and b"session_not_found" in reply and b"connection: close" in reply
    check = spooling.engine.expect(m.CheckUpdateArgs).args
    assert check.session_id == ("s" if "chunk" in path else None)
    assert not list(spool.iterdir())


def test_uploads_wait_for_their_turn_and_each_is_taken(make_stack, spool):
    """Two half-sent ones hold both places; a third is served once one of them has gone."""
    stack = make_stack(upload_dir=str(spool), max_uploads=2)
    for kind in (m.UpdateWeightsArgs, m.CheckUpdateArgs):
        stack.engine.replies[kind] = lambda call: m.Reply(call.call_id, {})
    address = stack.http.base_url
    halves = []
    for _ in range(2):
        client = socket.create_connection((address.host, address.port), timeout=20)
        client.sendall(f"POST /v1/update_weights HTTP/1.1\r\nhost: localhost\r\n{HALF}".encode() + bytes(1000))
        halves.append(client)
    wait_until(lambda: len(list(spool.iterdir())) == 2)
    replies: list = []
    post = lambda: replies.append(stack.http.post("/v1/update_weights", content=b"x", headers=OCTETS))  # noqa: E731
    thread = threading.Thread(target=post)
    thread.start()
    for _ in range(3):
        stack.engine.expect(m.CheckUpdateArgs)
    assert len(list(spool.iterdir())) == 2 and not replies
    halves[0].close()
    thread.join(20)
    assert replies[0].status_code == 200
    halves[1].close()


def test_an_upload_without_a_place_in_time_is_a_429(make_stack, spool):
    stack = make_stack(upload_dir=str(spool), max_uploads=1, body_idle_s=0.3)
    stack.engine.replies[m.UpdateWeightsArgs] = lambda call: None  # it takes its time
    replies: list = []
    post = lambda: replies.append(stack.http.post("/v1/update_weights", content=b"x", headers=OCTETS))  # noqa: E731
    thread = threading.Thread(target=post)
    thread.start()
    first = stack.engine.expect(m.UpdateWeightsArgs)
    for path, body in (("/v1/update_weights", b"y"), ("/update_weights", b"y"), ("/update_weights_from_tensor", b"{}")):
        refused = stack.http.post(path, content=body, headers=OCTETS)
        assert refused.json()["error"]["code"] == "server_busy", path
        assert refused.status_code == (400 if "tensor" in path else 429)
    assert len(list(spool.iterdir())) == 1
    stack.engine.send(m.Reply(first.call_id, {}))
    thread.join(20)
    assert replies[0].status_code == 200


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_no_room_is_a_507_the_engine_hears_nothing_and_no_file_stays(spooling, spool, monkeypatch, number):
    def full(file, rest):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(upload, "write_all", full)
    reply = spooling.http.post("/v1/update_weights", content=b"x", headers=OCTETS)
    assert (reply.status_code, reply.json()["error"]["code"]) == (507, "out_of_space")
    assert not list(spool.iterdir()) and spooling.engine.seen.empty()


def test_a_write_that_the_system_cuts_short_is_found(spooling, spool):
    """A real limit: the kernel takes the first bytes and refuses the rest."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, hard))
    try:
        reply = spooling.http.post("/v1/update_weights", content=bytes(1 << 20), headers=OCTETS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert reply.status_code == 507 and not list(spool.iterdir())


def test_a_client_that_goes_in_the_middle_leaves_no_file(spooling, spool):
    address = spooling.http.base_url
    with socket.create_connection((address.host, address.port)) as client:
        head = "POST /v1/update_weights HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/octet-stream\r\n"
        client.sendall(f"{head}content-length: 1000000\r\n\r\n".encode() + bytes(1000))
        wait_until(lambda: list(spool.iterdir()))
    wait_until(lambda: not list(spool.iterdir()))


def test_what_a_killed_server_left_is_removed_and_what_a_living_one_writes_is_not(spool):
    config = ServeConfig(model="m", upload_dir=str(spool))
    dead, alive, foreign = (spool / name for name in (f"{UPLOAD_PREFIX}dead", f"{UPLOAD_PREFIX}alive", "other"))
    for path in (dead, alive, foreign):
        path.write_bytes(b"x")
    with alive.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        upload.remove_leftovers(config)
    assert not dead.exists() and alive.exists() and foreign.exists()


def test_a_pipe_or_a_link_among_the_leftovers_is_left_alone_and_not_waited_for(spool, tmp_path):
    (tmp_path / "target").write_text("x")
    os.mkfifo(spool / f"{UPLOAD_PREFIX}pipe")
    (spool / f"{UPLOAD_PREFIX}link").symlink_to(tmp_path / "target")
    (spool / f"{UPLOAD_PREFIX}dead").write_bytes(b"x")
    upload.remove_leftovers(ServeConfig(model="m", upload_dir=str(spool)))
    assert sorted(path.name.removeprefix(UPLOAD_PREFIX) for path in spool.iterdir()) == ["link", "pipe"]


def test_an_upload_under_way_survives_the_start_of_another_server(make_stack, spooling, spool):
    entered, go_on = threading.Event(), threading.Event()
    take = spooling.engine.replies[m.UpdateWeightsArgs]

    def slow(call: m.Call) -> m.Reply:
        entered.set()
        assert go_on.wait(20)
        return take(call)

    spooling.engine.replies[m.UpdateWeightsArgs] = slow
    replies: list = []
    send = lambda: replies.append(spooling.http.post("/v1/update_weights", content=b"abc", headers=OCTETS))  # noqa: E731
    thread = threading.Thread(target=send)
    thread.start()
    assert entered.wait(20)
    upload.remove_leftovers(ServeConfig(model="m", upload_dir=str(spool)))
    go_on.set()
    thread.join(20)
    assert bytes.fromhex(replies[0].json()["result"]["content"]) == b"abc"


def test_leftovers_are_removed_when_a_server_starts(make_stack, spool):
    (spool / f"{UPLOAD_PREFIX}dead").write_bytes(b"x")
    make_stack(upload_dir=str(spool))
    assert not list(spool.iterdir())


def test_shared_memory_is_preferred_where_it_has_room(monkeypatch):
    config = ServeConfig(model="m")
    memory, temporary = upload_folders("")
    room = [10]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": room[0]}))
    assert str(upload.upload_folder(config, 9)) == memory
    assert str(upload.upload_folder(config, 10)) == temporary
    assert str(upload.upload_folder(ServeConfig(model="m", upload_dir="/x"), 10**18)) == "/x"


def test_an_upload_folder_that_is_none_is_refused_at_the_start(tmp_path):
    with pytest.raises(InvalidField, match="upload_dir"):
        ServeConfig(model="m", upload_dir=str(tmp_path / "absent")).check()


def wait_until(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)
