"""Commits in two calls, as the gateway of a fleet makes them, and the number of weights that it gives."""

from __future__ import annotations

import pytest

from engine.fleet_calls import prepare
from engine.views.test_events import Record
from engine.weight_calls import assert_serves, base_of, begin, chunk, commit
from fastdeploy.core.events import EventKind
from fastdeploy.core.weight_source import FolderSource
from fastdeploy.inter_communicator import messages as m
from support.fake_runner import FakeRunner, expected_tokens, fingerprint_of
from support.harness import PROMPT, Harness


def staged(h: Harness, folder: str = "/w1", **args) -> str:
    """Return an open session with all its parts."""
    session = begin(h, **args)
    assert chunk(h, session, folder).failure is None
    return session


def prepared(h: Harness, folder: str = "/w1", **args) -> str:
    session = staged(h, folder, **args)
    assert prepare(h, session).failure is None
    return session


def state(h: Harness) -> str | None:
    session = h.ask(m.WeightInfoArgs()).result["session"]
    return session and session["state"]


# ---------------------------------------------------------------------- the number


def test_a_commit_takes_the_number_that_it_is_given_in_its_label_its_spans_and_its_event():
    h = Harness()
    record = Record(h)
    h.add("r", PROMPT, max_tokens=12)
    h.run_rounds(3)
    result = commit(h, staged(h), weight_epoch=7).result
    assert (result["weight_epoch"], result["version"], result["previous_weight_epoch"]) == (7, "7", 0)
    h.run_out()
    spans = h.stream("r").spans
    assert [span.weight_epoch for span in spans] == sorted(span.weight_epoch for span in spans)
    assert {span.weight_epoch for span in spans} == {0, 7}
    assert record.fields(EventKind.COMMITTED, "weight_epoch", "version") == [(7, "7")]
    assert h.update("w2").result["weight_epoch"] == 8, "the next commit counts on"


@pytest.mark.parametrize("number", [-1, 0, 3])
def test_a_number_that_is_not_above_the_one_that_serves_is_a_conflict_and_the_session_stays(number):
    h = Harness()
    commit(h, staged(h), weight_epoch=3)
    session = staged(h, "/w2")
    failure = commit(h, session, weight_epoch=number).failure
    assert (failure.code, failure.detail["weight_epoch"]) == ("version_conflict", 3) and state(h) == "open"
    h.assert_refused(m.CommitUpdateArgs(session, weight_epoch=2**53), "weight_epoch")
    assert commit(h, session, weight_epoch=4).failure is None
    assert_serves(h, 2)


def test_a_number_that_was_passed_while_the_weights_were_checked_ends_the_session():
    h = Harness()
    session = staged(h)
    call = h.call(m.CommitUpdateArgs(session, weight_epoch=5))
    h.call(m.SetVersionArgs("joined", 6))
    h.run_rounds(2)
    assert h.reply(call).failure.code == "version_conflict" and h.served.weight_epoch == 6
    assert_serves(h, 0)


def test_a_new_label_may_bring_a_higher_number_and_no_kv_of_the_old_number_is_used():
    h, prompt = Harness(), list(range(1, 17))
    h.add("warm", prompt, max_tokens=2)
    h.add("runs", [7] * 6, max_tokens=30)
    h.run_rounds(4)
    result = h.ask(m.SetVersionArgs("fleet", 9)).result
    assert (result["version"], result["weight_epoch"]) == ("fleet", 9)
    hits = h.engine.kv.hit_tokens
    h.add("after", prompt, max_tokens=2)
    h.run_out()
    assert h.engine.kv.hit_tokens == hits and h.stream("after").spans[0].weight_epoch == 9
    assert [span.weight_epoch for span in h.stream("runs").spans][-1] == 9 and h.stream("runs").reason == "length"
    h.add("again", prompt, max_tokens=2)
    h.run_out()
    assert h.engine.kv.hit_tokens > hits, "weights of the new number share their own KV"
    assert h.ask(m.SetVersionArgs("same", 9)).result["version"] == "same"
    assert h.failure(m.SetVersionArgs("lower", 8)).code == "version_conflict"
    h.assert_refused(m.SetVersionArgs("x", 2**53), "weight_epoch")
    assert (h.served.version, h.served.weight_epoch) == ("same", 9)


def test_a_new_number_may_come_while_a_prompt_is_computed():
    h, prompt = Harness(max_num_batched_tokens=4), list(range(1, 17))
    h.add("r", prompt, max_tokens=4)
    h.run_rounds(2)
    h.ask(m.SetVersionArgs("fleet", 9))
    h.add("same", prompt, max_tokens=4)
    h.run_out()
    assert {span.weight_epoch for name in ("r", "same") for span in h.stream(name).spans} == {9}
    assert h.stream("r").tokens == h.stream("same").tokens == expected_tokens(prompt, 4)


def test_an_adapter_sees_the_new_number_too():
    h = Harness()
    h.load_adapter("a", 1)
    h.ask(m.SetVersionArgs("fleet", 9))
    h.add("r", PROMPT, adapter="a", max_tokens=2)
    h.run_out()
    assert {span.weight_epoch for span in h.stream("r").spans} == {9}


# ---------------------------------------------------------------------- prepare


