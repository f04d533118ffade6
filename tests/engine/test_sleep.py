"""Sleep and wake-up of weights and KV cache."""

from __future__ import annotations

import itertools

import pytest

from engine.weight_calls import assert_serves, begin, chunk, commit, hold_ids
from fastdeploy.core.errors import EngineError
from fastdeploy.core.weight_source import FolderSource
from fastdeploy.inter_communicator import messages as m
from support.fake_runner import FakeRunner, expected_tokens
from support.harness import Harness, one_running

PROMPT = list(range(1, 11))
TAGS = [("weight",), ("kv_cache",), ("weight", "kv_cache"), ()]


def sleep(h: Harness, *tags: str, rounds: int = 50, **args) -> m.Reply:
    return h.ask(m.SleepArgs(tags, **args), rounds=rounds)


def wake(h: Harness, *tags: str) -> m.Reply:
    return h.ask(m.WakeArgs(tags), rounds=3)


def busy(rounds: int = 3, **config) -> Harness:
    """Return a harness that runs request "r"."""
    return one_running(20, PROMPT, rounds=rounds, **config)


@pytest.mark.parametrize("tags", TAGS, ids=str)
def test_a_request_goes_on_after_the_engine_has_slept(tags):
    """The fake runner refuses a step while anything sleeps, and any KV that is not the sequence's own."""
    h = one_running(12, PROMPT, rounds=4)
    result = sleep(h, *tags).result
    named = sorted(tags or ("weight", "kv_cache"))
    assert (result["asleep"], result["freed_bytes"]) == (named, 1000 * len(named)) and h.runner.asleep == set(named)
    assert result["pause"]["is_paused"] and result["pause"]["mode"] == "keep"
    (hold,) = h.status()["holds"]
    assert (hold["id"], hold["placed_by"], hold["admission"]) == ("sleep", "system", "hold")
    h.add("held", [7, 8], max_tokens=4)
    h.run_rounds(5)
    assert h.rejected("held") is None and not h.stream("held").tokens
    assert h.ask(m.WeightInfoArgs()).result["asleep"] == named
    computed, done = h.runner.computed_tokens, len(h.stream("r").tokens)
    woken = wake(h).result
    assert (woken["asleep"], woken["still_held_by"], woken["state"]) == ([], [], "running") and not hold_ids(h)
    h.run_out()
    assert h.stream("r").tokens == expected_tokens(PROMPT, 12) and h.stream("r").reason == "length"
    assert h.stream("held").tokens == expected_tokens([7, 8], 4)
    rebuilt = h.runner.computed_tokens - computed - (12 - done) - (2 + 3)
    assert rebuilt == (len(PROMPT) + done - 1 if "kv_cache" in named else 0), "KV is computed again if it slept"


def test_there_is_no_prefix_hit_after_kv_has_slept():
    h = Harness()
    h.add("warm", PROMPT, max_tokens=2)
    h.run_out()
    sleep(h, "kv_cache")
    wake(h)
    h.add("after", PROMPT, max_tokens=2)
    h.run_out()
    assert h.engine.kv.hit_tokens == 0 and h.stream("after").tokens == expected_tokens(PROMPT, 2)


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_sleep_pauses_in_the_given_mode_and_waits_until_the_engine_is_quiesced(mode):
    h = busy(4)
    call = h.call(m.SleepArgs(mode=mode))
    h.run_rounds(3)
    assert (h.reply(call) is None) == (mode == "wait") == (not h.runner.asleep)
    h.run_rounds(30)
    assert h.reply(call).failure is None and h.reply(call).result["pause"]["mode"] == mode
    stream = h.stream("r")
    assert {"abort": "abort", "wait": "length", "keep": None}[mode] == stream.reason
    assert stream.tokens == expected_tokens(PROMPT, 20)[: len(stream.tokens)]
    h.add("held", [7, 8], max_tokens=2)
    h.run_rounds(2)
    assert h.rejected("held") is None, "a sleeping engine holds requests in every mode"
    wake(h)
    h.run_out()
    assert h.stream("held").reason == "length"


