"""Each verdict on a correct timeline, and on the same timeline with one defect.

The load: 2 running and 3 waiting streams, a token every 0.1 s from t=1; paused at t=6 (reply 6.05), resumed at t=9.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from acceptance.lib.verdicts import Check, PauseRun, check_abort, check_after, check_keep, check_texts, check_wait
from benchmarks.lib.dialect import Gauges
from fastdeploy.bench.timeline import StreamLog, TokenEvent

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


CHECKS_OF_MODE = {aborted: check_abort, kept: check_keep, waited: check_wait}
ONE_FINAL = "every stream got exactly one final chunk"


def test_correct_timelines_pass():
    for make, check_run in CHECKS_OF_MODE.items():
        assert [check for check in check_run(make(), rejects=True) if not check.ok] == []


def test_pause_times_are_counted_in_steps():
    run = aborted()
    assert run.step_s == pytest.approx(0.1)
    assert run.pause_steps == pytest.approx(0.5)
    assert run.answered_s == pytest.approx(0.04)
    run.streams[4].finals, run.streams[4].closed_at = [], 6.3
    assert run.answered_s == pytest.approx(0.3)


def token_in_the_gap(index: int) -> Callable[[PauseRun], None]:
    return lambda run: run.streams[index].tokens.append(TokenEvent(7.5, [99]))


def late_token_of_a_waiting_stream(run: PauseRun) -> None:
    run.streams[2].tokens.append(TokenEvent(9.5, [1]))
    run.streams[2].finals = [(9.6, "abort")]


def no_token_until(end: float) -> Callable[[PauseRun], None]:
    def remove(run: PauseRun) -> None:
        run.streams[1].tokens = [event for event in run.streams[1].tokens if event.at < 6 or event.at > end]

    return remove


def nothing_ran(run: PauseRun) -> None:
    run.streams[:2] = [stream(f"wait{i}", [], 6.04, "abort") for i in range(3, 5)]


def doubled_final(index: int) -> Callable[[PauseRun], None]:
    return lambda run: run.streams[index].finals.append(run.streams[index].finals[0])


def change(target: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        setattr(target, name, value)


def change_run(**values: Any) -> Callable[[PauseRun], None]:
    return lambda run: change(run, values)


def change_stream(index: int, **values: Any) -> Callable[[PauseRun], None]:
    return lambda run: change(run.streams[index], values)


def change_probe(**values: Any) -> Callable[[PauseRun], None]:
    return lambda run: change(run.probes[0], values)


@pytest.mark.parametrize(
    ("make", "defect", "promises"),
    [
        (kept, token_in_the_gap(0), ["no token in the gap"]),
        (kept, token_in_the_gap(3), ["no token in the gap", "nothing escaped"]),
        (kept, no_token_until(10.5), ["the token gap equals the pause"]),
        (kept, no_token_until(99), ["the token gap equals the pause"]),
        (kept, change_stream(4, finals=[(7.0, "abort")]), ["nothing is returned while kept"]),
        (kept, change_run(probes=[refused(7.0)]), ["is held, not refused"]),
        (kept, change_run(resume_called_at=REPLIED + 0.3), ["not vacuous: frozen"]),
        (aborted, lambda run: run.streams[2].tokens.append(TokenEvent(6.02, [1])),
         ["nothing escaped", "waiting streams return 0 tokens"]),
        (aborted, late_token_of_a_waiting_stream, ["waiting streams return 0 tokens"]),
        (aborted, change_stream(2, loose_text="?"), ["waiting streams return 0 tokens and no text, reason abort"]),
        *((make, doubled_final(index), [ONE_FINAL]) for make in CHECKS_OF_MODE for index in (0, 4)),
        (aborted, change_stream(3, finals=[]), [ONE_FINAL]),
        (aborted, change_stream(0, status=500), [ONE_FINAL]),
        (aborted, change_stream(0, finals=[(5.5, "length")]), ["not vacuous: nothing finished"]),
        (aborted, change_run(loaded=Gauges(2, 0, 80, 0.2)), ["not vacuous: gauges"]),
        (aborted, nothing_ran, ["nothing escaped", "running streams return partial tokens"]),
        (aborted, change_run(paused=Gauges(0, 0, 99, 0.0)), ["KV blocks"]),
        (aborted, change_run(paused=Gauges(1, 0, 100, 0.0)), ["metrics at zero"]),
        *((aborted, change_probe(**change), ["refused while paused"])
          for change in ({"status": 200}, {"headers": {}}, {"error": "busy"}, {"error": '{"detail": "x"}'})),
        (aborted, change_run(probes=[]), ["refused while paused"]),
        (waited, change_run(window_seen_at=None, window_probe=None), ["refused in the window"]),
        (waited, change_run(window_probe=refused(8.1)), ["refused in the window"]),
        (waited, lambda run: run.streams[0].tokens.pop(), ["running streams end by themselves"]),
        (waited, change_run(replied_at=7.0), ["running streams end by themselves"]),
        (waited, change_run(streams=[*waited().streams[:4], stream("wait2", [], 16.1, "abort")]),
         ["waiting streams stay queued"]),
    ],
)  # fmt: skip
def test_a_defect_fails_the_promise_that_it_breaks(
    make: Callable[[], PauseRun], defect: Callable[[PauseRun], None], promises: list[str]
):
    run = make()
    defect(run)
    failed = wrong(CHECKS_OF_MODE[make](run, rejects=True))
    assert all(promise in failed for promise in promises), failed


def test_a_dialect_that_holds_gets_no_verdict_on_refusals():
    checks = check_wait(run_of("wait", waited().streams, [], complete_tokens=70, replied_at=8.05), rejects=False)
    assert wrong(checks) == ""
    assert [check.ok for check in checks if "refused" in check.promise] == [None, None]


def texts(run: PauseRun, reference: list[StreamLog]) -> str:
    return wrong([check_texts("keep", list(zip(run.streams[:2], reference, strict=True)))])


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


@pytest.mark.parametrize(("different_ids", "passes"), [(1, False), (2, True)])
def test_streams_must_not_repeat_one_token_but_may_have_few_different_ones(different_ids: int, passes: bool):
    run, reference = kept(), kept().streams[:2]
    for log in [*run.streams[:2], *reference]:
        for i, event in enumerate(log.tokens):
            event.token_ids = [7 + i % different_ids]
    assert (texts(run, reference) == "") == passes


def test_half_a_character_at_the_cut_is_no_difference():
    run = kept()
    run.streams[0].loose_text = "\ufffd"
    assert texts(run, kept().streams[:2]) == ""


def test_after_the_resume_every_new_request_must_complete_and_everything_be_free():
    fresh = [stream(f"new{i}", steps(20.0, 21.6), 21.6, "length") for i in range(5)]
    assert wrong(check_after(fresh, 16, 5, IDLE, IDLE)) == ""
    assert "new requests complete" in wrong(check_after(fresh[:4], 16, 5, IDLE, IDLE))
    assert "new requests complete" in wrong(check_after(fresh, 17, 5, IDLE, IDLE))
    assert "metrics at zero" in wrong(check_after(fresh, 16, 5, IDLE, Gauges(0, 1, 100, 0.0)))
    assert "KV blocks" in wrong(check_after(fresh, 16, 5, IDLE, Gauges(0, 0, 90, 0.0)))
