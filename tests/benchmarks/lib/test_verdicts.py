"""Every verdict, on a correct timeline and on the same timeline with one defect.

The load: 2 running and 3 waiting streams, a token every 0.1 s from t=1; paused at t=6 (reply 6.05), resumed at t=9.
"""

from __future__ import annotations

import pytest

from benchmarks.lib.dialect import Gauges
from benchmarks.lib.timeline import StreamLog, TokenEvent
from benchmarks.lib.verdicts import Check, PauseRun, judge_abort, judge_after, judge_keep, judge_texts, judge_wait

REFUSAL = '{"error": {"message": "paused", "type": "rejecting_new_requests", "code": "rejecting_new_requests"}}'
IDLE = Gauges(0, 0, 100, 0.0)
CALLED, REPLIED, RESUMED = 6.0, 6.05, 9.0
MAX_TOKENS = 200


def stream(name: str, times: list[float], end: float, reason: str, token: int = 5) -> StreamLog:
    tokens = [TokenEvent(at, [token + i], chr(97 + i % 26)) for i, at in enumerate(times)]
    return StreamLog(name, 0.5, 200, tokens, [(end, reason)], done_markers=1, closed_at=end)


def steps(start: float, end: float) -> list[float]:
    return [start + 0.1 * i for i in range(round((end - start) / 0.1))]


def refused(at: float) -> StreamLog:
    return StreamLog("probe", at, 503, error=REFUSAL, headers={"retry-after": "1"}, closed_at=at + 0.01)


def run_of(mode: str, streams: list[StreamLog], probes: list[StreamLog], **changes) -> PauseRun:
    fields = {
        "scenario": mode,
        "running": 2,
        "complete_tokens": MAX_TOKENS,
        "streams": streams,
        "steady_at": 3.0,
        "called_at": CALLED,
        "replied_at": REPLIED,
        "resume_called_at": RESUMED,
        "resume_replied_at": RESUMED + 0.01,
        "before": IDLE,
        "loaded": Gauges(2, 3, 80, 0.2),
        "paused": IDLE,
        "probes": probes,
    }
    return PauseRun(**fields | changes)


def aborted() -> PauseRun:
    running = [stream(f"run{i}", steps(1.0, 6.0), 6.04, "abort") for i in range(2)]
    waiting = [stream(f"wait{i}", [], 6.04, "abort") for i in range(3)]
    return run_of("abort", running + waiting, [refused(7.0)])


def kept() -> PauseRun:
    times = steps(1.0, 6.0) + steps(9.1, 11.0)
    running = [stream(f"run{i}", times, 11.1, "abort") for i in range(2)]
    waiting = [stream(f"wait{i}", [], 11.1, "abort") for i in range(3)]
    return run_of("keep", running + waiting, [StreamLog("probe", 7.0, 200)], paused=Gauges(2, 3, 80, 0.2))


def waited() -> PauseRun:
    running = [stream(f"run{i}", steps(1.0, 8.0), 8.0, "length") for i in range(2)]
    waiting = [stream(f"wait{i}", steps(9.1, 16.1), 16.1, "length") for i in range(3)]
    return run_of(
        "wait",
        running + waiting,
        [refused(8.2)],
        complete_tokens=70,
        replied_at=8.05,
        window_probe=refused(6.2),
        window_seen_at=6.1,
    )


def wrong(checks: list[Check]) -> str:
    return "; ".join(check.promise for check in checks if check.ok is False)


def test_the_timelines_that_are_right_pass():
    for judge, run in ((judge_abort, aborted()), (judge_keep, kept()), (judge_wait, waited())):
        checks = judge(run, rejects=True)
        assert [check for check in checks if not check.ok] == []


def test_pause_times_are_counted_in_steps():
    run = aborted()
    assert run.step_s == pytest.approx(0.1)
    assert run.pause_steps == pytest.approx(0.5)
    assert run.answered_s == pytest.approx(0.04)
    run.streams[4].finals, run.streams[4].closed_at = [], 6.3
    assert run.answered_s == pytest.approx(0.3)


def test_a_token_in_the_keep_gap_fails():
    run = kept()
    log = run.streams[0]
    log.tokens.insert(50, TokenEvent(7.5, [99]))
    assert "no token in the gap" in wrong(judge_keep(run, rejects=True))


