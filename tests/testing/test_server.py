"""fastdeploy.testing.serve: reset, on a real server of the embedded model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.make_adapters import main as make_adapters
from e2e.server import in_background, perturbed, until
from fastdeploy.core.process import is_alive
from fastdeploy.embedded import MODEL_DIR
from fastdeploy.testing import Server, ServerFailed, serve

pytestmark = pytest.mark.processes
PROMPT = list(range(40, 60))


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve(None, "--max-num-seqs", "4", "--num-gpu-blocks-override", "512", "--faults") as server:
        yield server


def ok(server: Server, path: str, body: Any = None) -> Any:
    status, reply = server.call("GET" if body is None else "POST", path, body)
    assert status == 200, reply
    return reply.get("result", reply)


def state(server: Server) -> dict[str, Any]:
    """Return all that a test can change and a reset brings back."""
    weights = ok(server, "/v1/weights?checksums=true")
    paused = ok(server, "/v1/is_paused")
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
    same = ("version", "fingerprint", "checksum", "session", "asleep")
    return {
        **{name: weights[name] for name in same},
        "holds": [scope["holds"] for scope in (paused, *paused["scopes"])],
        "counts": paused["counts"],
        "adapters": ok(server, "/v1/adapters")["adapters"],
        "faults": ok(server, "/v1/faults")["armed"],
        "tokens": ok(server, "/v1/completions", body)["choices"][0]["token_ids"],
    }


def test_a_reset_undoes_all_that_a_test_does_and_may_be_repeated(server: Server, tmp_path: Path):
    before = state(server)
    new = perturbed(tmp_path / "new")
    long = {"prompt": PROMPT, "max_tokens": 3000, "ignore_eos": True}
    ok(server, "/v1/update_weights", {"model_path": str(new), "version": "step-1"})
    assert state(server)["checksum"] != before["checksum"]
    running = in_background(ok, server, "/v1/completions", long)
    until(lambda: ok(server, "/v1/is_paused")["counts"]["running"], 20, "a request runs")
    ok(server, "/v1/weights/begin", {"version": "step-2"})
    ok(server, "/v1/pause", {"mode": "keep", "hold_id": "trainer"})
    make_adapters([str(MODEL_DIR), str(tmp_path), "--count", "1"])
    ok(server, "/v1/adapters/load", {"lora_name": "math", "lora_path": str(tmp_path / "adapter-0")})
    ok(server, "/v1/pause", {"mode": "keep", "lora_name": "math", "hold_id": "of-an-adapter"})
    ok(server, "/v1/faults", {"fault": "http_error", "path": "/v1/reset", "status": "503"})
    assert len(ok(server, "/v1/faults")["armed"]) == 1
    server.reset()
    assert running.result(20)["choices"][0]["finish_reason"] == "abort"
    assert state(server) == before
    server.reset()
    assert state(server) == before


def test_a_reset_wakes_a_server_that_sleeps_without_its_weights(server: Server):
    before = state(server)
    ok(server, "/v1/sleep", {"discard": True})
    server.reset()
    assert state(server) == before


@pytest.mark.slow
def test_a_reset_after_the_death_of_the_engine_waits_for_the_next_one(server: Server, tmp_path: Path):
    before = state(server)
    ok(server, "/v1/update_weights", {"model_path": str(perturbed(tmp_path / "new"))})
    [engine] = server.pids("engine_main")
    os.kill(engine, signal.SIGKILL)
    server.reset()
    assert state(server) == before and server.pids("engine_main") != [engine]
    assert ok(server, "/v1/faults", {"fault": "death", "tokens": 2})
    assert server.call("POST", "/v1/completions", {"prompt": PROMPT, "ignore_eos": True})[0] == 503
    server.wait_ready()
    assert state(server) | {"faults": []} == before, "a death after a reset leaves the server held"


def test_a_flag_that_names_a_model_is_refused_since_a_reset_would_not_know_it():
    with pytest.raises(ValueError, match="flags: expected no --model"):
        serve("llama", "--model=/elsewhere")


def test_a_model_that_is_none_is_refused_before_anything_is_started():
    with pytest.raises(ValueError, match="model: expected a folder with a config.json, or one of .*, got '.*/qwen'"):
        serve("qwen")


PROGRAM = """
import time
from fastdeploy.testing import serve
with serve(None, "--max-num-seqs", "4", "--num-gpu-blocks-override", "256", replicas=2) as fleet:
    print(fleet.ipc.parent, *fleet.processes(), flush=True)
    time.sleep(100)
"""


@pytest.mark.slow
def test_nothing_is_left_of_a_fleet_when_the_program_that_started_it_is_killed():
    shared_before = segments()
    program = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True)
    with program:
        assert program.stdout is not None
        folder, *pids = program.stdout.readline().split()
        assert len(pids) == 1 + 1 + 2 * 3, "the parent, the gateway, and three processes of each replica"
        program.kill()
    until(lambda: not any(is_alive(int(pid)) for pid in pids), 20, "all processes have ended")
    until(lambda: not os.path.exists(folder), 20, "the folder is removed")
    assert segments() <= shared_before


def segments() -> set[str]:
    """Return the shared memory of all our servers. Other programs of this machine have some, too."""
    return {name for name in os.listdir("/dev/shm") if name.startswith("fastdeploy")}


def test_a_reset_of_a_server_that_has_ended_says_so(server: Server):
    """The last test of the shared server."""
    assert server.stop() == 0
    with pytest.raises(ServerFailed, match="the server ended with status 0; its log ends"):
        server.reset()
