"""Weight sessions: whatever becomes of one, the old weights or the new ones serve, whole, and everybody is told."""

from __future__ import annotations

import hashlib
import threading
from itertools import product

import pytest

from fake_runner import FakeRunner, expected_tokens
from fastdeploy.engine.weight_session import TRANSITIONS, Event, Session, State
from fastdeploy.errors import EngineError
from fastdeploy.inter_communicator import messages as m
from harness import Harness

PROMPT = [1, 2, 3]


@pytest.fixture
def folders(tmp_path):
    for name in ("w1", "w2", "w3", "w1-recompute", "bad", "garbage"):
        (tmp_path / name).mkdir()
    return tmp_path


def begin(h: Harness, **args) -> str:
    reply = h.ask(m.BeginUpdateArgs(**args))
    assert reply.failure is None, reply
    return reply.result["session_id"]


def chunk(h: Harness, session: str, folder, **args) -> m.Reply:
    return h.ask(m.UpdateChunkArgs(session, m.FolderSource(str(folder)), **args), turns=2)


def commit(h: Harness, session: str, **args) -> m.Reply:
    return h.ask(m.CommitUpdateArgs(session, **args), turns=2)


def failure(h: Harness, args: m.Args, turns: int = 2) -> m.Failure:
    reply = h.ask(args, turns=turns)
    assert reply.failure is not None, reply
    return reply.failure


def hold_ids(h: Harness) -> list[str]:
    return [hold["id"] for hold in h.status()["holds"]]


def assert_serves(h: Harness, weights: int) -> None:
    name = f"probe{len(h.transport.sent['a'])}"
    h.add(name, PROMPT, max_tokens=4)
    h.run_out()
    assert h.stream(name).tokens == expected_tokens(PROMPT, 4, weights=weights)


def paused(**config) -> Harness:
    h = Harness(**config)
    h.pause(mode="keep")
    return h


# ---------------------------------------------------------------------- the table


def session_in(state: State) -> Session:
    return Session("s", None, None, "keep", False, False, 1.0, "native", 0.0, 1.0, state)


@pytest.mark.parametrize(("state", "event"), list(product(State, Event)))
def test_a_session_moves_by_its_table_and_an_event_that_is_not_listed_raises(state, event):
    session = session_in(state)
    if (state, event) in TRANSITIONS:
        session.advance(event)
        assert session.state is TRANSITIONS[state, event]
    else:
        with pytest.raises(KeyError):
            session.advance(event)
        assert session.state is state


def test_an_ended_session_never_moves_again_and_every_other_can_end():
    assert not [event for state, event in TRANSITIONS if state is State.ENDED]
    assert {state for state, event in TRANSITIONS if event is Event.END} == set(State) - {State.ENDED}


# ---------------------------------------------------------------------- the good way


def test_begin_chunks_and_commit_swap_everything_at_once_beside_live_requests(folders):
    h = Harness()
    h.add("r", PROMPT, max_tokens=30)
    h.turn(3)
    opened = h.ask(m.BeginUpdateArgs(version="v1", lease_s=9.0)).result
    assert (opened["lease_s"], opened["version"], opened["epoch"], opened["boot_id"]) == (9.0, "0", 0, "boot")
    session = opened["session_id"]
    first = chunk(h, session, folders / "w1").result
    assert (first["session_id"], first["tensors"], first["nbytes"], first["tensors_received"]) == (session, 3, 12, 3)
    assert chunk(h, session, folders / "w2").result["tensors_received"] == 6
    assert h.engine.epoch == 0 and h.runner.weights == 0, "nothing changes before the commit"
    report = commit(h, session).result
    assert (report["status"], report["version"], report["epoch"]) == ("committed", "v1", 1)
    assert (report["previous_version"], report["previous_epoch"], report["requests_in_flight"]) == ("0", 0, 1)
    assert report["timings_ms"].keys() == {"stage", "wait_for_step", "commit", "total"}
    assert report["tensors"] == 6 and report["state"] == "running" and report["kv"] == "keep"
    h.run_out()
    assert h.stream("r").reason == "length" and {s.version for s in h.stream("r").spans} == {"0", "v1"}
    assert_serves(h, 2)
    assert h.ask(m.WeightInfoArgs()).result["session"] is None


