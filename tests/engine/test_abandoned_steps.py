"""Pauses in the middle of a step: an abandoned step is computed again later, and changes no token."""

from __future__ import annotations

import pytest

from engine.pause_calls import LONG, busy, tokens_of
from fastdeploy.inter_communicator import messages as m
from support.fake_runner import FakeRunner, expected_tokens
from support.harness import Harness


def pause_in_step(h: Harness, **args) -> m.Reply:
    """Pause while the next step computes, and return the reply."""
    calls: list[int] = []
    h.runner.in_step = lambda: calls.append(h.call(m.PauseArgs(**args)))
    h.run_rounds(4)
    return h.reply(calls[0])


@pytest.mark.parametrize("mode", ["abort", "keep"])
def test_a_pause_does_not_wait_for_the_step_in_flight(mode):
    h = busy()
    computed, before = h.runner.computed_tokens, tokens_of(h)
    assert pause_in_step(h, mode=mode).result["is_paused"]
    assert h.runner.computed_tokens == computed and tokens_of(h) == before
    h.resume()
    h.run_out()
    ends = before if mode == "abort" else [LONG] * 6
    for i, count in enumerate(ends):
        assert h.stream(f"r{i}").tokens == expected_tokens([i + 1] * 3, count), "the abandoned step changed tokens"
        assert len(h.stream(f"r{i}").finals) == 1


def test_a_drain_completes_the_step_in_flight():
    h = busy()
    computed = h.runner.computed_tokens
    h.runner.in_step = lambda: h.call(m.PauseArgs(mode="wait"))
    h.run_rounds()
    assert h.runner.computed_tokens == computed + 4


def test_of_two_steps_in_a_row_at_most_one_is_abandoned():
    h = busy()
    for _ in range(5):
        before = tokens_of(h)
        pause_in_step(h, mode="keep")
        assert tokens_of(h) == before
        h.resume()
        pause_in_step(h, mode="keep")
        assert tokens_of(h) == [count + 1 for count in before[:4]] + [0, 0]
        h.resume()


def test_messages_read_within_a_step_are_handled_in_their_order():
    h = busy()

    def arrive() -> None:
        h.add("before", [7, 7], max_tokens=3)
        h.call(m.PauseArgs(mode="abort"))
        h.add("after", [7, 7], max_tokens=3)

    h.runner.in_step = arrive
    h.run_rounds(4)
    assert h.stream("before").reason == "abort" and h.rejected("before") is None
    assert h.rejected("after").code == "rejecting_new_requests"


def test_a_step_computed_again_copies_its_blocks_again():
    """The second request shares a partial block with the first, so the step copies that block before it computes."""
    h = Harness(FakeRunner(num_blocks=128))
    prompt = [1, 2, 3, 4, 5, 6]
    h.add("first", prompt, max_tokens=LONG)
    h.run_rounds(3)
    h.add("second", [*prompt, 9, 9, 9], max_tokens=5)
    pause_in_step(h, mode="keep")
    h.resume()
    h.run_out()
    assert h.stream("second").tokens == expected_tokens([*prompt, 9, 9, 9], 5)
    assert h.stream("first").tokens == expected_tokens(prompt, LONG)


def test_an_abandoned_step_is_counted():
    h = busy()
    pause_in_step(h, mode="keep")
    assert h.metric("steps_abandoned_total") == 1
