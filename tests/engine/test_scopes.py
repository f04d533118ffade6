"""Pauses of one scope in an engine that has two."""

from __future__ import annotations

import pytest

from fastdeploy.inter_communicator import messages as m
from support.fake_runner import FakeRunner, expected_tokens
from support.harness import Harness

LONG = 60


def two_scopes(num_blocks: int = 128, rounds: int = 3, **config) -> Harness:
    """Return a harness with requests a0 to a2 of scope "a" and b0 to b2 of scope "b"; the last of each waits."""
    h = Harness(FakeRunner(num_blocks=num_blocks), **config)
    for scope in ("a", "b"):
        h.load_adapter(scope, 0)
    for i in range(3):
        for scope in ("a", "b"):
            h.add(f"{scope}{i}", [i + 1, 7], max_tokens=LONG, adapter=scope)
    h.run_rounds(rounds)
    return h


def counts(h: Harness, scope: str) -> list[int]:
    return [len(h.stream(f"{scope}{i}").tokens) for i in range(3)]


def assert_all_exact(h: Harness) -> None:
    h.run_out()
    for name in ("a0", "a1", "a2", "b0", "b1", "b2"):
        assert h.stream(name).tokens == expected_tokens([int(name[1]) + 1, 7], LONG), name


def test_one_scope_is_kept_while_the_other_runs():
    h = two_scopes()
    report = h.pause(mode="keep", scope="adapter:a").result
    frozen, running = counts(h, "a"), counts(h, "b")
    assert (report["scope"], report["hold"]["scope"], report["is_paused"]) == ("adapter:a", "adapter:a", True)
    assert report["counts"] == {"aborted": 0, "drained": 0, "kept": 2, "queued": 1}, "of the scope alone"
    h.run_rounds(10)
    assert counts(h, "a") == frozen and frozen[0] > 0
    assert all(now > before for now, before in zip(counts(h, "b"), running, strict=True)), "b2 took a free place"
    assert not h.status()["is_paused"] and not h.status()["rejecting_new_requests"], "the engine runs"
    assert h.ask(m.PauseStatusArgs(scope="adapter:a")).result["counts"] == {"running": 0, "frozen": 2, "queued": 1}
    assert h.ask(m.ResumeArgs(scope="adapter:b")).result["released"] == [], "the hold is of scope a"
    assert len(h.ask(m.ResumeArgs(scope="adapter:a")).result["released"]) == 1
    assert_all_exact(h)


def test_an_abort_of_one_scope_ends_only_its_requests():
    h = two_scopes()
    report = h.pause(mode="abort", scope="adapter:a").result
    assert sorted(report["aborted_ids"]) == ["a0", "a1", "a2"] and report["counts"]["aborted"] == 3
    assert report["tokens_returned"] == sum(counts(h, "a"))
    h.add("late", [1], adapter="a")
    h.add("other", [1], adapter="b")
    h.run_rounds()
    assert h.rejected("late").code == "rejecting_new_requests" and "adapter 'a'" in h.rejected("late").message
    h.run_out()
    assert h.stream("b2").reason == h.stream("other").reason == "length" and h.stream("a0").reason == "abort"
    assert h.pause(mode="abort").result["counts"]["aborted"] == 0


def test_a_drain_of_one_scope_ends_while_the_other_goes_on():
    """Outputs of the other scope after the fence do not delay the drain."""
    h = two_scopes(max_num_seqs=8)
    h.add("endless", [9], max_tokens=120, adapter="b")
    report = h.pause(rounds=80, mode="wait", scope="adapter:a").result
    assert counts(h, "a") == [LONG] * 3 and report["counts"]["drained"] == 3, "of the scope alone"
    assert h.stream("endless").tokens and not h.stream("endless").finals
    h.ask(m.ResumeArgs(scope="adapter:a"))
    assert_all_exact(h)


def test_a_freeze_of_the_engine_does_not_end_the_drain_of_a_scope():
    h = two_scopes()
    call = h.call(m.PauseArgs(mode="wait", scope="adapter:a"))
    h.run_rounds()
    h.pause(mode="keep")
    h.run_rounds(5)
    assert h.reply(call) is None and max(counts(h, "a")) < LONG
    h.resume()
    h.run_rounds(150)
    assert counts(h, "a") == [LONG, LONG, 0] and h.reply(call).result["counts"]["drained"] == 2
    h.ask(m.ResumeArgs(scope="adapter:a"))
    assert_all_exact(h)


def test_a_reset_releases_the_anonymous_holds_of_all_scopes_and_names_those_that_stand():
    h = two_scopes()
    h.pause(mode="keep", scope="adapter:a")
    h.pause(mode="keep", scope="adapter:b", hold_id="mine")
    report = h.ask(m.ResetArgs()).result
    assert len(report["released"]) == 1 and report["still_held_by"] == ["mine"]
    h.add("after", [5], max_tokens=2, adapter="a")
    h.run_out()
    assert h.stream("after").tokens == expected_tokens([5], 2)


def test_a_fence_of_a_scope_waits_for_the_acknowledgement_of_each_client():
    h = two_scopes()
    h.transport.mute.add("a")
    call = h.call(m.PauseArgs(mode="keep", scope="adapter:a"))
    h.run_rounds(5)
    assert h.reply(call) is None
    assert len(h.sent(m.Fence)) == 1, "outputs of b need no further fence"
    h.acknowledge()
    assert h.reply(call).result["is_paused"]


