"""Pause and resume: modes, holds, admission, timeouts, joining, escalation, fence, report."""

from __future__ import annotations

import pytest

from fastdeploy.engine import pause as p
from fastdeploy.engine import scopes
from fastdeploy.inter_communicator import messages as m
from support.fake_runner import FakeRunner, expected_tokens
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


def watch_clears(h: Harness) -> list[int]:
    """Return a list that grows with every clearing of the prefix cache."""
    clears: list[int] = []
    clear = h.engine.kv.index.clear
    h.engine.kv.index.clear = lambda: (clears.append(1), clear())
    return clears


# --------------------------------------------------------------------------- the three modes


def test_abort_ends_all_requests_with_exactly_the_tokens_they_had():
    h = busy()
    computed = h.runner.computed_tokens
    report = h.pause(mode="abort").result
    assert h.runner.computed_tokens == computed
    streams = [h.stream(f"r{i}") for i in range(6)]
    assert [s.reason for s in streams] == ["abort"] * 6
    assert [bool(s.tokens) for s in streams] == [True] * 4 + [False] * 2
    for i, stream in enumerate(streams):
        assert stream.tokens == expected_tokens([i + 1] * 3, len(stream.tokens)), "no invented EOS, no lost token"
        assert stream.finals[0].message.startswith("Abort before prefill") == (i >= 4)
    assert report["counts"] == {"aborted": 6, "drained": 0, "kept": 0, "queued": 0}
    assert report["tokens_returned"] == sum(tokens_of(h))
    assert sorted(report["aborted_ids"]) == [f"r{i}" for i in range(6)] and report["forced_ids"] == []
    assert h.pause(mode="abort").result["aborted_ids"] == [], "no request is left"


def test_abort_does_not_prefill_the_rest_of_a_half_prefilled_prompt():
    h = Harness(FakeRunner(num_blocks=64, max_model_len=200), max_num_batched_tokens=8)
    h.add("long", [1] * 100)
    h.run_rounds(2)
    assert h.runner.computed_tokens == 16
    h.pause(mode="abort")
    assert h.runner.computed_tokens == 16 and h.stream("long").reason == "abort"
    assert h.engine.kv.num_free == 64


def test_no_request_starts_while_an_abort_waits_for_its_fence():
    h = busy()
    h.transport.mute.add("a")
    call_pause(h, mode="abort", admission="hold")
    computed = h.runner.computed_tokens
    h.add("new", [1, 2])
    h.run_rounds(3)
    assert h.status()["phase"] == "draining" and h.runner.computed_tokens == computed


def test_keep_freezes_running_half_prefilled_and_waiting_requests():
    h = Harness(max_num_batched_tokens=8)
    for i in range(6):
        h.add(f"r{i}", [i + 1] * 9, max_tokens=12)
    h.run_rounds(3)
    report = h.pause(mode="keep").result
    assert report["counts"]["kept"] >= 1 and report["counts"]["kept"] + report["counts"]["queued"] == 6
    before, blocks = h.runner.computed_tokens, h.engine.kv.num_free
    h.run_rounds(10)
    assert h.runner.computed_tokens == before and h.engine.kv.num_free == blocks, "frozen requests keep their KV"
    h.resume()
    h.run_out()
    for i in range(6):
        assert h.stream(f"r{i}").tokens == expected_tokens([i + 1] * 9, 12)


def test_keep_recomputes_no_token():
    h, undisturbed = busy(max_tokens=12), busy(max_tokens=12)
    h.pause(mode="keep")
    h.run_rounds(5)
    h.resume()
    h.run_out()
    undisturbed.run_out()
    assert h.runner.computed_tokens == undisturbed.runner.computed_tokens


