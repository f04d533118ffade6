"""Files of uploads: where they are made, and when they are removed."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import threading

import pytest

from fastdeploy.core.config import UPLOAD_PREFIX, ServeConfig, upload_folders
from fastdeploy.core.errors import InvalidField
from fastdeploy.http import upload, upload_files
from support.http_calls import OCTETS, in_thread, wait_until
from support.upload_engine import SESSION, UploadEngine


@pytest.fixture
def spool(tmp_path):
    folder = tmp_path / "uploads"
    folder.mkdir()
    return folder


def test_files_of_a_killed_server_are_removed_and_those_of_a_living_server_are_not(spool):
    config = ServeConfig(model="m", upload_dir=str(spool))
    dead, alive, foreign = (spool / name for name in (f"{UPLOAD_PREFIX}dead", f"{UPLOAD_PREFIX}alive", "other"))
    for path in (dead, alive, foreign):
        path.write_bytes(b"x")
    with alive.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        upload_files.remove_leftovers(config)
    assert not dead.exists() and alive.exists() and foreign.exists()


def test_pipes_and_links_in_the_upload_folder_are_left_alone(spool, tmp_path):
    (tmp_path / "target").write_text("x")
    os.mkfifo(spool / f"{UPLOAD_PREFIX}pipe")
    (spool / f"{UPLOAD_PREFIX}link").symlink_to(tmp_path / "target")
    (spool / f"{UPLOAD_PREFIX}dead").write_bytes(b"x")
    upload_files.remove_leftovers(ServeConfig(model="m", upload_dir=str(spool)))
    assert sorted(path.name.removeprefix(UPLOAD_PREFIX) for path in spool.iterdir()) == ["link", "pipe"]


def test_an_upload_in_progress_survives_the_start_of_another_server(make_stack, spool):
    stack = make_stack(upload_dir=str(spool))
    engine = UploadEngine(stack.engine)
    path = f"/v1/weights/chunk?session_id={SESSION}"
    engine.reads = False
    reply = in_thread(stack.http.post, path, content=b"abc", headers=OCTETS)
    wait_until(lambda: engine.calls)
    upload_files.remove_leftovers(ServeConfig(model="m", upload_dir=str(spool)))
    engine.go_on()
    assert reply.result(20).status_code == 200
    assert engine.bodies == [b"abc"]


def test_leftovers_are_removed_when_a_server_starts(make_stack, spool):
    (spool / f"{UPLOAD_PREFIX}dead").write_bytes(b"x")
    make_stack(upload_dir=str(spool))
    assert not list(spool.iterdir())


async def test_a_cancelled_upload_leaves_no_file_and_no_thread_that_uses_it(spool, monkeypatch):
    may_write, done = threading.Event(), []

    def write(fd: int, data: memoryview, offset: int) -> int:
        assert may_write.wait(30)
        done.append(os.fstat(fd))
        return len(data)

    async def upload_to(file: upload_files.UploadFile) -> None:
        with contextlib.closing(file):
            await upload.on_thread(file.write, 0, bytes(100))

    monkeypatch.setattr(os, "pwrite", write)
    uploading = asyncio.create_task(upload_to(upload_files.UploadFile(spool)))
    async with asyncio.timeout(20):
        await asyncio.sleep(0.01)
        uploading.cancel()
        await asyncio.sleep(0.01)
        assert list(spool.iterdir()), "it is closed when its thread has ended"
        may_write.set()
        with pytest.raises(asyncio.CancelledError):
            await uploading
    assert done and not list(spool.iterdir())


def test_uploads_go_to_shared_memory_if_it_has_room(monkeypatch):
    config = ServeConfig(model="m")
    memory, temporary = upload_folders("")
    room = [10]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": room[0]}))
    assert str(upload_files.upload_folder(config, 9)) == memory
    assert str(upload_files.upload_folder(config, 10)) == temporary
    assert str(upload_files.upload_folder(ServeConfig(model="m", upload_dir="/x"), 10**18)) == "/x"


def test_an_upload_folder_that_does_not_exist_is_refused_at_the_start(tmp_path):
    with pytest.raises(InvalidField, match="upload_dir"):
        ServeConfig(model="m", upload_dir=str(tmp_path / "absent")).check()
