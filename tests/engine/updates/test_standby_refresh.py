"""The standby copy is brought up to the weights that serve after each commit, beside steps."""

from __future__ import annotations

from engine.weight_calls import OVERWRITE, base_of, begin, chunk, commit
from fastdeploy.core.weight_source import FolderSource
from fastdeploy.inter_communicator import messages as m
from support.fake_runner import fingerprint_of
from support.harness import PROMPT, Harness


def with_a_refresh_held_up() -> Harness:
    """Return a harness that has committed w1, and whose refresh waits until ``may_stage`` is set."""
    h = Harness()
    call = h.call(m.UpdateWeightsArgs(FolderSource("/w1")))
    h.run_rounds()
    h.runner.may_stage.clear()
    h.run_rounds()
    assert h.reply(call).failure is None and h.engine.weights.thread.busy and h.runner.refreshes == 0
    return h


def test_a_refresh_of_the_standby_copy_follows_each_commit_beside_steps_and_later_parts_wait_for_it():
    h = with_a_refresh_held_up()
    h.add("r", PROMPT, max_tokens=5)
    session = begin(h, base=base_of(1), fingerprint=fingerprint_of(5), lease_s=5.0)
    part = h.call(m.UpdatePartArgs(session, FolderSource("/d4"), form=OVERWRITE))
    h.run_out()
    h.now += 1000.0
    h.run_rounds()
    assert h.stream("r").reason == "length" and h.reply(part) is None
    h.runner.may_stage.set()
    h.run_rounds(4)
    assert h.reply(part).failure is None and h.runner.refreshes == 1
    assert commit(h, session).failure is None
    h.run_rounds(2)
    assert h.runner.refreshes == 2 and h.ask(m.WeightInfoArgs()).result["standby_nbytes"] > 0


def test_a_refused_update_is_followed_by_no_refresh():
    h = Harness()
    assert h.update("/bad").failure is not None and h.update("/w1", fingerprint=fingerprint_of(2)).failure is not None
    h.run_rounds(3)
    assert h.runner.refreshes == 0


def test_a_refresh_that_fails_is_logged_and_nothing_else(caplog):
    h = Harness()
    h.runner.no_space = True
    assert h.update("/w1").failure is None
    h.run_rounds(2)
    assert h.runner.refreshes == 0 and "standby copy" in caplog.text
    session = begin(h, base=base_of(1), fingerprint=fingerprint_of(3))
    chunk(h, session, "/d2", form=OVERWRITE)
    assert commit(h, session).failure is None


def test_a_sleep_right_after_a_commit_waits_for_the_refresh():
    """The fake runner refuses a refresh of weights that sleep."""
    h = with_a_refresh_held_up()
    sleep, late = h.call(m.SleepArgs()), h.call(m.SleepArgs(timeout_s=1.0))
    h.run_rounds(3)
    h.now += 2.0
    h.run_rounds()
    assert h.reply(sleep) is None and h.reply(late).failure.code == "pause_timeout"
    h.runner.may_stage.set()
    h.run_rounds(3)
    assert h.reply(sleep).failure is None and h.runner.refreshes == 1
    assert h.ask(m.WeightInfoArgs()).result["standby_nbytes"] == 0


def test_a_reset_and_an_abort_leave_a_refresh_alone():
    h = with_a_refresh_held_up()
    assert h.ask(m.ResetArgs()).result["sessions_aborted"] == []
    assert h.ask(m.AbortUpdateArgs()).result == {"aborted": []}
    h.runner.may_stage.set()
    h.run_rounds(2)
    assert h.runner.refreshes == 1


def test_an_engine_that_stops_does_not_wait_for_a_refresh(caplog):
    h = with_a_refresh_held_up()
    h.engine.stop()
    h.engine.run()
    assert not h.engine.weights.thread.busy and "standby copy" not in caplog.text
    h.runner.may_stage.set()
    h.join_staging()
