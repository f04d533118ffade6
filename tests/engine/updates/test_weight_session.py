"""Weight sessions: begin, parts and commit, refusals, leases and aborts."""

from __future__ import annotations

import traceback

import pytest

from engine.weight_calls import assert_serves, begin, chunk, commit
from fastdeploy.core.errors import EngineError, SessionNotFound
from fastdeploy.core.weight_source import DeltaBase, FolderSource
from fastdeploy.inter_communicator import messages as m
from support.fake_runner import expected_tokens
from support.harness import PROMPT, Harness, ListTransport, one_running

# ---------------------------------------------------------------------- sessions that are committed


def test_a_commit_replaces_all_weights_at_once_while_requests_run():
    h = one_running(30)
    opened = h.ask(m.BeginUpdateArgs(version="v1", lease_s=9.0)).result
    assert (opened["lease_s"], opened["version"], opened["weight_epoch"], opened["boot_id"]) == (9.0, "0", 0, "boot")
    session = opened["session_id"]
    first = chunk(h, session, "/w1").result
    assert (first["session_id"], first["tensors"], first["nbytes"], first["tensors_received"]) == (session, 3, 12, 3)
    assert chunk(h, session, "/w2").result["tensors_received"] == 6
    assert h.served.weight_epoch == 0 and h.runner.weights == 0, "nothing changes before the commit"
    report = commit(h, session).result
    assert (report["status"], report["version"], report["weight_epoch"]) == ("committed", "v1", 1)
    assert (report["previous_version"], report["previous_weight_epoch"], report["requests_in_flight"]) == ("0", 0, 1)
    assert report["timings_ms"].keys() == {"stage", "wait_for_step", "commit", "total"}
    assert report["tensors"] == 6 and report["state"] == "running" and report["kv"] == "keep"
    h.run_out()
    assert h.stream("r").reason == "length" and {s.version for s in h.stream("r").spans} == {"0", "v1"}
    assert_serves(h, 2)
    assert h.ask(m.WeightInfoArgs()).result["session"] is None


@pytest.mark.parametrize(
    ("at_begin", "at_chunk", "at_commit", "label"),
    [(None, None, None, "1"), ("b", None, None, "b"), ("b", "c", None, "c"), ("b", "c", "d", "d")],
)  # fmt: skip
def test_the_last_version_named_in_a_session_is_the_label(at_begin, at_chunk, at_commit, label):
    h = Harness()
    session = begin(h, version=at_begin)
    chunk(h, session, "/w1", version=at_chunk)
    assert commit(h, session, version=at_commit).result["version"] == label == h.served.version


def test_kv_of_the_commit_overrides_kv_of_begin():
    """The fake runner refuses KV of the old weights after a commit of w1-recompute."""
    h = one_running(rounds=5)
    session = begin(h, kv="keep")
    chunk(h, session, "/w1-recompute")
    report = commit(h, session, kv="recompute").result
    assert report["kv"] == "recompute" and report["tokens_to_recompute"] > 0
    h.run_out()
    assert h.stream("r").reason == "length"


def test_parts_and_the_commit_behind_them_are_handled_in_order_without_waiting_for_replies():
    h = Harness()
    session = begin(h)
    h.runner.may_stage.clear()
    calls = [h.call(m.UpdatePartArgs(session, FolderSource(w))) for w in ("/w1", "/w2")]
    done = h.call(m.CommitUpdateArgs(session))
    late = h.call(m.UpdatePartArgs(session, FolderSource("/w3")))
    again = h.call(m.CommitUpdateArgs(session))
    h.run_rounds(3)
    assert h.reply(late).failure.code == h.reply(again).failure.code == "wrong_order", "the session is being committed"
    assert h.reply(calls[0]) is h.reply(done) is None
    h.runner.may_stage.set()
    h.run_rounds(5)
    assert [h.reply(c).result["tensors_received"] for c in calls] == [3, 6]
    assert h.reply(done).failure is None and h.runner.weights == 2