def test_wait_completes_running_requests_and_starts_no_others():
    h = busy(max_tokens=12)
    report = h.pause(mode="wait").result
    assert [h.stream(f"r{i}").reason for i in range(6)] == ["length"] * 4 + [None] * 2
    assert tokens_of(h) == [12] * 4 + [0] * 2
    assert report["counts"] == {"aborted": 0, "drained": 4, "kept": 0, "queued": 2}


def test_wait_completes_all_choices_of_a_request_of_which_one_has_started():
    h = Harness(FakeRunner(num_blocks=128), max_num_seqs=2)
    h.add("g", [1, 2, 3], n=5, max_tokens=6)
    h.add("other", [9, 9], max_tokens=6)
    h.run_rounds(2)
    assert h.stream("g", 0).tokens and not h.stream("g", 4).tokens
    report = h.pause(mode="wait").result
    assert [h.stream("g", i).tokens for i in range(5)] == [expected_tokens([1, 2, 3], 6)] * 5
    assert report["counts"]["drained"] == 5 and report["counts"]["queued"] == 1


def test_wait_does_not_wait_for_a_prompt_that_is_half_prefilled():
    h = Harness(FakeRunner(num_blocks=64, max_model_len=200), max_num_batched_tokens=8)
    h.add("short", [1, 2], max_tokens=4)
    h.add("long", [3] * 100, max_tokens=4)
    h.run_rounds(3)
    assert len(h.engine.scheduler.running) == 2
    report = h.pause(mode="wait").result
    assert h.stream("short").reason == "length" and h.stream("long").reason is None
    assert report["counts"]["queued"] == 1
    h.resume()
    h.run_out()
    assert h.stream("long").tokens == expected_tokens([3] * 100, 4)


# --------------------------------------------------------------------------- caches


def test_clear_cache_gives_all_kv_back_and_the_same_tokens_follow():
    h = busy(max_tokens=20)
    h.pause(mode="keep", clear_cache=True)
    assert h.engine.kv.num_free == h.runner.info.num_blocks
    h.resume()
    h.run_out()
    for i in range(6):
        assert h.stream(f"r{i}").tokens == expected_tokens([i + 1] * 3, 20)
    undisturbed = busy(max_tokens=20)
    undisturbed.run_out()
    # Four had computed their prompt of 3 and all of their 4 tokens but the last.
    assert h.runner.computed_tokens == undisturbed.runner.computed_tokens + 4 * (3 + 3)


@pytest.mark.parametrize(("mode", "hits"), [("abort", 0), ("wait", 0), ("keep", 15)])
def test_each_mode_has_its_own_default_for_the_prefix_cache(mode, hits):
    h = Harness()
    h.add("first", list(range(1, 17)), max_tokens=2)
    h.run_out()
    h.pause(mode=mode)
    h.resume()
    h.add("again", list(range(1, 17)), max_tokens=2)
    h.run_out()
    assert h.engine.kv.hit_tokens == hits


def test_a_pause_that_keeps_the_cache_does_not_clear_it_for_the_pause_before():
    h = Harness()
    h.pause(mode="wait", hold_id="x")
    clears = watch_clears(h)
    h.pause(mode="keep", hold_id="y")
    h.run_rounds(5)
    h.resume("x")
    h.resume("y")
    h.run_rounds(5)
    assert not clears


def test_a_resume_during_a_drain_clears_no_cache():
    h = busy()
    call = call_pause(h, mode="wait", clear_cache=True)
    clears = watch_clears(h)
    h.resume()
    assert h.reply(call).failure.code == "pause_interrupted"
    h.run_out()
    h.pause(mode="keep")
    assert not clears and h.reply(call).failure is not None, "one reply, and no effect after it"


# --------------------------------------------------------------------------- holds


def test_an_anonymous_resume_leaves_named_and_system_holds():
    h = Harness(lost_commit=True)
    h.run_rounds()
    h.pause(mode="keep")
    h.pause(mode="keep", hold_id="trainer")
    reply = h.resume().result
    assert (
        reply["status"] == "held" and reply["still_held_by"] == ["republish", "trainer"] and len(reply["released"]) == 1
    )
    assert h.status()["is_paused"]
    assert h.resume("trainer").result["still_held_by"] == ["republish"]
    assert h.resume("republish").result["status"] == "running", "an operator may release this hold by name"


