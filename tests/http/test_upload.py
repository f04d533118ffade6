"""An upload reaches the engine through a file, and leaves nothing behind when it fails."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import resource
import shutil
import socket
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from fastdeploy.core.config import UPLOAD_PREFIX
from fastdeploy.core.errors import InvalidField
from fastdeploy.core.weight_source import FileSource
from fastdeploy.http import upload, upload_files
from fastdeploy.inter_communicator import messages as m
from support.http_calls import OCTETS, answer, in_thread, wait_until
from support.upload_engine import SESSION, UploadEngine

BOTH = pytest.mark.parametrize("spool", ["disk", "shared memory"], indirect=True)
UPDATE, CHUNK = "/v1/update_weights", f"/v1/weights/chunk?session_id={SESSION}"
PATHS = [UPDATE, CHUNK]
HALF = 1 << 16  # bytes; a shorter body is received through the parser


@pytest.fixture
def spool(tmp_path, monkeypatch, request):
    """The upload folder. The server treats it as what the parameter says: disk (the default) or shared memory."""
    folder = tmp_path / "uploads"
    folder.mkdir()
    if getattr(request, "param", "disk") == "shared memory":
        monkeypatch.setattr(upload_files, "SHARED_MEMORY", str(folder))
    return folder


@pytest.fixture
def uploads(make_stack, spool):
    """A stack with ``uploads``, an engine that takes uploads."""
    stack = make_stack(upload_dir=str(spool), max_upload_mb=2, max_body_mb=1)
    stack.uploads = UploadEngine(stack.engine)
    return stack


def post(stack, path: str, content):
    return stack.http.post(path, content=content, headers=OCTETS)


def assert_nothing_left(stack, spool) -> None:
    """Assert that no file of an upload is left."""
    stack.server.stop()
    assert not list(spool.iterdir())


# ------------------------------------------------------------------ uploads that succeed


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("size", [7, HALF, HALF + 1, 5 * HALF - 3])
def test_the_engine_gets_the_body_through_a_file_of_the_upload_folder(uploads, spool, path, declared, size):
    body = os.urandom(size)
    reply = post(uploads, path, body if declared else iter([body[:3], body[3:]]))
    assert reply.status_code == 200, reply.text
    assert uploads.uploads.bodies == [body]
    for used in uploads.uploads.paths:
        assert os.path.dirname(used) == str(spool) and os.path.basename(used).startswith(UPLOAD_PREFIX)
    assert_nothing_left(uploads, spool)


def test_an_update_by_an_upload_is_a_session_with_one_part(uploads):
    query = {"version": "7", "expected_version": "6", "kv": "recompute", "checksums": '{"a": "ff"}', "timeout_s": 5}
    reply = uploads.http.post(UPDATE, params=query, content=b"body", headers=OCTETS)
    assert reply.json()["result"]["version"] == "9"
    (call,) = uploads.uploads.calls
    assert isinstance(call.source, FileSource)
    assert call == m.UpdatePartArgs(SESSION, call.source, checksums={"a": "ff"})
    begin = m.BeginUpdateArgs("7", "6", "recompute", timeout_s=5.0, ends_with_client=True)
    assert uploads.uploads.sessions == [begin, m.CommitUpdateArgs(SESSION)]


def test_the_session_of_an_upload_that_fails_is_aborted(uploads):
    uploads.uploads.refuse = lambda args: m.Failure("weight_update_refused", "no")
    assert post(uploads, UPDATE, b"x").status_code == 400
    assert uploads.uploads.sessions[1:] == [m.AbortUpdateArgs(SESSION)]
    with unfinished_upload(uploads, UPDATE):
        wait_until(lambda: len(uploads.uploads.sessions) == 3)
    wait_until(lambda: uploads.uploads.sessions[3:] == [m.AbortUpdateArgs(SESSION)])


def test_the_lease_of_the_session_is_renewed_while_an_upload_is_received(uploads):
    answer(uploads, m.CheckUpdateArgs, {"session_id": SESSION, "lease_s": 0.2})
    with unfinished_upload(uploads, CHUNK) as client:
        for _ in range(5):
            assert uploads.engine.expect(m.CheckUpdateArgs).args.session_id == SESSION
        client.sendall(bytes(2_000_000 - 1000))
        assert client.recv(65536).startswith(b"HTTP/1.1 200")
    assert [type(call) for call in uploads.uploads.calls] == [m.UpdatePartArgs]


def test_an_upload_may_be_larger_than_max_body_mb(uploads):
    body = os.urandom(3 << 19)
    assert post(uploads, UPDATE, body).status_code == 200
    assert uploads.uploads.bodies == [body]
    assert uploads.http.post(UPDATE, content=body).status_code == 413, "as JSON"
    assert post(uploads, "/v1/completions", body).status_code == 413


# ------------------------------------------------------------------ memory that is used again


@pytest.fixture
def in_memory(make_stack, tmp_path, monkeypatch):
    """A stack with ``uploads``, whose upload folder ``spool`` is treated as shared memory."""
    monkeypatch.setattr(upload_files, "SHARED_MEMORY", str(tmp_path))
    stack = make_stack(upload_dir=str(tmp_path), max_upload_mb=2)
    stack.uploads, stack.spool = UploadEngine(stack.engine), tmp_path
    return stack


def test_uploads_to_shared_memory_are_received_into_the_same_pages(in_memory, monkeypatch):
    monkeypatch.setattr(upload, "WINDOW_BYTES", HALF + 5)
    bodies = [os.urandom(size) for size in (5 * HALF, 3 * HALF, 2 * HALF + 1, 9 * HALF, 9 * HALF)]
    allocated = []
    allocate = os.posix_fallocate
    monkeypatch.setattr(os, "posix_fallocate", lambda fd, *what: allocated.append(what[1]) or allocate(fd, *what))
    for body in bodies:
        assert post(in_memory, CHUNK, body).status_code == 200
        (file,) = in_memory.spool.iterdir()
        assert file.stat().st_size == len(body)
    assert in_memory.uploads.bodies == bodies and in_memory.uploads.paths == {str(file)}
    assert sum(allocated) == 5 * HALF + (9 * HALF - 2 * HALF - 1), "the last upload needs no new page"
    assert_nothing_left(in_memory, in_memory.spool)


def test_the_file_of_a_short_upload_is_not_kept(in_memory):
    assert post(in_memory, CHUNK, b"short").status_code == 200
    assert not list(in_memory.spool.iterdir())


def test_a_body_of_unknown_length_replaces_all_of_an_earlier_one(in_memory):
    bodies = [bytes(70_000), os.urandom(HALF + 1)]
    assert post(in_memory, CHUNK, bodies[0]).status_code == 200
    assert post(in_memory, CHUNK, iter([bodies[1]])).status_code == 200
    assert in_memory.uploads.bodies == bodies and len(in_memory.uploads.paths) == 1


def test_an_upload_that_is_much_smaller_leaves_the_memory_to_the_next_large_one(in_memory):
    bodies = [os.urandom(size) for size in (5 * HALF, 2 * HALF, 7, 5 * HALF)]
    for body in bodies:
        assert post(in_memory, CHUNK, body).status_code == 200
        (file,) = in_memory.spool.iterdir()
        assert file.stat().st_size == 5 * HALF
    assert in_memory.uploads.bodies == bodies and len(in_memory.uploads.paths) == 3


def test_memory_is_not_used_again_after_a_failure_because_the_engine_may_still_read_it(in_memory):
    in_memory.uploads.refuse = lambda args: m.Failure("staging_timeout", "it hangs")
    assert post(in_memory, CHUNK, bytes(3 * HALF)).status_code >= 400
    assert not list(in_memory.spool.iterdir())


def test_a_file_for_a_gateway_on_another_host_begins_empty_and_is_not_used_again(in_memory):
    assert post(in_memory, CHUNK, bytes(3 * HALF)).status_code == 200, "its file is kept"
    with in_memory.http.stream("POST", "/v1/replicas/spool", json={"nbytes": 3 * HALF}) as reply:
        assert reply.status_code == 200
        [file] = in_memory.spool.iterdir()
        assert in_memory.http.get("/v1/replicas/spool", params={"path": str(file)}).json() == {"nbytes": 0}
    wait_until(lambda: not list(in_memory.spool.iterdir()))


def test_two_uploads_at_once_have_two_files_and_leave_one(in_memory):
    in_memory.uploads.reads = False
    bodies = {os.urandom(3 * HALF), os.urandom(3 * HALF)}
    replies = [in_thread(post, in_memory, CHUNK, body) for body in bodies]
    wait_until(lambda: len(in_memory.uploads.calls) == 2)
    in_memory.uploads.go_on()
    assert [reply.result(20).status_code for reply in replies] == [200, 200]
    assert set(in_memory.uploads.bodies) == bodies
    assert len(list(in_memory.spool.iterdir())) == 1


def test_memory_that_no_upload_needs_is_freed_after_a_while(in_memory, monkeypatch):
    monkeypatch.setattr(upload_files, "KEEP_S", 0.1)
    assert post(in_memory, CHUNK, bytes(3 * HALF)).status_code == 200
    wait_until(lambda: not list(in_memory.spool.iterdir()))


def test_only_the_first_part_of_a_large_file_is_kept(in_memory, monkeypatch):
    monkeypatch.setattr(upload_files, "KEPT_BYTES", HALF)
    bodies = [os.urandom(3 * HALF), os.urandom(3 * HALF)]
    for body in bodies:
        assert post(in_memory, CHUNK, body).status_code == 200
        (file,) = in_memory.spool.iterdir()
        assert file.stat().st_size == HALF
    assert in_memory.uploads.bodies == bodies


def test_nothing_is_kept_where_shared_memory_is_nearly_full(in_memory, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2 * HALF))
    for _ in range(2):
        assert post(in_memory, CHUNK, bytes(3 * HALF)).status_code == 200
        assert not list(in_memory.spool.iterdir())


# ------------------------------------------------------------------ uploads that fail


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("declared", [True, False])
def test_an_upload_beyond_max_upload_mb_is_a_413(uploads, spool, path, declared):
    part = bytes(1 << 20)
    reply = post(uploads, path, part * 3 if declared else iter([part] * 3))
    assert reply.status_code == 413 and "--max-upload-mb" in reply.json()["error"]["message"]
    assert_nothing_left(uploads, spool)


@pytest.mark.parametrize("path", PATHS)
def test_an_empty_upload_names_the_body(uploads, spool, path):
    reply = post(uploads, path, b"")
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "body"
    assert not uploads.uploads.bodies
    assert_nothing_left(uploads, spool)
    gc.collect()
    kept = [error for error in gc.get_objects() if type(error) is InvalidField and error.field == "body"]
    assert not kept, "an error that is kept keeps the stack frames of all calls that raised it"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("failure", [m.Failure("weight_update_refused", "no"), m.Failure("engine_error", "gone")])
def test_a_part_that_the_engine_refuses_is_answered_with_its_error(uploads, spool, path, failure):
    uploads.uploads.refuse = lambda args: failure
    reply = post(uploads, path, bytes(3 * HALF))
    assert reply.json()["error"]["code"] == failure.code and reply.status_code >= 400
    assert_nothing_left(uploads, spool)


def unfinished_upload(stack, path: str = UPDATE, sent: int = 1000) -> socket.socket:
    """Open a connection, and send ``sent`` bytes of an upload of 2 MB."""
    connection = socket.create_connection(("127.0.0.1", stack.http.base_url.port), timeout=20)
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/octet-stream\r\n"
    connection.sendall(f"{head}content-length: 2000000\r\n\r\n".encode() + bytes(sent))
    return connection


@pytest.mark.parametrize("path", PATHS)
@BOTH
@pytest.mark.parametrize("sent", [1000, 3 * HALF])
def test_a_client_that_disconnects_leaves_no_part_of_its_upload(uploads, spool, path, sent):
    engine = uploads.uploads
    with unfinished_upload(uploads, path, sent):
        wait_until(lambda: list(spool.iterdir()))
    wait_until(lambda: not list(spool.iterdir()))
    assert not engine.calls
    assert post(uploads, path, b"again").status_code == 200 and engine.bodies == [b"again"]


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Switch the search for reference cycles off. A server searches rarely."""
    gc.disable()
    yield
    gc.enable()


