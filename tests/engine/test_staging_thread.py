"""Reads of weights that hang: time-outs, and threads that come back late."""

from __future__ import annotations

import threading

import pytest

from engine.weight_calls import assert_serves, begin, chunk, commit, hold_ids
from fastdeploy.core.config import UPLOAD_PREFIX
from fastdeploy.core.runner import AdapterInfo
from fastdeploy.core.weight_source import PLAIN, FileSource, FolderSource, SharedMemorySource
from fastdeploy.engine.common_engine import STAGING_REST
from fastdeploy.engine.staging_thread import MAX_LEFT_BEHIND, THREAD_NAME
from fastdeploy.inter_communicator import messages as m
from support.fake_runner import FakeAdapterStaging, FakeRunner, FakeStaging, Packed
from support.harness import Harness


class HangingStaging(FakeStaging):
    """Hangs in the first read of the folder "/dead" until the runner is mended."""

    def add(self, source, checksums, verify_checksum=False, form=PLAIN):
        if isinstance(source, FolderSource) and source.path.endswith("dead"):
            self._runner.hang()
        return super().add(source, checksums, verify_checksum, form)


class HangingRunner(FakeRunner):
    """hanging_checksums: whether checksums hang as well. hanging: ids of the threads that hang."""

    def __init__(self):
        super().__init__()
        self.mended = threading.Event()
        self.hanging_checksums = False
        self.hanging: set[int] = set()

    def hang(self) -> None:
        self.hanging.add(threading.get_ident())
        assert self.mended.wait(60)

    def begin_update(self, partial, delta=False):
        self.stagings.append(HangingStaging(self, partial))
        return self.stagings[-1]

    def checksums(self):
        if self.hanging_checksums:
            self.hang()
        return super().checksums()


class HangingHarness(Harness):
    """Waits after each round for the staging threads that do not hang."""

    def join_staging(self) -> None:
        runner = self.runner
        for thread in threading.enumerate():
            while thread.name == THREAD_NAME and thread.is_alive() and thread.ident not in runner.hanging:
                thread.join(0.01)

    def mend(self) -> None:
        """Let all hanging reads return."""
        self.runner.mended.set()
        self.runner.hanging.clear()
        self.join_staging()


@pytest.fixture
def h():
    h = HangingHarness(HangingRunner(), stage_timeout_s=60.0)
    yield h
    h.mend()


def hang(h: Harness, **args) -> int:
    call = h.call(m.UpdateWeightsArgs(FolderSource("/dead"), **args))
    h.run_rounds()
    return call


def hang_in_checksums(h: Harness) -> int:
    h.runner.hanging_checksums = True
    call = h.call(m.WeightInfoArgs(checksums=True))
    h.run_rounds()
    return call


def test_an_idle_loop_wakes_up_at_the_time_out_of_a_job_or_the_end_of_a_lease_whichever_is_first(h):
    begin(h, lease_s=100.0)
    lease_ends = h.now + 100.0
    assert h.engine.weights.next_deadline() == lease_ends
    hang_in_checksums(h)
    assert h.engine.weights.next_deadline() == h.now + 60.0 < lease_ends
    h.mend()


def test_an_update_that_hangs_times_out_and_the_next_one_has_a_thread_of_its_own(h):
    call = hang(h)
    assert h.engine.weights.next_deadline() == h.now + 60.0, "an idle loop wakes up at that time"
    h.now += 59.0
    h.run_rounds()
    assert h.reply(call) is None
    h.now += 2.0
    h.run_rounds()
    reply = h.reply(call)
    assert reply.failure.code == "staging_timeout" and "60 s" in reply.failure.message
    assert (reply.result["version"], reply.result["weight_epoch"]) == ("0", 0)
    assert_serves(h, 0)
    assert h.update("/w1").failure is None
    assert_serves(h, 1)
    h.mend()
    h.run_rounds(2)
    assert h.runner.stagings[0].names == [], "a read that ends late adds nothing"
    assert_serves(h, 1)


