"""benchmarks/interference.py: a run on servers of the embedded model, its arithmetic, and refused arguments."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from benchmarks import interference
from benchmarks.interference import BEFORE, PROMPT_OUTPUT, Load, Round
from fastdeploy.bench.client import Client
from fastdeploy.bench.timeline import StreamLog, TokenEvent
from fastdeploy.embedded import MODEL_DIR
from support.fake_pause_server import FakeServer


def log(sent_at: float, times: list[float]) -> StreamLog:
    """Return the log of a complete stream with a token at each of these times."""
    tokens = [TokenEvent(at, [1]) for at in times]
    return StreamLog("r", sent_at, 200, tokens, [(times[-1], "length")], done_markers=1)


def test_the_figures_of_a_round():
    """Tokens each second, and each two seconds while the prompt waits for its first one, from 100 to 110."""
    before, beside = [76.0 + i for i in range(25)], [102.0, 104.0, 106.0, 108.0, 110.0]
    stream = log(70.0, before + beside + [111.0, 112.0])
    prompt = log(100.0, [110.0 + i / 2 for i in range(PROMPT_OUTPUT)])
    found = interference.figures([stream], [prompt], 100.0, 32)
    assert found.errors == () and found.step_s == pytest.approx(1.0)
    assert found.beside_s == pytest.approx(2.0) and found.p95_s == pytest.approx(2.0)
    assert found.first_token_s == pytest.approx(10.0)
    assert found.tokens_per_s == pytest.approx((7 + PROMPT_OUTPUT) / 25.5)


def test_a_request_that_failed_is_named_and_gives_no_figures():
    found = interference.figures([log(0.0, [1.0, 2.0])], [], 1.0, 3)
    assert len(found.errors) == 1 and found.errors[0].startswith("r: ")
    assert interference.row(Load("avx2", 8, 4, 512), "default", [found])[4:] == ("-",) * 7


def test_a_row_has_medians_and_ratios_to_the_step():
    rounds = [
        Round(0.04, 0.06, 0.05, 0.08, 2.0, 100.0),
        Round(0.04, 0.05, 0.04, 0.06, 1.0, 120.0),
        Round(0.04, 0.1, 0.06, 0.2, 3.0, 90.0),
    ]
    row = interference.row(Load("avx2", 8, 4, 512), "default", rounds)
    assert row == ("avx2", "8", "4 x 512", "default", "40", "60", "1.50", "1.25", "2.00", "2.00", "100")


def test_the_page_compares_the_rounds_of_both_servers_and_leaves_failed_ones_out():
    load = Load("avx2", 8, 4, 512)
    good = [Round(0.04, 0.06, 0.05, 0.08, 2.0, 100.0), Round(0.04, 0.2, 0.2, 0.24, 1.0, 125.0)]
    failed = Round(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, ("r: HTTP 500",))
    found = {(load, "default"): [good[0], failed], (load, "limit"): [good[1], good[1]]}
    assert interference.page(found).splitlines()[2:] == [
        "| avx2 | 8 | 4 x 512 | 40 ms | 1.50, 1.25, 2.00 | 5.0, 5.0, 6.0 | 2.00 s | 1.00 s | 0.80 |"
    ]
    assert interference.compared({(load, "default"): [failed], (load, "limit"): [good[1]]}) == {}


def test_an_event_may_have_several_tokens():
    stream = log(0.0, [1.0, 2.0, 3.0])
    stream.tokens[1].token_ids.extend([1, 1, 1])
    assert [interference.arrival(stream, count) for count in (1, 2, 5, 6)] == [1.0, 2.0, 2.0, 3.0]


def test_a_round_over_http():
    async def run() -> Round:
        async with FakeServer() as server:
            return await interference.measure(Client(server.url), Load("", 2, 3, 16), "s", 60)

    found = asyncio.run(run())
    assert found.errors == () and found.step_s > 0 and found.tokens_per_s > 0


@pytest.mark.slow
def test_both_servers_get_every_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "out.json"
    small = ["--streams", "2", "--lengths", "16,40", "--prompts", "3", "--output-len", "200", "--repeats", "1"]
    page, plot = tmp_path / "page.md", tmp_path / "plot.png"
    written = ["--json", str(file), "--markdown", str(page), "--plot", str(plot)]
    assert interference.main(["--model-path", str(MODEL_DIR), *small, *written]) == 0
    assert len(page.read_text().splitlines()) == 4 and plot.stat().st_size > 1000
    loads = json.loads(file.read_text())["loads"]
    assert {(load["length"], load["server"]) for load in loads} == {
        (length, server) for length in (16, 40) for server in ("default", "limit 250 ms")
    }
    assert "first token" in capsys.readouterr().out


def test_streams_that_end_before_the_prompts_come_are_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        interference.main(["--model-path", "x", "--output-len", str(BEFORE)])
    assert "--output-len" in capsys.readouterr().err
