"""A request that asks for routed experts gets the row of each token but the last, once, as the next token was sampled
with. The state machine (tests/engine/test_state_machine.py) asks for rows, too, in any order of events."""

from __future__ import annotations

import pytest

from fastdeploy.inter_communicator import messages as m
from support.drafters import ScriptedDrafter, coming_tokens
from support.fake_runner import EXPERTS, FakeRunner, expected_rows, expected_tokens, next_token, row_of
from support.harness import PROMPT, Harness

LONG = list(range(1, 23))


def harness(**config) -> Harness:
    return Harness(FakeRunner(experts=EXPERTS), **config)


def assert_rows(h: Harness, request_id: str, prompt: list[int], choice: int = 0, start: int = 0, **client) -> None:
    stream = h.stream(request_id, choice, **client)
    assert stream.tokens and stream.routed == expected_rows(prompt + stream.tokens, EXPERTS, start)


@pytest.mark.parametrize("start", [0, 1, len(LONG) - 1, len(LONG)])
def test_rows_begin_where_the_request_says_and_come_with_chunks_of_the_prompt(start):
    h = harness(max_num_batched_tokens=5)
    h.add("r", LONG, routed_experts=True, routed_experts_start=start)
    h.run_out()
    assert len(h.runner.plans) > len(LONG) // 5
    assert_rows(h, "r", LONG, start=start)


def test_nobody_else_gets_rows_or_makes_the_runner_return_some():
    h = harness()
    h.add("r", LONG)
    h.run_out()
    assert not h.stream("r").routed
    assert all(chunk.routed_from == -1 for plan in h.runner.plans for chunk in plan.chunks)


def test_a_prefix_that_a_request_without_rows_has_computed_has_rows():
    h = harness()
    h.add("first", LONG, max_tokens=3)
    h.run_out()
    turn = LONG + h.stream("first").tokens + [7]
    for request_id, prompt in (("same", LONG), ("turn", turn), ("shorter", LONG[:-3] + [9])):
        hits = h.engine.kv.hit_tokens
        h.add(request_id, prompt, routed_experts=True)
        h.run_out()
        assert h.engine.kv.hit_tokens > hits
        assert_rows(h, request_id, prompt)
    assert any(plan.copies for plan in h.runner.plans), "no block was copied"


def test_each_choice_has_all_rows():
    h = harness()
    h.add("r", LONG, n=3, routed_experts=True)
    h.run_out()
    for choice in range(3):
        assert_rows(h, "r", LONG, choice)


def test_rows_of_right_drafts_come_and_of_no_token_behind_the_last():
    runner = FakeRunner(experts=EXPERTS)
    drafter = ScriptedDrafter(lambda request: [*coming_tokens(runner, request, 2), 999])
    tokens = expected_tokens(PROMPT, 12)
    h = Harness(runner, drafter=drafter)
    h.add("r", PROMPT, max_tokens=11, routed_experts=True)
    h.add("stopped", PROMPT, max_tokens=11, routed_experts=True, stop_token_ids=(tokens[4],))
    h.add("begins late", PROMPT, max_tokens=2, routed_experts=True, routed_experts_start=len(PROMPT))
    h.run_out()
    assert h.engine.scheduler.speculation.num_accepted > 5 and len(h.stream("stopped").tokens) == 5
    for request_id in ("r", "stopped"):
        assert_rows(h, request_id, PROMPT)
    assert_rows(h, "begins late", PROMPT, start=len(PROMPT))