def test_a_partial_session_completes_the_weights_that_serve_at_its_commit():
    h = Harness()
    h.update("/w2")
    session = begin(h, partial=True)
    chunk(h, session, "/w1")
    assert commit(h, session).failure is None
    assert_serves(h, 3)


def test_a_commit_with_missing_tensors_is_refused_and_names_them():
    h = Harness()
    session = begin(h)
    reply = commit(h, session)
    assert reply.failure.code == "weight_update_refused" and "tensor a" in reply.failure.message
    assert (reply.result["version"], reply.result["weight_epoch"]) == ("0", 0)
    assert_serves(h, 0)
    assert h.update("/w1").failure is None


# ---------------------------------------------------------------------- refused before anything is staged


def test_a_second_session_is_refused_and_the_first_goes_on():
    h = Harness()
    session = begin(h)
    for args in (m.BeginUpdateArgs(), m.UpdateWeightsArgs(FolderSource("/w2"))):
        assert h.failure(args).code == "update_in_progress"
    chunk(h, session, "/w1")
    assert commit(h, session).failure is None and h.runner.weights == 1


def test_expected_version_is_checked_at_begin_and_at_commit():
    h = Harness()
    conflict = h.failure(m.BeginUpdateArgs(expected_version="v0"))
    assert conflict.code == "version_conflict" and conflict.detail["version"] == "0"
    args = m.UpdateWeightsArgs(FolderSource("/w1"), expected_version="v0")
    assert h.failure(args).code == "version_conflict"
    session = begin(h, expected_version="0")
    chunk(h, session, "/w1")
    h.ask(m.SetVersionArgs("other"))
    assert commit(h, session).failure.code == "version_conflict"
    assert_serves(h, 0)
    h.ask(m.SetVersionArgs("0"))
    assert commit(h, session).failure is None, "the session is still open"


def test_expected_version_is_checked_again_just_before_the_weights_are_replaced():
    h = Harness()
    session = begin(h, expected_version="0")
    chunk(h, session, "/w1")
    h.runner.may_stage.clear()
    call = h.call(m.CommitUpdateArgs(session))
    h.run_rounds()
    h.ask(m.SetVersionArgs("other"))
    h.runner.may_stage.set()
    h.run_rounds(3)
    assert h.reply(call).failure.code == "version_conflict" and h.served.weight_epoch == 0
    assert_serves(h, 0)
    assert h.update("/w1", expected_version="other").failure is None


@pytest.mark.parametrize(
    ("args", "field"),
    [({"kv": "drop"}, "kv"), ({"version": ""}, "version"), ({"version": "x" * 257}, "version"),
     ({"lease_s": 0.0}, "lease_s"), ({"lease_s": 1e9}, "lease_s"), ({"lease_s": float("nan")}, "lease_s")],
)  # fmt: skip
def test_a_begin_with_an_invalid_field_opens_no_session(args, field):
    h = Harness()
    h.assert_refused(m.BeginUpdateArgs(**args), field)
    assert h.ask(m.WeightInfoArgs()).result["session"] is None


def test_invalid_labels_and_kv_are_refused_without_ending_the_session():
    h = Harness()
    session, source = begin(h), FolderSource("/w1")
    for args, field in (
        (m.UpdatePartArgs(session, source, version=""), "version"),
        (m.CommitUpdateArgs(session, version="x" * 257), "version"),
        (m.CommitUpdateArgs(session, kv="drop"), "kv"),
        (m.SetVersionArgs(""), "version"),
        (m.ResetArgs(version="x" * 257), "version"),
    ):
        h.assert_refused(args, field)
    chunk(h, session, "/w1")
    assert commit(h, session).failure is None


# ---------------------------------------------------------------------- sessions that end without a commit


