"""Pauses of one adapter while others run, and pauses of the whole engine on top."""

from __future__ import annotations

import pytest

from fastdeploy.inter_communicator import messages as m
from support.tenants import LONG, A, B, counts, exact, resume, run_out_exactly, tenants


def test_one_adapter_is_kept_while_the_other_runs():
    h = tenants()
    report = h.pause(mode="keep", scope=A).result
    frozen, running = counts(h, "a"), counts(h, "b")
    assert (report["scope"], report["hold"]["scope"], report["lora_name"]) == (A, A, "a") and report["is_paused"]
    assert report["counts"] == {"aborted": 0, "drained": 0, "kept": 2, "queued": 1}, "of the adapter alone"
    h.run_rounds(10)
    assert counts(h, "a") == frozen and frozen[0] > 0
    assert all(now > before for now, before in zip(counts(h, "b"), running, strict=True)), "b2 took a free place"
    assert not h.status()["is_paused"] and not h.status()["rejecting_new_requests"], "the engine runs"
    assert h.ask(m.PauseStatusArgs(A)).result["counts"] == {"running": 0, "frozen": 2, "queued": 1}
    assert resume(h, B)["released"] == [], "the hold is of adapter a"
    assert len(resume(h, A)["released"]) == 1
    run_out_exactly(h)


def test_an_abort_of_one_adapter_ends_only_its_requests():
    h = tenants()
    report = h.pause(mode="abort", scope=A).result
    assert sorted(report["aborted_ids"]) == ["a0", "a1", "a2"] and report["counts"]["aborted"] == 3
    assert report["tokens_returned"] == sum(counts(h, "a"))
    h.add("late", [1], adapter="a")
    h.add("other", [1], adapter="b")
    h.add("base", [1])
    h.run_rounds()
    assert h.rejected("late").code == "rejecting_new_requests" and "adapter 'a'" in h.rejected("late").message
    h.run_out()
    assert h.stream("b2").reason == h.stream("other").reason == h.stream("base").reason == "length"
    assert h.stream("a0").reason == "abort"
    assert h.pause(mode="abort").result["counts"]["aborted"] == 0


def test_an_abort_after_a_keep_ends_the_frozen_requests_and_frees_their_kv():
    h = tenants()
    h.pause(mode="keep", scope=A)
    frozen, free = counts(h, "a"), h.engine.kv.num_free
    report = h.pause(mode="abort", scope=A).result
    assert report["counts"]["aborted"] == 3 and report["is_paused"] and counts(h, "a") == frozen
    assert h.engine.kv.num_free > free and not h.stream("b0").finals
    resume(h, A)
    h.run_out()
    assert exact(h, "b0") and exact(h, "b2")


def test_a_drain_of_one_adapter_ends_while_the_other_goes_on():
    """Outputs of the other adapter after the fence do not delay the drain."""
    h = tenants(max_num_seqs=8)
    h.add("endless", [9], max_tokens=120, adapter="b")
    report = h.pause(rounds=80, mode="wait", scope=A).result
    assert counts(h, "a") == [LONG] * 3 and report["counts"]["drained"] == 3, "of the adapter alone"
    assert h.stream("endless").tokens and not h.stream("endless").finals
    resume(h, A)
    run_out_exactly(h)


@pytest.mark.parametrize(
    ("on_timeout", "reason", "code"),
    [("keep", None, None), ("abort", "abort", None), ("cancel", None, "pause_timeout")],
)
def test_a_drain_of_one_adapter_that_times_out_does_what_its_caller_chose(on_timeout, reason, code):
    h = tenants()
    call = h.call(m.PauseArgs(mode="wait", scope=A, timeout_s=1.0, on_timeout=on_timeout))
    h.run_rounds(2)
    h.now += 1.5
    h.run_rounds(3)
    reply = h.reply(call)
    assert (reply.failure and reply.failure.code) == code and h.stream("a0").reason == reason
    assert h.ask(m.PauseStatusArgs(A)).result["is_paused"] == (code is None) and not h.stream("b0").finals
    resume(h, A)
    h.run_out()
    assert exact(h, "b0") and (reason is not None or exact(h, "a0"))


