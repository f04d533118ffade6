"""Uploads that the engine reads while they arrive: the session waits for them, and they end with their API server."""

from __future__ import annotations

import pytest

from engine.weight_calls import assert_serves, begin, chunk, commit, hold_ids, paused
from fastdeploy.core.weight_source import DeltaBase, FileSource, StreamSource
from fastdeploy.inter_communicator import messages as m
from support.fake_runner import fingerprint_of
from support.harness import Harness

PATH = "/dev/shm/fastdeploy-upload-w5"


def piece(
    h: Harness, session: str, start: int, nbytes: int, state: str = "open", client: str = "a", name: str = "u-1", **more
) -> m.Reply:
    source = StreamSource(name, more.pop("path", PATH), 0, nbytes, start, state)
    return h.ask(m.UpdateChunkArgs(session, source, **more), client=client, rounds=2)


def code(reply: m.Reply) -> str | None:
    return None if reply.failure is None else reply.failure.code


@pytest.fixture
def h() -> Harness:
    harness = Harness()
    harness.connect("b")
    return harness


def test_the_tensors_of_an_upload_arrive_with_its_last_piece(h):
    session = begin(h, version="5")
    assert piece(h, session, 0, 0).result["tensors_received"] == 0
    assert piece(h, session, 0, 100).result["tensors_received"] == 0
    done = piece(h, session, 100, 7, "complete").result
    assert (done["tensors"], done["nbytes"], done["tensors_received"]) == (3, 12, 3)
    assert commit(h, session).result["version"] == "5"
    assert_serves(h, 5)


def test_the_lease_does_not_run_while_an_upload_is_received(h):
    session = begin(h, lease_s=10.0)
    piece(h, session, 0, 0)
    for _ in range(3):
        h.now += 60
        h.run_rounds()
    assert code(piece(h, session, 0, 5, "complete")) is None
    h.now += 9
    h.run_rounds()
    assert h.ask(m.WeightInfoArgs()).result["session"]["session_id"] == session
    h.now += 2
    h.run_rounds()
    assert code(commit(h, session)) == "session_expired"


@pytest.mark.parametrize("upload", ["complete", "broken"])
def test_a_session_is_not_committed_while_an_upload_is_received(h, upload):
    session = begin(h)
    chunk(h, session, "/w3")
    piece(h, session, 0, 5)
    refused = commit(h, session)
    assert code(refused) == "wrong_order" and "upload" in refused.failure.message
    piece(h, session, 5, 0, upload)
    assert code(commit(h, session)) is None
    assert_serves(h, 5 if upload == "complete" else 3)


def test_an_upload_that_breaks_off_leaves_the_session_open_and_may_come_again(h):
    session = begin(h, lease_s=10.0)
    piece(h, session, 0, 5)
    assert code(piece(h, session, 5, 0, "broken")) is None
    assert h.runner.stagings[-1].pieces[-1].state == "broken"
    h.now += 9
    piece(h, session, 0, 9, "complete", name="u-2")
    assert code(commit(h, session)) is None
    assert_serves(h, 5)


def test_two_uploads_may_be_received_at_the_same_time(h):
    session = begin(h)
    piece(h, session, 0, 5, name="u-1")
    piece(h, session, 0, 5, name="u-2", client="b", path=PATH.replace("w5", "w6"))
    piece(h, session, 5, 5, "complete", name="u-1")
    assert code(commit(h, session)) == "wrong_order"
    piece(h, session, 5, 5, "complete", name="u-2", client="b", path=PATH.replace("w5", "w6"))
    assert code(commit(h, session)) is None
    assert_serves(h, 6)


@pytest.mark.parametrize(
    ("start", "state", "client"),
    [(0, "open", "a"), (4, "open", "a"), (6, "complete", "a"), (5, "open", "b"), (5, "broken", "b")],
)
def test_a_piece_out_of_order_is_refused_and_the_upload_can_go_on(h, start, state, client):
    session = begin(h)
    piece(h, session, 0, 5)
    assert code(piece(h, session, start, 3, state, client)) == "wrong_order"
    assert code(piece(h, session, 5, 3, "complete")) is None
    assert code(commit(h, session)) is None


def test_an_upload_that_was_not_begun_is_refused(h):
    session = begin(h)
    assert code(piece(h, session, 9, 5)) == "wrong_order"
    assert not h.runner.stagings[-1].pieces and code(piece(h, "weights-x", 0, 5)) == "session_not_found"


@pytest.mark.parametrize("fields", [{"path": "/etc/passwd"}, {"nbytes": -1}, {"start": -1}])
def test_a_piece_that_no_api_server_has_written_is_refused(h, fields):
    session = begin(h)
    fields = {"start": 0, "nbytes": 5} | fields
    assert code(piece(h, session, **fields)) == "invalid_field"
    assert not h.runner.stagings[-1].pieces