@pytest.mark.parametrize(
    ("at_begin", "at_chunk", "at_commit", "label"),
    [(None, None, None, "1"), ("b", None, None, "b"), ("b", "c", None, "c"), ("b", "c", "d", "d"), (None, None, "d", "d")],
)  # fmt: skip
def test_the_label_named_last_is_the_one(folders, at_begin, at_chunk, at_commit, label):
    h = Harness()
    session = begin(h, version=at_begin)
    chunk(h, session, folders / "w1", version=at_chunk)
    assert commit(h, session, version=at_commit).result["version"] == label == h.engine.version


def test_kv_of_the_commit_goes_over_that_of_begin(folders):
    """The fake runner refuses KV of the old weights after a commit of w1-recompute."""
    h = Harness()
    h.add("r", PROMPT, max_tokens=20)
    h.turn(5)
    session = begin(h, kv="keep")
    chunk(h, session, folders / "w1-recompute")
    report = commit(h, session, kv="recompute").result
    assert report["kv"] == "recompute" and report["tokens_to_recompute"] > 0
    h.run_out()
    assert h.stream("r").reason == "length"


def test_chunks_sent_without_waiting_are_taken_in_order_and_so_is_the_commit_behind_them_refused(folders):
    h = Harness()
    session = begin(h)
    h.runner.may_stage.clear()
    calls = [h.call(m.UpdateChunkArgs(session, m.FolderSource(str(folders / w)))) for w in ("w1", "w2")]
    done = h.call(m.CommitUpdateArgs(session))
    late = h.call(m.UpdateChunkArgs(session, m.FolderSource(str(folders / "w3"))))
    again = h.call(m.CommitUpdateArgs(session))
    h.turn(3)
    assert h.reply(late).failure.code == h.reply(again).failure.code == "wrong_order", "it is being committed"
    assert h.reply(calls[0]) is h.reply(done) is None
    h.runner.may_stage.set()
    h.turn(5)
    assert [h.reply(c).result["tensors_received"] for c in calls] == [3, 6]
    assert h.reply(done).failure is None and h.runner.weights == 2


def test_a_partial_session_adds_to_what_serves_at_its_commit(folders):
    h = Harness()
    h.update(folders / "w2")
    session = begin(h, partial=True)
    chunk(h, session, folders / "w1")
    assert commit(h, session).failure is None
    assert_serves(h, 3)


def test_a_commit_of_a_session_in_which_tensors_are_missing_is_refused_and_says_which(folders):
    h = Harness()
    session = begin(h)
    reply = commit(h, session)
    assert reply.failure.code == "weight_update_refused" and "tensor a" in reply.failure.message
    assert (reply.result["version"], reply.result["epoch"]) == ("0", 0)
    assert_serves(h, 0)
    assert h.update(folders / "w1").failure is None


# ---------------------------------------------------------------------- one at a time, and which version


def test_two_trainers_at_once_the_second_is_told_and_the_first_is_not_disturbed(folders):
    h = Harness()
    session = begin(h)
    for args in (m.BeginUpdateArgs(), m.UpdateWeightsArgs(m.FolderSource(str(folders / "w2")))):
        assert failure(h, args).code == "update_in_progress"
    chunk(h, session, folders / "w1")
    assert commit(h, session).failure is None and h.runner.weights == 1


def test_a_session_that_expects_another_version_is_refused_at_begin_and_when_it_is_relabelled_before_the_commit(
    folders,
):
    h = Harness()
    conflict = failure(h, m.BeginUpdateArgs(expected_version="v0"))
    assert conflict.code == "version_conflict" and conflict.detail["version"] == "0"
    args = m.UpdateWeightsArgs(m.FolderSource(str(folders / "w1")), expected_version="v0")
    assert failure(h, args).code == "version_conflict"
    session = begin(h, expected_version="0")
    chunk(h, session, folders / "w1")
    h.ask(m.SetVersionArgs("other"))
    assert commit(h, session).failure.code == "version_conflict"
    assert_serves(h, 0)