def test_a_resume_during_the_drain_of_one_adapter_answers_its_caller_and_no_other():
    h = tenants()
    of_a, of_b = (h.call(m.PauseArgs(mode="wait", scope=scope)) for scope in (A, B))
    h.run_rounds()
    assert resume(h, A)["status"] == "running"
    assert h.reply(of_a).failure.code == "pause_interrupted" and h.reply(of_b) is None
    h.run_rounds(150)
    assert h.reply(of_b).result["counts"]["drained"] == 2 and counts(h, "a") == [LONG] * 3
    resume(h, B)
    run_out_exactly(h)


def test_a_freeze_of_the_engine_does_not_end_the_drain_of_an_adapter():
    h = tenants()
    call = h.call(m.PauseArgs(mode="wait", scope=A))
    h.run_rounds()
    h.pause(mode="keep")
    h.run_rounds(5)
    assert h.reply(call) is None and max(counts(h, "a")) < LONG
    h.resume()
    h.run_rounds(150)
    assert counts(h, "a") == [LONG, LONG, 0] and h.reply(call).result["counts"]["drained"] == 2
    resume(h, A)
    run_out_exactly(h)


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_requests_that_arrive_are_held_if_the_hold_says_so(mode):
    h = tenants()
    h.pause(rounds=80, mode=mode, admission="hold", scope=A)
    h.add("late", [5], max_tokens=4, adapter="a")
    h.run_rounds(10)
    assert h.rejected("late") is None and not h.stream("late").tokens
    resume(h, A)
    h.run_out()
    assert exact(h, "late", [5], 4, adapter="a")


def test_held_requests_of_an_adapter_take_no_place_in_the_queue_of_others():
    h = tenants(max_waiting=6)
    h.pause(mode="keep", scope=A)
    h.run_rounds(3)
    for i in range(8):
        h.add(f"held{i}", [5], max_tokens=2, adapter="a")
        h.add(f"late{i}", [5], max_tokens=2, adapter="b")
    h.run_rounds()
    assert [bool(h.rejected(f"held{i}")) for i in range(8)] == [False] * 5 + [True] * 3, "a2 waits too"
    assert [bool(h.rejected(f"late{i}")) for i in range(8)] == [False] * 6 + [True] * 2, "as without a pause"
    assert h.rejected("held7").code == h.rejected("late7").code == "queue_full"
    resume(h, A)
    run_out_exactly(h)


# --------------------------------------------------------------------------- the whole engine on top


@pytest.mark.parametrize("first", [A, "engine"])
@pytest.mark.parametrize("mode", ["keep", "wait"])
def test_pauses_of_the_engine_and_of_one_adapter_may_be_released_in_any_order(mode, first):
    h = tenants()
    h.pause(mode="keep", scope=A)
    frozen = counts(h, "a")
    report = h.pause(rounds=80, mode=mode).result
    assert report["is_paused"] and report["counts"]["kept"] == (5 if mode == "keep" else 2), "frozen ones stay frozen"
    assert report["counts"]["drained"] == (0 if mode == "keep" else 3), "the engine counts those of every adapter"
    computed = h.runner.computed_tokens
    resume(h, first)
    h.run_rounds(5)
    if first == A:
        assert h.runner.computed_tokens == computed, "the engine is held"
    assert counts(h, "a") == frozen
    resume(h, "engine" if first == A else A)
    run_out_exactly(h)


@pytest.mark.parametrize("mode", ["keep", "abort"])
def test_an_adapter_may_be_paused_while_the_engine_is(mode):
    h = tenants()
    h.pause(mode="keep")
    report = h.pause(mode=mode, scope=A, timeout_s=0.0).result
    assert report["is_paused"] and report["counts"]["aborted"] == (3 if mode == "abort" else 0)
    h.resume()
    before = counts(h, "a")
    h.run_rounds(5)
    assert counts(h, "a") == before
    resume(h, A)
    h.run_out()
    assert exact(h, "b0") and exact(h, "a2") == (mode != "abort")


