"""An upload reaches the engine through files, as a stream or as a whole, and leaves nothing behind when it fails."""

from __future__ import annotations

import asyncio
import errno
import gc
import itertools
import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from fastdeploy.core.config import UPLOAD_PREFIX
from fastdeploy.core.errors import InvalidField
from fastdeploy.core.weight_source import FileSource, StreamSource
from fastdeploy.http import upload_files
from fastdeploy.inter_communicator import messages as m
from support.http_calls import OCTETS, answer, in_thread, wait_until
from support.upload_engine import SESSION, UploadEngine

UPDATE, CHUNK = "/v1/update_weights", f"/v1/weights/chunk?session_id={SESSION}"
PATHS = [UPDATE, CHUNK]
HALF = 1 << 16


@pytest.fixture
def spool(tmp_path):
    folder = tmp_path / "uploads"
    folder.mkdir()
    return folder


@pytest.fixture(params=[True, False], ids=["stream", "file"])
def streams(request) -> bool:
    """Return whether the engine takes uploads as streams."""
    return request.param


@pytest.fixture
def uploads(make_stack, spool, streams, monkeypatch):
    """A stack with ``uploads``, an engine that takes uploads."""
    monkeypatch.setattr(upload_files, "HALF_BYTES", HALF)
    stack = make_stack(upload_dir=str(spool), max_upload_mb=2, max_body_mb=1)
    stack.uploads = UploadEngine(stack.engine)
    stack.engine.streams = streams
    return stack


def post(stack, path: str, content):
    return stack.http.post(path, content=content, headers=OCTETS)


def assert_nothing_left(stack, spool) -> None:
    """Assert that the engine has no part of an upload, and that no file is left but those for later uploads."""
    stack.server.stop()
    assert not stack.uploads.open and not list(spool.iterdir())


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


@pytest.mark.parametrize("streams", [True], indirect=True)
def test_a_stream_needs_two_halves_of_a_file_however_large_the_body_is(uploads, spool):
    body = os.urandom(30 * HALF + 5)
    engine = uploads.uploads
    engine.reads = False
    reply = in_thread(post, uploads, CHUNK, body)
    both = [body[HALF : 2 * HALF] + body[:HALF]]
    wait_until(lambda: [file.read_bytes() for file in spool.iterdir()] == both)
    wait_until(lambda: [piece.source.nbytes for piece in engine.pieces] == [0, HALF])
    engine.go_on()
    assert reply.result(20).status_code == 200
    assert [file.stat().st_size for file in spool.iterdir()] == [2 * HALF]
    assert engine.bodies == [body]


@pytest.mark.parametrize("streams", [True], indirect=True)
def test_the_reply_about_a_stream_is_that_of_its_last_piece_with_the_time_of_all(uploads):
    result = post(uploads, CHUNK, bytes(3 * HALF + 1)).json()["result"]
    assert result == {"session_id": SESSION, "lease_s": 300.0, "version": "9", "stage_ms": 5.0}


@pytest.mark.parametrize("streams", [True], indirect=True)
def test_later_streams_use_the_same_file_again_and_streams_at_the_same_time_do_not(uploads, spool):
    for _ in range(3):
        assert post(uploads, CHUNK, b"body").status_code == 200
    assert len(uploads.uploads.paths) == 1
    uploads.uploads.reads = False
    replies = [in_thread(post, uploads, CHUNK, body) for body in (b"one", b"two")]
    wait_until(lambda: len(uploads.uploads.pieces) == 3 * 2 + 2 * 2)
    uploads.uploads.go_on()
    assert [reply.result(20).status_code for reply in replies] == [200, 200]
    assert len(uploads.uploads.paths) == len(list(spool.iterdir())) == 2
    assert sorted(uploads.uploads.bodies[3:]) == [b"one", b"two"]


def test_an_update_in_one_call_is_a_session_that_ends_with_the_api_server_or_one_file(uploads, streams):
    query = {"version": "7", "expected_version": "6", "kv": "recompute", "checksums": '{"a": "ff"}', "timeout_s": 5}
    reply = uploads.http.post(UPDATE, params=query, content=b"body", headers=OCTETS)
    assert reply.json()["result"]["version"] == "9"
    calls = uploads.uploads.calls
    if not streams:
        (call,) = calls
        expected = m.UpdateWeightsArgs(call.source, "7", "6", "recompute", checksums={"a": "ff"}, timeout_s=5.0)
        assert isinstance(call.source, FileSource) and call == expected
        return
    assert uploads.uploads.kinds == ["BeginUpdate", "CommitUpdate"]
    assert calls[0] == m.BeginUpdateArgs("7", "6", "recompute", timeout_s=5.0, ends_with_client=True)
    assert {(piece.session_id, str(piece.checksums)) for piece in uploads.uploads.pieces} == {(SESSION, "{'a': 'ff'}")}
    assert calls[-1] == m.CommitUpdateArgs(SESSION)