def test_a_prepared_session_changes_nothing_until_its_commit_which_swaps_at_once():
    h = Harness()
    record = Record(h)
    h.add("r", PROMPT, max_tokens=40)
    h.run_rounds(3)
    session = staged(h)
    reply = prepare(h, session)
    assert reply.result == {"session_id": session, "fingerprint": fingerprint_of(1), "eos_token_ids": None}
    assert state(h) == "prepared" and h.served.weight_epoch == 0 and h.runner.weights == 0
    before = len(h.stream("r").tokens)
    result = h.ask(m.CommitUpdateArgs(session, version="v", weight_epoch=4), rounds=1).result
    assert (result["status"], result["version"], result["weight_epoch"]) == ("committed", "v", 4)
    assert (result["session_id"], result["tensors"], result["requests_in_flight"]) == (session, 3, 1)
    h.run_out()
    spans = h.stream("r").spans
    assert [s.weight_epoch for s in spans] == [0] * before + [4] * (40 - before)
    assert record.fields(EventKind.SESSION, "event", "state")[-4:] == [
        ("commit", "committing"), ("prepare", "prepared"), ("commit", "ready"), ("swap", "ended"),
    ]  # fmt: skip
    assert h.failure(m.CommitUpdateArgs(session)).message.endswith("was committed already")


def test_a_commit_and_the_messages_behind_it_take_effect_in_their_order():
    h = Harness()
    session = prepared(h)
    calls = [h.call(args) for args in (m.CommitUpdateArgs(session), m.AbortUpdateArgs(), m.SetVersionArgs("after"))]
    h.run_rounds()
    committed, aborted, labelled = (h.reply(call) for call in calls)
    assert (committed.result["version"], aborted.result["aborted"]) == ("1", [])
    assert (labelled.result["version"], labelled.result["weight_epoch"]) == ("after", 1)
    assert_serves(h, 1)


def test_every_check_of_the_weights_is_made_at_the_prepare_and_ends_the_session():
    h = Harness()
    wrong = prepare(h, staged(h), fingerprint=fingerprint_of(2)).failure
    assert (wrong.code, wrong.detail["param"]) == ("weight_update_refused", "fingerprint") and state(h) is None
    assert prepare(h, begin(h)).failure.code == "weight_update_refused", "tensors are missing"
    session = staged(h, expected_version="0")
    h.ask(m.SetVersionArgs("other"))
    assert prepare(h, session).failure.code == "version_conflict" and state(h) == "open"
    h.ask(m.AbortUpdateArgs())
    assert_serves(h, 0)


@pytest.mark.parametrize("what", ["label", "base", "number"])
def test_a_new_label_does_not_refuse_a_prepared_session(what):
    h = Harness()
    if what == "base":
        delta = {"base": base_of(0, version="0", weight_epoch=0), "fingerprint": fingerprint_of(2)}
        session = prepared(h, "/d2", **delta)
    else:
        session = prepared(h, "/w2", expected_version="0")
    h.ask(m.SetVersionArgs("other", 3 if what == "number" else None))
    assert commit(h, session).result["weight_epoch"] == (4 if what == "number" else 1)
    assert_serves(h, 2)


def test_a_bad_field_of_the_commit_leaves_the_session_prepared():
    h = Harness()
    session = prepared(h)
    h.assert_refused(m.CommitUpdateArgs(session, version=""), "version")
    h.assert_refused(m.CommitUpdateArgs(session, kv="drop"), "kv")
    assert h.failure(m.CommitUpdateArgs(session, weight_epoch=0)).code == "version_conflict"
    assert h.failure(m.CommitUpdateArgs(session, fingerprint=fingerprint_of(9))).code == "weight_update_refused"
    assert state(h) == "prepared"
    assert commit(h, session, kv="recompute").result["kv"] == "recompute"


def test_a_prepared_session_takes_no_more_parts():
    h = Harness()
    session = prepared(h)
    for args in (m.UpdatePartArgs(session, FolderSource("/w2")), m.CheckUpdateArgs(session)):
        assert h.failure(args).code == "wrong_order"
    assert h.failure(m.BeginUpdateArgs()).code == "update_in_progress" and state(h) == "prepared"


def test_a_prepared_session_is_aborted_and_its_weights_are_freed():
    h = Harness()
    session = prepared(h)
    assert h.ask(m.AbortUpdateArgs(session)).result == {"aborted": [session]}
    h.run_rounds(2)
    assert h.runner.stagings[-1].abandoned and state(h) is None
    assert h.failure(m.CommitUpdateArgs(session)).code == "session_not_found"
    assert_serves(h, 0)


def test_the_lease_of_a_prepared_session_runs_and_another_prepare_renews_it():
    h = Harness()
    session = prepared(h, lease_s=5.0)
    h.now += 4.0
    assert prepare(h, session).result["fingerprint"] == fingerprint_of(1)
    h.now += 4.0
    h.run_rounds()
    assert state(h) == "prepared"
    h.now += 1.1
    h.run_rounds()
    failure = h.failure(m.CommitUpdateArgs(session))
    assert failure.code == "session_expired" and "no commit came" in failure.message
    assert_serves(h, 0)


def test_a_swap_that_fails_ends_the_engine_and_not_only_the_call():
    class BrokenRunner(FakeRunner):
        def commit(self, weights):
            raise RuntimeError("half of the weights are new")

    h = Harness(BrokenRunner())
    h.call(m.CommitUpdateArgs(prepared(h)))
    with pytest.raises(RuntimeError, match="half of the weights"):
        h.run_rounds()
