"""While sleeping weights are written to their file, or read back, the engine answers everything else."""

from __future__ import annotations

import pytest

from engine.weight_calls import assert_serves, begin, chunk, commit, hold_ids
from fastdeploy.core.errors import EngineError
from fastdeploy.core.weight_source import FolderSource
from fastdeploy.engine.staging_thread import MAX_LEFT_BEHIND
from fastdeploy.inter_communicator import messages as m
from support.fake_runner import expected_tokens
from support.harness import PROMPT, Harness, one_running

WAYS = ["write", "read"]


class Moving(Harness):
    """A harness whose weights are being written to their file, or read from it. call: of the sleep or wake-up."""

    def __init__(self, way: str, timeout_s: float = 60.0, **config):
        super().__init__(**config)
        self.way = way
        self.add("r", PROMPT, max_tokens=20)
        self.run_rounds(3)
        if way == "read":
            assert self.ask(m.SleepArgs(("weight",)), rounds=5).failure is None
        self.runner.may_stage.clear()
        self.call_id = self.call(m.SleepArgs(("weight",), timeout_s=timeout_s) if way == "write" else m.WakeArgs())
        self.run_rounds(4)
        assert self.runner.moves[-1].runs.wait(30)
        assert self.state == "begun" and self.reply(self.call_id) is None
        assert self.runner.has_weights == (way == "write")

    @property
    def state(self) -> str:
        return self.runner.moves[-1].state

    def goes_on(self) -> m.Reply:
        """Let the move end, and return the reply to the call."""
        self.runner.may_stage.set()
        self.join_staging()
        self.run_rounds(2)
        return self.reply(self.call_id)

    def assert_runs_on(self, done: int = 20) -> None:
        """Wake up if anything sleeps. Request "r" must end as if nothing had happened."""
        self.runner.may_stage.set()
        self.run_rounds(2)
        if self.runner.asleep:
            assert self.ask(m.WakeArgs(), rounds=5).failure is None
        assert not hold_ids(self)
        self.run_out()
        assert self.stream("r").tokens == expected_tokens(PROMPT, done) and self.stream("r").reason == "length"


@pytest.mark.parametrize("way", WAYS)
def test_the_loop_goes_on_while_weights_are_moved(way):
    h = Moving(way, heartbeat_s=1.0)
    before = len(h.sent(m.Heartbeat))
    for _ in range(5):
        h.now += 1.1
        assert h.ask(m.PauseStatusArgs()).result["is_paused"]
    assert len(h.sent(m.Heartbeat)) == before + 5
    h.add("held", [7, 8], max_tokens=2)
    h.run_rounds(2)
    assert h.rejected("held") is None and not h.stream("held").tokens
    assert h.ask(m.AbortArgs(["held"])).result["aborted"]
    assert h.ask(m.WeightInfoArgs()).result["asleep"] == ([] if way == "write" else ["weight"])
    assert h.goes_on().failure is None
    assert h.runner.asleep == ({"weight"} if way == "write" else set())
    h.assert_runs_on()


@pytest.mark.parametrize("way", WAYS)
def test_no_resume_and_no_reset_ends_a_move(way):
    h = Moving(way)
    h.pause(mode="keep")
    assert h.resume().result["still_held_by"] == ["sleep"]
    assert h.ask(m.ResumeArgs("sleep")).failure.code == "resume_refused"
    h.ask(m.ResetArgs())
    assert h.status()["is_paused"] and h.state == "begun"
    assert h.goes_on().failure is None
    if way == "write":
        h.ask(m.WakeArgs(), rounds=3)
    assert not hold_ids(h)
    assert_serves(h, 0)


# ---------------------------------------------------------------------- a write that fails


def test_a_sleep_that_times_out_while_it_writes_changes_nothing():
    h = Moving("write", timeout_s=5.0)
    assert h.engine.sleeper.next_deadline() == h.now + 5.0, "an idle loop wakes up at that time"
    h.now += 6.0
    h.run_rounds()
    reply = h.reply(h.call_id)
    assert reply.failure.code == "pause_timeout" and reply.result["asleep"] == [] and h.state == "abandoned"
    assert not hold_ids(h) and h.runner.has_weights
    assert h.ask(m.SleepArgs(("kv_cache",)), rounds=3).failure is None, "a sleep does not wait for the abandoned write"
    h.assert_runs_on()
    assert h.ask(m.SleepArgs(("weight",)), rounds=5).failure is None
    h.assert_runs_on()