@pytest.mark.parametrize("folder", ["/bad", "/garbage"])
def test_a_refused_part_ends_the_session_and_later_calls_name_the_reason(folder):
    h = Harness()
    h.add("r", PROMPT, max_tokens=30)
    session = begin(h)
    chunk(h, session, "/w1")
    reply = chunk(h, session, folder)
    assert reply.failure.code == "weight_update_refused" and reply.result["version"] == "0"
    h.run_rounds()
    assert h.runner.stagings[0].abandoned
    for args in (m.UpdatePartArgs(session, FolderSource("/w2")), m.CommitUpdateArgs(session)):
        late = h.failure(args)
        assert late.code == "session_not_found" and reply.failure.message in late.message
    h.run_out()
    assert h.stream("r").tokens == expected_tokens(PROMPT, 30)
    assert h.update("/w1").failure is None


def test_calls_sent_behind_a_refused_part_are_answered():
    h = Harness()
    session = begin(h)
    h.runner.may_stage.clear()
    calls = [h.call(m.UpdatePartArgs(session, FolderSource(w))) for w in ("/bad", "/w1", "/w2")]
    calls.append(h.call(m.CommitUpdateArgs(session)))
    h.run_rounds(2)
    h.runner.may_stage.set()
    h.run_rounds(6)
    codes = [h.reply(call).failure.code for call in calls]
    assert codes == ["weight_update_refused"] + ["session_not_found"] * 3
    assert not h.runner.stagings[0].names, "parts behind a refused one are not read"
    assert_serves(h, 0)


def test_a_check_names_the_refusal_that_an_update_would_get_and_changes_nothing():
    h = Harness()
    ask = lambda session_id=None, **begin: h.ask(m.CheckUpdateArgs(session_id, m.BeginUpdateArgs(**begin)))  # noqa: E731
    assert ask().failure is None and h.engine.weights.session is None
    assert ask(expected_version="7").failure.code == "version_conflict"
    assert ask(base=DeltaBase("0" * 64), fingerprint="0" * 64).failure.code == "base_mismatch"
    assert ask(kv="x").failure.code == "invalid_field"
    assert ask("nobody's").failure.code == "session_not_found"
    session = begin(h)
    assert ask(session).failure is None
    assert ask().failure.code == "update_in_progress"
    assert ask("nobody's").failure.code == "session_not_found"
    assert chunk(h, session, "/w1").failure is None
    h.ask(m.AbortUpdateArgs(session))
    assert ask(session).failure.code == "session_not_found" and ask().failure is None


def test_calls_without_a_session_id_concern_the_session_of_the_same_placer():
    h = Harness()
    add = lambda placer: h.ask(m.UpdatePartArgs(None, FolderSource("/w1"), placed_by=placer), rounds=2)  # noqa: E731
    check = lambda placer: h.ask(m.CheckUpdateArgs(placed_by=placer)).failure  # noqa: E731
    assert add("vllm").result == {"session_id": None} and check("vllm") is None
    session = begin(h, placed_by="vllm", partial=True)
    assert add("sglang").result == {"session_id": None}
    assert check("sglang").code == "update_in_progress" and check("vllm") is None
    assert h.failure(m.CommitUpdateArgs(None, placed_by="sglang")).code == "wrong_order"
    assert h.engine.weights.session.tensors == 0, "the session of another placer is left alone"
    assert (add("vllm").result["session_id"], h.engine.weights.session.tensors) == (session, 3)
    assert h.ask(m.CommitUpdateArgs(None, placed_by="vllm"), rounds=2).result["session_id"] == session
    assert h.failure(m.CommitUpdateArgs(None, placed_by="vllm")).code == "wrong_order"


def test_calls_with_an_unknown_session_id_are_refused():
    h = Harness()
    source = FolderSource("/w1")
    for args in (m.UpdatePartArgs("x", source), m.CommitUpdateArgs("x"), m.AbortUpdateArgs("x")):
        assert h.failure(args).code == "session_not_found"