@pytest.mark.parametrize("streams", [False], indirect=True)
def test_a_session_waits_for_an_upload_that_is_kept_in_a_file(uploads):
    """An open stream without content stops the lease."""
    assert post(uploads, CHUNK, b"body").status_code == 200
    kinds = [getattr(call.source, "state", "file") for call in uploads.uploads.calls]
    assert kinds == ["open", "file", "broken"]


@pytest.mark.parametrize("streams", [False], indirect=True)
def test_an_upload_that_is_kept_in_a_file_takes_no_room_for_a_stream(uploads, spool, monkeypatch):
    """A small delta needs room for its own bytes only."""
    monkeypatch.setattr(upload_files, "HALF_BYTES", 1 << 60)
    assert post(uploads, CHUNK, b"body").status_code == 200


def test_an_upload_may_be_larger_than_max_body_mb(uploads):
    body = os.urandom(3 << 19)
    assert post(uploads, UPDATE, body).status_code == 200
    assert uploads.uploads.bodies == [body]
    assert uploads.http.post(UPDATE, content=body).status_code == 413, "as JSON"
    assert post(uploads, "/v1/completions", body).status_code == 413


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
@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("failure", [m.Failure("weight_update_refused", "no"), m.Failure("engine_error", "gone")])
def test_a_part_that_the_engine_refuses_is_answered_with_its_error(uploads, spool, streams, path, number, failure):
    """At whichever piece the engine refuses. An update in one call leaves no session."""
    counter = itertools.count()

    def refuse(args: m.Args) -> m.Failure | None:
        is_part = isinstance(args, m.UpdateWeightsArgs | m.UpdateChunkArgs) and not (
            isinstance(args.source, StreamSource) and args.source.state == "broken"
        )
        return failure if is_part and (not streams or next(counter) == number) else None

    uploads.uploads.refuse = refuse
    reply = post(uploads, path, bytes(3 * HALF))
    assert reply.json()["error"]["code"] == failure.code and reply.status_code >= 400
    if streams and path == UPDATE:
        assert uploads.uploads.kinds == ["BeginUpdate", "AbortUpdate"]
    assert_nothing_left(uploads, spool)


@pytest.mark.parametrize("path", PATHS)
def test_the_answer_to_a_large_upload_that_is_refused_early_reaches_a_client_that_sends_on(
    make_stack, spool, monkeypatch, path
):
    """httpx's asynchronous client reads no answer before it has sent the whole body."""
    monkeypatch.setattr(upload_files, "HALF_BYTES", HALF)
    stack = make_stack(upload_dir=str(spool), max_upload_mb=64)
    engine = UploadEngine(stack.engine)
    failure = m.Failure("weight_update_refused", "tensor a: no")
    engine.refuse = lambda args: failure if isinstance(args, m.UpdateChunkArgs) and args.source.nbytes else None

    async def pieces():
        for _ in range(48):
            yield bytes(1 << 20)
            await asyncio.sleep(0.002)

    async def post() -> httpx.Response:
        headers = OCTETS | {"Content-Length": str(48 << 20)}
        async with httpx.AsyncClient(base_url=stack.http.base_url, timeout=30) as client:
            return await client.post(path, content=pieces(), headers=headers)

    reply = asyncio.run(post())
    assert (reply.status_code, reply.json()["error"]["message"]) == (400, "tensor a: no")
    assert sum(piece.source.nbytes for piece in engine.pieces) < 8 << 20, "the rest was dropped, and not staged"


@pytest.mark.parametrize("streams", [True], indirect=True)
@pytest.mark.parametrize("refused", [m.BeginUpdateArgs, m.CommitUpdateArgs])
def test_an_update_in_one_call_whose_begin_or_commit_fails_is_answered_with_its_error(uploads, spool, refused):
    failure = m.Failure("update_in_progress", "another session")
    uploads.uploads.refuse = lambda args: failure if isinstance(args, refused) else None
    reply = post(uploads, UPDATE, b"body")
    assert (reply.status_code, reply.json()["error"]["code"]) == (409, "update_in_progress")
    expected = ["BeginUpdate"] if refused is m.BeginUpdateArgs else ["BeginUpdate", "CommitUpdate", "AbortUpdate"]
    assert uploads.uploads.kinds == expected
    assert_nothing_left(uploads, spool)