def test_the_version_is_looked_at_once_more_at_the_swap(folders):
    h = Harness()
    session = begin(h, expected_version="0")
    chunk(h, session, folders / "w1")
    h.runner.may_stage.clear()
    call = h.call(m.CommitUpdateArgs(session))
    h.turn()
    h.ask(m.SetVersionArgs("other"))
    h.runner.may_stage.set()
    h.turn(3)
    assert h.reply(call).failure.code == "version_conflict" and h.engine.epoch == 0
    assert_serves(h, 0)
    assert h.update(folders / "w1", expected_version="other").failure is None


@pytest.mark.parametrize(
    ("args", "field"),
    [({"kv": "drop"}, "kv"), ({"version": ""}, "version"), ({"version": "x" * 257}, "version"),
     ({"lease_s": 0.0}, "lease_s"), ({"lease_s": 1e9}, "lease_s"), ({"lease_s": float("nan")}, "lease_s")],
)  # fmt: skip
def test_a_begin_that_makes_no_sense_names_the_field_and_opens_nothing(args, field):
    h = Harness()
    refused = failure(h, m.BeginUpdateArgs(**args))
    assert (refused.code, refused.detail["param"]) == ("invalid_field", field)
    assert h.ask(m.WeightInfoArgs()).result["session"] is None


def test_bad_labels_and_kv_are_refused_everywhere_and_do_not_end_the_session(folders):
    h = Harness()
    session, source = begin(h), m.FolderSource(str(folders / "w1"))
    for args, field in (
        (m.UpdateChunkArgs(session, source, version=""), "version"),
        (m.CommitUpdateArgs(session, version="x" * 257), "version"),
        (m.CommitUpdateArgs(session, kv="drop"), "kv"),
        (m.SetVersionArgs(""), "version"),
        (m.ResetArgs(version="x" * 257), "version"),
    ):
        assert failure(h, args).detail["param"] == field
    chunk(h, session, folders / "w1")
    assert commit(h, session).failure is None


# ---------------------------------------------------------------------- the bad ways


@pytest.mark.parametrize("folder", ["bad", "garbage"])
def test_a_refused_chunk_ends_the_session_and_later_calls_are_told_why(folders, folder):
    h = Harness()
    h.add("r", PROMPT, max_tokens=30)
    session = begin(h)
    chunk(h, session, folders / "w1")
    reply = chunk(h, session, folders / folder)
    assert reply.failure.code == "weight_update_refused" and reply.result["version"] == "0"
    h.turn()
    assert h.runner.stagings[0].abandoned
    for args in (m.UpdateChunkArgs(session, m.FolderSource(str(folders / "w2"))), m.CommitUpdateArgs(session)):
        late = failure(h, args)
        assert late.code == "session_not_found" and reply.failure.message in late.message
    h.run_out()
    assert h.stream("r").tokens == expected_tokens(PROMPT, 30)
    assert h.update(folders / "w1").failure is None


def test_what_was_sent_behind_a_refused_chunk_is_answered_too(folders):
    h = Harness()
    session = begin(h)
    h.runner.may_stage.clear()
    calls = [h.call(m.UpdateChunkArgs(session, m.FolderSource(str(folders / w)))) for w in ("bad", "w1", "w2")]
    calls.append(h.call(m.CommitUpdateArgs(session)))
    h.turn(2)
    h.runner.may_stage.set()
    h.turn(6)
    codes = [h.reply(call).failure.code for call in calls]
    assert codes == ["weight_update_refused"] + ["session_not_found"] * 3
    assert_serves(h, 0)