def test_writes_that_hang_are_limited():
    h = Harness()
    h.runner.may_stage.clear()
    for _ in range(MAX_LEFT_BEHIND):
        call = h.call(m.SleepArgs(("weight",), timeout_s=1.0))
        h.run_rounds(3)
        assert h.runner.moves[-1].runs.wait(30)
        h.now += 1.5
        h.run_rounds()
        assert h.reply(call).failure.code == "pause_timeout" and not hold_ids(h)
    assert h.ask(m.SleepArgs(("weight",)), rounds=5).failure.code == "update_in_progress" and not hold_ids(h)
    h.runner.may_stage.set()
    h.join_staging()
    h.run_rounds()
    assert h.ask(m.SleepArgs(("weight",)), rounds=5).failure is None


def test_a_session_begun_while_the_weights_are_written_makes_the_sleep_fail():
    h = Moving("write")
    session = begin(h)
    assert h.goes_on().failure.code == "wrong_order" and h.state == "abandoned" and not h.runner.asleep
    chunk(h, session, "/w1")
    assert commit(h, session).failure is None and not hold_ids(h)
    assert_serves(h, 1)


@pytest.mark.parametrize("abort", [False, True])
def test_weights_that_were_committed_before_the_write_began_are_written(abort):
    h = Harness()
    h.runner.may_stage.clear()
    update = h.call(m.UpdateWeightsArgs(FolderSource("/w1")))
    h.run_rounds(2)
    assert h.ask(m.SleepArgs(("weight",))).failure.code == "wrong_order"
    if abort:
        h.ask(m.AbortUpdateArgs())
    sleeping = h.call(m.SleepArgs(("kv_cache",)))
    h.runner.may_stage.set()
    h.run_rounds(5)
    assert (h.reply(update).failure is None) != abort and h.reply(sleeping).failure is None
    assert h.ask(m.SleepArgs(("weight",)), rounds=5).failure is None
    h.ask(m.WakeArgs(), rounds=3)
    assert_serves(h, 0 if abort else 1)


# ---------------------------------------------------------------------- more calls meanwhile


def test_a_second_sleep_waits_for_the_first():
    h = Moving("write")
    same, other = (h.call(m.SleepArgs((tag,))) for tag in ("weight", "kv_cache"))
    h.run_rounds(3)
    assert h.reply(same) is None and h.reply(other) is None and len(h.runner.moves) == 1
    assert h.goes_on().failure is None
    assert h.reply(same).failure.code == "wrong_order" and h.reply(other).result["asleep"] == ["kv_cache", "weight"]
    assert len(h.runner.moves) == 1, "the weights are not written twice"
    h.assert_runs_on()


def test_a_wake_up_is_refused_until_the_weights_sleep():
    h = Moving("write")
    for args in (m.WakeArgs(), m.WakeArgs(("weight",)), m.WakeArgs(("kv_cache",))):
        refused = h.ask(args).failure
        assert refused.code == "wrong_order" and "when the sleep call is answered" in refused.message
    assert h.goes_on().failure is None
    h.assert_runs_on()


def test_kv_may_wake_up_while_the_weights_are_written():
    h = Harness()
    h.ask(m.SleepArgs(("kv_cache",)), rounds=5)
    h.runner.may_stage.clear()
    call = h.call(m.SleepArgs(("weight",)))
    h.run_rounds(3)
    assert h.ask(m.WakeArgs(("kv_cache",))).result["asleep"] == [] and hold_ids(h) == ["sleep"]
    h.runner.may_stage.set()
    h.run_rounds(3)
    assert h.reply(call).result["asleep"] == ["weight"]