def test_rows_come_once_though_the_kv_is_computed_again():
    h = Harness(FakeRunner(num_blocks=9, max_model_len=32, experts=EXPERTS))
    for request_id, first in (("a", 1), ("b", 2)):
        h.add(request_id, [first] * 12, max_tokens=18, routed_experts=True)
    h.run_out()
    assert h.engine.scheduler.num_preemptions
    for request_id, first in (("a", 1), ("b", 2)):
        assert_rows(h, request_id, [first] * 12)


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_after_an_update_delivered_rows_stay_and_later_ones_are_of_the_new_weights(kv):
    h = harness()
    h.add("r", LONG, max_tokens=12, routed_experts=True)
    h.run_rounds(4)
    before = len(h.stream("r").tokens)
    assert 0 < before < 12
    assert h.update("/w1", kv=kv).failure is None
    h.run_out()
    stream = h.stream("r")
    change = next(span.start for span in stream.spans if span.weight_epoch == h.served.weight_epoch)
    known = LONG + stream.tokens
    rows = [row_of(known[: p + 1], EXPERTS, int(p + 1 >= len(LONG) + change)) for p in range(len(known) - 1)]
    assert stream.routed == b"".join(rows)
    h.add("later", LONG, max_tokens=2, routed_experts=True)
    h.run_out()
    known = LONG + h.stream("later").tokens
    assert known[-2] == next_token(LONG, 1, 1000)
    assert h.stream("later").routed == expected_rows(known, EXPERTS, weights=1), "rows of the old weights"


def test_a_prompt_that_is_computed_again_before_its_first_token_has_the_rows_of_the_new_weights():
    h = harness(max_num_batched_tokens=5)
    h.add("r", LONG, max_tokens=4, routed_experts=True)
    h.run_rounds()
    assert h.engine.scheduler.running[0].num_computed
    assert h.update("/w1", kv="recompute").failure is None
    h.run_out()
    known = LONG + h.stream("r").tokens
    assert len(h.stream("r").spans) == 4 and h.engine.scheduler.num_recomputed
    assert h.stream("r").routed == expected_rows(known, EXPERTS, weights=1)


@pytest.mark.parametrize("mode", ["abort", "keep"])
def test_an_aborted_or_paused_request_has_the_rows_of_the_tokens_that_it_has(mode):
    h = harness()
    h.add("r", LONG, routed_experts=True)
    h.run_rounds(3)
    h.runner.in_step = lambda: h.call(m.PauseArgs(mode))
    h.run_rounds(3)
    assert_rows(h, "r", LONG)
    h.resume()
    h.run_out()
    assert_rows(h, "r", LONG)


def test_a_request_that_goes_on_with_its_tokens_gets_the_rows_that_its_client_lacks():
    h = harness()
    tokens = expected_tokens(LONG, 9)
    h.add("rest", LONG + tokens[:4], resumed_tokens=4, max_tokens=5, routed_experts=True, routed_experts_start=25)
    h.run_out()
    assert h.stream("rest").tokens == tokens[4:]
    assert_rows(h, "rest", LONG + tokens[:4], start=25)


@pytest.mark.parametrize("rounds", [3, 40])
def test_a_client_that_attaches_to_a_retained_request_gets_all_rows(rounds):
    h = harness()
    h.connect("b")
    asked = {"retain_s": 10.0, "fingerprint": "body", "max_tokens": 12, "routed_experts": True}
    h.add("r", LONG, **asked)
    h.run_rounds(rounds)
    h.send(m.CancelRequest("r"))
    h.run_rounds()
    h.add("r", LONG, client="b", **asked)
    h.run_out()
    h.run_rounds()
    assert_rows(h, "r", LONG, client="b")
    kept = h.engine.retention.nbytes
    h.add("s", LONG, **asked | {"routed_experts": False})
    h.run_out()
    assert 2 * kept - h.engine.retention.nbytes == len(h.stream("r", client="b").routed), "rows count as kept bytes"


@pytest.mark.parametrize(
    ("experts", "asked", "field"),
    [
        (None, {"routed_experts": True}, "routed_experts"),
        (EXPERTS, {"routed_experts_start": 1}, "routed_experts_start"),
        (EXPERTS, {"routed_experts": True, "routed_experts_start": len(PROMPT) + 1}, "routed_experts_start"),
    ],
)
def test_rows_that_cannot_be_returned_are_refused_by_name(experts, asked, field):
    h = Harness(FakeRunner(experts=experts))
    h.add("r", PROMPT, **asked)
    h.run_rounds(2)
    failure = h.rejected("r")
    assert failure.code == "invalid_field" and failure.detail["param"] == field
    assert experts is not None or "--enable-return-routed-experts" in failure.message