def test_a_sleep_whose_drain_times_out_releases_its_hold():
    h = one_running(60, PROMPT)
    calls = [h.call(m.SleepArgs((tag,), mode="wait", timeout_s=5.0)) for tag in ("weight", "kv_cache")]
    h.run_rounds(2)
    h.now += 6.0
    h.run_rounds(2)
    assert [h.reply(call).failure.code for call in calls] == ["pause_timeout"] * 2
    assert h.reply(calls[0]).result["asleep"] == [] and not h.runner.asleep and not hold_ids(h)
    h.run_out()
    assert h.stream("r").tokens == expected_tokens(PROMPT, 60)
    assert sleep(h).failure is None, "the next sleep is accepted"


def test_a_sleep_waits_for_its_fence():
    h = Harness()
    h.transport.mute.add("a")
    call = h.call(m.SleepArgs())
    h.run_rounds(3)
    assert h.reply(call) is None and not h.runner.asleep


# ---------------------------------------------------------------------- holds


def test_wake_releases_only_the_hold_of_sleep():
    h = busy()
    h.pause(mode="keep")
    h.pause(mode="keep", hold_id="trainer")
    sleep(h)
    woken = wake(h).result
    assert woken["still_held_by"] == ["anonymous-1", "trainer"] and woken["state"] == "paused"
    h.run_rounds(3)
    assert h.status()["is_paused"] and h.stream("r").reason is None


def test_no_resume_and_no_reset_ends_a_sleep():
    h = busy()
    h.pause(mode="keep")
    sleep(h, "kv_cache")
    result = h.resume().result
    assert (result["status"], result["still_held_by"]) == ("held", ["sleep"])
    refused = h.ask(m.ResumeArgs("sleep")).failure
    assert refused.code == "resume_refused" and "wake" in refused.message
    h.ask(m.ResetArgs())
    h.run_rounds(3)
    assert h.status()["is_paused"] and hold_ids(h) == ["sleep"]
    wake(h)
    assert_serves(h, 0)


def test_an_engine_runs_after_its_wake_up_if_no_other_hold_is_left():
    h = Harness()
    sleep(h)
    wake(h)
    assert not h.status()["rejecting_new_requests"]
    assert_serves(h, 0)


def test_requests_may_be_aborted_and_caches_reset_during_a_sleep():
    h = busy(4)
    sleep(h)
    h.ask(m.ResetCacheArgs(running=True))
    assert h.ask(m.AbortArgs(["r"])).result["aborted"][0]["request_id"] == "r"
    assert h.stream("r").reason == "abort"
    h.ask(m.PauseArgs(mode="abort", hold_id="x"), rounds=5)
    wake(h)
    h.resume("x")
    assert_serves(h, 0)


# ---------------------------------------------------------------------- order


def test_tags_may_sleep_and_wake_one_by_one_but_weights_must_wake_first():
    h = Harness()
    sleep(h, "weight")
    assert sleep(h, "kv_cache").result["asleep"] == ["kv_cache", "weight"]
    refused = h.ask(m.WakeArgs(("kv_cache",)), rounds=3).failure
    assert refused.code == "wrong_order" and h.runner.asleep == {"weight", "kv_cache"}
    assert wake(h, "weight").result["asleep"] == ["kv_cache"]
    assert hold_ids(h) == ["sleep"], "one tag still sleeps"
    assert wake(h, "kv_cache").result["asleep"] == [] and not hold_ids(h)
    assert_serves(h, 0)


def test_sleep_and_wake_without_tags_concern_all_tags_that_do_not_sleep_or_that_do():
    h = Harness()
    sleep(h, "weight")
    assert sleep(h).result["asleep"] == ["kv_cache", "weight"]
    assert wake(h).result["asleep"] == []