def test_a_token_of_a_waiting_stream_in_the_keep_gap_fails():
    run = kept()
    run.streams[3].tokens.append(TokenEvent(7.5, [99]))
    failed = wrong(judge_keep(run, rejects=True))
    assert "no token in the gap" in failed and "nothing escaped" in failed


def test_a_gap_that_is_longer_than_the_pause_fails():
    run = kept()
    run.streams[1].tokens = [event for event in run.streams[1].tokens if event.at < 6 or event.at > 10.5]
    assert wrong(judge_keep(run, rejects=True)) == "the token gap equals the pause"


def test_a_stream_without_a_token_after_the_resume_fails():
    run = kept()
    run.streams[1].tokens = run.streams[1].tokens[:50]
    assert "the token gap equals the pause" in wrong(judge_keep(run, rejects=True))


def test_a_final_chunk_while_kept_fails():
    run = kept()
    run.streams[4].finals = [(7.0, "abort")]
    assert "nothing is returned while kept" in wrong(judge_keep(run, rejects=True))


def test_a_request_that_is_refused_while_kept_fails():
    run = kept()
    run.probes = [refused(7.0)]
    assert "is held, not refused" in wrong(judge_keep(run, rejects=True))


def test_a_freeze_too_short_to_show_anything_fails():
    run = kept()
    run.resume_called_at = REPLIED + 0.3
    assert "not vacuous: frozen" in wrong(judge_keep(run, rejects=True))


def test_an_escaped_request_fails():
    run = aborted()
    run.streams[2].tokens.append(TokenEvent(6.02, [1]))
    failed = wrong(judge_abort(run, rejects=True))
    assert "nothing escaped" in failed and "waiting streams return 0 tokens" in failed


def test_a_waiting_stream_that_gets_tokens_later_fails():
    run = aborted()
    run.streams[2].tokens.append(TokenEvent(9.5, [1]))
    run.streams[2].finals = [(9.6, "abort")]
    assert "waiting streams return 0 tokens" in wrong(judge_abort(run, rejects=True))


def test_a_waiting_stream_with_text_and_no_token_fails():
    run = aborted()
    run.streams[2].loose_text = "?"
    assert wrong(judge_abort(run, rejects=True)) == "waiting streams return 0 tokens and no text, reason abort"


@pytest.mark.parametrize("judge", ["abort", "keep", "wait"])
@pytest.mark.parametrize("stream_index", [0, 4])
def test_a_doubled_final_chunk_fails(judge: str, stream_index: int):
    run = {"abort": aborted, "keep": kept, "wait": waited}[judge]()
    log = run.streams[stream_index]
    log.finals.append(log.finals[0])
    checks = {"abort": judge_abort, "keep": judge_keep, "wait": judge_wait}[judge](run, rejects=True)
    assert "every stream got exactly one final chunk" in wrong(checks)


def test_a_missing_final_chunk_fails():
    run = aborted()
    run.streams[3].finals = []
    assert "every stream got exactly one final chunk" in wrong(judge_abort(run, rejects=True))


def test_an_error_instead_of_partial_tokens_fails():
    run = aborted()
    run.streams[0].status = 500
    assert "every stream got exactly one final chunk" in wrong(judge_abort(run, rejects=True))


def test_a_run_in_which_a_stream_had_finished_is_vacuous():
    run = aborted()
    run.streams[0].finals = [(5.5, "length")]
    assert "not vacuous: nothing finished" in wrong(judge_abort(run, rejects=True))


def test_a_run_in_which_nothing_waited_is_vacuous():
    run = aborted()
    run.loaded = Gauges(2, 0, 80, 0.2)
    assert "not vacuous: gauges" in wrong(judge_abort(run, rejects=True))


def test_a_run_in_which_nothing_ran_is_vacuous():
    run = run_of("abort", [stream(f"wait{i}", [], 6.04, "abort") for i in range(5)], [refused(7.0)])
    failed = wrong(judge_abort(run, rejects=True))
    assert "nothing escaped" in failed and "running streams return partial tokens" in failed


def test_blocks_that_do_not_come_back_fail():
    run = aborted()
    run.paused = Gauges(0, 0, 99, 0.0)
    assert "KV blocks" in wrong(judge_abort(run, rejects=True))


def test_gauges_above_zero_while_paused_fail():
    run = aborted()
    run.paused = Gauges(1, 0, 100, 0.0)
    assert "metrics at zero" in wrong(judge_abort(run, rejects=True))


