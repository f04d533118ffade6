"""benchmarks/compare.py: a run on two servers of the embedded model, failing peers, and refused arguments."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import fastdeploy.embedded
from benchmarks import compare
from benchmarks.lib import contenders, engines
from benchmarks.lib.engines import Engine, ours
from benchmarks.lib.loads import Groups, Load, RepeatedGroups, Streams
from benchmarks.lib.report import Printer
from benchmarks.lib.roofline import Machine
from support.http_calls import wait_until

MODEL = Path(fastdeploy.embedded.__file__).with_name("model")
LOADS: list[Load] = [Streams("s", 2, 6, 5, 4), Groups("g", 2, 6, 3, 2), RepeatedGroups("r", 2, 6, 3, 2)]
PROBED = Machine(1e10, 1e12)


def twins() -> list[Engine]:
    engine = ours(MODEL, "q05")
    return [engine, replace(engine, name="twin")]


@pytest.mark.slow
@pytest.mark.parametrize("apart", [[], ["--apart"]])
def test_two_servers_are_started_compared_and_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], apart: list[str]
):
    file = tmp_path / "out.json"
    tables = tmp_path / "out.md"
    options = ["--model-path", str(MODEL), "--repeats", "2", "--json", str(file), "--markdown", str(tables)]
    args = compare.parse([*options, *apart])
    started = []

    class Watched(contenders.Contender):
        def __init__(self, engine: Engine) -> None:
            super().__init__(engine)
            started.append(self.server)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contenders, "Contender", Watched)
        patch.setattr(contenders, "WATCH_S", 0.1)
        assert compare.run(twins(), LOADS, args, Printer(), lambda: PROBED) == 0
    assert len(started) == 2 and [server.processes() for server in started] == [[], []]
    content = json.loads(file.read_text())
    assert list(content["engines"]) == ["ours", "twin"]
    for costs in content["engines"].values():
        assert costs["ready_s"] > 0 and costs["update_s"] > 0
        assert costs["start_bytes"] > costs["serving_bytes"] / 2 > 0 and costs["update_bytes"] > 0
    expected = {"s": 4 * 5, "g": 2 * 8 * 3, "r": 2 * 8 * 3}
    for load in content["loads"]:
        assert len(load["probes"]) == (6 if apart else 3)  # before, between and after the two repeats
        for engine in load["engines"].values():
            assert [run["tokens"] for run in engine["runs"]] == [expected[load["load"]["name"]]] * 2
            assert len(engine["engine_token_s"]) == 2 and min(engine["engine_token_s"]) > 0
    assert "twin" in capsys.readouterr().out
    assert "| 2 streams, 6 tokens in, 5 out |" in tables.read_text() and "| ready after |" in tables.read_text()


def test_a_server_that_dies_at_start_is_exit_code_two_and_shows_its_log(capsys: pytest.CaptureFixture[str]):
    command = (sys.executable, "-c", "raise SystemExit('no such model')")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(engines.ENGINES, "ours", lambda model, served, limits: Engine("ours", "1", command, "/ready"))
        assert compare.main(["--model-path", str(MODEL), "--engines", "ours"]) == 2
    assert "no such model" in capsys.readouterr().err


# Peers that fail: at the start, by never being ready, during a load.
EXITS = "import sys; print('no float32 KV here'); sys.exit(3)"
NEVER_READY = "echo still loading; exec sleep 600"
DIES_LATER = """
import http.server, os, sys, time
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def do_POST(self):
        print("out of memory", flush=True)
        self.server.socket.close()  # a dying server breaks and refuses connections before its exit status is known
        self.connection.shutdown(2)
        time.sleep(0.5)
        os._exit(9)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[-1])), Handler).serve_forever()
"""


@pytest.mark.slow
def test_a_failing_peer_is_removed_with_a_reason_and_the_comparison_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    failing = {
        "exits": (EXITS, ["ended with status 3", "no float32 KV here"]),
        "silent": ("raise SystemExit", ["ended with status 0", "its log is empty"]),
        "dies": (DIES_LATER, ["ended with status 9", "out of memory"]),
    }
    file = tmp_path / "out.json"
    args = compare.parse(["--model-path", str(MODEL), "--repeats", "1", "--json", str(file)])
    peers = [Engine(name, "1", (sys.executable, "-c", code), "/ready") for name, (code, _) in failing.items()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contenders, "WATCH_S", 0.1)
        patch.setattr(contenders, "ENDING_S", 30.0)
        assert compare.run([twins()[0], *peers, twins()[1]], LOADS[:1], args, Printer(), lambda: PROBED) == 0
    told = capsys.readouterr().err.split("without ")
    for name, (_, why) in failing.items():
        assert any(part.startswith(f"{name}: ") and all(words in part for words in why) for part in told), name
    content = json.loads(file.read_text())
    assert list(content["engines"]) == list(content["loads"][0]["engines"]) == ["ours", "twin"]


def test_a_peer_that_is_never_ready_is_removed_after_the_limit():
    said: list[str] = []
    running = contenders.RunningEngines(said.append)
    first = Engine("first", "1", (sys.executable, "-c", DIES_LATER), "/ready")
    peer = Engine("peer", "1", ("sh", "-c", NEVER_READY), "/ready")
    with running.started([first], ready_s=60), running.started([peer], ready_s=2):
        assert [contender.engine.name for contender in running.contenders] == ["first"]
    assert "without peer: the server did not become ready within 2 s" in said[-1] and "still loading" in said[-1]


COMPARES = """
import sys
from benchmarks import compare
from benchmarks.lib import engines
from benchmarks.lib.engines import Engine
command = ("sh", "-c", f"echo $$ > {sys.argv[1]}; exec sleep 600")
engines.ENGINES["ours"] = lambda model, served, limits: Engine("ours", "1", command, "/ready")
sys.exit(compare.main(["--model-path", sys.argv[2], "--engines", "ours"]))
"""


def test_a_comparison_that_gets_sigterm_stops_its_servers(tmp_path: Path):
    file = tmp_path / "pid"
    program = subprocess.Popen([sys.executable, "-c", COMPARES, str(file), str(MODEL)])
    wait_until(lambda: file.exists() and file.read_text().endswith("\n"))
    server = Path("/proc", file.read_text().strip())
    assert server.exists()
    program.terminate()
    assert program.wait(60) == 128 + signal.SIGTERM
    assert not server.exists()


def test_a_peer_that_is_not_installed_is_reported_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("PEERS_DIR", str(tmp_path))
    measured: list[str] = []
    monkeypatch.setattr(compare, "run", lambda engines, *_: measured.extend(engine.name for engine in engines) or 0)
    assert compare.main(["--model-path", str(MODEL)]) == 0
    assert measured == ["ours"]
    told = capsys.readouterr().err
    assert all(f"without {name}" in told for name in ("vllm", "openvino", "llamacpp"))
    assert compare.main(["--model-path", str(MODEL), "--engines", "vllm"]) == 2


def test_a_load_that_does_not_fit_the_context_is_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        compare.parse(["--model-path", str(MODEL), "--loads", "prefill", "--max-model-len", "512"])
    assert "--max-model-len: load prefill needs more than 512 tokens" in capsys.readouterr().err