def test_a_call_may_set_the_timeout_of_its_update_or_session(h):
    call = hang(h, timeout_s=3.0)
    h.now += 3.5
    h.run_rounds()
    assert h.reply(call).failure.code == "staging_timeout"
    session = begin(h, timeout_s=5.0)
    first = h.call(m.UpdatePartArgs(session, FolderSource("/dead")))
    second = h.call(m.UpdatePartArgs(session, FolderSource("/w1")))
    h.run_rounds()
    h.now += 5.5
    h.run_rounds(2)
    assert h.reply(first).failure.code == h.reply(second).failure.code == "staging_timeout"
    assert commit(h, session).failure.code == "staging_timeout", "later calls name the reason of the end"
    session = begin(h)
    assert chunk(h, session, "/w2").failure is None and commit(h, session).failure is None
    assert_serves(h, 2)


def test_the_loop_rests_after_each_step_while_new_weights_are_staged_and_only_then(h):
    h.runner.step_s = 0.1
    h.add("r", [1] * 8, max_tokens=50)
    h.run_rounds(2)
    assert h.engine._idle_time() == 0.0
    hang(h)
    assert h.engine._idle_time() == pytest.approx(0.1 * STAGING_REST), "a share of the last step"
    assert h.engine._idle_time() == 0.0, "once for each step"
    h.runner.step_s = 0.2
    h.run_rounds()
    assert h.engine._idle_time() == pytest.approx(0.2 * STAGING_REST)
    h.runner.step_s = 0.1
    h.run_rounds()
    h.mend()
    h.run_rounds(2)
    assert h.engine.weights.session is None and h.engine.scheduler.has_work
    assert h.engine._idle_time() == 0.0


def test_rests_of_short_steps_add_up_to_whole_milliseconds(h):
    h.runner.step_s = 0.00042 / STAGING_REST
    h.add("r", [1] * 8, max_tokens=50)
    hang(h)
    rests = []
    for _ in range(10):
        h.run_rounds()
        rests.append(round(h.engine._idle_time() * 1000, 9))
    assert set(rests) == {0.0, 1.0} and 3.0 <= sum(rests) <= 4.0


def test_the_loop_does_not_rest_for_other_work_of_the_staging_thread(h):
    h.runner.step_s = 0.1
    h.add("r", [1] * 8, max_tokens=50)
    h.run_rounds(2)
    hang_in_checksums(h)
    assert h.engine.weights.thread.busy
    assert h.engine._idle_time() == 0.0


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan"), 1e9])
def test_an_invalid_timeout_is_refused(h, timeout_s):
    update = m.UpdateWeightsArgs(FolderSource("/w1"), timeout_s=timeout_s)
    for args in (m.BeginUpdateArgs(timeout_s=timeout_s), update):
        h.assert_refused(args, "timeout_s")


@pytest.mark.parametrize("how", [m.AbortUpdateArgs(), m.ResetArgs()])
def test_an_abort_or_a_reset_ends_an_update_that_hangs_at_once(h, how):
    call = hang(h)
    h.ask(how)
    assert h.reply(call).failure.code == "session_not_found"
    assert h.update("/w1").failure is None
    assert_serves(h, 1)


def test_the_number_of_reads_that_hang_is_limited(h):
    for _ in range(MAX_LEFT_BEHIND):
        call = hang(h, timeout_s=1.0)
        h.now += 2.0
        h.run_rounds(2)
        assert h.reply(call).failure.code == "staging_timeout"
    update = m.UpdateWeightsArgs(FolderSource("/w1"))
    refused = h.failure(update)
    assert refused.code == "update_in_progress" and "4 reads" in refused.message
    assert h.ask(m.WeightInfoArgs()).result["session"] is None
    assert_serves(h, 0)
    session = begin(h)
    assert chunk(h, session, "/w1").failure.code == "update_in_progress"
    assert h.ask(m.UpdatePartArgs(session, SharedMemorySource("w2", 12)), rounds=2).failure is None
    assert commit(h, session).failure is None, "shared memory does not count as a folder"
    assert h.ask(m.WeightInfoArgs(checksums=True), rounds=2).failure is None
    assert_serves(h, 2)
    upload = FileSource(f"/dev/shm/{UPLOAD_PREFIX}w3")
    assert h.ask(m.UpdateWeightsArgs(upload), rounds=3).failure is None, "an upload cannot hang"
    assert_serves(h, 3)
    h.mend()
    h.run_rounds()
    assert h.update("/w1").failure is None
    assert_serves(h, 1)