def test_a_session_nobody_opened_is_unknown(folders):
    h = Harness()
    source = m.FolderSource(str(folders / "w1"))
    for args in (m.UpdateChunkArgs("x", source), m.CommitUpdateArgs("x"), m.AbortUpdateArgs("x")):
        assert failure(h, args).code == "session_not_found"


def test_a_commit_that_is_repeated_is_told_that_it_was_done(folders):
    h = Harness()
    session = begin(h)
    chunk(h, session, folders / "w1")
    commit(h, session)
    again = commit(h, session).failure
    assert again.code == "session_not_found" and "committed" in again.message and h.engine.epoch == 1


def test_a_killed_trainer_is_an_expired_lease_and_the_next_one_may_begin(folders):
    h = Harness()
    h.add("r", PROMPT, max_tokens=60)
    session = begin(h, lease_s=5.0)
    h.now += 4.0
    chunk(h, session, folders / "w1")
    h.now += 4.9
    h.turn()
    assert h.engine.weights.session is not None, "a chunk renews the lease"
    h.now += 0.2
    h.turn(2)
    assert h.engine.weights.session is None and h.runner.stagings[0].abandoned
    for args in (m.UpdateChunkArgs(session, m.FolderSource(str(folders / "w2"))), m.CommitUpdateArgs(session)):
        late = failure(h, args)
        assert late.code == "session_expired" and "5 s" in late.message
    h.run_out()
    assert h.stream("r").tokens == expected_tokens(PROMPT, 60)
    session = begin(h)
    chunk(h, session, folders / "w2")
    assert commit(h, session).failure is None


def test_an_idle_loop_wakes_up_for_the_end_of_a_lease():
    h = Harness(heartbeat_s=100.0)
    h.turn()
    begin(h, lease_s=7.0)
    assert h.engine._patience() == pytest.approx(7.0)


def test_the_lease_does_not_run_while_a_chunk_is_being_staged_or_the_commit_checked(folders):
    h = Harness()
    session = begin(h, lease_s=5.0)
    for args in (m.UpdateChunkArgs(session, m.FolderSource(str(folders / "w1"))), m.CommitUpdateArgs(session)):
        h.runner.may_stage.clear()
        call = h.call(args)
        h.turn()
        h.now += 60.0
        h.turn(2)
        assert h.reply(call) is None and h.engine.weights.session is not None
        h.runner.may_stage.set()
        h.turn(2)
        assert h.reply(call).failure is None
        h.now += 4.0  # counted from the end of the work
        h.turn()
    assert h.engine.epoch == 1


def test_abort_names_what_it_ended_and_may_be_repeated(folders):
    h = Harness()
    assert h.ask(m.AbortUpdateArgs()).result == {"aborted": []}
    session = begin(h)
    chunk(h, session, folders / "w1")
    assert h.ask(m.AbortUpdateArgs(session)).result == {"aborted": [session]}
    assert h.ask(m.AbortUpdateArgs(session)).result == {"aborted": []}
    other = begin(h)
    assert h.ask(m.AbortUpdateArgs(session)).result == {"aborted": []}, "an old name does not hit the new session"
    assert h.ask(m.AbortUpdateArgs()).result == {"aborted": [other]}
    h.turn()
    assert h.runner.stagings[0].abandoned
    assert_serves(h, 0)


@pytest.mark.parametrize("one_call", [True, False])
def test_an_abort_while_tensors_are_being_staged_answers_every_call_once(folders, one_call):
    h = Harness()
    h.runner.may_stage.clear()
    if one_call:
        calls = [h.call(m.UpdateWeightsArgs(m.FolderSource(str(folders / "w1"))))]
    else:
        session = begin(h)
        calls = [h.call(m.UpdateChunkArgs(session, m.FolderSource(str(folders / w)))) for w in ("w1", "w2")]
        calls.append(h.call(m.CommitUpdateArgs(session)))
    h.turn(2)
    assert len(h.ask(m.AbortUpdateArgs()).result["aborted"]) == 1
    h.runner.may_stage.set()
    h.turn(4)
    assert {h.reply(call).failure.code for call in calls} == {"session_not_found"}
    assert "aborted" in h.reply(calls[-1]).failure.message and h.runner.stagings[0].abandoned
    assert_serves(h, 0)
    assert h.update(folders / "w2").failure is None