def test_a_resume_of_an_unknown_hold_says_so_and_changes_nothing():
    h = Harness()
    h.pause(mode="keep")
    reply = h.resume("nobody")
    assert reply.failure is None and reply.result["unknown"] == ["nobody"] and reply.result["released"] == []
    assert h.status()["is_paused"]


def test_resume_without_a_pause_is_harmless():
    h = Harness()
    assert h.resume().result["status"] == "running"


def test_the_same_name_is_the_same_hold_and_its_ttl_is_renewed():
    h = Harness()
    h.pause(mode="keep", hold_id="x", ttl_s=10.0)
    h.now += 8
    h.pause(mode="keep", hold_id="x", ttl_s=10.0)
    h.now += 8
    h.run_rounds()
    assert [hold["id"] for hold in h.status()["holds"]] == ["x"]
    h.now += 3
    h.run_rounds()
    assert h.status()["holds"] == [] and h.status()["phase"] == "running"


def test_a_hold_ends_after_its_ttl():
    h = busy(max_tokens=12)
    h.pause(mode="keep", ttl_s=5.0)
    h.now += 5.1
    h.run_out()
    assert tokens_of(h) == [12] * 6


def test_a_pause_whose_ttl_ends_during_its_drain_is_interrupted():
    h = busy()
    call = call_pause(h, mode="wait", ttl_s=5.0)
    h.now += 5.1
    h.run_rounds()
    assert h.reply(call).failure.code == "pause_interrupted" and h.status()["phase"] == "running"


def test_a_pause_that_names_an_anonymous_hold_makes_it_a_named_one():
    h = Harness()
    name = h.pause(mode="keep").result["hold"]["id"]
    h.pause(mode="keep", hold_id=name)
    assert h.resume().result["still_held_by"] == [name]


def test_a_pause_cannot_take_over_a_hold_of_the_system():
    h = Harness(lost_commit=True)
    assert h.pause(mode="abort", hold_id="republish").failure.code == "invalid_field"
    assert h.status()["mode"] == "keep"


def test_the_number_of_holds_is_bounded(monkeypatch):
    monkeypatch.setattr(scopes, "MAX_HOLDS", 2)
    h = Harness()
    h.pause(mode="keep")
    h.pause(mode="keep", hold_id="x")
    assert h.pause(mode="keep").failure.code == "invalid_field"
    assert h.pause(mode="keep", hold_id="x").failure is None


def test_a_wait_by_another_controller_does_not_end_the_freeze_of_a_keep():
    h = busy()
    h.pause(mode="keep", hold_id="trainer")
    before = h.runner.computed_tokens
    h.pause(mode="wait", hold_id="other")
    h.run_rounds(3)
    h.resume("trainer")
    h.run_rounds(3)
    assert h.runner.computed_tokens == before and h.status()["is_paused"]
    h.resume("other")
    h.run_rounds()
    assert h.runner.computed_tokens > before


def test_a_wait_drains_once_the_keep_that_joined_it_is_released():
    h = busy(max_tokens=12)
    h.connect("b")
    h.transport.mute.add("b")
    waiting = call_pause(h, mode="wait", hold_id="w", timeout_s=500.0)
    keeping = call_pause(h, mode="keep", hold_id="k")
    before = h.runner.computed_tokens
    h.run_rounds(3)
    assert h.runner.computed_tokens == before
    h.resume("k")
    assert h.reply(keeping).failure.code == "pause_interrupted" and h.reply(waiting) is None
    h.transport.mute.clear()
    h.run_rounds(15)
    assert h.reply(waiting).failure is None and tokens_of(h) == [12] * 4 + [0] * 2