@BOTH
@pytest.mark.parametrize("cut", [False, True])
def test_an_upload_that_fails_frees_the_memory_of_its_file_at_once(uploads, spool, no_collector, cut):
    def opened() -> list[str]:
        links = []
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
                links.append(os.readlink(f"/proc/self/fd/{fd}"))
        return [link for link in links if str(spool) in link]

    uploads.uploads.refuse = lambda args: m.Failure("weight_update_refused", "no")
    for _ in range(2):
        if cut:
            with unfinished_upload(uploads, CHUNK, 3 * HALF):
                wait_until(opened)
        else:
            assert post(uploads, CHUNK, bytes(3 * HALF)).status_code == 400
        wait_until(lambda: not opened())


@pytest.mark.parametrize("path", PATHS)
def test_an_upload_whose_engine_dies_is_answered_at_once(uploads, spool, path):
    with unfinished_upload(uploads, path, 3 * HALF) as client:
        wait_until(lambda: list(spool.iterdir()))
        uploads.engine.die()
        client.sendall(bytes(2_000_000 - 3 * HALF))
        reply = client.recv(65536)
    assert reply.startswith(b"HTTP/1.1 503"), reply
    uploads.restart_engine()
    wait_until(lambda: not list(spool.iterdir()))


@pytest.mark.parametrize("path", PATHS)
def test_an_upload_that_the_engine_would_refuse_is_refused_before_its_body_is_read(uploads, spool, path):
    answer(uploads, m.CheckUpdateArgs, failure=m.Failure("session_not_found", "there is no weight session"))
    with unfinished_upload(uploads, path, sent=0) as client:
        reply = b"".join(iter(lambda: client.recv(65536), b""))
    assert reply.startswith(b"HTTP/1.1 404") and b"session_not_found" in reply and b"connection: close" in reply
    check = uploads.engine.expect(m.CheckUpdateArgs).args
    assert check.session_id == (SESSION if path == CHUNK else None)
    assert not list(spool.iterdir()) and not uploads.uploads.calls


