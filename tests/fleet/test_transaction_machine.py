"""Hypothesis explores the fleet: calls that overlap, messages that are late, doubled or lost, replicas that die, hang
or refuse, gateways that die at any point, and a trainer that writes other weights, adapters and EOS ids to its folder
at any time."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import example, given, note, settings
from hypothesis import strategies as st

from fastdeploy.core.weight_source import FolderSource
from fastdeploy.inter_communicator import messages as m
from fleet.simulated_fleet import SOURCE, SimulatedFleet
from support.search import examples


def hold(name: str | None) -> m.PauseArgs:
    return m.PauseArgs("keep", hold_id=name)


ADAPTER_CALLS = [
    lambda n: m.LoadAdapterArgs("lora", FolderSource(f"/a{n}")),
    lambda n: m.LoadAdapterArgs("other", FolderSource(f"/a{n}")),
    lambda n: m.UnloadAdapterArgs("lora"),
]
CALLS = [
    lambda n: hold("a"),
    lambda n: hold("b"),
    lambda n: hold(None),
    lambda n: m.ResumeArgs("a"),
    lambda n: m.ResumeArgs(),
    lambda n: m.UpdateWeightsArgs(SOURCE, version=f"v{n}"),
    lambda n: m.BeginUpdateArgs(version=f"v{n}", placed_by="s"),
    lambda n: m.UpdatePartArgs(None, SOURCE, placed_by="s"),
    lambda n: m.CommitUpdateArgs(None, placed_by="s"),
    lambda n: m.AbortUpdateArgs(),
    *ADAPTER_CALLS,
    lambda n: m.SleepArgs(),
    lambda n: m.WakeArgs(),
]
REFUSABLE = [
    m.PauseArgs,
    m.ResumeArgs,
    m.BeginUpdateArgs,
    m.UpdatePartArgs,
    m.CommitUpdateArgs,
    m.LoadAdapterArgs,
    m.EndLoadArgs,
    m.SleepArgs,
]
# The steps of a script, the frequent ones several times.
COMMANDS = (
    *["call"] * 8,
    *["whole call of an adapter"] * 2,
    *["handle"] * 6,
    *["handle twice"] * 2,
    *["deliver"] * 6,
    *["deadline", "die", "hang", "refuse", "refuse", "join", "join", "new gateway"],
    *["settle"] * 3,
    *["write"] * 2,
    *["die and join"] * 3,
)


def scripts(min_size: int, max_size: int) -> st.SearchStrategy[list[tuple[str, int]]]:
    """Return a strategy of scripts: each step with a number that chooses the call or the replica."""
    codes = st.lists(st.integers(0, len(COMMANDS) * 1000 - 1), min_size=min_size, max_size=max_size)
    return codes.map(lambda codes: [(COMMANDS[code % len(COMMANDS)], code // len(COMMANDS)) for code in codes])


def play(num: int, script: list[tuple[str, int]]) -> None:
    """Run a script, and check the fleet at every point where nothing is in flight."""
    note(f"play({num}, {script})")
    with asyncio.Runner() as runner:
        play_in(SimulatedFleet(num, runner.get_loop()), num, script)


def play_in(fleet: SimulatedFleet, num: int, script: list[tuple[str, int]]) -> None:
    for number, (what, at) in enumerate(script):
        name = f"r{at % num}"
        match what:
            case "call":
                fleet.gateway.call(CALLS[at % len(CALLS)](number))
            case "whole call of an adapter":
                fleet.gateway.call(ADAPTER_CALLS[at % len(ADAPTER_CALLS)](number))
                fleet.settle()
            case "handle" | "handle twice":
                fleet.handle_one(name, doubled=what == "handle twice")
            case "deliver":
                fleet.deliver_one(name)
            case "deadline":
                running = [call for call in fleet.gateway.calls if call.outcome is None]
                if running:
                    fleet.gateway.deadline(running[at % len(running)])
            case "die":
                fleet.die(name)
            case "hang":
                fleet.replicas[name].hangs = True
            case "refuse":
                fleet.replicas[name].refuses.add(REFUSABLE[at // num % len(REFUSABLE)])
            case "join":
                fleet.join(name)
            case "die and join":
                fleet.die(name)
                fleet.settle()
                fleet.join(name)
            case "settle":
                fleet.settle()
                fleet.check()
            case "new gateway":
                fleet.new_gateway()
            case "write":
                fleet.sources.write()
    fleet.settle()
    fleet.check()


# Of two resumes of a hold, the first one is refused and the second one is not. Then a new pause is refused.
REFUSED_RESUME = [
    *[("call", 0), ("handle", 2), ("call", 4), ("call", 3), ("die", 1), ("refuse", 2)],
    *[("call", 3), ("handle", 2), ("call", 0), ("die", 0), ("refuse", 5)],
]

# After the reply to a load, or to an update with EOS ids, the trainer overwrites the folder. Then a replica comes back.
OVERWRITTEN = [
    [("call", 10), ("settle", 0), ("write", 0), ("die and join", 0)],
    [("write", 0), ("call", 5), ("settle", 0), ("write", 0), ("die and join", 0)],
]

# The only replica that has committed a load dies. The other one refuses, and the next load gets another number.
LOST_COMMIT = [
    *[("call", CALLS.index(ADAPTER_CALLS[0])), ("handle", 0), ("handle", 1), ("deliver", 0), ("deliver", 1)],
    *[("refuse", 1 + 2 * REFUSABLE.index(m.EndLoadArgs)), ("handle", 0), ("die", 0), ("settle", 0)],
    ("whole call of an adapter", 0),
]

# An unload comes between the two messages of a load, and then a later load: the first one fails, the later one stands.
LOAD, UNLOAD = CALLS.index(ADAPTER_CALLS[0]), CALLS.index(ADAPTER_CALLS[2])
UNLOADED_MEANWHILE = [
    *[("whole call of an adapter", 0), ("call", LOAD), ("call", UNLOAD), ("whole call of an adapter", 0)],
    ("die and join", 0),
]
# The same, and the later load fails too.
BOTH_LOADS_FAIL = [
    *[("whole call of an adapter", 0), ("call", LOAD), ("call", UNLOAD), ("call", LOAD)],
    *[("handle", 0), ("handle", 1), ("deliver", 0), ("deliver", 1)] * 3,
    *[("handle", 0), ("handle", 1), ("deliver", 0), ("deliver", 1)],
    *[("refuse", at + 2 * REFUSABLE.index(m.EndLoadArgs)) for at in (0, 1)],
]


@examples(600)
@given(num=st.integers(2, 5), script=scripts(12, 50))
@example(num=3, script=REFUSED_RESUME)
@example(num=2, script=OVERWRITTEN[0])
@example(num=2, script=OVERWRITTEN[1])
@example(num=2, script=LOST_COMMIT)
@example(num=2, script=UNLOADED_MEANWHILE)
@example(num=2, script=BOTH_LOADS_FAIL)
def test_all_members_have_one_state_whatever_is_lost_late_or_doubled(num, script):
    play(num, script)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=30_000)
@given(num=st.integers(2, 5), script=scripts(20, 100))
def test_all_members_have_one_state_in_long_histories(num, script):
    play(num, script)