# --------------------------------------------------------------------------- admission


@pytest.mark.parametrize(("mode", "admission"), [("abort", "reject"), ("wait", "hold"), ("keep", "hold")])
def test_each_mode_has_its_own_default_of_admission_which_the_reply_names(mode, admission):
    h = Harness()
    assert h.pause(mode=mode).result["admission"] == admission
    h.add("new", [1, 2])
    h.run_rounds()
    assert (h.rejected("new") is not None) == (admission == "reject")


def test_requests_are_rejected_from_the_start_of_a_drain_until_the_last_hold_ends():
    h = busy()
    call_pause(h, mode="wait", admission="reject")
    assert h.status()["rejecting_new_requests"] and not h.status()["is_paused"]
    h.add("new", [1, 2])
    h.run_rounds()
    failure = h.rejected("new")
    assert failure.code == "rejecting_new_requests" and failure.detail["retry_after"] >= 1
    h.resume()
    h.add("new", [1, 2])
    h.run_rounds()
    assert h.stream("new").tokens or len(h.engine.scheduler.waiting)
    assert not h.status()["rejecting_new_requests"]


def test_admission_is_reject_while_any_hold_asks_for_it():
    h = Harness()
    h.pause(mode="keep", hold_id="x", admission="reject")
    h.pause(mode="abort", hold_id="y", admission="hold")
    assert h.status()["admission"] == "reject"
    h.resume("x")
    assert h.status()["admission"] == "hold"


def test_held_requests_are_bounded_by_the_queue_limit_and_run_after_resume():
    h = Harness(max_waiting=3)
    h.pause(mode="keep")
    for i in range(5):
        h.add(f"r{i}", [i + 1])
    h.run_rounds()
    assert [h.rejected(f"r{i}") and h.rejected(f"r{i}").code for i in range(5)] == [None] * 3 + ["queue_full"] * 2
    h.resume()
    h.run_out()
    assert [h.stream(f"r{i}").reason for i in range(5)] == ["length"] * 3 + [None] * 2


def test_a_request_that_an_abort_pause_holds_is_not_aborted():
    h = busy()
    h.pause(mode="abort", admission="hold")
    h.add("new", [1, 2], max_tokens=3)
    h.run_rounds(3)
    assert h.stream("new").reason is None
    h.resume()
    h.run_out()
    assert h.stream("new").tokens == expected_tokens([1, 2], 3)


# --------------------------------------------------------------------------- timeouts


def test_a_drain_that_times_out_freezes_what_is_left_by_default():
    h = busy()
    call = call_pause(h, mode="wait", timeout_s=10.0)
    h.now += 10.0
    h.run_rounds(3)
    report = h.reply(call).result
    assert report["is_paused"] and report["mode"] == "keep" and report["escalated_by"] == "timeout"
    assert report["counts"]["kept"] == 4 and report["forced_ids"] == []
    h.resume()
    h.run_out()
    assert tokens_of(h) == [LONG] * 6


def test_on_timeout_abort_reports_the_requests_that_it_aborted():
    h = busy()
    call = call_pause(h, mode="wait", timeout_s=10.0, on_timeout="abort")
    h.now += 10.0
    h.run_rounds(3)
    report = h.reply(call).result
    assert report["mode"] == "abort" and report["escalated_by"] == "timeout" and report["is_paused"]
    assert sorted(report["forced_ids"]) == [f"r{i}" for i in range(6)] and report["counts"]["aborted"] == 6
    assert report["aborted_ids"] == report["forced_ids"]
    assert report["tokens_returned"] == sum(tokens_of(h))


def test_on_timeout_cancel_lets_the_engine_run_again():
    h = busy()
    call = call_pause(h, mode="wait", timeout_s=10.0, on_timeout="cancel")
    h.now += 10.0
    h.run_rounds()
    assert h.reply(call).failure.code == "pause_timeout" and h.status()["phase"] == "running"
    h.run_out()
    assert tokens_of(h) == [LONG] * 6


