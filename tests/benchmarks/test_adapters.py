"""benchmarks/adapters.py: a run on a server of the embedded model, its table, its guards, and refused arguments."""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path

import pytest

from benchmarks import adapters
from benchmarks.lib import contenders, engines
from benchmarks.lib.comparison import HEADER, EngineRuns, LoadComparison
from benchmarks.lib.loads import AdapterStreams, Figures
from benchmarks.lib.report import Printer
from benchmarks.lib.roofline import Machine, Shape
from fastdeploy.bench.client import Client
from fastdeploy.embedded import MODEL_DIR
from fastdeploy.entrypoints.cli.flags import configs
from fastdeploy.entrypoints.cli.main import make_parser
from support.fake_pause_server import FakeServer

SMALL = ["--counts", "1,3", "--streams", "4", "--rank", "16", "--input-len", "8", "--output-len", "40"]


def parsed(*more: str) -> argparse.Namespace:
    return adapters.parse(["--model-path", str(MODEL_DIR), "--engines", "ours", *more])


@pytest.mark.slow
def test_decoding_is_measured_with_and_without_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(contenders, "WATCH_S", 0.1)
    file = tmp_path / "out.json"
    args = parsed(*SMALL, "--repeats", "2", "--json", str(file))
    assert adapters.run([engines.ours(MODEL_DIR, "base")], args, Printer(), lambda: Machine(1e10, None)) == 0
    loads = json.loads(file.read_text())["loads"]
    assert [load["load"]["adapters"] for load in loads] == [0, 1, 3]
    assert all(len(load["engines"]["ours"]["runs"]) == 2 and len(load["probes"]) == 3 for load in loads)
    assert "of base only" in capsys.readouterr().out


def test_a_row_has_the_ratio_to_the_base_model_and_the_bound_of_reading_the_adapters():
    def compared(count: int, *steps: float) -> LoadComparison:
        runs = EngineRuns("ours", tuple(Figures(1.0, 4, 4.0, token_s=step) for step in steps))
        return LoadComparison(AdapterStreams("s", 4, 8, 8, 4, count, 50), (runs,), (Machine(1000.0, None),))

    shape = Shape(hidden=4, inner=8, layers=2, heads=2, kv_heads=1, head_dim=2, vocab=10)  # 656 bytes a step
    # The machine is twice as slow in the second repeat.
    base, four = adapters.rows([compared(0, 1.0, 2.0, 1.0), compared(4, 1.25, 2.5, 1.25)], shape)
    assert base[-2:] == ("1.000", "1.000") and four[-2:] == ("0.800", f"{1.0 / (1.0 + 4 * 50 / 1000):.3f}")
    assert four[HEADER.index("of the roofline")] == f"{(656 + 200) / 1.25 / 1000:.0%} of least time"


def test_our_own_flags_are_those_of_serve():
    args = parsed("--counts", "32", "--rank", "128")
    engine, *_ = configs(
        make_parser().parse_args(adapters.with_adapters(engines.ours(MODEL_DIR, "b"), args).command[3:])
    )
    size = adapters.adapter_bytes(adapters.Shape.of(MODEL_DIR), 128)
    assert engine.max_lora_rank == 128 and engine.adapter_memory_mb << 20 > 32 * size


def test_a_server_that_ignores_the_adapter_and_one_that_refuses_are_noticed():
    async def check(rejecting: bool) -> list[str]:
        async with FakeServer(max_num_seqs=9) as server:
            server.rejecting = rejecting
            return await adapters.check_adapters(Client(server.url), 2)

    assert asyncio.run(check(False)) == ["adapter-0 answers as base does", "adapter-1 answers as base does"]
    errors = asyncio.run(check(True))
    assert len(errors) == 3 and all("HTTP 503" in error for error in errors)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (["--counts", "1,1"], "each once"),
        (["--counts", "0,8"], "above 0"),
        (["--counts", "33"], "as many as adapters"),
        (["--streams", "33"], "1 to 32"),
        (["--engines", "openvino"], "each once"),
    ],
)
def test_arguments_that_cannot_be_measured_are_refused(wrong: list[str], why: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        adapters.parse(["--model-path", str(MODEL_DIR), *wrong])
    assert ended.value.code == 2 and why in capsys.readouterr().err
