"""Pauses of a harness with requests."""

from __future__ import annotations

from fastdeploy.inter_communicator import messages as m
from support.fake_runner import FakeRunner
from support.harness import Harness

LONG = 100


def busy(max_tokens: int = LONG) -> Harness:
    """Return a harness with requests r0 to r5, of which the first 4 run and have tokens."""
    h = Harness(FakeRunner(num_blocks=128))
    for i in range(6):
        h.add(f"r{i}", [i + 1] * 3, max_tokens=max_tokens)
    h.run_rounds(4)
    return h


def tokens_of(h: Harness) -> list[int]:
    return [len(h.stream(f"r{i}").tokens) for i in range(6)]


def call_pause(h: Harness, **args) -> int:
    """Call a pause, and run one round. The reply may come later."""
    call = h.call(m.PauseArgs(**args))
    h.run_rounds()
    return call