@pytest.mark.parametrize("first", ["a", "engine"])
@pytest.mark.parametrize("mode", ["keep", "wait"])
def test_pauses_of_the_engine_and_of_one_scope_may_be_released_in_any_order(mode, first):
    h = two_scopes()
    h.pause(mode="keep", scope="adapter:a")
    frozen = counts(h, "a")
    report = h.pause(rounds=80, mode=mode).result
    assert report["is_paused"] and report["counts"]["kept"] == (5 if mode == "keep" else 2), "frozen ones stay frozen"
    assert report["counts"]["drained"] == (0 if mode == "keep" else 3), "the engine counts those of every scope"
    computed = h.runner.computed_tokens
    h.ask(m.ResumeArgs(scope=first))
    h.run_rounds(5)
    if first == "a":
        assert h.runner.computed_tokens == computed, "the engine is held"
    assert counts(h, "a") == frozen
    h.ask(m.ResumeArgs(scope="engine" if first == "a" else "a"))
    assert_all_exact(h)


def test_no_scope_starts_a_request_while_the_engine_drains():
    h = two_scopes()
    h.pause(mode="keep", scope="adapter:a")
    h.call(m.PauseArgs(mode="wait"))
    h.run_rounds()
    h.ask(m.ResumeArgs(scope="adapter:a"))
    h.run_rounds(150)
    assert h.status()["is_paused"] and counts(h, "a") == [LONG, LONG, 0]
    h.resume()
    assert_all_exact(h)


@pytest.mark.parametrize("scope", ["a", "engine"])
def test_a_drain_puts_a_half_computed_prompt_back_in_the_queue(scope):
    h = Harness(max_num_batched_tokens=8)
    h.load_adapter("a", 0)
    h.add("old", [2], max_tokens=30, adapter="a")
    h.run_rounds(2)
    h.add("r", [1] * 40, max_tokens=3, adapter="a")
    h.run_rounds(2)
    report = h.pause(mode="wait", scope=scope).result
    assert report["counts"]["queued"] == 1 and not h.stream("r").tokens, "a drain starts no output"
    h.ask(m.ResumeArgs(scope=scope))
    h.run_out()
    assert h.stream("r").tokens == expected_tokens([1] * 40, 3)


def test_frozen_requests_of_a_paused_scope_are_preempted_for_another_scope():
    h = two_scopes(num_blocks=32, max_num_seqs=2, rounds=8)
    assert len(h.engine.scheduler.running) == 2
    h.pause(mode="keep", scope="adapter:a")
    h.run_rounds(150)
    assert all(h.stream(f"b{i}").tokens == expected_tokens([i + 1, 7], LONG) for i in range(3))
    h.ask(m.ResumeArgs(scope="adapter:a"))
    assert_all_exact(h)
    assert [h.stream(name).finals[0].num_preempted for name in ("a0", "b0", "b1", "b2")] == [1, 0, 0, 0]


def test_a_half_computed_prompt_of_a_frozen_request_delays_no_request_with_the_same_prompt():
    h = Harness(max_num_batched_tokens=8)
    h.load_adapter("a", 0)
    for name in ("first", "second"):
        h.add(name, [7] * 20, max_tokens=3, adapter="a")
    h.add("other", [7] * 20, max_tokens=3)
    h.run_rounds()
    h.pause(mode="keep", scope="adapter:a", rounds=3)
    h.run_rounds(10)
    assert h.stream("other").reason == "length" and not h.stream("first").tokens
    h.ask(m.ResumeArgs(scope="adapter:a"))
    h.run_out()
    assert h.stream("first").tokens == h.stream("second").tokens == expected_tokens([7] * 20, 3)


def test_a_pause_of_one_scope_does_not_abandon_the_step_in_flight():
    h = two_scopes()
    computed_to_the_end = len(h.runner.plans)
    h.runner.in_step = lambda: h.call(m.PauseArgs(mode="keep", scope="adapter:a"))
    h.run_rounds()
    assert len(h.runner.plans) == computed_to_the_end + 1


def test_clearing_the_cache_of_one_scope_keeps_the_prefix_hits_of_the_other():
    h = Harness()
    h.load_adapter("a", 0)
    for name, scope in (("a0", "a"), ("e0", "engine")):
        h.add(name, list(range(1, 13)), max_tokens=2, adapter=scope)
    h.run_out()
    h.pause(mode="keep", clear_cache=True, scope="adapter:a")
    h.ask(m.ResumeArgs(scope="adapter:a"))
    hits = []
    for name, scope in (("e1", "engine"), ("a1", "a")):
        before = h.engine.kv.hit_tokens
        h.add(name, list(range(1, 13)), max_tokens=2, adapter=scope)
        h.run_out()
        hits.append(h.engine.kv.hit_tokens - before)
    assert hits == [11, 0]


def test_a_commit_and_a_label_show_in_the_spans_of_every_scope():
    h = two_scopes()
    h.pause(mode="keep", scope="adapter:a")
    h.update("/w1", version="new")
    h.ask(m.SetVersionArgs("label"))
    assert h.ask(m.ResumeArgs(scope="adapter:a")).result["version"] == "label"
    h.run_out()
    for name in ("a0", "b0"):
        spans = h.stream(name).spans
        assert [spans[0].weight_epoch, spans[-1].weight_epoch] == [0, 1] and spans[-1].version == "label"
        assert not spans[-1].recomputed, "the KV was kept"


@pytest.mark.parametrize(
    "args", [m.PauseArgs(scope="c"), m.ResumeArgs(scope="c"), m.RenewArgs("x", scope="c"), m.PauseStatusArgs("c")]
)
def test_an_unknown_scope_is_refused(args):
    h = two_scopes()
    h.assert_refused(args, "scope")
    h.add("r", [1], adapter="c")
    h.run_rounds()
    assert h.rejected("r").detail["param"] == "scope"
