"""Updates in place: there is one copy of the weights, and no step runs while that copy is incomplete."""

from __future__ import annotations

import pytest

from engine.weight_calls import assert_serves, begin, chunk, commit, hold_ids, paused
from fastdeploy.core.weight_source import FolderSource
from fastdeploy.inter_communicator import messages as m
from support.fake_runner import FakeRunner, expected_tokens
from support.harness import PROMPT, Harness, one_running


def test_in_place_needs_a_paused_engine():
    h = Harness()
    for args in (m.BeginUpdateArgs(in_place=True), m.UpdateWeightsArgs(FolderSource("/w1"), in_place=True)):
        assert h.failure(args).code == "wrong_order"
    h.add("r", PROMPT, max_tokens=50)
    h.run_rounds(3)
    h.call(m.PauseArgs(mode="wait"))
    h.run_rounds()
    assert h.failure(m.BeginUpdateArgs(in_place=True)).code == "wrong_order", "draining is not paused"
    assert hold_ids(h) == ["anonymous-1"] and h.engine.weights.session is None


def half_updated() -> tuple[Harness, str]:
    """Return a paused harness with a frozen request "r", and its session in place that has staged a part."""
    h = one_running(rounds=4)
    h.pause(mode="keep")
    session = begin(h, in_place=True)
    chunk(h, session, "/w1")
    return h, session


def test_an_update_in_place_holds_the_engine_until_its_commit_and_releases_only_its_own_hold():
    h, session = half_updated()
    assert h.resume().result["still_held_by"] == ["in_place"]
    refused = h.failure(m.ResumeArgs("in_place"))
    assert (refused.code, refused.detail["param"]) == ("resume_refused", "hold_id")
    seen = len(h.stream("r").tokens)
    h.run_rounds(3)
    assert len(h.stream("r").tokens) == seen and h.status()["is_paused"]
    assert commit(h, session).failure is None
    assert hold_ids(h) == []
    h.run_out()
    assert {s.weight_epoch for s in h.stream("r").spans} == {0, 1} and h.stream("r").reason == "length"
    h.pause(mode="keep", hold_id="mine")
    assert h.update("/w2", in_place=True).failure is None
    assert hold_ids(h) == ["mine"], "an update releases no hold of a client"


def end(h: Harness, session: str, how: str) -> None:
    """End a session without a commit."""
    match how:
        case "abort":
            h.ask(m.AbortUpdateArgs(session))
        case "expire":
            h.now += 301.0
        case "garbage":
            chunk(h, session, "/garbage")
        case "reset":
            h.ask(m.ResetArgs())


@pytest.mark.parametrize("how", ["abort", "expire", "garbage", "reset"])
@pytest.mark.parametrize("good", ["session", "one call", "beside"])
def test_after_a_failed_update_in_place_no_step_runs_until_the_next_commit(how, good):
    h, session = half_updated()
    end(h, session, how)
    h.run_rounds(3)
    h.resume()
    assert h.failure(m.ResumeArgs("in_place")).code == "resume_refused"
    h.add("later", PROMPT, max_tokens=5)
    h.run_rounds(3)
    assert h.status()["is_paused"] and hold_ids(h) == ["in_place"] and not h.stream("later").tokens
    assert h.failure(m.BeginUpdateArgs(partial=True)).code == "wrong_order", "a partial update needs whole weights"
    assert h.failure(m.WeightInfoArgs(checksums=True)).code == "wrong_order"
    if good == "session":
        session = begin(h, in_place=True)
        chunk(h, session, "/w2")
        assert commit(h, session).failure is None
    else:
        assert h.update("/w2", in_place=good == "one call").failure is None
    h.run_out()
    assert h.stream("later").tokens == expected_tokens(PROMPT, 5, weights=2) and not h.status()["is_paused"]


@pytest.mark.parametrize("how", ["abort", "expire", "reset"])
def test_a_session_in_place_that_staged_nothing_releases_its_hold_at_its_end(how):
    h = paused()
    end(h, begin(h, in_place=True), how)
    h.run_rounds(3)
    assert "in_place" not in hold_ids(h)
    h.resume()
    assert_serves(h, 0)


def test_the_end_of_one_session_in_place_does_not_release_the_hold_of_the_next():
    h = paused()
    begin(h, in_place=True)
    h.call(m.AbortUpdateArgs())
    h.call(m.BeginUpdateArgs(in_place=True))
    h.run_rounds(4)
    h.resume()
    assert hold_ids(h) == ["in_place"] and h.engine.weights.session.begin.in_place


def test_the_fake_runner_refuses_a_step_without_whole_weights():
    runner = FakeRunner()
    staging = runner.begin_update(partial=False, in_place=True)
    staging.add(FolderSource("/w1"), {})
    with pytest.raises(AssertionError, match="without weights"):
        runner.execute(None)
