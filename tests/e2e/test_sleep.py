"""A sleep whose disk hangs: the engine answers meanwhile, and dies and restarts like any other."""

from __future__ import annotations

import os
import signal

import pytest

from e2e.server import PROMPT, SMALL, LiveStream, Server, in_background, until
from fastdeploy.core.process import is_alive

# Loaded by Python at the start of each process of the server: a write to the folder of sleeping weights hangs.
HANGING_DISK = """
import os, threading
write, folder = os.write, {folder!r}
def hanging_write(fd, data):
    if os.readlink(f"/proc/self/fd/{{fd}}").startswith(folder):
        open({hangs!r}, "w").close()
        threading.Event().wait()
    return write(fd, data)
os.write = hanging_write
"""


@pytest.fixture
def hanging_disk(tmp_path, monkeypatch):
    """Give a server that counts an engine as stuck after 2 s, and a path that is there once a write hangs."""
    site, spill, hangs = tmp_path / "site", tmp_path / "spill", tmp_path / "hangs"
    for folder in (site, spill):
        folder.mkdir()
    (site / "sitecustomize.py").write_text(HANGING_DISK.format(folder=str(spill), hangs=str(hangs)))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])]))
    with Server(*SMALL, "--stall-s", "2", "--spill-dir", str(spill)) as server:
        yield server, hangs


@pytest.mark.slow
def test_an_engine_whose_sleep_hangs_in_a_write_answers_calls_and_its_death_ends_the_sleep(hanging_disk):
    server, hangs = hanging_disk
    boot, engine = server.get("/v1/is_paused").result["boot_id"], server.engine_pid
    stream = LiveStream(server, PROMPT).wait_for_tokens(3)
    late = server.post("/v1/sleep", {"tags": ["weight"], "timeout_s": 3})
    assert late.status == 504 and late.json["error"]["code"] == "pause_timeout"
    assert hangs.exists() and server.engine_pid == engine, "it was not counted as stuck"
    seen = len(stream.tokens)
    stream.wait_for_tokens(seen + 3)

    hangs.unlink()
    sleeping = in_background(server.post, "/v1/sleep", {"tags": ["weight"], "timeout_s": 60})
    until(hangs.exists, 30, "the write hangs")
    status = server.get("/v1/is_paused").result
    assert status["is_paused"] and [hold["id"] for hold in status["holds"]] == ["sleep"]
    assert server.post("/v1/wakeup", {}).status == 409
    os.kill(engine, signal.SIGKILL)
    reply = sleeping.result(20)
    assert reply.status == 503 and reply.json["error"]["code"] == "engine_dead"
    stream.wait_end()
    until(lambda: not is_alive(engine), 20, "the engine has ended")
    server.wait_ready()
    status = server.get("/v1/is_paused").result
    assert status["boot_id"] != boot and not status["holds"]
    assert len(server.complete(PROMPT, max_tokens=5, ignore_eos=True)["token_ids"]) == 5