def unfinished_upload(stack, path: str = UPDATE, sent: int = 1000) -> socket.socket:
    """Open a connection, and send ``sent`` bytes of an upload of 2 MB."""
    connection = socket.create_connection(("127.0.0.1", stack.http.base_url.port), timeout=20)
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/octet-stream\r\n"
    connection.sendall(f"{head}content-length: 2000000\r\n\r\n".encode() + bytes(sent))
    return connection


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("sent", [1000, 3 * HALF])
def test_a_client_that_disconnects_leaves_no_part_of_its_upload(uploads, spool, streams, path, sent):
    engine = uploads.uploads
    with unfinished_upload(uploads, path, sent):
        wait_until(lambda: list(spool.iterdir()) and len(engine.pieces) >= (sent // HALF + 1 if streams else 0))
        assert not engine.broken
    wait_until(lambda: not list(spool.iterdir()) and not engine.open)
    assert not engine.bodies
    wait_until(lambda: engine.kinds == (["BeginUpdate", "AbortUpdate"] if streams and path == UPDATE else []))
    assert post(uploads, path, b"again").status_code == 200 and engine.bodies == [b"again"]


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Switch the search for reference cycles off. A server searches rarely."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("streams", [True], indirect=True)
@pytest.mark.parametrize("cut", [False, True])
def test_a_stream_that_fails_frees_the_memory_of_its_file_at_once(uploads, spool, no_collector, cut):
    def mapped() -> list[str]:
        return [line for line in Path("/proc/self/maps").read_text().splitlines() if str(spool) in line]

    def refuse(args: m.Args) -> m.Failure | None:
        has_content = isinstance(args, m.UpdateChunkArgs) and args.source.nbytes
        return m.Failure("weight_update_refused", "no") if has_content and not cut else None

    uploads.uploads.refuse = refuse
    for _ in range(2):
        if cut:
            with unfinished_upload(uploads, CHUNK, 3 * HALF):
                wait_until(mapped)
        else:
            assert post(uploads, CHUNK, bytes(3 * HALF)).status_code == 400
        wait_until(lambda: not mapped())


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
    engine = UploadEngine(stack.engine)
    with unfinished_upload(stack, CHUNK) as first, unfinished_upload(stack, CHUNK):
        wait_until(lambda: len(engine.pieces) == 2)
        answer(stack, m.CheckUpdateArgs, {"session_id": SESSION, "streams": True})
        third = in_thread(post, stack, CHUNK, b"x")
        stack.engine.expect(m.CheckUpdateArgs)
        assert len(engine.pieces) == 2 and not third.done()
        first.close()
        assert third.result(20).status_code == 200


def test_an_upload_that_waits_too_long_for_a_place_is_a_429(make_stack, spool):
    stack = make_stack(upload_dir=str(spool), max_uploads=1, body_idle_s=0.3)
    engine = UploadEngine(stack.engine)
    engine.reads = False
    reply = in_thread(post, stack, CHUNK, b"x")
    wait_until(lambda: len(engine.pieces) == 2)
    for path in (UPDATE, "/update_weights", "/update_weights_from_tensor", "/v1/adapters/load?lora_name=a&config={}"):
        refused = post(stack, path, b"{}")
        assert refused.json()["error"]["code"] == "server_busy", path
        assert refused.status_code == (400 if "tensor" in path else 429)
    engine.go_on()
    assert reply.result(20).status_code == 200


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_an_upload_to_a_full_disk_is_a_507(uploads, spool, monkeypatch, path, number):
    def full(*args) -> int:
        raise OSError(number, os.strerror(number))

    for call in ("pwrite", "posix_fallocate"):
        monkeypatch.setattr(os, call, full)
    reply = post(uploads, path, b"x")
    assert (reply.status_code, reply.json()["error"]["code"]) == (507, "out_of_space")
    assert not uploads.uploads.bodies
    assert_nothing_left(uploads, spool)


@pytest.mark.parametrize("path", PATHS)
def test_an_upload_that_the_kernel_writes_only_in_part_is_a_507(uploads, spool, monkeypatch, path):
    monkeypatch.setattr(upload_files, "HALF_BYTES", 1 << 20)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, hard))
    try:
        reply = post(uploads, path, bytes(1 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert reply.status_code == 507 and not uploads.uploads.bodies
    assert_nothing_left(uploads, spool)
