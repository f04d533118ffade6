"""benchmarks/gateway.py: delays of tokens, the table, and a small run with our gateway."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import gateway
from benchmarks.gateway import DelayLog, Phase


def test_a_token_carries_the_time_of_its_making():
    log = DelayLog("r", 100.0)
    choice = {"text": "ab", "logprobs": {"token_logprobs": [-102.0, -102.5]}, "finish_reason": None}
    log.add_event(103.0, json.dumps({"choices": [choice]}).encode())
    log.add_event(103.0, b"[DONE]")
    assert log.delays == [1.0, 0.5]


def test_the_table_shows_what_a_gateway_adds_to_the_direct_way():
    def phase(name: str, delay_s: float, cpu_s: float) -> Phase:
        return Phase(name, [delay_s] * 100, [0.05], 10.0, cpu_s, 0.1, 0.2 + cpu_s)

    rounds = [phase("own", 0.0035, 0.1), phase("direct", 0.003, 0.0)] * 3
    direct, own = gateway.table(rounds).splitlines()[2:]
    assert direct.startswith("| direct | (3.00) | (3.00) | (3.00) | 50.0 | 10.0 | 0.0000 | 0.1000 |")
    assert own == "| own | 0.50 | 0.50 | 0.50 | 50.0 | 10.0 | 0.1000 | 0.1000 | 0.3000 |"


@pytest.mark.slow
@pytest.mark.parametrize(
    "requests", [["--stream"], *(["--no-stream", "--route", name] for name in gateway.TRAINER_ROUTES)]
)
def test_our_gateway_is_measured_beside_the_replicas(
    requests: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "out.json"
    small = ["--streams", "4", "--requests", "1", "--tokens", "10", "--rounds", "1", "--settle-s", "0"]
    assert gateway.main([*small, *requests, "--json", str(file)]) == 0
    rounds = json.loads(file.read_text())["rounds"]
    assert {phase["contender"] for phase in rounds} == {"direct", "fastdeploy"}
    assert all(phase["delay_ms"]["50"] > 0 for phase in rounds)
    assert "| fastdeploy |" in capsys.readouterr().out