def test_the_session_can_be_aborted_while_an_upload_is_received(h):
    session = begin(h)
    piece(h, session, 0, 5)
    assert h.ask(m.AbortUpdateArgs(session)).result == {"aborted": [session]}
    assert code(piece(h, session, 5, 5)) == "session_not_found"
    assert code(h.ask(m.BeginUpdateArgs())) is None
    assert_serves(h, 0)


def lose(h: Harness, client: str) -> None:
    h.transport.gone.add(client)
    h.now += 5  # the next heartbeat finds out
    h.run_rounds(3)


def test_an_upload_breaks_off_when_its_api_server_dies_and_the_lease_runs_again(h):
    session = begin(h, lease_s=10.0)
    piece(h, session, 0, 5, client="b")
    piece(h, session, 0, 5, name="u-2")
    lose(h, "b")
    assert h.runner.stagings[-1].pieces[-1] == StreamSource("u-1", "", 0, 0, 5, "broken")
    assert code(commit(h, session)) == "wrong_order", "the upload of the other API server goes on"
    assert code(piece(h, session, 5, 5, "complete", name="u-2")) is None
    h.now += 11
    h.run_rounds()
    assert code(commit(h, session)) == "session_expired"


@pytest.mark.parametrize("in_place", [False, True])
def test_a_session_of_one_call_ends_with_its_api_server(in_place):
    h = paused() if in_place else Harness()
    h.connect("b")
    args = m.BeginUpdateArgs(in_place=in_place, ends_with_client=True)
    session = h.ask(args, client="b").result["session_id"]
    piece(h, session, 0, 5, client="b")
    assert code(h.ask(m.BeginUpdateArgs())) == "update_in_progress"
    lose(h, "b")
    assert h.ask(m.WeightInfoArgs()).result["session"] is None
    assert "in_place" not in hold_ids(h), "no tensor has arrived: the old weights are whole"
    assert code(commit(h, session)) == "session_not_found"


def test_a_session_of_one_call_whose_api_server_dies_in_the_commit_is_committed(h):
    """As an update of another source in one call."""
    session = h.ask(m.BeginUpdateArgs(ends_with_client=True), client="b").result["session_id"]
    piece(h, session, 0, 5, "complete", client="b")
    h.runner.may_stage.clear()
    h.call(m.CommitUpdateArgs(session), client="b")
    h.run_rounds()
    lose(h, "b")
    h.runner.may_stage.set()
    h.run_rounds(3)
    assert_serves(h, 5)


def test_a_session_of_one_call_stays_when_another_api_server_dies(h):
    session = begin(h, ends_with_client=True)
    lose(h, "b")
    assert code(piece(h, session, 0, 5, "complete")) is None and code(commit(h, session)) is None


BASE = DeltaBase(fingerprint_of(0))


@pytest.mark.parametrize(
    ("args", "streams"),
    [
        ({}, True),
        ({"partial": True}, True),
        ({"in_place": True}, True),
        ({"in_place": True, "partial": True}, False),
        ({"base": BASE, "fingerprint": fingerprint_of(5)}, False),
    ],
    ids=str,
)
def test_an_upload_may_come_as_a_stream_unless_its_memory_holds_values_that_must_stay(args, streams):
    """The uploads of other sessions are read as a whole, and an empty stream stops the lease meanwhile."""
    h = paused()
    assert h.ask(m.CheckUpdateArgs(begin=m.BeginUpdateArgs(**args))).result == {"session_id": None, "streams": streams}
    session = begin(h, lease_s=10.0, **args)
    assert h.ask(m.CheckUpdateArgs(session)).result == {"session_id": session, "streams": streams}
    assert code(piece(h, session, 0, 0)) is None
    h.now += 60
    h.run_rounds()
    if streams:
        assert code(piece(h, session, 0, 5, "complete")) is None
    else:
        assert code(piece(h, session, 0, 5)) == "invalid_field"
        source = FileSource(PATH.replace("w5", "d5") if "base" in args else PATH)
        assert code(h.ask(m.UpdateChunkArgs(session, source), rounds=2)) is None
        assert code(piece(h, session, 0, 0, "broken")) is None
        assert not h.runner.stagings[-1].pieces
    assert code(commit(h, session)) is None
    h.resume()
    assert_serves(h, 5)


def test_the_check_of_a_part_names_the_open_session_of_the_same_opener(h):
    session = begin(h, placed_by="vllm")
    for name, found in (("vllm", session), ("native", None)):
        reply = h.ask(m.CheckUpdateArgs(placed_by=name))
        assert (reply.result.get("session_id"), code(reply)) == (found, None if found else "update_in_progress")
