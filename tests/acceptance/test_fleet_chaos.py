"""acceptance/fleet_chaos.py: a short run, what it would find, and its figures."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from acceptance import fleet_chaos
from acceptance.lib.chaos.load import Answer, Cut, Load
from acceptance.lib.chaos.options import Options, Pause
from acceptance.lib.chaos.run import Chaos
from acceptance.lib.ledger import Ledger
from benchmarks.lib.fleet.runner import expected_tokens, fingerprint_of
from fastdeploy.bench.client import Client
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


@pytest.mark.slow
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


class Untouched:
    """Gateways to which nothing is done."""

    client = Client("http://127.0.0.1:1")

    def cut_since(self, since: float) -> bool:
        return False

    def stalled_since(self, since: float) -> bool:
        return False


async def compared(beginnings: list[Answer], after: Answer, num_harmed: int = 1) -> Ledger:
    load = Load(Untouched(), Ledger(), 0, 0, 1.0, lambda name: asyncio.sleep(0, {}), {"replica-0": num_harmed})
    for beginning in beginnings:
        load.compare(Cut(beginning, {"replica-0": 1}), after, 0.0)
    load.check_end()
    return load.ledger


@pytest.mark.parametrize("num_harmed", [1, 2])
def test_other_tokens_at_another_gateway_are_found_unless_their_engine_was_harmed(num_harmed):
    before, after = Answer("a", PROMPT, 4, 0, [1, 2, 3]), Answer("a", PROMPT, 4, 0, [1, 2, 4, 5])
    ledger = asyncio.run(compared([before, after], after, num_harmed))
    assert ledger.counts["of these: with the same tokens"] == 1 and ledger.counts["taken up at another gateway"] == 2
    found = ["a: other tokens at another gateway, though ['replica-0'] had the first ones"]
    assert ledger.problems == (found if num_harmed == 1 else [])


def test_answers_that_are_computed_again_though_an_engine_has_them_are_few():
    before, after = Answer("a", PROMPT, 4, 0, [1, 2, 3]), Answer("a", PROMPT, 4, 0, [1, 2], finish="abort")
    assert asyncio.run(compared([before], after)).problems == []
    problem = "2 of 2 answers were computed again, though kept"
    assert asyncio.run(compared([before, before], after)).problems == [problem]


MEMBER = {"weight_epoch": 2, "fingerprint": fingerprint_of(7), "version": "w7", "is_paused": True, "phase": "paused"}


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        ({}, ""),
        (None, "a member that does not answer"),
        ({"is_paused": False}, "a member that is not paused"),
        ({"holds": []}, "a member that is not paused: {'trainer'} of {'trainer'}"),
        ({"holds": [{"id": "trainer"}, {"id": "old"}]}, "a hold that was released, or never stood: {'old'}"),
        ({"fingerprint": fingerprint_of(6)}, "its weights are not those of its label 'w7'"),
        ({"weight_epoch": 1}, "a member with epoch 1, below 2"),
        ({"weight_epoch": 3}, "members with different weights"),
    ],
)
def test_a_look_at_the_engines_finds_a_member_that_is_not_as_the_others(other, problem):
    chaos = Chaos(Options(replicas=2))
    holds = {"holds": [{"id": "trainer"}]}
    reports = {"replica-0": MEMBER | holds} | ({} if other is None else {"replica-1": MEMBER | holds | other})
    chaos.launcher = SimpleNamespace(harmed={}, num_harmed={})
    chaos.load = SimpleNamespace(committed=2, first_version="first")
    chaos._witness = SimpleNamespace(ask=lambda names: asyncio.sleep(0, reports))
    chaos._members = lambda: asyncio.sleep(0, dict.fromkeys(("replica-0", "replica-1"), ("gateway-0",)))
    assert asyncio.run(chaos._looked({"trainer"}, None))
    assert bool(chaos.ledger.problems) == bool(problem) and problem in "".join(chaos.ledger.problems)


def test_figures_are_above_one_step():
    assert fleet_chaos.excess_ms([Pause("keep", 0.05, False, False, 0)], 0.03) == pytest.approx([20.0])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_long_run_of_32_replicas_finds_nothing_wrong(capsys: pytest.CaptureFixture[str]):
    status = fleet_chaos.main(["--pauses", "300", "--fence-ms", "200"])
    assert status == 0, capsys.readouterr().out