def test_all_callers_of_one_hold_that_times_out_are_answered():
    h = busy()
    waiting = {"mode": "wait", "hold_id": "x", "timeout_s": 10.0}
    calls = [call_pause(h, **waiting, on_timeout=on_timeout) for on_timeout in ("cancel", "abort", "cancel")]
    h.now += 10.0
    h.run_rounds(2)
    assert [h.reply(call).failure.code for call in calls] == ["pause_timeout"] * 3
    assert h.status()["phase"] == "running" and h.stream("r0").reason is None, "no abort once the hold is gone"


@pytest.mark.parametrize("mode", ["abort", "keep"])
def test_abort_and_keep_need_no_time_to_drain(mode):
    h = busy()
    assert h.pause(mode=mode, timeout_s=0.0, on_timeout="cancel").failure is None


@pytest.mark.parametrize(
    ("field", "args"),
    [("mode", {"mode": "stop"}), ("admission", {"admission": "no"}), ("on_timeout", {"on_timeout": "wait"}),
     ("timeout_s", {"timeout_s": -1.0}), ("timeout_s", {"timeout_s": float("nan")}), ("ttl_s", {"ttl_s": 0.0}),
     ("hold_id", {"hold_id": ""})],
)  # fmt: skip
def test_an_invalid_argument_is_named_and_changes_nothing(field, args):
    h = busy()
    h.assert_refused(m.PauseArgs(**args), field)
    assert h.status()["phase"] == "running" and h.status()["holds"] == []


# --------------------------------------------------------------------------- joining and escalation


def test_two_pauses_at_once_are_both_answered():
    h = busy(max_tokens=12)
    first = call_pause(h, mode="wait")
    second = call_pause(h, mode="wait")
    h.run_rounds(20)
    assert h.reply(first).failure is None and h.reply(second).failure is None
    assert len(h.status()["holds"]) == 2


def test_the_report_of_a_pause_names_the_stronger_pause_that_escalated_it():
    h = busy()
    first = call_pause(h, mode="wait", hold_id="w")
    second = call_pause(h, mode="abort", hold_id="z")
    h.run_rounds(3)
    assert h.reply(first).failure is None
    assert (h.reply(first).result["mode"], h.reply(first).result["escalated_by"]) == ("abort", "z")
    assert h.reply(second).result["escalated_by"] is None and h.reply(second).result["counts"]["aborted"] == 6


def test_a_pause_may_be_escalated_under_the_same_name():
    h = busy()
    first = call_pause(h, mode="wait", hold_id="x")
    call_pause(h, mode="keep", hold_id="x")
    h.run_rounds(2)
    assert h.reply(first).result["mode"] == "keep" and h.reply(first).result["escalated_by"] == "x"


def test_abort_after_keep_ends_the_frozen_requests_without_a_step():
    h = busy()
    h.pause(mode="keep")
    before = h.runner.computed_tokens
    report = h.pause(mode="abort").result
    assert report["counts"]["aborted"] == 6 and report["is_paused"]
    assert [h.stream(f"r{i}").reason for i in range(6)] == ["abort"] * 6
    assert h.runner.computed_tokens == before and h.engine.kv.num_free == h.runner.info.num_blocks


def test_a_resume_during_a_drain_answers_the_released_callers_with_the_report_so_far():
    h = busy(max_tokens=12)
    anonymous, named = call_pause(h, mode="wait"), call_pause(h, mode="wait", hold_id="x")
    reply = h.resume()
    assert reply.result["status"] == "held" and reply.result["state"] == "draining"
    assert h.reply(anonymous).failure.code == "pause_interrupted"
    assert h.reply(anonymous).result["status"] == "interrupted" and "counts" in h.reply(anonymous).result
    assert h.reply(named) is None
    h.run_rounds(20)
    assert h.reply(named).failure is None and h.status()["is_paused"]