def test_a_failing_engine_answers_every_call_of_a_session_once(folders):
    h = Harness()
    h.add("r", PROMPT, max_tokens=50)
    session = begin(h)
    h.runner.may_stage.clear()
    calls = [h.call(m.UpdateChunkArgs(session, m.FolderSource(str(folders / w)))) for w in ("w1", "w2")]
    calls += [h.call(m.CommitUpdateArgs(session)), h.call(m.WeightInfoArgs(checksums=True))]
    h.turn(2)
    h.runner.fail_next = True
    with pytest.raises(EngineError):
        h.engine.run()
    h.runner.may_stage.set()
    assert [h.reply(call).failure.code for call in calls] == ["engine_error"] * 4


def test_an_engine_that_stops_answers_an_open_commit_and_is_not_woken_afterwards(folders):
    h = Harness()
    woken = []
    h.transport.wake = lambda: woken.append(1)
    h.runner.may_stage.clear()
    call = h.call(m.UpdateWeightsArgs(m.FolderSource(str(folders / "w1"))))
    h.turn()
    h.engine.stop()
    woken.clear()
    h.engine.run()
    assert h.reply(call).failure.code == "engine_dead"
    h.runner.may_stage.set()
    for thread in threading.enumerate():
        if thread.name == "stage-weights":
            thread.join()
    assert not woken, "the transport is closed by now"


# ---------------------------------------------------------------------- sources


@pytest.mark.parametrize("name", ["", "/", "..", "a/b", "/a/b", "x\0y", "x" * 256])
def test_shared_memory_is_a_plain_name(name):
    h = Harness()
    refused = failure(h, m.UpdateWeightsArgs(m.SharedMemorySource(name)))
    assert (refused.code, refused.detail["param"]) == ("invalid_field", "shared_memory")


@pytest.mark.parametrize(("roots", "allowed"), [(("/",), True), (("/dev/shm",), True), (("/srv",), False), ((), False)])
def test_shared_memory_is_allowed_where_its_folder_is(roots, allowed):
    h = Harness(model_roots=roots)
    reply = h.ask(m.UpdateWeightsArgs(m.SharedMemorySource("/w1")), turns=3)
    assert (reply.failure is None) == allowed and h.runner.weights == int(allowed)
    if not allowed:
        assert reply.failure.detail["param"] == "shared_memory"


def test_shared_memory_has_no_negative_size():
    assert failure(Harness(), m.UpdateWeightsArgs(m.SharedMemorySource("w1", -1))).detail["param"] == "nbytes"


def test_an_upload_is_taken_from_the_upload_folder_and_is_no_way_around_the_roots(tmp_path):
    uploads, other = tmp_path / "uploads", tmp_path / "other"
    for folder in (uploads, other):
        folder.mkdir()
    (other / "fastdeploy-upload-secret").write_text("s")
    (uploads / "fastdeploy-upload-link").symlink_to(other / "fastdeploy-upload-secret")
    (uploads / "secret").write_text("s")
    h = Harness(model_roots=(), upload_dir=str(uploads))
    for path in (
        other / "fastdeploy-upload-secret",
        uploads / "fastdeploy-upload-link",
        uploads / "secret",
        uploads / ".." / "other" / "fastdeploy-upload-secret",
        uploads,
    ):
        refused = failure(h, m.UpdateWeightsArgs(m.FileSource(str(path))))
        assert refused.code == "invalid_field", path
    (uploads / "fastdeploy-upload-1").write_text("not a checkpoint of the fake's, but let in")
    refused = failure(h, m.UpdateWeightsArgs(m.FileSource(str(uploads / "fastdeploy-upload-1"))), turns=3)
    assert refused.code == "weight_update_refused"


