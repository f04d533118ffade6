"""The pytest plugin, in runs of pytest of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from e2e.server import until
from fastdeploy.testing import ServerFailed
from fastdeploy.testing.plugin import Servers

pytestmark = pytest.mark.processes
ROOT = Path(__file__).parents[2]
SMALL = "[pytest]\nfastdeploy_flags = --max-num-seqs 4 --num-gpu-blocks-override 256 --served-model-name policy\n"
LOADED = "fastdeploy.testing.plugin"


def run_pytest(folder: Path, *arguments: str, plugin: bool = True, **files: str) -> subprocess.CompletedProcess[str]:
    """Run pytest in ``folder``, with the plugin or without. files: names without .py, and their content."""
    (folder / "pytest.ini").write_text(SMALL)
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    # Where the package is installed, the plugin has an entry point: turned off, since pytest loads no plugin twice.
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:fastdeploy", *arguments]
    command += ["-p", LOADED] if plugin else []
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100)


CHANGES = """
import json, pathlib, pytest

@pytest.mark.parametrize("number", range(2))
def test_weights(fastdeploy_server, number):
    status, reply = fastdeploy_server.call("GET", "/v1/weights")
    assert status == 200 and reply["result"]["version"] == "0"
    assert fastdeploy_server.call("GET", "/v1/models")[1]["data"][0]["id"] == "policy"
    assert fastdeploy_server.call("GET", "/v1/is_paused")[1]["result"]["holds"] == []
    assert fastdeploy_server.call("POST", "/v1/update_weights", {"version": "step-1"})[0] == 200
    assert fastdeploy_server.call("POST", "/v1/pause", {"hold_id": "mine"})[0] == 200
    with open("seen", "a") as file:
        file.write(json.dumps([fastdeploy_server.url, *fastdeploy_server.processes()]) + "\\n")
"""


def processes(folder: Path) -> list[list[str]]:
    """Return the URL and the process ids that each test has seen."""
    return [line.strip("[]\n").split(", ") for line in (folder / "seen").read_text().splitlines(keepends=True)]


def test_each_test_gets_the_server_as_it_was_at_its_start_and_each_worker_has_its_own(tmp_path: Path):
    done = run_pytest(tmp_path, "-n", "2", "--dist", "loadfile", test_one=CHANGES, test_two=CHANGES)
    assert done.returncode == 0, done.stdout
    seen = processes(tmp_path)
    assert len(seen) == 4 and len({url for url, *_ in seen}) == 2
    assert not [pid for _, *pids in seen for pid in pids if os.path.exists(f"/proc/{pid}")]


def test_a_server_that_ends_while_it_is_reset_is_replaced_and_one_that_cannot_be_reset_is_ended():
    """The servers are stubs, since a real one ends at that moment by chance alone."""

    class Stub:
        def __init__(self, code: int | None):
            self.code, self.ended = code, False

        def reset(self) -> None:
            raise ServerFailed("as planned")

        def poll(self) -> int | None:
            return self.code

        def send_signal(self, number: int) -> None: ...

        def __exit__(self, *_: object) -> None:
            self.ended = True

    class StubServers(Servers):
        def start(self, *_: Any, **__: Any) -> Any:
            return made.pop(0)

    servers, made = StubServers(), [Stub(-9), Stub(None), Stub(None)]
    first, second, third = made
    assert servers.shared() is first
    assert servers.shared() is second and first.ended
    with pytest.raises(ServerFailed):
        servers.shared()
    assert second.ended and servers.shared() is third


FAILS = """
import os, signal

def test_kills(fastdeploy_server):
    os.kill(fastdeploy_server.pids("api_server")[0], signal.SIGKILL)
    assert fastdeploy_server.wait_ready(60)
    raise RuntimeError("as planned")

def test_ends_it(fastdeploy_server):
    fastdeploy_server.kill()

def test_next(fastdeploy_server):
    assert fastdeploy_server.call("GET", "/ready")[0] == 200

def test_fails_without_a_server():
    raise RuntimeError("as planned")
"""


@pytest.mark.slow
def test_a_failed_test_shows_the_log_of_its_time_and_the_next_test_gets_a_living_server(tmp_path: Path):
    done = run_pytest(tmp_path, test_it=FAILS)
    assert "2 failed, 2 passed" in done.stdout, done.stdout
    killed, other = done.stdout.split("test_fails_without_a_server", 1)
    assert re.search(r"log of FastDeploy at http://127.0.0.1:\d+ -+\n.*api-0 ended with status -9", killed, re.DOTALL)
    assert "log of FastDeploy" not in other


FACTORY = """
import pytest
from fastdeploy.testing import ServerFailed

own = []

def test_one(fastdeploy_serve):
    own.append(fastdeploy_serve("moe", "--max-num-seqs", "2", "--num-gpu-blocks-override", "64"))
    assert own[0].call("GET", "/v1/models")[1]["data"][0]["id"] == "moe"

def test_two(fastdeploy_serve):
    assert own[0].poll() == 0 and own[0].processes() == []
    with pytest.raises(ServerFailed, match="--no-such-flag"):
        fastdeploy_serve(None, "--no-such-flag")
"""


@pytest.mark.slow
def test_a_server_of_the_factory_ends_with_its_test_and_serves_a_model_by_its_name(tmp_path: Path):
    done = run_pytest(tmp_path, test_it=FACTORY)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_a_killed_worker_leaves_no_server(tmp_path: Path):
    kills = "import os\n\ndef test_dies(fastdeploy_fleet):\n"
    kills += "    open('seen', 'w').write(repr([fastdeploy_fleet.url, *fastdeploy_fleet.processes()]))\n"
    done = run_pytest(tmp_path, "-n", "1", test_it=kills + "    os.kill(os.getpid(), 9)\n")
    assert "worker 'gw0' crashed" in done.stdout
    [[_, *pids]] = processes(tmp_path)
    assert len(pids) == 1 + 1 + 2 * 3
    until(lambda: not [pid for pid in pids if os.path.exists(f"/proc/{pid}")], 20, "all processes have ended")


def test_the_plugin_imports_nothing_heavy_and_can_be_turned_off(tmp_path: Path):
    code = f"import sys, {LOADED}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    modules = set(done.stdout.split())
    assert not modules & {"paddle", "numpy", "httpx", "asyncio", "http.client", "fastdeploy.testing.server"}
    done = run_pytest(tmp_path, plugin=False, test_it="def test_it(fastdeploy_server): pass\n")
    assert "fixture 'fastdeploy_server' not found" in done.stdout