def test_a_pause_and_a_resume_in_the_same_round_leave_the_engine_running():
    h = busy(max_tokens=12)
    call = h.call(m.PauseArgs(mode="keep"))
    resumed = h.call(m.ResumeArgs())
    h.run_rounds()
    assert h.reply(call).failure.code == "pause_interrupted" and h.reply(resumed).result["status"] == "running"
    h.run_out()
    assert tokens_of(h) == [12] * 6


# --------------------------------------------------------------------------- questions and aborts while paused


def test_a_status_query_is_answered_during_a_drain():
    h = busy()
    call_pause(h, mode="wait")
    status = h.ask(m.PauseStatusArgs()).result
    assert status["phase"] == "draining" and status["rejecting_new_requests"] and not status["is_paused"]
    assert status["counts"] == {"running": 4, "frozen": 0, "queued": 2}


def test_status_describes_holds_and_frozen_requests():
    h = busy()
    h.pause(mode="keep", hold_id="x", ttl_s=10.0, placed_by="vllm")
    h.now += 4
    status = h.status()
    assert status["counts"] == {"running": 0, "frozen": 4, "queued": 2} and status["mode"] == "keep"
    hold = status["holds"][0]
    assert (hold["age_s"], hold["ttl_left_s"], hold["placed_by"], hold["named"]) == (4.0, 6.0, "vllm", True)


def test_a_client_may_abort_and_cancel_while_paused():
    h = busy()
    h.pause(mode="keep")
    reply = h.ask(m.AbortArgs(["r0", "r0", "nobody"])).result
    assert reply["aborted"] == [{"request_id": "r0", "output_token_count": len(h.stream("r0").tokens)}]
    assert reply["not_found"] == ["nobody"] and h.stream("r0").reason == "abort"
    h.send(m.CancelRequest("r1"))
    h.run_rounds()
    assert h.stream("r1").reason is None and not h.engine.lifecycle.requests.get("r1")
    assert h.status()["is_paused"]


# --------------------------------------------------------------------------- the fence


def test_the_reply_waits_until_every_client_has_acknowledged_every_output():
    h = busy()
    h.connect("b")
    h.transport.mute.add("b")
    call = call_pause(h, mode="keep")
    h.run_rounds(5)
    assert h.reply(call) is None and h.status()["phase"] == "draining"
    h.send(m.FenceAck(h.sent(m.Fence, "b")[-1].fence_id - 1), "b")
    h.run_rounds()
    assert h.reply(call) is None, "the acknowledgement of an earlier fence does not count"
    h.acknowledge("b")
    assert h.reply(call).failure is None


def test_the_fence_is_sent_after_the_last_output():
    h = busy()
    call_pause(h, mode="abort")
    sent = h.transport.sent["a"]
    last = max(i for i, x in enumerate(sent) if isinstance(x, m.Outputs))
    assert [i for i, x in enumerate(sent) if isinstance(x, m.Fence)][-1] > last


def test_a_client_that_never_acknowledges_is_dropped_after_a_time():
    h = busy()
    h.connect("b")
    h.add("of_b", [7], client="b", max_tokens=LONG)
    h.transport.mute.add("b")
    call = call_pause(h, mode="keep")
    h.now += p.FENCE_TIMEOUT_S - 0.1
    h.run_rounds()
    assert h.reply(call) is None
    h.now += 0.2
    h.run_rounds()
    assert h.reply(call).failure is None
    assert isinstance(h.transport.sent["b"][-1], m.Goodbye) and not h.engine.lifecycle.requests.get("of_b")
    h.add("again", [7], client="b")
    h.run_rounds()
    assert isinstance(h.transport.sent["b"][-1], m.Goodbye), "the client must say Hello again"