def test_a_chunk_from_outside_the_roots_is_refused(folders):
    h = Harness(model_roots=(str(folders),))
    session = begin(h)
    refused = chunk(h, session, "/").failure
    assert (refused.code, refused.detail["param"]) == ("invalid_field", "model_path")


# ---------------------------------------------------------------------- in place


def test_in_place_needs_a_paused_engine(folders):
    h = Harness()
    for args in (
        m.BeginUpdateArgs(in_place=True),
        m.UpdateWeightsArgs(m.FolderSource(str(folders / "w1")), in_place=True),
    ):
        assert failure(h, args).code == "wrong_order"
    h.add("r", PROMPT, max_tokens=50)
    h.turn(3)
    h.call(m.PauseArgs(mode="wait"))
    h.turn()
    assert failure(h, m.BeginUpdateArgs(in_place=True)).code == "wrong_order", "draining is not paused"
    assert hold_ids(h) == ["anonymous-1"] and h.engine.weights.session is None


def test_an_update_in_place_holds_the_engine_until_it_is_committed_and_releases_only_its_own_hold(folders):
    h = Harness()
    h.add("r", PROMPT, max_tokens=20)
    h.turn(4)
    h.pause(mode="keep")
    session = begin(h, in_place=True)
    chunk(h, session, folders / "w1")
    assert h.resume().result["still_held_by"] == ["in_place"]
    refused = failure(h, m.ResumeArgs("in_place"))
    assert (refused.code, refused.detail["param"]) == ("resume_refused", "hold_id")
    seen = len(h.stream("r").tokens)
    h.turn(3)
    assert len(h.stream("r").tokens) == seen and h.status()["is_paused"]
    assert commit(h, session).failure is None
    assert hold_ids(h) == []
    h.run_out()
    assert {s.epoch for s in h.stream("r").spans} == {0, 1} and h.stream("r").reason == "length"
    h.pause(mode="keep", hold_id="mine")
    assert h.update(folders / "w2", in_place=True).failure is None
    assert hold_ids(h) == ["mine"], "an update never resumes"


def abort_it(h: Harness, session: str, folders) -> None:
    h.ask(m.AbortUpdateArgs(session))


def let_it_expire(h: Harness, session: str, folders) -> None:
    h.now += 301.0


def send_it_garbage(h: Harness, session: str, folders) -> None:
    chunk(h, session, folders / "garbage")


def reset_it(h: Harness, session: str, folders) -> None:
    h.ask(m.ResetArgs())


@pytest.mark.parametrize("fail", [abort_it, let_it_expire, send_it_garbage, reset_it])
@pytest.mark.parametrize("good", ["session", "one call", "beside"])
def test_after_a_failure_in_place_nothing_runs_until_a_good_commit(folders, fail, good):
    h = Harness()
    h.add("r", PROMPT, max_tokens=20)
    h.turn(4)
    h.pause(mode="keep")
    session = begin(h, in_place=True)
    chunk(h, session, folders / "w1")
    fail(h, session, folders)
    h.turn(3)
    h.resume()
    assert failure(h, m.ResumeArgs("in_place")).code == "resume_refused"
    h.add("later", PROMPT, max_tokens=5)
    h.turn(3)
    assert h.status()["is_paused"] and hold_ids(h) == ["in_place"] and not h.stream("later").tokens
    assert failure(h, m.BeginUpdateArgs(partial=True)).code == "wrong_order", "there is nothing that it could complete"
    assert failure(h, m.WeightInfoArgs(checksums=True)).code == "wrong_order"
    if good == "session":
        session = begin(h, in_place=True)
        chunk(h, session, folders / "w2")
        assert commit(h, session).failure is None
    else:
        assert h.update(folders / "w2", in_place=good == "one call").failure is None
    h.run_out()
    assert h.stream("later").tokens == expected_tokens(PROMPT, 5, weights=2) and not h.status()["is_paused"]


