"""One process dies: every open call is answered, no process or file is left, and the server serves again."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from e2e.server import PROMPT, SMALL, LiveStream, Server, in_background, shared_memory, until
from fastdeploy.core.process import is_alive


@pytest.fixture(scope="module")
def server_that_recovers():
    """Return a server for tests that kill its engine. Each test waits until the new engine runs."""
    with Server(*SMALL) as server:
        yield server


@pytest.fixture(scope="module")
def impatient_server():
    """Return a server that replaces an engine that is silent for 2 s. Each test waits until the new engine runs."""
    with Server(*SMALL, "--stall-s", "2") as server:
        yield server


def pause_in_background(server, **args):
    """Start a pause that drains, and return when the drain has begun."""
    call = in_background(server.post, "/v1/pause", {"mode": "wait", **args})
    until(lambda: server.get("/v1/is_paused").result["phase"] == "draining", 20, "draining")
    return call


CLIENT = """
import sys, urllib.request
request = urllib.request.Request(sys.argv[1], sys.argv[2].encode(), {"Content-Type": "application/json"})
for line in urllib.request.urlopen(request):
    print(line, flush=True)
"""


def start_client(server, stream):
    """Start a client process whose request runs for seconds."""
    body = {"prompt": PROMPT, "stream": stream, "ignore_eos": True, "max_tokens": 3900}
    command = [sys.executable, "-c", CLIENT, server.url + "/v1/completions", json.dumps(body)]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


def is_socket(fd):
    try:
        return os.readlink(fd).startswith("socket:")
    except FileNotFoundError:  # closed since the folder was listed
        return False


def open_sockets(pid):
    return sum(map(is_socket, Path(f"/proc/{pid}/fd").iterdir()))


def ended(server):
    """Return how many sequences were cancelled, and how many ran to their end."""
    return server.finished("abort"), server.finished("length")


@contextlib.contextmanager
def stuck_engine(server):
    """Stop the engine's process while a stream runs, and yield the stream. Wait until another engine serves."""
    stream = LiveStream(server, PROMPT).wait_for_tokens(3)
    stuck = server.engine_pid
    os.kill(stuck, signal.SIGSTOP)
    yield stream
    stream.wait_end(20)
    until(lambda: not is_alive(stuck), 20, "the stuck engine is gone")
    server.wait_ready()


def test_an_engine_killed_in_a_drain_answers_every_call_and_restarts_with_a_new_boot_id(server_that_recovers):
    """The stream keeps every token that it got, and ends once."""
    server = server_that_recovers
    boot = server.get("/v1/is_paused").result["boot_id"]
    streams = [LiveStream(server, [*PROMPT, i]).wait_for_tokens(3) for i in range(3)]
    pause = pause_in_background(server, timeout_s=60)
    os.kill(server.engine_pid, signal.SIGKILL)
    reply = pause.result(20)
    assert reply.status == 503 and reply.json["error"]["code"] == "engine_dead"
    for stream in streams:
        stream.wait_end(20)
        assert stream.error is not None or stream.finals == ["error"]
        assert len(stream.finals) <= 1 and stream.tokens
    server.wait_ready()
    status = server.get("/v1/is_paused").result
    assert status["boot_id"] != boot
    assert not status["is_paused"] and not status["rejecting_new_requests"]
    assert len(server.complete(PROMPT, max_tokens=5, ignore_eos=True)["token_ids"]) == 5


def test_an_engine_restarted_after_a_commit_does_not_serve_the_old_weights_by_itself(server_that_recovers):
    """The engine stays paused until weights are published again."""
    server = server_that_recovers
    model = server.get("/v1/models").json["data"][0]
    assert server.post("/v1/update_weights", {"model_path": model["root"], "version": "p1"}).status == 200
    boot = server.get("/v1/is_paused").result["boot_id"]
    os.kill(server.engine_pid, signal.SIGKILL)

    def came_back():
        reply = server.get("/v1/is_paused")
        return reply.status == 200 and reply.result["boot_id"] != boot

    until(came_back, 60, "the engine is back")
    status = server.get("/v1/is_paused").result
    assert [h["id"] for h in status["holds"]] == ["republish"]
    held = LiveStream(server, PROMPT, max_tokens=5)
    assert server.post("/v1/resume").result["still_held_by"] == ["republish"]
    assert not held.tokens
    assert server.post("/v1/update_weights", {"model_path": model["root"], "version": "p2"}).status == 200
    held.wait_end(30)
    assert held.finals == ["length"] and {s["version"] for s in held.spans} == {"p2"}


@pytest.mark.slow
def test_an_api_server_killed_in_a_drain_ends_only_its_own_requests(start_server):
    """The drain does not wait for requests of a dead API server."""
    server = start_server("--workers", "2")
    streams = [LiveStream(server, [*PROMPT, i]).wait_for_tokens(3) for i in range(4)]
    pause = pause_in_background(server, timeout_s=60, on_timeout="cancel")
    victim = max(server.api_pids, key=open_sockets)  # the API server with more of the streams
    os.kill(victim, signal.SIGKILL)
    until(lambda: victim not in server.api_pids and len(server.api_pids) == 2, 30, "a new API server")

    def broken():
        return [s for s in streams if s.ended.is_set() and not s.finals]

    until(lambda: broken() and server.finished("abort") == len(broken()), 20, "its requests are reaped, no others")
    server.post("/v1/abort_requests", {"abort_all": True})
    for stream in streams:
        stream.wait_end(20)
    error = pause.exception(20)  # a broken connection, if the killed API server had the call
    assert isinstance(error, httpx.TransportError) or pause.result().status == 200
    server.post("/v1/resume")
    until(lambda: server.metric("available_gpu_block_num") == server.metric("max_gpu_block_num"), 30, "KV is back")