def test_repeated_pauses_give_a_mute_client_no_more_time():
    h = busy()
    h.connect("b")
    h.transport.mute.add("b")
    calls = []
    for _ in range(4):
        calls.append(call_pause(h, mode="keep"))
        h.now += 2.0
    h.run_rounds()
    assert all(h.reply(call).failure is None for call in calls)


def test_dropping_a_mute_client_drops_no_client_that_answers():
    """An output sent behind the fence needs another fence, which has a timeout of its own."""
    h = busy()
    h.connect("b")
    h.transport.mute.add("b")
    call = call_pause(h, mode="keep")
    h.now += p.FENCE_TIMEOUT_S - 0.1
    h.ask(m.AbortArgs(["r0"]))
    h.now += 0.2
    h.transport.mute.add("a")  # the acknowledgement of the next fence is still on its way
    h.run_rounds(2)
    assert "a" in h.engine.lifecycle.delivery.clients and h.reply(call) is None
    h.acknowledge()
    assert h.reply(call).failure is None and h.status()["is_paused"]


# --------------------------------------------------------------------------- renewal


def test_a_hold_stands_as_long_as_it_is_renewed():
    h = busy()
    h.pause(mode="keep", hold_id="mine", ttl_s=10.0)
    for _ in range(5):
        h.now += 8.0
        renewed = h.ask(m.RenewArgs("mine", 10.0)).result
        assert renewed["is_paused"] and renewed["hold"]["ttl_left_s"] == 10.0
    h.now += 10.0
    h.run_rounds()
    assert not h.status()["holds"]
    assert h.ask(m.RenewArgs("mine", 10.0)).failure.code == "hold_not_found"
    assert not h.status()["holds"], "a renewal never places a hold"


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_a_renewal_changes_nothing_but_the_ttl(mode):
    h = busy()
    h.pause(rounds=200, mode=mode, hold_id="mine", admission="hold", ttl_s=10.0, clear_cache=True)
    h.add("late", [1, 2], max_tokens=3)
    h.run_rounds()
    fences = len(h.sent(m.Fence))
    before, computed, status = tokens_of(h), h.runner.computed_tokens, h.status()
    assert h.ask(m.RenewArgs("mine", 20.0)).failure is None
    h.run_rounds(3)
    assert len(h.sent(m.Fence)) == fences
    after = h.status()
    status["holds"][0].pop("ttl_left_s"), after["holds"][0].pop("ttl_left_s")
    assert after == status and tokens_of(h) == before and h.runner.computed_tokens == computed
    h.resume("mine")
    h.run_out()
    assert h.stream("late").tokens == expected_tokens([1, 2], 3)


def test_a_renewal_reaches_a_pause_that_still_drains():
    h = busy()
    call = call_pause(h, mode="wait", timeout_s=60.0, hold_id="mine", ttl_s=10.0)
    h.now += 8.0
    assert h.ask(m.RenewArgs("mine", 10.0)).result["state"] == "draining"
    h.now += 8.0
    h.run_rounds()
    assert h.status()["holds"] and (h.reply(call) is None or h.reply(call).failure is None)


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, 1e9, float("nan")])
def test_a_renewal_with_a_ttl_out_of_range_is_refused(ttl_s):
    h = Harness()
    h.pause(mode="keep", hold_id="mine", ttl_s=10.0)
    h.assert_refused(m.RenewArgs("mine", ttl_s), "ttl_s")
    assert h.status()["holds"][0]["ttl_left_s"] == 10.0


def test_a_hold_of_the_system_cannot_be_renewed():
    h = Harness(lost_commit=True)
    assert [hold["id"] for hold in h.status()["holds"]] == ["republish"]
    assert h.ask(m.RenewArgs("republish", 1.0)).failure.code == "hold_not_found"
    h.now += 100.0
    h.run_rounds()
    assert h.status()["holds"]


# --------------------------------------------------------------------------- slow clients


