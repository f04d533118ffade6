"""Hypothesis explores a fleet of three gateways: networks that are split between any two hosts, late messages, late
leases, gateways that are stopped or killed at any point, so that two of them believe that they lead."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from fastdeploy.core.request_fields import AddRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.inter_communicator import messages as m
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


async def pause_while_a_replica_joins_late(fleet: SplitFleet) -> None:
    """Another gateway takes the lead, and reaches replica-1 late. Requests of the third gateway run there."""
    fleet.start()
    await fleet.until(lambda: fleet.complete)
    late = fleet.engines["replica-1"].engine
    first = fleet.gateways.index(fleet.leader)
    leads, follows = (i for i in range(3) if i != first)
    for number in range(8):
        fleet.begin(fleet.ask(follows, f"session-{number}", 400))
    await fleet.until(lambda: late.scheduler.running)
    fleet.split.slow(f"gateway-{leads}", "replica-1", 3.0)
    fleet.freeze(fleet.gateways[follows], 1.0)  # so that the other one is first
    fleet.gateways[first].kill()
    await fleet.until(lambda: fleet.gateways[leads].leads)
    await fleet.until(lambda: fleet.gateways[follows].client.membership.following.leader)
    report = await fleet.gateways[leads].call(m.PauseArgs("keep", hold_id="trainer"))
    assert [entry["name"] for entry in report["replicas"]] == ["replica-0"]
    assert not late.pause.holds, "else the test shows nothing"
    follower = fleet.gateways[follows].client
    tokens = [len(relay.tokens[0]) for relay in follower._relays.values()]
    await asyncio.sleep(1.0)
    assert [len(relay.tokens[0]) for relay in follower._relays.values()] == tokens, "tokens in the pause"
    await fleet.gateways[leads].call(m.ResumeArgs("trainer"))
    fleet.replace(first)
    await fleet.settle()
    fleet.check()


def test_a_replica_that_joins_the_next_leader_late_gives_no_tokens_after_a_pause():
    async def script() -> None:
        fleet = SplitFleet(NUM)
        try:
            await pause_while_a_replica_joins_late(fleet)
        finally:
            fleet.end()

    run_steadily(script())


async def lose_the_leader_of_a_pause_that_has_aborted(fleet: SplitFleet) -> None:
    """One engine has aborted what ran there at the time-out of a pause, and the other one had nothing to end."""
    fleet.start()
    await fleet.until(lambda: fleet.complete)
    first = fleet.gateways.index(fleet.leader)
    other = fleet.gateways[(first + 1) % 3]
    engines = [engine.engine for engine in fleet.engines.values()]
    fleet.begin(fleet.ask((first + 1) % 3, "session", 400))
    await fleet.until(lambda: any(engine.scheduler.running for engine in engines))
    await fleet.leader.call(m.PauseArgs("wait", hold_id="trainer", timeout_s=0.2, on_timeout="abort"))
    assert [engine.pause.mode.name for engine in engines].count("WAIT") == 1
    with other.host.here():
        sampling = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
        streams = [await other.client.submit(AddRequest(f"waits-{i}", [i, 5], sampling)) for i in range(4)]
    await fleet.until(lambda: all(len(engine.scheduler.waiting) for engine in engines))
    fleet.gateways[first].kill()
    await fleet.until(lambda: any(gateway.leads for gateway in fleet.gateways if gateway is not fleet.gateways[first]))
    fleet.replace(first)
    await fleet.until(lambda: fleet.complete)
    assert not any(stream.ended for stream in streams)
    await fleet.leader.call(m.ResumeArgs("trainer"))
    await fleet.until(lambda: all(stream.ended for stream in streams))
    assert [stream.read()[-1].finish_reason for stream in streams] == ["length"] * 4


def test_what_waits_in_a_pause_that_has_aborted_waits_on_under_the_next_leader():
    async def script() -> None:
        fleet = SplitFleet(NUM)
        try:
            await lose_the_leader_of_a_pause_that_has_aborted(fleet)
        finally:
            fleet.end()

    run_steadily(script())


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=2_000)
@given(script=scripts(20, 80))
def test_a_fleet_is_whole_after_long_histories_of_splits(script):
    note(f"play({script})")
    run_steadily(play(script))
