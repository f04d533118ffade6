"""``fastdeploy bench``: every request and token is counted, and what cannot be measured is refused by name."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from fastdeploy.entrypoints.cli.bench.serve import _entries
from fastdeploy.entrypoints.cli.main import main, make_parser
from fastdeploy.testing.process import free_port
from support.fake_pause_server import FakeServer


def bench_serve(*args: str, defect: str | None = None, url: str | None = None) -> tuple[int, str, str]:
    """Measure a FakeServer (or ``url``). Return exit status, stdout and stderr."""

    async def run() -> tuple[int, str, str]:
        async with FakeServer(defect=defect) as server:
            words = [sys.executable, "-m", "fastdeploy", "bench", "serve", "--base-url", url or server.url, *args]
            pipe = subprocess.PIPE
            process = await asyncio.create_subprocess_exec(*words, stdout=pipe, stderr=pipe)
            out, err = await process.communicate()
            return process.returncode or 0, out.decode(), err.decode()

    return asyncio.run(run())


@pytest.mark.parametrize("load", [["--max-concurrency", "3"], ["--request-rate", "50", "--burstiness", "2"]])
def test_every_request_and_token_is_counted(load: list[str], tmp_path: Path):
    small = ["--num-prompts", "9", "--random-output-len", "7", "--random-input-len", "5"]
    code, out, err = bench_serve(*load, *small, "--result-dir", str(tmp_path), "--result-filename", "r.json")
    assert code == 0, out + err
    figures = json.loads((tmp_path / "r.json").read_text())
    assert (figures["completed"], figures["failed"], figures["total_output_tokens"]) == (9, 0, 63)
    assert figures["num_prompts"] == 9 and 0 < figures["p50_ttft_ms"] <= figures["p99_ttft_ms"]
    assert "output tokens/s" in out and "first token ms" in out


def test_a_request_that_fails_is_exit_status_one():
    code, out, err = bench_serve("--num-prompts", "3", "--random-output-len", "7", defect="double_end")
    assert code == 1 and "failed" in out + err


def test_a_server_that_is_not_there_is_exit_status_two():
    code, _, err = bench_serve(url=f"http://127.0.0.1:{free_port()}")
    assert code == 2 and "cannot go on" in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("serve --num-prompts 0", "--num-prompts: expected a number above 0"),
        ("serve --request-rate 0", "--request-rate: expected a number above 0"),
        ("serve --metric-percentiles 5,101", "--metric-percentiles: expected numbers from 0 to 100"),
        ("serve --metric-percentiles nan", "--metric-percentiles: expected numbers from 0 to 100"),
        ("serve --metric-percentiles 5,x", "--metric-percentiles: expected numbers from 0 to 100"),
        ("serve --percentile-metrics ttfb", "--percentile-metrics: expected some of ttft"),
        ("serve --dataset-name EBChat", "--dataset-path: expected a file for EBChat"),
        ("serve --dataset-name EBChat --dataset-path /nowhere", "--dataset-path: expected a JSON object on each line"),
        ("serve --backend openai-chat", "--backend: expected openai for random prompts"),
        ("latency --batch-size 0", "--batch-size: expected a number above 0"),
        ("throughput --dataset-name EB", "--dataset-name: expected random, got 'EB'"),
        ("throughput --backend fastdeploy-chat --dataset-name EBChat --dataset-path f", "`bench serve` takes files"),
        ("throughput --dataset-path f", "--dataset-path: prompts are random here"),
        ("throughput --tensor-parallel-size 4", "--tensor-parallel-size: '4' is refused here"),
        ("eval", "eval is refused here: lm-eval is a program of its own"),
        ("eval --model local-completions -t a --write_out", "eval is refused here: lm-eval is a program of its own"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_name(flags: str, told: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        main(["bench", *flags.split()])
    assert caught.value.code == 2
    assert told in capsys.readouterr().err.splitlines()[-1]


def test_percentiles_may_have_a_fraction_and_fastdeploys_further_metrics_are_taken(tmp_path: Path):
    shown = ["--percentile-metrics", "ttft,s_ttft,s_decode,input_len", "--metric-percentiles", "80,99.9"]
    file = ["--result-dir", str(tmp_path), "--result-filename", "one.json"]
    code, out, _ = bench_serve("--num-prompts", "2", *shown, *file)
    assert code == 0 and "p80 " in out and "p99.9 " in out and "s_ttft" not in out
    assert {"p80_ttft_ms", "p99.9_ttft_ms"} <= json.loads((tmp_path / "one.json").read_text()).keys()


def test_files_of_fastdeploys_formats_become_requests(tmp_path: Path):
    chats, texts = tmp_path / "chats.jsonl", tmp_path / "texts.jsonl"
    chats.write_text('{"messages": [{"role": "user", "content": "a"}], "max_tokens": 5, "id": 3}\n\n')
    texts.write_text('{"text": "b", "topp": 0.5, "max_dec_len": 6, "penalty_score": 1.0, "input_token_num": 1}\n')

    def entries(name: str, path: Path, backend: str) -> list[dict]:
        words = ["bench", "serve", "--dataset-name", name, "--dataset-path", str(path)]
        return _entries(make_parser().parse_args(words), backend)

    assert entries("EBChat", chats, "openai-chat") == [
        {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5}
    ]
    assert entries("EB", texts, "openai") == [{"prompt": "b", "top_p": 0.5, "max_tokens": 6, "repetition_penalty": 1.0}]


def test_an_engine_of_this_process_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    small = ["--input-len", "4", "--output-len", "3", "--max-model-len", "64", "--num-gpu-blocks-override", "64"]
    file = tmp_path / "out.json"
    assert main(["bench", "throughput", *small, "--num-prompts", "6", "--n", "2", "--output-json", str(file)]) == 0
    figures = json.loads(file.read_text())
    assert figures["total_num_tokens"] == 6 * (4 + 2 * 3) and figures["tokens_per_second"] > 0
    few = ["--batch-size", "2", "--num-iters", "2", "--num-iters-warmup", "1"]
    assert main(["bench", "latency", *small, *few, "--output-json", str(file)]) == 0
    assert len(json.loads(file.read_text())["latencies"]) == 2
    assert "output tokens per second" in capsys.readouterr().out
