"""The commands as processes: their ends, a full disk, and what they refuse."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from fastdeploy.entrypoints.cli.main import main
from fastdeploy.testing import ServerProcess
from fastdeploy.traffic.file import Begin, Body, End, Opening, Outcome, Piece, RecordWriter, Side, read_recording

FASTDEPLOY = (sys.executable, "-m", "fastdeploy")
pytestmark = pytest.mark.processes


class Engine(http.server.BaseHTTPRequestHandler):
    """Answers a POST with its body; the path /endless with a stream that never ends."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.answer(b"{}")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.path == "/endless":
            self.send_response(200)
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"9\r\ndata: 1\n\n\r\n")
            self.rfile.read()
        else:
            self.answer(body)

    def answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Engine) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@contextlib.contextmanager
def running(*command: str, ready: str = "/health") -> Iterator[ServerProcess]:
    process = ServerProcess(command)
    try:
        process.wait_ready(60, ready)
        yield process
    finally:
        process.close()


def recording_of(out: Path, engine: str) -> contextlib.AbstractContextManager[ServerProcess]:
    return running(*FASTDEPLOY, "record", "--upstream", engine, "--out", str(out))


def replaying(out: Path, *flags: str) -> contextlib.AbstractContextManager[ServerProcess]:
    return running(*FASTDEPLOY, "replay", str(out), "--speed", "0", *flags, ready="/replay/report")


def test_a_recorder_that_is_killed_leaves_a_file_that_replays(engine, tmp_path):
    out = tmp_path / "a"
    with recording_of(out, engine) as recorder:
        assert httpx.post(recorder.url + "/v1/completions", json={"n": 1}).json() == {"n": 1}
        with httpx.stream("POST", recorder.url + "/endless", json={}) as reply:
            assert next(reply.iter_raw()) == b"data: 1\n\n"
            while not read_recording(str(out)).exchanges[-1].pieces:
                time.sleep(0.01)
            os.kill(recorder.pid, signal.SIGKILL)
            recorder.wait(30)
    last = read_recording(str(out)).exchanges[-1]
    assert last.outcome is None and last.pieces[0][1] == b"data: 1\n\n"
    with replaying(out) as replay:
        assert httpx.post(replay.url + "/v1/completions", json={"n": 1}).json() == {"n": 1}
        with httpx.stream("POST", replay.url + "/endless", json={}) as reply:
            pieces = reply.iter_raw()
            assert next(pieces) == b"data: 1\n\n"
            with pytest.raises(httpx.RemoteProtocolError):
                next(pieces)
        assert replay.stop(signal.SIGINT) == 0 and "No difference." in replay.log()


def test_a_recorder_that_is_stopped_says_so_in_the_file_also_in_the_middle_of_a_stream(engine, tmp_path):
    out = tmp_path / "a"
    with recording_of(out, engine) as recorder, httpx.stream("POST", recorder.url + "/endless", json={}) as reply:
        pieces = reply.iter_raw()
        assert next(pieces) == b"data: 1\n\n"
        assert recorder.stop(signal.SIGTERM) == 0
        assert f"{out}: 2 requests" in recorder.log()
    recording = read_recording(str(out))
    assert recording.closed and recording.exchanges[-1].outcome is Outcome.RECORDER_STOPPED
    shown = subprocess.run([*FASTDEPLOY, "replay", str(out), "--show"], capture_output=True, text=True, check=True)
    assert "recorder_stopped" in shown.stdout and "POST /endless" in shown.stdout


def test_the_traffic_goes_on_when_the_disk_is_full_and_the_recorder_says_so(engine, tmp_path):
    out = tmp_path / "a"
    words = [*FASTDEPLOY, "record", "--upstream", engine, "--out", str(out)]
    limited = ("bash", "-c", 'ulimit -f 8; exec "$0" "$@"', *words)  # 8 KiB a file
    with running(*limited) as recorder:
        with httpx.Client() as client:
            for number in range(20):
                body = {"n": number, "random": os.urandom(1000).hex()}
                assert client.post(recorder.url + "/v1/completions", json=body).json() == body
        while "The traffic goes on" not in recorder.log():
            time.sleep(0.02)
        assert recorder.stop(signal.SIGINT) == 1
        assert "File too large" in recorder.log() and "not complete" in recorder.log()
    assert 1 <= len(read_recording(str(out)).exchanges) < 20


def test_a_run_that_is_different_has_the_status_1_and_is_told_at_the_end_and_while_it_runs(tmp_path):
    out = tmp_path / "a"
    file = RecordWriter(str(out), Opening(version="1", upstream="http://a", began=0.0))
    file.write([Begin(1, 0.0, "POST", "/generate", []), Piece(1, 0.1, Side.REQUEST, b'{"text": "a"}')])
    file.write([Body(1, 0.1, Side.REQUEST, 13, "", True), End(1, 0.2, Outcome.UPSTREAM_FAILED)])
    with replaying(out) as replay:
        assert httpx.post(replay.url + "/generate", json={"text": "b"}).status_code == 409
        report = httpx.get(replay.url + "/replay/report").json()
        assert report["differences"][0]["fields"] == [{"path": "text", "recorded": '"a"', "now": '"b"'}]
        assert replay.stop(signal.SIGTERM) == 1
        assert 'text: "a" in the recording, "b" now' in replay.log()


def test_what_cannot_be_recorded_or_replayed_is_refused_by_its_flag(tmp_path, capsys):
    (tmp_path / "old").write_text("precious")
    record, new = ("record", "--port", "18399"), str(tmp_path / "new")
    itself = "argument --upstream: expected an engine, got the address of this recorder"
    cases = {
        (*record, "--upstream", "http://localhost:18399", "--out", new): itself,
        (*record, "--host", "0.0.0.0", "--upstream", "http://127.0.0.1:18399", "--out", new): itself,
        (*record, "--upstream", "engine:80", "--out", new): "argument --upstream: expected http://HOST:PORT",
        (*record, "--upstream", "http://a:1", "--out", str(tmp_path / "old")): "argument --out: expected a new file",
        ("replay", str(tmp_path / "old")): "FILE: expected a recording of `fastdeploy record`",
        ("replay", new, "--speed", "-1"): "argument --speed: expected recorded, or a number from 0, got '-1'",
    }
    for words, message in cases.items():
        with pytest.raises(SystemExit) as stopped:
            main(words)
        assert stopped.value.code == 2 and message in capsys.readouterr().err, words
    assert not (tmp_path / "new").exists()


def test_an_engine_that_is_down_is_a_502_that_names_it_and_is_recorded(tmp_path):
    down = "http://127.0.0.1:9"
    command = (*FASTDEPLOY, "record", "--upstream", down, "--out", str(tmp_path / "a"))
    process = ServerProcess(command)
    try:
        while "Recording at" not in process.log():
            process.require_running(0.05)
        reply = httpx.get(process.url + "/health")
        assert reply.status_code == 502 and json.loads(reply.content)["error"]["upstream"] == down
        process.stop()
    finally:
        process.close()
    (exchange,) = read_recording(str(tmp_path / "a")).exchanges
    assert exchange.status == 502 and "cannot connect" in exchange.error