@pytest.mark.parametrize("fail", [abort_it, let_it_expire, reset_it])
def test_a_session_in_place_that_staged_nothing_gives_the_engine_back(folders, fail):
    h = paused()
    session = begin(h, in_place=True)
    fail(h, session, folders)
    h.turn(3)
    assert "in_place" not in hold_ids(h)
    h.resume()
    assert_serves(h, 0)


def test_the_end_of_one_session_in_place_does_not_release_the_hold_of_the_next(folders):
    h = paused()
    begin(h, in_place=True)
    h.call(m.AbortUpdateArgs())
    h.call(m.BeginUpdateArgs(in_place=True))
    h.turn(4)
    h.resume()
    assert hold_ids(h) == ["in_place"] and h.engine.weights.session.in_place


# ---------------------------------------------------------------------- label, reset, caches, info


def test_a_relabel_changes_no_past_span_no_kv_and_no_request(folders):
    """26"""
    h = Harness()
    h.add("r", list(range(1, 17)), n=2, max_tokens=12)
    h.turn(5)
    before = [len(h.stream("r", i).tokens) for i in range(2)]
    result = h.ask(m.SetVersionArgs("v9")).result
    assert (result["version"], result["epoch"], h.engine.epoch) == ("v9", 0, 0)
    h.run_out()
    for i, count in enumerate(before):
        stream = h.stream("r", i)
        assert stream.reason == "length" and stream.tokens == expected_tokens(list(range(1, 17)), 12)
        assert [s.version for s in stream.spans] == ["0"] * count + ["v9"] * (12 - count)
        assert {s.epoch for s in stream.spans} == {0} and not any(s.recomputed for s in stream.spans)
    h.add("again", list(range(1, 17)), max_tokens=2)
    h.run_out()
    assert h.stream("again").finals[0].finish_reason == "length" and h.engine.kv.hit_tokens >= 15


def test_a_relabel_of_a_paused_engine_leaves_it_paused():
    h = paused()
    h.ask(m.SetVersionArgs("v9"))
    assert h.status()["is_paused"] and h.status()["version"] == "v9"


def test_a_relabel_is_no_publication():
    h = Harness(lost_commit=True)
    h.ask(m.SetVersionArgs("v9"))
    assert hold_ids(h) == ["republish"]


def test_reset_aborts_all_drops_anonymous_holds_and_the_session_and_forgets_kv(folders):
    h = Harness()
    h.connect("b")
    prompt = list(range(1, 17))
    h.add("warm", prompt, max_tokens=2)
    h.run_out()
    h.add("mine", [1, 2], n=2, max_tokens=40)
    h.add("theirs", [3, 4], client="b", max_tokens=40)
    h.turn(3)
    h.pause(mode="keep")
    h.pause(mode="keep", hold_id="named")
    session = begin(h)
    chunk(h, session, folders / "w1")
    result = h.ask(m.ResetArgs(version="fresh")).result
    assert (result["aborted"], result["released"], result["sessions_aborted"]) == (2, ["anonymous-1"], [session])
    assert (result["version"], result["epoch"], result["still_held_by"]) == ("fresh", 0, ["named"])
    for stream in (h.stream("mine", 0), h.stream("mine", 1), h.stream("theirs", client="b")):
        assert stream.reason == "abort" and stream.tokens
    assert failure(h, m.CommitUpdateArgs(session)).code == "session_not_found"
    h.resume("named")
    hits = h.engine.kv.hit_tokens
    h.add("after", prompt, max_tokens=2)
    h.run_out()
    assert h.engine.kv.hit_tokens == hits, "its KV was forgotten"
    assert {s.version for s in h.stream("after").spans} == {"fresh"}


def test_reset_of_an_idle_engine_is_harmless_and_answers_a_pause_that_drains():
    h = Harness()
    assert h.ask(m.ResetArgs()).result["aborted"] == 0
    h.add("r", PROMPT, max_tokens=90)
    h.turn(3)
    call = h.call(m.PauseArgs(mode="wait"))
    h.turn()
    h.ask(m.ResetArgs())
    assert h.reply(call).failure.code == "pause_interrupted" and not h.status()["rejecting_new_requests"]
    assert_serves(h, 0)