@pytest.mark.parametrize("change", [{"status": 200}, {"headers": {}}, {"error": "busy"}, {"error": '{"detail": "x"}'}])
def test_a_request_while_paused_that_is_not_properly_refused_fails(change: dict):
    run = aborted()
    for name, value in change.items():
        setattr(run.probes[0], name, value)
    assert "refused while paused" in wrong(judge_abort(run, rejects=True))


def test_no_request_while_paused_proves_nothing():
    run = aborted()
    run.probes = []
    assert "refused while paused" in wrong(judge_abort(run, rejects=True))


def test_a_dialect_that_holds_gets_no_verdict_on_refusals():
    checks = judge_wait(run_of("wait", waited().streams, [], complete_tokens=70, replied_at=8.05), rejects=False)
    assert wrong(checks) == ""
    assert [check.ok for check in checks if "refused" in check.promise] == [None, None]


def test_a_window_that_was_never_seen_fails():
    run = waited()
    run.window_seen_at = run.window_probe = None
    assert "refused in the window" in wrong(judge_wait(run, rejects=True))


def test_a_refusal_after_the_pause_replied_is_not_one_in_the_window():
    run = waited()
    run.window_probe = refused(8.1)
    assert "refused in the window" in wrong(judge_wait(run, rejects=True))


def test_a_running_stream_cut_short_by_wait_fails():
    run = waited()
    run.streams[0].tokens.pop()
    assert "running streams end by themselves" in wrong(judge_wait(run, rejects=True))


def test_a_wait_that_replies_before_its_streams_ended_fails():
    run = waited()
    run.replied_at = 7.0
    assert "running streams end by themselves" in wrong(judge_wait(run, rejects=True))


def test_a_waiting_stream_that_never_completes_after_wait_fails():
    run = waited()
    run.streams[4] = stream("wait2", [], 16.1, "abort")
    assert "waiting streams stay queued" in wrong(judge_wait(run, rejects=True))


def texts(run: PauseRun, reference: list[StreamLog]) -> str:
    prompts = {log.request_id: log for log in reference}
    return wrong(judge_texts("keep", run.streams[:2], prompts, lambda name: name))


def test_tokens_that_equal_the_undisturbed_run_pass_and_any_difference_fails():
    reference = [stream(f"run{i}", steps(1.0, 20.0), 20.0, "length") for i in range(2)]
    assert texts(kept(), reference) == ""
    lost, doubled, invented = kept(), kept(), kept()
    del lost.streams[0].tokens[50]
    doubled.streams[1].tokens.insert(50, doubled.streams[1].tokens[50])
    invented.streams[0].tokens.append(TokenEvent(11.0, [257]))
    for run in (lost, doubled, invented):
        assert "tokens and text equal" in texts(run, reference)


def test_text_that_differs_while_the_ids_agree_fails():
    run = kept()
    run.streams[0].tokens[3].text = "?"
    assert texts(run, kept().streams[:2]) != ""


def test_streams_that_repeat_one_token_prove_nothing():
    run, reference = kept(), kept().streams[:2]
    for log in [*run.streams[:2], *reference]:
        for event in log.tokens:
            event.token_ids = [7]
    assert texts(run, reference) != ""


def test_a_model_of_few_tokens_proves_something_as_long_as_its_streams_vary():
    """The embedded model writes digits: 8 streams may have only 6 different ids in total."""
    run, reference = kept(), kept().streams[:2]
    for log in [*run.streams[:2], *reference]:
        for i, event in enumerate(log.tokens):
            event.token_ids = [7 + i % 2]
    assert texts(run, reference) == ""


def test_half_a_character_at_the_cut_is_no_difference():
    run = kept()
    run.streams[0].loose_text = "\ufffd"
    assert texts(run, kept().streams[:2]) == ""


def test_after_the_resume_every_new_request_must_complete_and_everything_be_free():
    fresh = [stream(f"new{i}", steps(20.0, 21.6), 21.6, "length") for i in range(5)]
    assert wrong(judge_after(fresh, 16, 5, IDLE, IDLE)) == ""
    assert "new requests complete" in wrong(judge_after(fresh[:4], 16, 5, IDLE, IDLE))
    assert "new requests complete" in wrong(judge_after(fresh, 17, 5, IDLE, IDLE))
    assert "metrics at zero" in wrong(judge_after(fresh, 16, 5, IDLE, Gauges(0, 1, 100, 0.0)))
    assert "KV blocks" in wrong(judge_after(fresh, 16, 5, IDLE, Gauges(0, 0, 90, 0.0)))