def test_kv_wakes_up_at_once_while_new_weights_are_staged():
    h = Harness()
    h.ask(m.SleepArgs(("kv_cache",)), rounds=5)
    h.runner.may_stage.clear()
    update = h.call(m.UpdateWeightsArgs(FolderSource("/w1")))
    h.run_rounds(2)
    assert h.ask(m.WakeArgs()).result["asleep"] == [] and h.reply(update) is None
    h.runner.may_stage.set()
    h.run_rounds(3)
    assert_serves(h, 1)


def test_calls_during_a_wake_up_are_refused_or_wait_for_it():
    h = Moving("read")
    refused = [m.WakeArgs(), m.WakeArgs(("weight",)), m.SleepArgs(("weight",)), m.BeginUpdateArgs(),
               m.UpdateWeightsArgs(FolderSource("/w1"))]  # fmt: skip
    for args in refused:
        assert h.ask(args).failure.code == "wrong_order", args
    call = h.call(m.SleepArgs(("kv_cache",)))
    h.run_rounds(3)
    assert h.reply(call) is None and not h.runner.asleep & {"kv_cache"}
    woken = h.goes_on()
    assert woken.result["still_held_by"] == ["sleep"], "the other sleep shares the hold"
    assert h.reply(call).result["asleep"] == ["kv_cache"]
    h.assert_runs_on()


# ---------------------------------------------------------------------- a read that fails


def test_a_wake_up_that_hangs_is_given_up_and_may_be_repeated():
    h = Moving("read", stage_timeout_s=5.0)
    h.now += 6.0
    h.run_rounds()
    reply = h.reply(h.call_id)
    assert reply.failure.code == "staging_timeout" and reply.result["asleep"] == ["weight"]
    assert h.state == "abandoned" and hold_ids(h) == ["sleep"] and not h.runner.has_weights
    h.assert_runs_on()


@pytest.mark.parametrize("when", ["while reading", "for the cache"])
def test_a_wake_up_without_memory_is_answered_and_may_be_repeated(when):
    h = Moving("read")
    if when == "while reading":
        h.runner.no_space = True
    h.runner.may_stage.set()
    h.join_staging()
    h.runner.no_space = True
    h.run_rounds()
    assert h.reply(h.call_id).failure.code == "out_of_space" and h.state == "abandoned"
    assert h.runner.asleep == {"weight"} and hold_ids(h) == ["sleep"]
    h.runner.no_space = False
    h.assert_runs_on()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("error", "code"), [(EngineError("has ended"), "engine_error"), (RuntimeError("?"), "weight_update_refused")]
)
def test_a_move_that_raises_is_answered_and_changes_nothing(way, error, code, monkeypatch):
    h = Moving(way)

    def fails() -> None:
        raise error

    monkeypatch.setattr(h.runner.moves[-1], "check", fails)
    asleep = h.runner.asleep
    assert h.goes_on().failure.code == code and h.state == "abandoned"
    assert h.runner.asleep == asleep and h.status()["is_paused"] == (way == "read")
    h.assert_runs_on()


# ---------------------------------------------------------------------- the end of the engine


@pytest.mark.parametrize("way", WAYS)
def test_the_end_of_the_engine_answers_the_call_once_and_abandons_the_move(way):
    h = Moving(way)
    h.engine.stop()
    h.engine.run()
    h.runner.may_stage.set()
    assert h.reply(h.call_id).failure.code == "engine_dead" and h.state == "abandoned"


@pytest.mark.parametrize("way", WAYS)
def test_an_abort_of_all_requests_does_not_end_a_move(way):
    h = Moving(way)
    h.ask(m.PauseArgs("abort", hold_id="x"), rounds=5)
    assert h.stream("r").reason == "abort"
    assert h.goes_on().failure is None
    if way == "write":
        h.ask(m.WakeArgs(), rounds=3)
    h.resume("x")
    assert_serves(h, 0)


def test_a_sleep_that_discards_the_weights_writes_nothing():
    h = one_running()
    h.runner.may_stage.clear()
    assert h.ask(m.SleepArgs(discard=True), rounds=5).failure is None and not h.runner.moves
    assert h.ask(m.WakeArgs()).result["still_held_by"] == ["republish"]
