"""benchmarks/adapters.py: a run on two servers of the embedded model, its guards, and refused arguments."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from benchmarks import adapters
from benchmarks.lib import contenders, engines
from benchmarks.lib.adapter_decoding import Streams, check_adapters
from benchmarks.lib.client import Client
from benchmarks.lib.engines import Engine
from benchmarks.lib.report import Printer
from benchmarks.lib.roofline import Machine
from fastdeploy.embedded import MODEL_DIR
from fastdeploy.entrypoints.cli import configs, make_parser
from support.fake_pause_server import FakeServer

SMALL = ["--counts", "1,3", "--streams", "4", "--rank", "16", "--input-len", "8", "--output-len", "300"]
SMALL += ["--repeats", "2", "--cycles", "2", "--quiet-s", "0.3"]


def parsed(*more: str) -> argparse.Namespace:
    return adapters.parse(["--model-path", str(MODEL_DIR), "--engines", "ours", *more])


@pytest.mark.slow
def test_decoding_and_tenants_are_measured_and_the_servers_are_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    file, started = tmp_path / "out.json", []

    class Watched(contenders.Contender):
        def __init__(self, engine: Engine, folder: Path) -> None:
            super().__init__(engine, folder)
            started.append(self.server)

    monkeypatch.setattr(contenders, "Contender", Watched)
    monkeypatch.setattr(contenders, "WATCH_S", 0.1)
    args = parsed(*SMALL, "--json", str(file))
    status = adapters.run(
        adapters.servers_of([engines.ours(MODEL_DIR, "base")], args), args, Printer(), lambda: Machine(1e10, None)
    )
    out, err = capsys.readouterr()
    assert [server.processes() for server in started] == [[], []]
    content = json.loads(file.read_text())
    # A busy machine may compute too little in a phase, and a fast one may reach the end of the context, which is short
    # here. No other error is possible.
    of_speed = (adapters.TOO_SHORT, "ended: length", "raise --quiet-s")
    assert all(error.endswith(of_speed) for error in content["errors"]), err
    assert status == (1 if content["errors"] else 0)
    rounds = {server: {n: len(found["rounds"]) for n, found in counts.items()}
              for server, counts in content["decoding"].items()}  # fmt: skip
    assert rounds == {"ours": {"3": 2, "1": 2, "0": 2}, "ours without adapters": {"0": 2}}
    assert len(content["probes"]) == 3  # before, between and after the two repeats
    phases = {found["phase"]: len(found["lasted_s"]) for found in content["tenants"]["ours"]}
    calls = ("pause of A", "A is paused", "load of A, paused", "resume of A", "load of A, running")
    assert phases == {"both decode": 5} | dict.fromkeys(calls, 2)
    for title in ("decoding: ", "base requests: ", "tenants: "):
        assert f"\n{title}" in out


def test_our_own_flags_are_those_of_serve():
    args = parsed("--counts", "32", "--rank", "128")
    server = adapters.servers_of([engines.ours(MODEL_DIR, "base")], args)[0]
    engine, *_ = configs(make_parser().parse_args(server.engine.command[3:]))
    size = adapters.adapter_bytes(adapters.Shape.of(MODEL_DIR), 128)
    assert engine.max_lora_rank == 128 and engine.adapter_memory_mb << 20 > 32 * size


def test_a_server_that_ignores_the_adapter_is_noticed():
    async def check() -> list[str]:
        async with FakeServer(max_num_seqs=9) as server:
            return await check_adapters(Client(server.url), "base", 2)

    assert asyncio.run(check()) == ["adapter-0 answers as base does", "adapter-1 answers as base does"]


def test_a_refused_request_is_noticed():
    async def check() -> list[str]:
        async with FakeServer() as server:
            server.rejecting = True
            return await check_adapters(Client(server.url), "base", 1)

    errors = asyncio.run(check())
    assert len(errors) == 2 and all("HTTP 503" in error for error in errors)


@pytest.mark.parametrize(("count", "expected"), [(0, {"base": 5}), (2, {"adapter-0": 3, "adapter-1": 2})])
def test_streams_use_the_distinct_adapters_in_turn(count: int, expected: dict[str, int]):
    named: Counter[str] = Counter()

    class Naming(FakeServer):
        async def _completion(self, body: dict, writer: asyncio.StreamWriter) -> None:
            named[body["model"]] += 1
            await super()._completion(body, writer)

    async def run() -> None:
        async with Naming(max_num_seqs=9) as server:
            found = await Streams("base", 5, 4, 30).run(Client(server.url), count, "seed")
            assert not found.errors

    asyncio.run(run())
    assert named == expected


def test_a_server_that_dies_at_start_is_exit_code_two_and_shows_its_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    command = (sys.executable, "-c", "raise SystemExit('no such model')")
    monkeypatch.setitem(engines.ENGINES, "ours", lambda model, served: Engine("ours", "1", command, "/ready"))
    assert adapters.main(["--model-path", str(MODEL_DIR), "--engines", "ours", "--counts", "1"]) == 2
    assert "no such model" in capsys.readouterr().err


def test_a_peer_that_is_not_installed_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("PEERS_DIR", str(tmp_path))
    names: list[str] = []
    monkeypatch.setattr(adapters, "run", lambda servers, *_: names.extend(s.engine.name for s in servers) or 0)
    assert adapters.main(["--model-path", str(MODEL_DIR)]) == 0
    assert names == ["ours", "ours without adapters"]
    assert capsys.readouterr().err.count("vllm.sh install") == 1
    assert adapters.main(["--model-path", str(MODEL_DIR), "--engines", "vllm"]) == 2


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (["--counts", "1,1"], "each once"),
        (["--counts", "0,8"], "above 0"),
        (["--counts", "x"], "above 0"),
        (["--counts", "33"], "as many as adapters"),
        (["--streams", "33"], "2 to 32"),
        (["--streams", "4"], "as many as adapters"),
        (["--only", "tenant"], "each once"),
        (["--engines", "openvino"], "each once"),
    ],
)
def test_arguments_that_cannot_be_measured_are_refused(wrong: list[str], why: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        adapters.parse(["--model-path", str(MODEL_DIR), *wrong])
    assert ended.value.code == 2 and why in capsys.readouterr().err
