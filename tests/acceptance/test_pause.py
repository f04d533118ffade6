"""acceptance/pause.py as a command, on correct, defective and missing servers."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from e2e.server import Server
from fastdeploy.testing.process import free_port
from support.fake_pause_server import FakeServer

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--streams", "7", "--running", "3", "--prompt-tokens", "8", "--wait-tokens", "60"]
SMALL += ["--before", "20", "--freeze", "0.3"]


def command(script: str, *args: str, defect: str | None = None, url: str | None = None) -> tuple[int, str, str]:
    """Run ``script`` against a FakeServer (or ``url``); return exit code, stdout and stderr."""

    async def run() -> tuple[int, str, str]:
        async with FakeServer(defect=defect) as server:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                str(ROOT / script),
                "--url",
                url or server.url,
                *args,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            out, err = await process.communicate()
            return process.returncode, out.decode(), err.decode()

    return asyncio.run(run())


def test_pause_exits_zero_and_prints_the_acceptance_table(tmp_path: Path):
    file = tmp_path / "out.json"
    code, out, err = command("acceptance/pause.py", *SMALL, "--json", str(file))
    assert code == 0, out + err
    for item in ("KV blocks, before and after", "requests between the two flags", "gap while kept", "pause times"):
        assert item in out
    assert "FAIL" not in out
    seen = json.loads(file.read_text())
    assert [run["scenario"] for run in seen["runs"]] == ["abort", "keep", "wait"]
    assert seen["failed"] == 0 and all(run["step_ms"] > 0 for run in seen["runs"])


def test_pause_asks_the_server_how_many_sequences_run_at_once(tmp_path: Path):
    file = tmp_path / "out.json"
    code, out, err = command("acceptance/pause.py", *SMALL[4:], "--json", str(file))
    assert code == 0, out + err
    assert "abort: starting 15 streams, 3 of them running" in err


def test_pause_names_the_missing_flag_if_the_server_has_no_route_for_it():
    code, _, err = command("acceptance/pause.py", "--dialect", "vllm")
    assert code == 2 and "--running" in err


@pytest.mark.slow
def test_all_promises_of_a_pause_hold_on_our_own_server():
    with Server() as server:
        # So many tokens that no request has ended before the pause, also on a busy machine.
        code, out, err = command("acceptance/pause.py", "--wait-tokens", "800", url=server.url)
        assert code == 0, out + err


@pytest.mark.slow
def test_pause_measures_a_peer_in_turn_and_only_the_first_server_decides_the_exit_code(tmp_path: Path):
    file = tmp_path / "out.json"

    async def beside_a_broken_peer() -> tuple[int, str, str]:
        async with FakeServer(defect="escape") as peer:
            more = ("--peer", f"native={peer.url}", "--json", str(file))
            return await asyncio.to_thread(command, "acceptance/pause.py", *SMALL, *more)

    code, out, err = asyncio.run(beside_a_broken_peer())
    assert code == 0, out + err
    assert "beside the peer" in out
    seen = json.loads(file.read_text())
    assert seen["failed"] == 0 and seen["peer"]["failed"] > 0
    assert [run["scenario"] for run in seen["peer"]["runs"]] == ["abort", "keep", "wait"]


@pytest.mark.slow
def test_pause_exits_one_when_a_promise_fails():
    code, out, _ = command("acceptance/pause.py", *SMALL, defect="escape")
    assert code == 1
    assert "FAIL" in out


@pytest.mark.slow
def test_pause_exits_one_when_it_takes_more_steps_than_allowed():
    code, out, _ = command("acceptance/pause.py", *SMALL, "--max-pause-steps", "0.0001")
    assert code == 1
    assert "paused within 0.0001 steps" in out


def test_a_server_that_is_not_there_is_exit_code_two():
    code, _, err = command("acceptance/pause.py", url=f"http://127.0.0.1:{free_port()}")
    assert code == 2
    assert "cannot go on" in err and "Traceback" not in err


def test_pause_refuses_a_load_in_which_nothing_waits():
    code, _, err = command("acceptance/pause.py", "--streams", "8", "--running", "8")
    assert code == 2
    assert "--streams must be above --running" in err
