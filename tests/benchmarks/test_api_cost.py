"""benchmarks/api_cost.py: a run on a server of the embedded model, its arithmetic, and refused arguments."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import api_cost
from benchmarks.api_cost import CASES, Cost
from benchmarks.make_model import write_tokenizer
from fastdeploy.bench.client import Client
from fastdeploy.client.tokenizer import load_tokenizer
from fastdeploy.embedded import MODEL_DIR
from fastdeploy.testing import ServerProcess
from support.fake_pause_server import FakeServer


def one_round(output_len: int = 40, pids: tuple[int, ...] = (), defect: str | None = None) -> Cost:
    """Measure a round of three completions on a FakeServer in this process."""

    async def run() -> Cost:
        async with FakeServer(defect=defect) as server:
            return await api_cost.measure(Client(server.url), pids, CASES[0], 3, "s", 8, output_len)

    return asyncio.run(run())


@pytest.mark.slow
def test_every_case_is_measured_and_the_server_is_stopped_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    file, servers, measured = tmp_path / "out.json", [], set()

    class Watched(ServerProcess):
        def wait_ready(self, timeout_s: float, path: str = "/ready") -> float:
            seconds = super().wait_ready(timeout_s, path)
            servers.append((self, self.pids(api_cost.API_SERVER)))
            return seconds

    cpu = api_cost.cpu_seconds

    def cpu_seconds(pids: Sequence[int]) -> float:
        measured.update(pids)
        return cpu(pids)

    monkeypatch.setattr(api_cost, "ServerProcess", Watched)
    monkeypatch.setattr(api_cost, "cpu_seconds", cpu_seconds)
    small = ["--streams", "3", "--input-len", "20", "--output-len", "400", "--repeats", "2", "--json", str(file)]
    status = api_cost.main(["--model-path", str(MODEL_DIR), *small])
    [(server, pids)] = servers
    assert server.processes() == [] and measured == set(pids) and len(pids) == 1
    cases = json.loads(file.read_text())["cases"]
    assert list(cases) == [case.name for case in CASES]
    costs = [cost for rounds in cases.values() for cost in rounds]
    assert len(costs) == 2 * len(CASES) and all(cost["tokens"] <= 3 * 400 for cost in costs)
    errors = [error for cost in costs for error in cost["errors"]]
    # On a busy machine the streams of a round may not all run at the same time. No other error is possible.
    assert all("raise --output-len" in error for error in errors) and status == (1 if errors else 0)
    shown = capsys.readouterr().out
    assert all(case.name in shown for case in CASES)


def test_a_row_has_medians_and_extremes_of_the_rounds_without_errors():
    rounds = [Cost(1.0, 0.1, 100), Cost(1.0, 0.3, 100), Cost(1.0, 0.2, 100), Cost(1.0, 0.9, 100, ("lost",))]
    assert api_cost.row("chat", rounds) == ("chat", "20.0", "10.0 - 30.0", "2000", "100")
    assert api_cost.row("chat", rounds[3:]) == ("chat", "-", "-", "-", "-")


def test_tokens_are_counted_from_the_last_streams_first_token_to_the_first_end():
    cost = one_round(pids=(os.getpid(),))
    assert not cost.errors
    assert 0 < cost.tokens <= 3 * 39 and cost.wall_s > 0


def test_a_stream_that_ends_wrongly_is_an_error():
    assert "40 of 40 tokens" in one_round(defect="double_end").errors[0]


def test_streams_too_short_to_run_at_the_same_time_are_an_error():
    assert "raise --output-len" in one_round(output_len=1).errors[0]


def test_every_id_has_a_text_of_its_own_and_texts_keep_their_ids(tmp_path: Path):
    model, folder = tmp_path / "model", tmp_path / "copy"
    model.mkdir(), folder.mkdir()
    write_tokenizer(model)
    (model / "config.json").write_text(json.dumps({"vocab_size": 1000}))
    before, after = load_tokenizer(str(model)), load_tokenizer(str(api_cost.with_words(model, folder)))
    assert before.token_text(999) == "" and before.token_text(256) == after.token_text(256)
    texts = [after.token_text(i) for i in range(256, 1000)]
    assert "" not in texts and len(set(texts)) == len(texts)
    text = "<|im_start|>user\nHello \u00e4\u2192<|im_end|>"
    assert after.encode_now(text) == before.encode_now(text) and max(after.encode_now(text)) < 260
