"""Hypothesis explores a fleet of three gateways: networks that are split between any two hosts, late messages, late
leases, gateways that are stopped or killed at any point, so that two of them believe that they lead."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from fleet.split_fleet import SplitFleet, pairs, run_steadily
from support.search import examples

COMMANDS = (
    *["ask"] * 8,
    *["pause"] * 3,
    *["resume"] * 3,
    *["update"] * 4,
    *["cut"] * 4,
    *["cut off a gateway"] * 2,
    *["slow"] * 2,
    *["heal"] * 4,
    *["freeze"] * 3,
    *["replace"] * 2,
    *["kill an engine"],
    *["wait"] * 8,
)
NUM = 2
PAIRS = list(pairs(NUM))
NOTICED_S = (0.1, 0.7, 3.0)  # before fence_after_s, before and after the end of the lease
WAITS_S = (0.005, 0.05, 0.4, 1.0, 2.5)
Script = list[tuple[str, int]]


def scripts(min_size: int, max_size: int) -> st.SearchStrategy[Script]:
    codes = st.lists(st.integers(0, len(COMMANDS) * 1000 - 1), min_size=min_size, max_size=max_size)
    return codes.map(lambda codes: [(COMMANDS[code % len(COMMANDS)], code // len(COMMANDS)) for code in codes])


async def play(script: Script) -> None:
    """Run a script, heal everything, and check that the fleet is whole."""
    fleet = SplitFleet(NUM)
    try:
        await play_in(fleet, script)
    finally:
        fleet.end()


async def play_in(fleet: SplitFleet, script: Script) -> None:
    fleet.start()
    await fleet.until(lambda: fleet.complete)
    for number, (what, at) in enumerate(script):
        door, pair = at % 3, PAIRS[at % len(PAIRS)]
        match what:
            case "ask":
                fleet.begin(fleet.ask(door, f"session-{at // 3 % 2}", (3, 40)[at // 6 % 2]))
            case "pause":
                fleet.begin(fleet.pause(door, f"hold-{number}", ("keep", "abort")[at // 3 % 2]))
            case "resume" if fleet.holds:
                fleet.begin(fleet.resume(door, list(fleet.holds)[at // 3 % len(fleet.holds)]))
            case "update":
                fleet.begin(fleet.update(door, number))
            case "cut":
                fleet.split.cut(*pair, NOTICED_S[at // len(PAIRS) % len(NOTICED_S)])
            case "cut off a gateway":
                for a, b in PAIRS:
                    if f"gateway-{door}" in (a, b):
                        fleet.split.cut(a, b, NOTICED_S[at // 3 % len(NOTICED_S)])
            case "slow":
                fleet.split.slow(*pair, (0.05, 0.6, 2.5)[at // len(PAIRS) % 3])
            case "heal":
                fleet.split.heal_all()
            case "freeze":
                fleet.freeze(fleet.gateways[door], (0.1, 0.7, 3.0)[at // 3 % 3])
            case "replace":
                fleet.replace(door)
            case "kill an engine":
                names = list(fleet.engines)
                if len(names) == NUM:  # one lives, so that the weights are not lost
                    fleet.kill([names[at % NUM]])
            case "wait":
                await asyncio.sleep(WAITS_S[at % len(WAITS_S)])
        for gateway in fleet.gateways:
            gateway.raise_error()
    await fleet.settle()
    fleet.check()


@examples(25)
@given(script=scripts(10, 30))
def test_a_fleet_is_whole_after_any_split_and_no_session_goes_back(script):
    note(f"play({script})")
    run_steadily(play(script))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=2_000)
@given(script=scripts(20, 80))
def test_a_fleet_is_whole_after_long_histories_of_splits(script):
    run_steadily(play(script))