@pytest.mark.parametrize("running", [False, True])
@pytest.mark.parametrize("pause", [None, "keep", "wait"])
def test_the_cache_is_reset_in_every_state_frozen_requests_or_not(running, pause):
    """29"""
    h = Harness()
    prompt = list(range(1, 17))
    h.add("r", prompt, max_tokens=12)
    h.turn(4)
    if pause == "keep":
        h.pause(mode="keep")
    elif pause == "wait":
        h.call(m.PauseArgs(mode="wait"))
        h.turn()
    computed = h.runner.computed_tokens
    result = h.ask(m.ResetCacheArgs(running=running)).result
    assert result == {"success": True, "requests_to_recompute": int(running)}
    assert h.status()["is_paused"] == (pause == "keep")
    h.resume()
    h.run_out()
    assert h.stream("r").tokens == expected_tokens(prompt, 12)
    recomputed = h.runner.computed_tokens - computed > 16
    assert recomputed == running, "KV of running requests goes if asked for, and only then"


def test_after_a_reset_no_request_matches_what_was_cached_before():
    h = Harness()
    prompt = list(range(1, 17))
    h.add("r", prompt, max_tokens=2)
    h.run_out()
    h.ask(m.ResetCacheArgs())
    h.add("after", prompt, max_tokens=2)
    h.run_out()
    assert h.engine.kv.hit_tokens == 0


def test_info_tells_the_session_and_checksums_are_computed_beside_steps(folders):
    h = Harness()
    begin(h, version="v1", partial=True, placed_by="sglang", lease_s=9.0)
    chunk(h, h.engine.weights.session.id, folders / "w1")
    h.now += 2.0
    info = h.ask(m.WeightInfoArgs()).result
    assert (info["version"], info["epoch"], info["boot_id"], info["asleep"]) == ("0", 0, "boot", [])
    told = info["session"]
    assert told["session_id"] == h.engine.weights.session.id and told["placed_by"] == "sglang"
    assert (told["version"], told["partial"], told["in_place"], told["state"]) == ("v1", True, False, "open")
    assert (told["tensors_received"], told["nbytes_received"], told["lease_left_s"]) == (3, 12, 7.0)
    h.runner.may_stage.clear()
    h.add("r", PROMPT, max_tokens=8)
    call = h.call(m.WeightInfoArgs(checksums=True))
    h.run_out()
    assert h.reply(call) is None and h.stream("r").reason == "length", "steps go on meanwhile"
    h.runner.may_stage.set()
    h.turn(2)
    one = hashlib.sha256(b"0").hexdigest()
    result = h.reply(call).result
    assert result["checksums"] == {"weights": one}
    assert result["checksum"] == hashlib.sha256(f"weights:{one}\n".encode()).hexdigest()


def test_checksums_of_weights_that_were_replaced_meanwhile_are_not_passed_off_as_those_that_serve(folders):
    h = Harness()
    h.runner.may_stage.clear()
    update = h.call(m.UpdateWeightsArgs(m.FolderSource(str(folders / "w1"))))
    call = h.call(m.WeightInfoArgs(checksums=True))
    h.turn(2)
    h.runner.may_stage.set()
    h.turn(6)
    assert h.reply(update).failure is None
    reply = h.reply(call)
    assert reply.failure is not None and reply.failure.code == "wrong_order"


def test_a_call_the_engine_does_not_know_is_an_error_and_not_its_end():
    h = Harness()
    del h.engine._on_call[m.ModelInfoArgs]
    assert failure(h, m.ModelInfoArgs()).code == "invalid_field"
    assert_serves(h, 0)


def test_the_fake_would_notice_a_step_without_whole_weights(folders):
    runner = FakeRunner()
    staging = runner.begin_update(partial=False, in_place=True)
    staging.add(m.FolderSource(str(folders / "w1")), {})
    with pytest.raises(AssertionError, match="without weights"):
        runner.execute(None)
