"""An upload is a file while its call lasts, and the file is gone afterwards, also after an error."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import shutil
import socket
import threading

import pytest

from fastdeploy.core.config import UPLOAD_PREFIX, ServeConfig, upload_folders
from fastdeploy.core.errors import InvalidField
from fastdeploy.http import upload
from fastdeploy.inter_communicator import messages as m
from support.http_calls import OCTETS, answer, in_thread, wait_until

PATHS = ["/v1/update_weights", "/v1/weights/chunk?session_id=s"]


@pytest.fixture
def spool(tmp_path):
    folder = tmp_path / "uploads"
    folder.mkdir()
    return folder


@pytest.fixture
def spooling(make_stack, spool):
    """A stack whose engine replies with the content of each file that it is sent."""
    stack = make_stack(upload_dir=str(spool), max_upload_mb=2, max_body_mb=1)

    def take(call: m.Call) -> m.Reply:
        path = call.args.source.path
        assert os.stat(path).st_mode & 0o077 == 0, "only its owner may read it"
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


def test_an_upload_may_be_larger_than_max_body_mb(spooling):
    body = os.urandom(3 << 19)
    reply = spooling.http.post("/v1/update_weights", content=body, headers=OCTETS)
    assert bytes.fromhex(reply.json()["result"]["content"]) == body[:32]
    assert spooling.http.post("/v1/update_weights", content=body).status_code == 413, "as JSON"
    assert spooling.http.post("/v1/completions", content=body, headers=OCTETS).status_code == 413


@pytest.mark.parametrize("declared", [True, False])
def test_an_upload_beyond_max_upload_mb_is_a_413_and_leaves_no_file(spooling, spool, declared):
    part = bytes(1 << 20)
    reply = spooling.http.post("/v1/update_weights", content=part * 3 if declared else iter([part] * 3), headers=OCTETS)
    assert reply.status_code == 413 and "--max-upload-mb" in reply.json()["error"]["message"]
    assert not list(spool.iterdir())


def test_an_empty_upload_names_the_body(spooling, spool):
    reply = spooling.http.post("/v1/update_weights", headers=OCTETS)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "body" and not list(spool.iterdir())


@pytest.mark.parametrize("refusal", [m.Failure("weight_update_refused", "no"), m.Failure("engine_error", "gone")])
def test_a_refused_upload_leaves_no_file(spooling, spool, refusal):
    answer(spooling, m.UpdateWeightsArgs, failure=refusal)
    assert spooling.http.post("/v1/update_weights", content=b"x", headers=OCTETS).status_code >= 400
    assert not list(spool.iterdir())


def unfinished_upload(stack, path: str = "/v1/update_weights", sent: int = 1000) -> socket.socket:
    """Open a connection, and send ``sent`` bytes of an upload of 2 MB."""
    connection = socket.create_connection(("127.0.0.1", stack.http.base_url.port), timeout=20)
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/octet-stream\r\n"
    connection.sendall(f"{head}content-length: 2000000\r\n\r\n".encode() + bytes(sent))
    return connection


@pytest.mark.parametrize("path", PATHS)
def test_an_upload_that_the_engine_would_refuse_is_refused_before_its_body_is_read(spooling, spool, path):
    answer(spooling, m.CheckUpdateArgs, failure=m.Failure("session_not_found", "there is no weight session"))
    with unfinished_upload(spooling, path, sent=0) as client:
        reply = b"".join(iter(lambda: client.recv(65536), b""))
    assert reply.startswith(b"HTTP/1.1 404") and b"session_not_found" in reply and b"connection: close" in reply
    check = spooling.engine.expect(m.CheckUpdateArgs).args
    assert check.session_id == ("s" if "chunk" in path else None)
    assert not list(spool.iterdir())


def test_an_upload_beyond_max_uploads_waits_until_another_one_ends(make_stack, spool):
    stack = make_stack(upload_dir=str(spool), max_uploads=2)
    for kind in (m.UpdateWeightsArgs, m.CheckUpdateArgs):
        answer(stack, kind)
    with unfinished_upload(stack) as first, unfinished_upload(stack):
        wait_until(lambda: len(list(spool.iterdir())) == 2)
        third = in_thread(stack.http.post, "/v1/update_weights", content=b"x", headers=OCTETS)
        for _ in range(3):
            stack.engine.expect(m.CheckUpdateArgs)
        assert len(list(spool.iterdir())) == 2 and not third.done()
        first.close()
        assert third.result(20).status_code == 200


def test_an_upload_that_waits_too_long_for_a_place_is_a_429(make_stack, spool):
    stack = make_stack(upload_dir=str(spool), max_uploads=1, body_idle_s=0.3)
    stack.engine.replies[m.UpdateWeightsArgs] = lambda call: None  # the reply is sent below
    reply = in_thread(stack.http.post, "/v1/update_weights", content=b"x", headers=OCTETS)
    first = stack.engine.expect(m.UpdateWeightsArgs)
    for path, body in (("/v1/update_weights", b"y"), ("/update_weights", b"y"), ("/update_weights_from_tensor", b"{}")):
        refused = stack.http.post(path, content=body, headers=OCTETS)
        assert refused.json()["error"]["code"] == "server_busy", path
        assert refused.status_code == (400 if "tensor" in path else 429)
    assert len(list(spool.iterdir())) == 1
    stack.engine.send(m.Reply(first.call_id, {}))
    assert reply.result(20).status_code == 200


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_an_upload_to_a_full_disk_is_a_507_and_leaves_no_file(spooling, spool, monkeypatch, number):
    def full(file, rest):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(upload, "write_all", full)
    reply = spooling.http.post("/v1/update_weights", content=b"x", headers=OCTETS)
    assert (reply.status_code, reply.json()["error"]["code"]) == (507, "out_of_space")
    assert not list(spool.iterdir()) and spooling.engine.seen.empty()


def test_an_upload_that_the_kernel_writes_only_in_part_is_a_507(spooling, spool):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, hard))
    try:
        reply = spooling.http.post("/v1/update_weights", content=bytes(1 << 20), headers=OCTETS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert reply.status_code == 507 and not list(spool.iterdir())


def test_a_client_that_disconnects_during_an_upload_leaves_no_file(spooling, spool):
    with unfinished_upload(spooling):
        wait_until(lambda: list(spool.iterdir()))
    wait_until(lambda: not list(spool.iterdir()))


def test_files_of_a_killed_server_are_removed_and_those_of_a_living_server_are_not(spool):
    config = ServeConfig(model="m", upload_dir=str(spool))
    dead, alive, foreign = (spool / name for name in (f"{UPLOAD_PREFIX}dead", f"{UPLOAD_PREFIX}alive", "other"))
    for path in (dead, alive, foreign):
        path.write_bytes(b"x")
    with alive.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        upload.remove_leftovers(config)
    assert not dead.exists() and alive.exists() and foreign.exists()


def test_pipes_and_links_in_the_upload_folder_are_left_alone(spool, tmp_path):
    (tmp_path / "target").write_text("x")
    os.mkfifo(spool / f"{UPLOAD_PREFIX}pipe")
    (spool / f"{UPLOAD_PREFIX}link").symlink_to(tmp_path / "target")
    (spool / f"{UPLOAD_PREFIX}dead").write_bytes(b"x")
    upload.remove_leftovers(ServeConfig(model="m", upload_dir=str(spool)))
    assert sorted(path.name.removeprefix(UPLOAD_PREFIX) for path in spool.iterdir()) == ["link", "pipe"]


def test_an_upload_in_progress_survives_the_start_of_another_server(spooling, spool):
    entered, go_on = threading.Event(), threading.Event()
    take = spooling.engine.replies[m.UpdateWeightsArgs]

    def slow(call: m.Call) -> m.Reply:
        entered.set()
        assert go_on.wait(20)
        return take(call)

    spooling.engine.replies[m.UpdateWeightsArgs] = slow
    reply = in_thread(spooling.http.post, "/v1/update_weights", content=b"abc", headers=OCTETS)
    assert entered.wait(20)
    upload.remove_leftovers(ServeConfig(model="m", upload_dir=str(spool)))
    go_on.set()
    assert bytes.fromhex(reply.result(20).json()["result"]["content"]) == b"abc"


def test_leftovers_are_removed_when_a_server_starts(make_stack, spool):
    (spool / f"{UPLOAD_PREFIX}dead").write_bytes(b"x")
    make_stack(upload_dir=str(spool))
    assert not list(spool.iterdir())


def test_uploads_go_to_shared_memory_if_it_has_room(monkeypatch):
    config = ServeConfig(model="m")
    memory, temporary = upload_folders("")
    room = [10]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": room[0]}))
    assert str(upload.upload_folder(config, 9)) == memory
    assert str(upload.upload_folder(config, 10)) == temporary
    assert str(upload.upload_folder(ServeConfig(model="m", upload_dir="/x"), 10**18)) == "/x"


def test_an_upload_folder_that_does_not_exist_is_refused_at_the_start(tmp_path):
    with pytest.raises(InvalidField, match="upload_dir"):
        ServeConfig(model="m", upload_dir=str(tmp_path / "absent")).check()