def test_a_repeated_commit_is_refused_as_already_committed():
    h = Harness()
    session = begin(h)
    chunk(h, session, "/w1")
    commit(h, session)
    again = commit(h, session).failure
    assert again.code == "session_not_found" and "committed" in again.message and h.served.weight_epoch == 1


def test_the_error_of_an_ended_session_does_not_keep_the_calls_that_it_was_raised_in():
    h = Harness()
    session = begin(h, idempotency_key="key")
    h.ask(m.AbortUpdateArgs(session))
    depths = []
    for _ in range(2):
        for call in (
            lambda: h.engine.weights.commit(m.CommitUpdateArgs(session), lambda result, error: None),
            lambda: h.engine.weights.begin(m.BeginUpdateArgs(idempotency_key="key"), "a"),
        ):
            with pytest.raises(SessionNotFound) as raised:
                call()
            depths.append(len(traceback.extract_tb(raised.value.__traceback__)))
    assert depths[:2] == depths[2:]


def test_a_session_ends_with_its_lease_and_the_next_one_may_begin():
    h = Harness()
    h.add("r", PROMPT, max_tokens=60)
    session = begin(h, lease_s=5.0)
    h.now += 4.0
    chunk(h, session, "/w1")
    h.now += 4.9
    h.run_rounds()
    assert h.engine.weights.session is not None, "a part renews the lease"
    h.now += 0.2
    h.run_rounds(2)
    assert h.engine.weights.session is None and h.runner.stagings[0].abandoned
    for args in (m.UpdatePartArgs(session, FolderSource("/w2")), m.CommitUpdateArgs(session)):
        late = h.failure(args)
        assert late.code == "session_expired" and "5 s" in late.message
    h.run_out()
    assert h.stream("r").tokens == expected_tokens(PROMPT, 60)
    session = begin(h)
    chunk(h, session, "/w2")
    assert commit(h, session).failure is None


def test_an_idle_loop_wakes_up_at_the_end_of_a_lease():
    h = Harness(heartbeat_s=100.0)
    h.run_rounds()
    begin(h, lease_s=7.0)
    assert h.engine._idle_time() == pytest.approx(7.0)


def test_the_lease_stands_still_while_a_part_is_staged_or_the_commit_is_checked():
    h = Harness()
    session = begin(h, lease_s=5.0)
    for args in (m.UpdatePartArgs(session, FolderSource("/w1")), m.CommitUpdateArgs(session)):
        h.runner.may_stage.clear()
        call = h.call(args)
        h.run_rounds()
        h.now += 60.0
        h.run_rounds(2)
        assert h.reply(call) is None and h.engine.weights.session is not None
        h.runner.may_stage.set()
        h.run_rounds(2)
        assert h.reply(call).failure is None
        h.now += 4.0  # counted from the end of the work
        h.run_rounds()
    assert h.served.weight_epoch == 1


def test_abort_names_the_session_that_it_ended_and_may_be_repeated():
    h = Harness()
    assert h.ask(m.AbortUpdateArgs()).result == {"aborted": []}
    session = begin(h)
    chunk(h, session, "/w1")
    assert h.ask(m.AbortUpdateArgs(session)).result == {"aborted": [session]}
    assert h.ask(m.AbortUpdateArgs(session)).result == {"aborted": []}
    other = begin(h)
    assert h.ask(m.AbortUpdateArgs(session)).result == {"aborted": []}, (
        "the id of an ended session does not end the next one"
    )
    assert h.ask(m.AbortUpdateArgs()).result == {"aborted": [other]}
    h.run_rounds()
    assert h.runner.stagings[0].abandoned
    assert_serves(h, 0)


