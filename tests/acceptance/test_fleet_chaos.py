"""acceptance/fleet_chaos.py: a short run, what it would find, and its figures."""

from __future__ import annotations

import asyncio

import pytest

from acceptance import fleet_chaos
from acceptance.lib.chaos.load import Answer
from acceptance.lib.chaos.run import Chaos, Options, Pause
from acceptance.lib.ledger import Ledger
from benchmarks.lib.fleet.runner import expected_tokens
from fastdeploy.core.outputs import Span
from fastdeploy.fleet.pause_calls import PauseCall

SHORT = Options(replicas=6, pauses=8, step_s=0.005, fence_s=0.3, sessions=6, pace_s=0.02)
PROMPT = [3, 4, 5]
WEIGHTS = [0, 0, 7, 7]  # of each token


def tokens() -> list[int]:
    old = expected_tokens(PROMPT, 2, 0)
    return old + expected_tokens(PROMPT + old, 2, 7)


def events(spans: list[Span] | None = None) -> list[tuple[list[int], list[Span]]]:
    spans = spans or [Span("first", 4, 0, 2), Span("w7", 5, 2, 4)]
    return [(tokens()[:2], spans[:1]), (tokens()[2:], spans[1:])]


def problems(received: list[tuple[list[int], list[Span]]], floor: int = 4) -> list[str]:
    ledger = Ledger()
    answer = Answer("a", PROMPT, 4, floor)
    for event in received:
        answer.add(*event)
    answer.check(ledger, "first", may_be_short=False)
    return ledger.problems


def test_a_short_run_finds_nothing_wrong():
    chaos = Chaos(SHORT)
    asyncio.run(chaos.run())
    counts = chaos.ledger.counts
    assert not chaos.ledger.problems
    assert counts["pauses"] + counts["pauses refused"] >= 8 and counts["engines asked"] > 50
    assert counts["kill"] + counts["stop"] + counts["stop for good"] + counts["slow"] > 0
    assert sum(number for what, number in counts.items() if what.startswith("gateway: ")) > 3
    assert counts["tokens compared"] == counts["tokens"] > 0


def forget_a_replica() -> None:
    send = PauseCall.messages_to_prepare
    PauseCall.messages_to_prepare = lambda self, name: [] if name == "replica-0" else send(self, name)  # type: ignore


def test_a_fleet_that_is_half_paused_is_found():
    options = Options(replicas=3, gateways=1, pauses=3, step_s=0.005, fence_s=1.0, sessions=2, pace_s=0.0, scale=0.1)
    chaos = Chaos(options, in_gateways=forget_a_replica)
    asyncio.run(chaos.run())
    assert any("replica-0: a member that is not paused" in problem for problem in chaos.ledger.problems)


def test_the_ledger_takes_tokens_of_the_weights_in_their_spans():
    assert problems(events()) == []


@pytest.mark.parametrize(
    ("received", "floor", "problem"),
    [
        (events(), 5, "a token of epoch 4, but 5 was seen"),
        (events([Span("first", 4, 0, 2), Span("w7", 3, 2, 4)]), 0, "weight_epoch 3 after a token of 4"),
        (events([Span("first", 4, 0, 2), Span("w8", 5, 2, 4)]), 4, "token 2 is not that of weights 'w8'"),
        (events([Span("first", 4, 0, 2), Span("w7", 4, 2, 4)]), 4, "weight_epoch 4 is version 'w7', and was 'first'"),
        (events()[:1], 4, "2 tokens of 4, end ''"),
        (events()[1:], 4, "the span [2, 4) follows token 0"),
        ([events()[0], *events()], 4, "the span [0, 2) follows token 2"),
    ],
    ids=["older than a commit", "older than a token", "wrong", "two labels", "lost end", "lost", "doubled"],
)
def test_the_ledger_finds_what_must_not_be(received, floor, problem):
    assert any(problem in found for found in problems(received, floor))


def test_figures_are_above_one_step():
    assert fleet_chaos.excess_ms([Pause("keep", 0.05, False, False, 0)], 0.03) == pytest.approx([20.0])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_long_run_of_32_replicas_finds_nothing_wrong(capsys: pytest.CaptureFixture[str]):
    status = fleet_chaos.main(["--pauses", "300", "--fence-ms", "200"])
    assert status == 0, capsys.readouterr().out