# ------------------------------------------------------------------ limits


def test_an_upload_beyond_max_uploads_waits_until_another_one_ends(make_stack, spool):
    stack = make_stack(upload_dir=str(spool), max_uploads=2)
    UploadEngine(stack.engine)
    with unfinished_upload(stack, CHUNK) as first, unfinished_upload(stack, CHUNK):
        wait_until(lambda: len(list(spool.iterdir())) == 2)
        answer(stack, m.CheckUpdateArgs, {"session_id": SESSION})
        third = in_thread(post, stack, CHUNK, b"x")
        stack.engine.expect(m.CheckUpdateArgs)
        assert len(list(spool.iterdir())) == 2 and not third.done()
        first.close()
        assert third.result(20).status_code == 200


def test_an_upload_that_waits_too_long_for_a_place_is_a_429(make_stack, spool):
    stack = make_stack(upload_dir=str(spool), max_uploads=1, body_idle_s=0.3)
    engine = UploadEngine(stack.engine)
    engine.reads = False
    reply = in_thread(post, stack, CHUNK, b"x")
    wait_until(lambda: engine.calls)
    for path in (UPDATE, "/update_weights", "/update_weights_from_tensor", "/v1/adapters/load?lora_name=a&config={}"):
        refused = post(stack, path, b"{}")
        assert refused.json()["error"]["code"] == "server_busy", path
        assert refused.status_code == (400 if "tensor" in path else 429)
    engine.go_on()
    assert reply.result(20).status_code == 200


@pytest.mark.parametrize("spool", ["shared memory"], indirect=True)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG])
def test_an_upload_for_which_shared_memory_has_too_few_pages_is_a_507(uploads, spool, monkeypatch, number):
    def full(*args) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", full)
    reply = post(uploads, CHUNK, bytes(3 * HALF))
    assert (reply.status_code, reply.json()["error"]["code"]) == (507, "out_of_space")
    assert not uploads.uploads.bodies and not list(spool.iterdir())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_an_upload_to_a_full_disk_is_a_507(uploads, spool, monkeypatch, path, number):
    def full(*args) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pwrite", full)
    reply = post(uploads, path, b"x")
    assert (reply.status_code, reply.json()["error"]["code"]) == (507, "out_of_space")
    assert not uploads.uploads.bodies
    assert_nothing_left(uploads, spool)


@pytest.mark.parametrize("path", PATHS)
def test_an_upload_that_the_kernel_writes_only_in_part_is_a_507(uploads, spool, path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, hard))
    try:
        reply = post(uploads, path, bytes(1 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert reply.status_code == 507 and not uploads.uploads.bodies
    assert_nothing_left(uploads, spool)
