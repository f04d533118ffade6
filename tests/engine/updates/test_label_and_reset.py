"""Labels, resets of the engine and of its caches, and queries about weights."""

from __future__ import annotations

import hashlib

import pytest

from engine.weight_calls import assert_serves, begin, chunk, hold_ids, paused
from fastdeploy.core.weight_source import FolderSource
from fastdeploy.engine.handlers import handlers_of
from fastdeploy.inter_communicator import messages as m
from support.fake_runner import expected_tokens, tensor_fingerprint
from support.harness import PROMPT, Harness, one_running


def test_a_new_label_changes_no_earlier_span_no_kv_and_no_request():
    h, prompt = Harness(), list(range(1, 17))
    h.add("r", prompt, n=2, max_tokens=12)
    h.run_rounds(5)
    before = [len(h.stream("r", i).tokens) for i in range(2)]
    result = h.ask(m.SetVersionArgs("v9")).result
    assert (result["version"], result["weight_epoch"], h.served.weight_epoch) == ("v9", 0, 0)
    h.run_out()
    for i, count in enumerate(before):
        stream = h.stream("r", i)
        assert stream.reason == "length" and stream.tokens == expected_tokens(prompt, 12)
        assert [s.version for s in stream.spans] == ["0"] * count + ["v9"] * (12 - count)
        assert {s.weight_epoch for s in stream.spans} == {0} and not any(s.recomputed for s in stream.spans)
    h.add("again", prompt, max_tokens=2)
    h.run_out()
    assert h.stream("again").reason == "length" and h.engine.kv.hit_tokens >= 15


def test_a_new_label_does_not_resume_a_paused_engine():
    h = paused()
    h.ask(m.SetVersionArgs("v9"))
    assert h.status()["is_paused"] and h.status()["version"] == "v9"


def test_a_new_label_does_not_release_the_republish_hold():
    h = Harness(lost_commit=True)
    h.ask(m.SetVersionArgs("v9"))
    assert hold_ids(h) == ["republish"]


def test_reset_aborts_requests_and_the_session_and_drops_anonymous_holds_and_kv():
    h = Harness()
    h.connect("b")
    prompt = list(range(1, 17))
    h.add("warm", prompt, max_tokens=2)
    h.run_out()
    h.add("mine", [1, 2], n=2, max_tokens=40)
    h.add("theirs", [3, 4], client="b", max_tokens=40)
    h.run_rounds(3)
    h.pause(mode="keep")
    h.pause(mode="keep", hold_id="named")
    session = begin(h)
    chunk(h, session, "/w1")
    result = h.ask(m.ResetArgs(version="fresh")).result
    assert (result["aborted"], result["released"], result["sessions_aborted"]) == (2, ["anonymous-1"], [session])
    assert (result["version"], result["weight_epoch"], result["still_held_by"]) == ("fresh", 0, ["named"])
    for stream in (h.stream("mine", 0), h.stream("mine", 1), h.stream("theirs", client="b")):
        assert stream.reason == "abort" and stream.tokens
    assert h.failure(m.CommitUpdateArgs(session)).code == "session_not_found"
    h.resume("named")
    hits = h.engine.kv.hit_tokens
    h.add("after", prompt, max_tokens=2)
    h.run_out()
    assert h.engine.kv.hit_tokens == hits, "no prefix hit after a reset"
    assert {s.version for s in h.stream("after").spans} == {"fresh"}


def test_reset_answers_a_pause_that_drains_and_changes_nothing_on_an_idle_engine():
    h = one_running(90)
    call = h.call(m.PauseArgs(mode="wait"))
    h.run_rounds()
    assert h.ask(m.ResetArgs()).result["aborted"] == 1
    assert h.reply(call).failure.code == "pause_interrupted" and not h.status()["rejecting_new_requests"]
    assert h.ask(m.ResetArgs()).result["aborted"] == 0
    assert_serves(h, 0)


@pytest.mark.parametrize("running", [False, True])
@pytest.mark.parametrize("pause", [None, "keep", "wait"])
def test_the_cache_can_be_reset_in_every_state_of_the_engine(running, pause):
    prompt = list(range(1, 17))
    h = one_running(12, prompt, rounds=4)
    if pause == "keep":
        h.pause(mode="keep")
    elif pause == "wait":
        h.call(m.PauseArgs(mode="wait"))
        h.run_rounds()
    computed = h.runner.computed_tokens
    result = h.ask(m.ResetCacheArgs(running=running)).result
    assert result == {"success": True, "requests_to_recompute": int(running)}
    assert h.status()["is_paused"] == (pause == "keep")
    h.resume()
    h.run_out()
    assert h.stream("r").tokens == expected_tokens(prompt, 12)
    recomputed = h.runner.computed_tokens - computed > 16
    assert recomputed == running, "running requests lose their KV only if the call says so"