@pytest.mark.parametrize("on_timeout", ["keep", "abort", "cancel"])
def test_a_wait_for_requests_that_the_whole_engine_freezes_names_at_once_what_holds_them(on_timeout):
    h = tenants()
    h.pause(mode="keep", hold_id="trainer")
    h.pause(mode="wait", hold_id="other")
    failure = h.pause(mode="wait", scope=A, hold_id="tenant", on_timeout=on_timeout).failure
    assert failure.code == "pause_blocked" and failure.detail["held_by"] == ["trainer", "other"]
    assert "'trainer'" in failure.message
    status = h.ask(m.PauseStatusArgs()).result
    assert [hold["id"] for hold in status["holds"]] == ["trainer", "other"] and status["scopes"] == []
    h.resume(hold_id="trainer")
    assert h.pause(mode="wait", scope=A).failure.code == "pause_blocked", "the wait of the engine still freezes them"
    h.resume(hold_id="other")
    report = h.pause(rounds=80, mode="wait", scope=A).result
    assert report["counts"] == {"aborted": 0, "drained": 2, "kept": 0, "queued": 1}
    resume(h, A)
    run_out_exactly(h)


def test_a_wait_without_started_requests_or_that_came_first_is_not_blocked():
    h = tenants()
    before = h.call(m.PauseArgs(mode="wait", scope=A, hold_id="tenant"))
    h.run_rounds(2)
    h.pause(mode="keep")
    again = h.call(m.PauseArgs(mode="wait", scope=A, hold_id="tenant"))
    h.run_rounds(5)
    assert h.reply(before) is None and h.reply(again) is None, "they go on when the engine runs again"
    assert h.pause(mode="keep", scope=A).result["is_paused"]
    assert h.pause(mode="wait", scope=A).result["is_paused"], "frozen by the adapter's own hold"
    idle = tenants(requests=0)
    idle.pause(mode="keep")
    assert idle.pause(mode="wait", scope=A).result["is_paused"]


def test_no_adapter_starts_a_request_while_the_engine_drains():
    h = tenants()
    h.pause(mode="keep", scope=A)
    h.call(m.PauseArgs(mode="wait"))
    h.run_rounds()
    resume(h, A)
    h.run_rounds(150)
    assert h.status()["is_paused"] and counts(h, "a") == [LONG, LONG, 0]
    h.resume()
    run_out_exactly(h)


@pytest.mark.parametrize("scope", [A, "engine"])
def test_a_drain_puts_a_half_computed_prompt_back_in_the_queue(scope):
    h = tenants(requests=0, max_num_batched_tokens=8)
    h.add("old", [2], max_tokens=30, adapter="a")
    h.run_rounds(2)
    h.add("r", [1] * 40, max_tokens=3, adapter="a")
    h.run_rounds(2)
    report = h.pause(mode="wait", scope=scope).result
    assert report["counts"]["queued"] == 1 and not h.stream("r").tokens, "a drain starts no output"
    resume(h, scope)
    h.run_out()
    assert exact(h, "r", [1] * 40, 3, adapter="a")


# --------------------------------------------------------------------------- places and KV


def test_frozen_requests_of_a_paused_adapter_are_preempted_for_others():
    h = tenants(num_blocks=32, max_num_seqs=2, rounds=8)
    assert len(h.engine.scheduler.running) == 2
    h.pause(mode="keep", scope=A)
    h.run_rounds(150)
    assert all(exact(h, f"b{i}") for i in range(3)), "b has the place and the KV of a"
    resume(h, A)
    run_out_exactly(h)
    assert [h.stream(name).finals[0].num_preempted for name in ("a0", "b0", "b1", "b2")] == [1, 0, 0, 0]