@pytest.fixture
def slow() -> Harness:
    """Return a busy harness whose client "b", in the running process 22, acknowledges no fence."""
    h = busy()
    h.connect("b", pid=22)
    h.add("of_b", [7], client="b", max_tokens=LONG)
    h.transport.mute.add("b")
    h.running_pids.add(22)
    return h


def test_a_slow_client_keeps_its_requests_and_the_report_names_it(slow):
    call = call_pause(slow, mode="keep", timeout_s=60.0)
    for _ in range(8):
        slow.now += p.FENCE_TIMEOUT_S
        slow.run_rounds()
        assert slow.reply(call) is None and "b" in slow.engine.lifecycle.delivery.clients
    slow.acknowledge("b")
    report = slow.reply(call).result
    assert report["is_paused"] and report["slow_api_servers"] == [22] and report["dropped_api_servers"] == []
    slow.resume()
    slow.transport.mute.clear()
    slow.run_out()
    assert slow.stream("of_b", client="b").tokens == expected_tokens([7], LONG)


@pytest.mark.parametrize("mode", ["keep", "abort"])
def test_a_slow_client_does_not_hold_a_pause_beyond_its_timeout(slow, mode):
    call = call_pause(slow, mode=mode, timeout_s=12.0)
    slow.now += 11.9
    slow.run_rounds()
    assert slow.reply(call) is None
    slow.now += 0.2
    slow.run_rounds(2)
    report = slow.reply(call).result
    assert report["is_paused"] and report["slow_api_servers"] == report["dropped_api_servers"] == [22]
    assert isinstance(slow.transport.sent["b"][-1], m.Goodbye)


def test_a_later_pause_with_a_longer_timeout_does_not_delay_an_earlier_one(slow):
    first = call_pause(slow, mode="keep", timeout_s=12.0)
    call_pause(slow, mode="keep", timeout_s=600.0)
    slow.now += 12.1
    slow.run_rounds(2)
    assert slow.reply(first).result["dropped_api_servers"] == [22]


def test_a_slow_client_has_the_timeout_of_a_fence_even_if_that_of_the_pause_is_shorter(slow):
    call = call_pause(slow, mode="keep", timeout_s=0.5)
    slow.now += p.FENCE_TIMEOUT_S - 0.1
    slow.run_rounds()
    assert slow.reply(call) is None and "b" in slow.engine.lifecycle.delivery.clients
    slow.now += 0.2
    slow.run_rounds(2)
    assert slow.reply(call).result["dropped_api_servers"] == [22]


def test_a_pause_stops_waiting_for_a_slow_client_that_dies(slow):
    call = call_pause(slow, mode="keep", timeout_s=600.0)
    slow.now += p.FENCE_TIMEOUT_S
    slow.run_rounds()
    slow.running_pids.clear()
    slow.now += p.FENCE_TIMEOUT_S
    slow.run_rounds(2)
    assert slow.reply(call).result["dropped_api_servers"] == [22]


# --------------------------------------------------------------------------- report and tables


def test_the_report_has_every_documented_field():
    h = busy()
    h.now += 1
    report = h.pause(mode="abort", hold_id="x", placed_by="sglang").result
    assert set(report) >= {
        "status", "state", "mode", "scope", "hold", "admission", "version", "weight_epoch", "counts", "tokens_returned",
        "aborted_ids", "forced_ids", "escalated_by", "elapsed_ms", "is_paused", "rejecting_new_requests",
        "slow_api_servers", "dropped_api_servers",
    }  # fmt: skip
    assert (report["status"], report["state"], report["scope"]) == ("paused", "paused", "engine")
    assert report["hold"]["id"] == "x" and report["hold"]["placed_by"] == "sglang"


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_a_paused_engine_sends_heartbeats(mode):
    h = Harness(heartbeat_s=1.0)
    h.pause(mode=mode)
    for _ in range(3):
        before = len(h.sent(m.Heartbeat))
        h.now += 1.1
        h.run_rounds()
        assert len(h.sent(m.Heartbeat)) == before + 1