def test_there_is_no_prefix_hit_after_a_reset_of_the_cache():
    h = one_running(2, list(range(1, 17)))
    h.ask(m.ResetCacheArgs())
    h.add("after", list(range(1, 17)), max_tokens=2)
    h.run_out()
    assert h.engine.kv.hit_tokens == 0


def test_weight_info_describes_the_session_and_steps_go_on_while_checksums_are_computed():
    h = Harness()
    begin(h, version="v1", partial=True, placed_by="sglang", lease_s=9.0)
    chunk(h, h.engine.weights.session.id, "/w1")
    h.now += 2.0
    info = h.ask(m.WeightInfoArgs()).result
    assert (info["version"], info["weight_epoch"], info["boot_id"], info["asleep"]) == ("0", 0, "boot", [])
    told = info["session"]
    assert told["session_id"] == h.engine.weights.session.id and told["placed_by"] == "sglang"
    assert (told["version"], told["partial"], told["state"]) == ("v1", True, "open")
    assert (told["tensors_received"], told["nbytes_received"], told["lease_left_s"]) == (3, 12, 7.0)
    h.runner.may_stage.clear()
    h.add("r", PROMPT, max_tokens=8)
    call = h.call(m.WeightInfoArgs(checksums=True))
    h.run_out()
    assert h.reply(call) is None and h.stream("r").reason == "length", "steps go on"
    h.runner.may_stage.set()
    h.run_rounds(2)
    one = hashlib.sha256(b"0").hexdigest()
    result = h.reply(call).result
    assert result["checksums"] == {"weights": one}
    assert result["checksum"] == hashlib.sha256(f"weights:{one}\n".encode()).hexdigest()


def test_weight_info_has_the_fingerprint_of_every_tensor_on_demand():
    h = Harness()
    assert "fingerprints" not in h.ask(m.WeightInfoArgs()).result
    for weights in (0, 1):
        told = h.ask(m.WeightInfoArgs(fingerprints=True)).result["fingerprints"]
        assert told == {"weights": tensor_fingerprint(weights)}
        h.update("/w1")
    h.ask(m.SleepArgs(("weight",)), rounds=4)
    assert h.failure(m.WeightInfoArgs(fingerprints=True)).code == "wrong_order"


def test_checksums_of_weights_that_are_replaced_before_they_are_computed_are_refused():
    h = Harness()
    h.runner.may_stage.clear()
    update = h.call(m.UpdateWeightsArgs(FolderSource("/w1")))
    call = h.call(m.WeightInfoArgs(checksums=True))
    h.run_rounds(2)
    h.runner.may_stage.set()
    h.run_rounds(6)
    assert h.reply(update).failure is None
    reply = h.reply(call)
    assert reply.failure is not None and reply.failure.code == "wrong_order"


def test_metrics_count_sessions_commits_and_sleep():
    h = Harness()
    begin(h)
    assert h.metric("weight_session_open") == 1 and h.metric("weight_updates_failed") == 0
    h.ask(m.AbortUpdateArgs())
    assert h.metric("weight_session_open") == 0 and h.metric("weight_updates_failed") == 1
    h.update("/w1")
    assert h.metric("weight_epoch") == h.metric("weight_updates_failed") == 1
    assert h.metric("weight_commit_seconds") == 0
    h.ask(m.SleepArgs(("weight",)), rounds=5)
    assert h.metric('asleep{tag="weight"}') == 1 and h.metric('asleep{tag="kv_cache"}') == 0


def test_an_engine_in_which_a_call_has_no_handler_or_two_does_not_start():
    h = Harness()
    assert h.engine._on_call.keys() == {call for call in m.Args.__subclasses__() if not call.gateways_only}
    with pytest.raises(AssertionError, match="'PauseArgs'"):
        handlers_of(h.engine)
    with pytest.raises(AssertionError, match="'SleepArgs'"):
        handlers_of(h.engine, h.engine.sleeper, h.engine.sleeper)