def test_the_request_of_a_client_killed_in_a_drain_is_cancelled_and_the_drain_ends(server):
    aborted, whole = ended(server)
    client = start_client(server, stream=True)
    assert client.stdout.readline(), "the stream has begun"
    pause = pause_in_background(server, timeout_s=60, on_timeout="cancel")
    client.kill()
    client.wait()
    assert pause.result(20).result["is_paused"]
    assert server.metric("num_requests_running") == 0
    assert ended(server) == (aborted + 1, whole), "the request was cancelled, not run to its end"
    server.post("/v1/resume")


def test_a_client_that_hangs_up_without_streaming_is_cancelled_too(server):
    aborted, whole = ended(server)
    client = start_client(server, stream=False)
    until(lambda: server.metric("num_requests_running") == 1, 20, "the request runs")
    client.kill()
    client.wait()
    until(lambda: server.metric("num_requests_running") == 0, 30, "the request is cancelled")
    assert ended(server) == (aborted + 1, whole), "the request was cancelled, not run to its end"


def test_a_stuck_engine_is_detected_by_its_heartbeat_answered_504_and_replaced(impatient_server):
    """The server is never half paused, and never answers "already paused" after a failure."""
    server = impatient_server
    with stuck_engine(server):
        reply = server.post("/v1/pause", {"mode": "abort", "timeout_s": 1})
        assert reply.status == 504 and reply.json["error"]["code"] == "engine_stalled"
    status = server.get("/v1/is_paused").result
    assert not status["is_paused"] and not status["holds"]
    assert server.post("/v1/pause", {"mode": "abort"}).result["is_paused"]
    server.post("/v1/resume")


@pytest.mark.slow
def test_a_stuck_engine_is_detected_and_replaced_although_clients_only_generate(impatient_server):
    server = impatient_server
    with stuck_engine(server) as stream:
        os.kill(server.pid, signal.SIGSTOP)  # no new engine starts before /health was asked
        assert "silent for 2 s" in stream.wait_end(20).error["message"]
        health = until(lambda: (reply := server.get("/health")).status == 503 and reply.json, 30, "/health is 503")
        assert "silent" in health["reason"]
        os.kill(server.pid, signal.SIGCONT)
    assert len(server.complete(PROMPT, max_tokens=5, ignore_eos=True)["token_ids"]) == 5


@pytest.mark.slow
def test_an_api_server_that_was_stopped_itself_does_not_consider_the_engine_stuck(impatient_server):
    server = impatient_server
    boot = server.get("/v1/is_paused").result["boot_id"]
    stream = LiveStream(server, PROMPT).wait_for_tokens(3)
    pause = pause_in_background(server, timeout_s=0.5, on_timeout="keep")
    os.kill(server.api_pids[0], signal.SIGSTOP)
    time.sleep(3)  # longer than the deadline and the stall time; the engine sends heartbeats meanwhile
    os.kill(server.api_pids[0], signal.SIGCONT)
    report = pause.result(20).result
    assert report["is_paused"] and report["boot_id"] == boot
    server.post("/v1/resume")
    assert stream.wait_end().finals == ["length"]


@pytest.mark.parametrize(
    ("how", "paused"), [(signal.SIGTERM, False), pytest.param(signal.SIGINT, True, marks=pytest.mark.slow)]
)
def test_a_stop_ends_within_its_limit_and_leaves_no_process_or_file(start_server, how, paused):
    server = start_server("--workers", "2")
    stream = LiveStream(server, PROMPT).wait_for_tokens(3)
    if paused:
        server.post("/v1/pause", {"mode": "keep"})
    pids = [server.engine_pid, *server.api_pids]
    shared = shared_memory(pids)
    assert server.stop(how, timeout_s=20) == 0
    stream.wait_end(30)
    assert stream.finals == ["abort"] and stream.done_seen, (stream.finals, stream.error, len(stream.tokens))
    assert not [p for p in pids if is_alive(p)]
    assert server.leftovers() == []
    assert not [path for path in shared if os.path.exists(path)]


@pytest.mark.slow
def test_a_killed_supervisor_ends_all_its_processes(start_server):
    server = start_server("--workers", "2")
    pids = [server.engine_pid, *server.api_pids]
    server.send_signal(signal.SIGKILL)
    until(lambda: not [p for p in pids if is_alive(p)], 20, "all children are gone")
    until(lambda: server.leftovers() == [], 30, "the socket folder is gone")


@pytest.mark.slow  # 15 s of waits between restarts. test_supervisor.py has the case of an engine that fails at once.
def test_an_engine_that_dies_again_and_again_ends_the_server_with_an_error(start_server):
    server = start_server()
    end = time.monotonic() + 100
    while server.poll() is None and time.monotonic() < end:
        for pid in server.pids("fastdeploy.entrypoints.engine_main"):
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.2)
    assert server.poll() not in (None, 0)
    assert server.leftovers() == []