@pytest.mark.parametrize("tags", [(), ("weight",), ("kv_cache",)], ids=str)
def test_a_sleep_that_waits_for_a_read_times_out_and_releases_its_hold(h, tags):
    checksums = hang_in_checksums(h)
    h.add("r", [1, 2, 3], max_tokens=60)
    h.run_rounds(3)
    call = h.call(m.SleepArgs(tags, timeout_s=2.0))
    h.run_rounds(3)
    assert h.reply(call) is None and hold_ids(h) == ["sleep"]
    assert h.engine.sleeper.next_deadline() == h.now + 2.0, "an idle loop wakes up at that time"
    h.now += 2.5
    h.run_rounds()
    reply = h.reply(call)
    assert reply.failure.code == "pause_timeout" and reply.result["asleep"] == [] and not h.runner.asleep
    assert not hold_ids(h) and not h.status()["rejecting_new_requests"]
    h.run_out()
    assert h.stream("r").reason == "length"
    assert h.ask(m.WakeArgs(), rounds=3).failure.code == "wrong_order", "nothing sleeps"
    h.now += 60.0
    h.run_rounds(2)
    assert h.reply(checksums).failure.code == "staging_timeout"
    assert h.ask(m.SleepArgs(tags), rounds=3).failure is None, "a sleep does not wait for a read that timed out"
    h.ask(m.WakeArgs(), rounds=3)
    assert_serves(h, 0)


def test_if_one_of_two_waiting_sleeps_times_out_the_hold_of_the_other_stays(h):
    hang_in_checksums(h)
    short, long = (h.call(m.SleepArgs((tag,), timeout_s=s)) for tag, s in (("weight", 2.0), ("kv_cache", 30.0)))
    h.run_rounds(3)
    h.now += 3.0
    h.run_rounds()
    assert h.reply(short).failure.code == "pause_timeout" and h.reply(long) is None and hold_ids(h) == ["sleep"]
    h.mend()
    h.run_rounds(3)
    assert h.reply(long).result["asleep"] == ["kv_cache"] and hold_ids(h) == ["sleep"]
    h.ask(m.WakeArgs(), rounds=3)
    assert not hold_ids(h)
    assert_serves(h, 0)


def test_a_sleep_that_waits_for_a_hanging_read_goes_on_after_a_reset(h):
    hanging = hang(h)
    call = h.call(m.SleepArgs(("kv_cache",), timeout_s=30.0))
    h.run_rounds(3)
    assert h.reply(call) is None
    h.ask(m.ResetArgs())
    h.run_rounds(3)
    assert h.reply(hanging).failure.code == "session_not_found" and h.reply(call).result["asleep"] == ["kv_cache"]
    h.ask(m.WakeArgs(), rounds=3)
    assert not hold_ids(h)
    assert_serves(h, 0)


class LateStaging(FakeAdapterStaging):
    def read(self, path: str) -> AdapterInfo:
        self._packed = Packed(2, True)
        assert self._runner.may_stage.wait(30)
        return AdapterInfo(8, 1000, "f")


def test_an_adapter_that_was_read_too_late_is_discarded_at_the_runner():
    h, discarded = Harness(), []
    h.runner.discard_adapter = discarded.append
    h.load_adapter("a", 1)
    load = h.call(m.LoadAdapterArgs("a", h.adapter_folder("a2")))
    h.run_rounds()  # the copy is made
    h.runner.begin_adapter = lambda: LateStaging(h.runner)
    h.runner.may_stage.clear()
    h.run_rounds()  # the read begins, and hangs
    assert h.unload_adapter("a").failure is None and h.reply(load).failure is not None
    h.runner.may_stage.set()
    h.join_staging()
    assert discarded == []
    h.run_rounds()
    assert [packed.content for packed in discarded] == [2]