@pytest.mark.parametrize("asleep", TAGS[:3] + [None], ids=str)
@pytest.mark.parametrize("tag", ["weight", "kv_cache"])
def test_a_second_sleep_and_a_wake_up_without_a_sleep_are_refused(asleep, tag):
    h = Harness()
    if asleep:
        sleep(h, *asleep)
    before = h.runner.asleep, hold_ids(h)
    wrong = [m.SleepArgs((tag,))] if asleep and tag in asleep else [m.WakeArgs((tag,))]
    wrong += [m.WakeArgs()] if not asleep else []
    wrong += [m.SleepArgs()] if asleep and len(asleep) == 2 else []
    for args in wrong:
        assert h.ask(args, rounds=3).failure.code == "wrong_order", args
    assert (h.runner.asleep, hold_ids(h)) == before


@pytest.mark.parametrize(
    ("args", "field"),
    [(m.SleepArgs(("weights",)), "tags"), (m.WakeArgs(("x",)), "tags"), (m.SleepArgs(mode="nap"), "mode"),
     (m.SleepArgs(timeout_s=-1.0), "timeout_s")],
)  # fmt: skip
def test_an_invalid_field_of_sleep_or_wake_is_refused_without_a_hold(args, field):
    h = Harness()
    h.assert_refused(args, field)
    assert not hold_ids(h)


def test_of_two_sleeps_of_one_tag_at_once_the_second_is_refused():
    h = Harness()
    calls = [h.call(m.SleepArgs(("weight",))) for _ in range(2)]
    h.run_rounds(4)
    assert h.reply(calls[0]).failure is None and h.reply(calls[1]).failure.code == "wrong_order"
    assert h.runner.asleep == {"weight"} and hold_ids(h) == ["sleep"]
    wake(h)
    assert_serves(h, 0)


# ---------------------------------------------------------------------- no room


def test_the_engine_runs_on_if_there_is_no_space_for_sleeping_weights():
    h = busy()
    h.runner.no_space = True
    reply = sleep(h, "weight")
    assert reply.failure.code == "out_of_space" and reply.result["asleep"] == []
    h.run_out()
    assert h.stream("r").tokens == expected_tokens(PROMPT, 20) and not hold_ids(h)


@pytest.mark.parametrize("order", list(itertools.permutations([("weight",), ("kv_cache",)])), ids=str)
def test_if_one_of_two_sleeps_at_once_fails_the_hold_of_the_other_stays(order):
    h = busy()
    h.runner.no_space = True
    calls = {tags: h.call(m.SleepArgs(tags)) for tags in order}
    h.run_rounds(5)
    assert h.reply(calls["weight",]).failure.code == "out_of_space" and h.reply(calls["kv_cache",]).failure is None
    assert h.runner.asleep == {"kv_cache"} and h.status()["is_paused"] and hold_ids(h) == ["sleep"]
    h.runner.no_space = False
    wake(h)
    h.run_out()
    assert h.stream("r").tokens == expected_tokens(PROMPT, 20)


def test_a_wake_up_without_enough_memory_changes_nothing_and_may_be_repeated():
    h = Harness()
    sleep(h)
    h.runner.no_space = True
    assert h.ask(m.WakeArgs(), rounds=3).failure.code == "out_of_space"
    assert h.runner.asleep == {"weight", "kv_cache"} and h.status()["is_paused"]
    h.runner.no_space = False
    assert wake(h).failure is None
    assert_serves(h, 0)


# ---------------------------------------------------------------------- sleep and updates


def test_an_update_while_the_weights_sleep_is_refused():
    h = Harness()
    sleep(h)
    source = FolderSource("/w1")
    for args in (m.UpdateWeightsArgs(source), m.BeginUpdateArgs()):
        assert h.ask(args).failure.code == "wrong_order"
    assert h.ask(m.WeightInfoArgs(checksums=True)).failure.code == "wrong_order"
    wake(h)
    assert_serves(h, 0)