def test_frozen_requests_of_a_paused_adapter_leave_room_for_the_prompts_of_others():
    h = tenants(requests=0, num_blocks=32, max_num_batched_tokens=128)
    for i in range(2):
        h.add(f"a{i}", [i + 1] * 58, max_tokens=4, adapter="a")
    h.run_rounds(2)
    assert h.stream("a0").tokens and h.stream("a1").tokens and h.engine.kv.num_free < 10
    h.pause(mode="keep", scope=A)
    h.add("b0", [9] * 40, max_tokens=4, adapter="b")
    h.run_rounds(10)
    assert exact(h, "b0", [9] * 40, 4)
    resume(h, A)
    h.run_out()
    assert all(exact(h, f"a{i}", [i + 1] * 58, 4) for i in range(2))


def test_a_half_computed_prompt_of_a_frozen_request_delays_no_request_with_the_same_prompt():
    h = tenants(requests=0, max_num_batched_tokens=8)
    for name in ("first", "second"):
        h.add(name, [7] * 20, max_tokens=3, adapter="a")
    h.add("other", [7] * 20, max_tokens=3)
    h.run_rounds()
    h.pause(mode="keep", scope=A, rounds=3)
    h.run_rounds(10)
    assert h.stream("other").reason == "length" and not h.stream("first").tokens
    resume(h, A)
    h.run_out()
    assert all(exact(h, name, [7] * 20, 3, adapter="a") for name in ("first", "second"))


def test_clearing_the_cache_of_one_adapter_keeps_the_prefix_hits_of_others():
    h = tenants(requests=0)
    long = list(range(1, 13))
    for name in ("a", "b", ""):
        h.add(f"first{name}", long, max_tokens=2, adapter=name)
        h.run_out()
    h.pause(mode="keep", clear_cache=True, scope=A)
    resume(h, A)
    hits = []
    for name in ("a", "b", ""):
        before = h.engine.kv.hit_tokens
        h.add(f"again{name}", long, max_tokens=2, adapter=name)
        h.run_out()
        hits.append(h.engine.kv.hit_tokens - before)
    assert hits == [0, 11, 11]


def test_a_pause_that_clears_the_cache_of_one_adapter_recomputes_only_its_requests():
    h = tenants()
    undisturbed = tenants()
    h.pause(mode="keep", clear_cache=True, scope=A)
    again = sum(2 + count - 1 for count in counts(h, "a") if count)
    resume(h, A)
    run_out_exactly(h)
    run_out_exactly(undisturbed)
    assert h.runner.computed_tokens == undisturbed.runner.computed_tokens + again


def first_tokens(num_adapters: int) -> list[tuple[str, int]]:
    """Run 24 requests on 3 places, and return the round in which each has got its first token."""
    h = tenants(requests=0, num_blocks=256, max_num_seqs=3)
    for k in range(num_adapters):
        h.load_adapter(f"t{k}", k + 1)
    for i in range(24):
        adapter = f"t{i * 7 % num_adapters}" if num_adapters else ""
        h.add(f"r{i}", [i + 1, 3], max_tokens=4 + i % 5, adapter=adapter)
    begun: dict[str, int] = {}
    for number in range(80):
        h.run_rounds()
        begun |= {f"r{i}": number for i in range(24) if f"r{i}" not in begun and h.stream(f"r{i}").tokens}
    return list(begun.items())


def test_with_more_adapters_than_places_each_request_starts_when_it_would_among_equals():
    alone = first_tokens(0)
    assert first_tokens(12) == first_tokens(2) == alone and len(alone) == 24


def test_a_commit_and_a_label_show_in_the_spans_of_every_adapter():
    h = tenants()
    h.pause(mode="keep", scope=A)
    h.update("/w1", version="new")
    assert resume(h, A)["weight_epoch"] == 1
    h.run_out()
    for name in ("a0", "b0"):
        spans = h.stream(name).spans
        assert [spans[0].weight_epoch, spans[-1].weight_epoch] == [0, 1]
        assert {(span.adapter, span.adapter_epoch) for span in spans} == {(name[0], 1)}
        assert not spans[-1].recomputed, "the KV was kept"
