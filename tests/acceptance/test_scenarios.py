"""The complete acceptance run over real sockets, on a correct server and on servers with one defect each."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from acceptance.lib import scenarios
from acceptance.lib.scenarios import Acceptance, Options, Outcome
from benchmarks.lib.dialect import DIALECTS
from fastdeploy.bench.client import Client
from support.fake_pause_server import FakeServer


def accept(dialect: str = "native", defect: str | None = None, **changes: int) -> Outcome:
    async def run() -> Outcome:
        async with FakeServer(defect=defect) as server:
            small = Options("fake", streams=7, running=3, prompt_tokens=8, wait_tokens=60, before=20, freeze_s=0.3)
            options = replace(small, **{"load_timeout_s": 20.0, **changes})
            return await Acceptance(DIALECTS[dialect](Client(server.url)), options).run()

    return asyncio.run(run())


def failures(outcome: Outcome) -> list[str]:
    return [f"{check.scenario}: {check.promise}: {check.seen}" for check in outcome.failed]


def test_a_server_that_keeps_every_promise_passes_every_check():
    outcome = accept()
    assert failures(outcome) == []
    assert all(check.ok for check in outcome.checks)
    assert [run.scenario for run in outcome.runs] == ["abort", "keep", "wait"]


def test_promises_that_a_dialect_does_not_make_are_neither_passed_nor_failed():
    outcome = accept("vllm")
    assert failures(outcome) == []
    apart = {check.promise for check in outcome.checks if check.ok is None}
    assert any("refused while paused" in promise for promise in apart)
    assert any("refused in the window" in promise for promise in apart)
    assert any("KV blocks" in promise for promise in apart)


@pytest.mark.slow
def test_a_long_queue_adds_abort_and_keep_scenarios():
    outcome = accept(waiting=300)
    assert failures(outcome) == []
    assert [len(run.streams) for run in outcome.runs] == [7, 7, 7, 303, 303]


@pytest.mark.parametrize(
    ("defect", "promise"),
    [
        ("leaky_gap", "keep: no token in the gap"),
        ("escape", "abort: nothing escaped"),
        ("double_final", "abort: every stream got exactly one final chunk"),
        ("early_finish", "abort: not vacuous: nothing finished before the pause"),
        ("accepts", "abort: refused while paused"),
        ("lost_token", "against an undisturbed run of the same prompts: keep: tokens and text equal"),
        ("lost_blocks", "abort: KV blocks"),
    ],
)
def test_a_broken_server_fails_the_promise_it_breaks(defect: str, promise: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scenarios, "PROBE_S", 0.3)  # only a request that should be refused waits so long
    monkeypatch.setattr(scenarios, "SETTLE_S", 0.0)  # for exact step times, which these promises do not need
    outcome = accept(defect=defect, load_timeout_s=2)
    assert any(line.startswith(promise) for line in failures(outcome)), failures(outcome)