def test_weights_may_be_updated_while_only_kv_sleeps():
    h = busy(4)
    sleep(h)
    wake(h, "weight")
    for i in (1, 2):
        assert h.update(f"/w{i}").failure is None
    h.run_rounds(3)
    assert hold_ids(h) == ["sleep"], "an update does not end a sleep"
    wake(h, "kv_cache")
    h.run_out()
    stream = h.stream("r")
    assert stream.reason == "length" and {s.weight_epoch for s in stream.spans} == {0, 2}
    assert {s.recomputed for s in stream.spans if s.weight_epoch == 2} == {True}
    assert_serves(h, 2)


def test_an_open_session_keeps_weights_from_sleeping_but_not_kv():
    h = Harness()
    session = begin(h)
    for tags in (("weight",), ()):
        assert h.ask(m.SleepArgs(tags)).failure.code == "wrong_order" and not hold_ids(h)
    assert sleep(h, "kv_cache").failure is None
    chunk(h, session, "/w1")
    assert commit(h, session).failure is None
    wake(h)
    assert_serves(h, 1)


def test_a_session_begun_during_the_drain_of_a_sleep_makes_the_sleep_fail():
    h = busy()
    call = h.call(m.SleepArgs(("weight",), mode="wait"))
    h.run_rounds()
    session = begin(h)
    h.run_out()
    h.run_rounds(3)
    assert h.reply(call).failure.code == "wrong_order" and not hold_ids(h) and not h.runner.asleep
    chunk(h, session, "/w1")
    assert commit(h, session).failure is None
    assert_serves(h, 1)


def test_weights_do_not_sleep_while_a_thread_reads_them():
    h = Harness()
    h.runner.may_stage.clear()
    checksums, call = h.call(m.WeightInfoArgs(checksums=True)), h.call(m.SleepArgs(("weight",)))
    h.run_rounds(4)
    assert h.status()["is_paused"] and not h.runner.asleep and h.reply(call) is None
    h.runner.may_stage.set()
    h.run_rounds(3)
    assert h.reply(checksums).failure is None and h.reply(call).failure is None and h.runner.asleep == {"weight"}


def test_a_failing_engine_answers_a_sleep_that_waits_for_a_thread():
    h = Harness()
    h.runner.may_stage.clear()
    h.call(m.WeightInfoArgs(checksums=True))
    call = h.call(m.SleepArgs())
    h.run_rounds(3)
    h.engine.send_heartbeats = None
    with pytest.raises(EngineError):
        h.engine.run()
    h.runner.may_stage.set()
    assert h.reply(call).failure.code == "engine_error"


def test_discarded_weights_hold_the_engine_until_the_next_commit():
    h = one_running(12, PROMPT, rounds=4)
    assert sleep(h, discard=True).failure is None
    woken = wake(h).result
    assert woken["still_held_by"] == ["republish"] and woken["asleep"] == []
    assert h.ask(m.ResumeArgs("republish")).failure.code == "resume_refused", "there are no weights"
    assert h.ask(m.BeginUpdateArgs(partial=True)).failure.code == "wrong_order"
    assert h.update("/bad").failure.code == "weight_update_refused"
    h.resume()
    h.run_rounds(3)
    assert h.status()["is_paused"]
    assert h.update("/w1").failure is None and not hold_ids(h)
    h.run_out()
    assert h.stream("r").reason == "length"
    assert_serves(h, 1)


def test_the_republish_hold_of_discarded_weights_cannot_be_released_by_name():
    h = Harness(lost_commit=True)
    sleep(h, discard=True)
    wake(h)
    assert h.ask(m.ResumeArgs("republish")).failure.code == "resume_refused"
    assert h.update("/w1").failure is None
    assert_serves(h, 1)


def test_discard_does_not_concern_kv():
    h = Harness()
    sleep(h, "kv_cache", discard=True)
    wake(h)
    assert_serves(h, 0)


@pytest.mark.parametrize("tag", ["weight", "kv_cache"])
def test_the_fake_runner_refuses_a_step_while_anything_sleeps(tag):
    runner = FakeRunner()
    runner.sleep((tag,), None)
    with pytest.raises(AssertionError, match="without weights or KV"):
        runner.execute(None)