@pytest.mark.parametrize("one_call", [True, False])
def test_an_abort_while_tensors_are_staged_answers_every_call_once(one_call):
    h = Harness()
    h.runner.may_stage.clear()
    if one_call:
        calls = [h.call(m.UpdateWeightsArgs(FolderSource("/w1")))]
    else:
        session = begin(h)
        calls = [h.call(m.UpdatePartArgs(session, FolderSource(w))) for w in ("/w1", "/w2")]
        calls.append(h.call(m.CommitUpdateArgs(session)))
    h.run_rounds(2)
    assert len(h.ask(m.AbortUpdateArgs()).result["aborted"]) == 1
    assert h.runner.stagings[0].was_abandoned.wait(30)
    h.runner.may_stage.set()
    h.run_rounds(4)
    assert {h.reply(call).failure.code for call in calls} == {"session_not_found"}
    assert "aborted" in h.reply(calls[-1]).failure.message and h.runner.stagings[0].abandoned
    assert not h.runner.stagings[0].names, "a read that ends after the abort adds nothing"
    assert_serves(h, 0)
    assert h.update("/w2").failure is None


def test_a_failing_engine_answers_every_call_of_a_session_once():
    h = Harness()
    h.add("r", PROMPT, max_tokens=50)
    session = begin(h)
    h.runner.may_stage.clear()
    calls = [h.call(m.UpdatePartArgs(session, FolderSource(w))) for w in ("/w1", "/w2")]
    calls += [h.call(m.CommitUpdateArgs(session)), h.call(m.WeightInfoArgs(checksums=True))]
    h.run_rounds(2)
    h.runner.fail_next = True
    with pytest.raises(EngineError):
        h.engine.run()
    h.runner.may_stage.set()
    assert [h.reply(call).failure.code for call in calls] == ["engine_error"] * 4


def test_an_engine_that_stops_answers_an_open_update_and_is_not_woken_afterwards(monkeypatch):
    woken = []
    monkeypatch.setattr(ListTransport, "wake", lambda transport: woken.append(1))
    h = Harness()
    h.runner.may_stage.clear()
    call = h.call(m.UpdateWeightsArgs(FolderSource("/w1")))
    h.run_rounds()
    h.engine.stop()
    woken.clear()
    h.engine.run()
    assert h.reply(call).failure.code == "engine_dead"
    h.runner.may_stage.set()
    h.join_staging()
    assert not woken, "the transport is closed"


def test_a_check_renews_the_lease_so_that_a_long_upload_does_not_lose_its_session():
    h = Harness()
    session = begin(h, lease_s=10.0)
    for _ in range(4):
        h.now += 9
        assert h.ask(m.CheckUpdateArgs(session)).result == {"session_id": session, "lease_s": 10.0}
    assert chunk(h, session, "/w1").failure is None
    h.now += 11
    h.run_rounds()
    assert h.ask(m.CheckUpdateArgs(session)).failure.code == "session_expired"


def test_a_session_of_one_call_ends_with_the_client_that_opened_it_and_with_no_other():
    h = Harness()
    for client in "bc":
        h.connect(client)
    session = h.ask(m.BeginUpdateArgs(ends_with_client=True), client="b").result["session_id"]
    lose(h, "c")
    assert chunk(h, session, "/w1").failure is None
    lose(h, "b")
    assert h.ask(m.WeightInfoArgs()).result["session"] is None
    assert commit(h, session).failure.code == "session_not_found"
    assert_serves(h, 0)


def test_a_session_of_one_call_whose_client_dies_in_the_commit_is_committed():
    """As an update of another source in one call."""
    h = Harness()
    h.connect("b")
    session = h.ask(m.BeginUpdateArgs(ends_with_client=True), client="b").result["session_id"]
    assert chunk(h, session, "/w5").failure is None
    h.runner.may_stage.clear()
    h.call(m.CommitUpdateArgs(session), client="b")
    h.run_rounds()
    lose(h, "b")
    h.runner.may_stage.set()
    h.run_rounds(3)
    assert_serves(h, 5)


def lose(h: Harness, client: str) -> None:
    """Let an API server die, and the engine learn of it."""
    h.transport.gone.add(client)
    h.now += 6.0  # the next heartbeat finds out
    h.run_rounds(3)
