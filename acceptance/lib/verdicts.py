"""Checks of pauses and updates on recorded timelines. No I/O, so that tests can check made-up timelines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from benchmarks.lib.dialect import Gauges
from fastdeploy.bench.timeline import StreamLog, gaps, is_prefix, median_step, uncovered

# A token may arrive this long after the reply to the pause, since it comes over another socket.
DELIVERY_GRACE_S = 0.05
# Extra gap of a resumed stream: the resume, one scheduling round and one step, on cores that this client also uses.
RESUME_SLACK_STEPS = 5
RESUME_SLACK_S = 0.5
MIN_FREEZE_STEPS = 5
SAME_TEXT = "tokens and text equal, none lost, doubled or invented"


@dataclass(frozen=True)
class Check:
    """The verdict on one promise. ok None: the promise does not apply to this dialect."""

    scenario: str
    promise: str
    seen: str
    ok: bool | None


@dataclass
class PauseRun:
    """One pause under load. Times are time.perf_counter() seconds.

    running: the server's max_num_seqs. complete_tokens: tokens of an uninterrupted stream (max_tokens). steady_at: all
    streams were sent and the running ones decode; the step time is measured from here to the pause. Gauges: before (of
    the idle server), loaded (just before the pause), paused (after its reply). probes: requests sent while paused.
    window_probe: a request sent while the server rejected but was not paused yet; window_seen_at: when its flags showed
    that state.
    """

    scenario: str
    running: int
    complete_tokens: int
    streams: list[StreamLog]
    steady_at: float
    called_at: float
    replied_at: float
    resume_called_at: float
    resume_replied_at: float
    before: Gauges
    loaded: Gauges
    paused: Gauges
    probes: list[StreamLog] = field(default_factory=list)
    window_probe: StreamLog | None = None
    window_seen_at: float | None = None

    def check(self, promise: str, seen: str, ok: bool | None) -> Check:
        return Check(self.scenario, promise, seen, ok)

    @property
    def pause_s(self) -> float:
        return self.replied_at - self.called_at

    @property
    def step_s(self) -> float:
        return median_step(self.started, self.steady_at, self.called_at)

    @property
    def pause_steps(self) -> float:
        return self.pause_s / self.step_s if self.step_s else float("nan")

    @property
    def started(self) -> list[StreamLog]:
        """The running streams: those with a token before the resume was called."""
        return [log for log in self.streams if log.tokens and log.tokens[0].at < self.resume_called_at]

    @property
    def waiting(self) -> list[StreamLog]:
        started = {id(log) for log in self.started}
        return [log for log in self.streams if id(log) not in started]

    @property
    def answered_s(self) -> float:
        """Seconds from the pause's call until every stream had its final chunk or was closed."""
        ends = [log.finals[0][0] if log.finals else log.closed_at or self.called_at for log in self.streams]
        return max(ends) - self.called_at


def check_common(run: PauseRun) -> list[Check]:
    """Check the promises of all modes: the load was the intended one, and each stream ended exactly once."""
    early = [log.request_id for log in run.streams if log.finals and log.finals[0][0] <= run.called_at]
    waiting = len(run.streams) - run.running
    loaded = (run.loaded.running, run.loaded.waiting)
    broken = [log for log in run.streams if not log.ended_once]
    ended = f"{len(run.streams) - len(broken)} of {len(run.streams)}"
    if broken:
        first = broken[0]
        ended += f"; {first.request_id}: {len(first.finals)} finals, {first.error or first.status}"[:120]
    gauges = f"not vacuous: gauges showed {run.running} running, {waiting} waiting"
    escaped = f"nothing escaped: exactly {run.running} streams had tokens"
    had = f"{len(run.started)} had tokens, {len(run.waiting)} had none"
    return [
        run.check("not vacuous: nothing finished before the pause", f"{len(early)} finished", not early),
        run.check(gauges, f"{loaded[0]} running, {loaded[1]} waiting", loaded == (run.running, waiting)),
        run.check(escaped, had, len(run.started) == run.running),
        run.check("every stream got exactly one final chunk", ended, not broken),
    ]


def check_abort(run: PauseRun, *, rejects: bool) -> list[Check]:
    partial = [log.num_tokens for log in run.started]
    whole = all(log.reason == "abort" and 0 < log.num_tokens < run.complete_tokens for log in run.started)
    counts = f"{len(partial)} streams, {min(partial)} to {max(partial)} tokens each" if partial else "none"
    right = [log for log in run.waiting if log.reason == "abort" and not log.num_tokens and not log.text]
    returned = f"{len(right)} of {len(run.waiting)}, {sum(log.num_tokens for log in run.waiting)} tokens"
    if texts := [log.text for log in run.waiting if log.text]:
        returned += f", {len(texts)} have text: {texts[0][:20]!r}"
    queued = len(run.streams) - run.running
    same = None if run.before.free_blocks is None else run.before.free_blocks == run.paused.free_blocks
    return [
        *check_common(run),
        run.check("running streams return partial tokens, reason abort", counts, bool(partial) and whole),
        run.check("waiting streams return 0 tokens and no text, reason abort", returned, len(right) == queued),
        run.check("KV blocks free: before the load = while paused", _blocks(run.before, run.paused), same),
        _idle_check(run.scenario, "metrics at zero while paused", run.paused),
        _refusal_check(run, rejects),
    ]


def check_keep(run: PauseRun, *, rejects: bool) -> list[Check]:
    """Check mode keep: the client sees only a gap, as long as the pause."""
    frozen_s, start = run.resume_called_at - run.replied_at, run.replied_at + DELIVERY_GRACE_S
    enough = run.step_s > 0 and frozen_s >= MIN_FREEZE_STEPS * run.step_s + DELIVERY_GRACE_S
    late = sum(log.tokens_between(start, run.resume_called_at) for log in run.streams)
    finals = sum(1 for log in run.streams for at, _ in log.finals if run.called_at < at < run.resume_called_at)
    gaps = [token_gap(log, run.resume_called_at) for log in run.started]
    found = [gap for gap in gaps if gap is not None]
    most = run.resume_replied_at - run.called_at + RESUME_SLACK_S + RESUME_SLACK_STEPS * run.step_s
    least = frozen_s - DELIVERY_GRACE_S
    fits = bool(found) and len(found) == len(gaps) and all(least <= gap <= most for gap in found)
    seen = f"{min(found):.3f} to {max(found):.3f} s, pause {frozen_s:.3f} s" if found else "no token after the resume"
    held = [probe for probe in run.probes if probe.tokens_between(run.replied_at, run.resume_called_at) == 0]
    refused = [probe for probe in run.probes if probe.status >= 400 or probe.error]
    held_all = bool(run.probes) and len(held) == len(run.probes) and not refused
    held_seen = f"{len(held)} of {len(run.probes)} held, {len(refused)} refused"
    return [
        *check_common(run),
        run.check(f"not vacuous: frozen for at least {MIN_FREEZE_STEPS} steps", f"{frozen_s:.3f} s frozen", enough),
        run.check("no token in the gap", f"{late} tokens", late == 0),
        run.check("nothing is returned while kept", f"{finals} final chunks", finals == 0),
        run.check("the token gap equals the pause", seen, fits),
        run.check("a request that arrives while kept is held, not refused", held_seen, held_all),
    ]


def check_wait(run: PauseRun, *, rejects: bool) -> list[Check]:
    total, limit = run.complete_tokens, run.replied_at + DELIVERY_GRACE_S

    def is_whole(log: StreamLog) -> bool:
        return log.reason == "length" and log.num_tokens == total

    ended = [log for log in run.started if is_whole(log) and log.finals[0][0] <= limit]
    done = [log for log in run.waiting if is_whole(log)]
    promise = f"running streams end by themselves, {total} tokens, before the reply"
    queued = "waiting streams stay queued with 0 tokens and complete after the resume"
    return [
        *check_common(run),
        run.check(promise, f"{len(ended)} of {len(run.started)}", len(ended) == run.running),
        run.check(queued, f"{len(done)} of {len(run.waiting)}", len(done) == len(run.streams) - run.running),
        _refusal_check(run, rejects),
        _window_check(run, rejects),
    ]


def check_texts(scenario: str, pairs: Sequence[tuple[StreamLog, StreamLog]]) -> Check:
    """Compare the tokens and the text of interrupted streams with an undisturbed run of the same prompts.

    Also fails if half of the streams or more repeat one token, since equal texts prove nothing then. pairs: each
    interrupted stream, with the undisturbed one."""
    same = [
        log
        for log, whole in pairs
        if is_prefix(log.token_ids, whole.token_ids) and whole.text.startswith(log.text.rstrip("\ufffd"))
    ]
    tokens = sum(log.num_tokens for log in same)
    varied = sum(1 for log, _ in pairs if len(set(log.token_ids)) > 1)
    return Check(
        "against an undisturbed run of the same prompts",
        f"{scenario}: {SAME_TEXT}",
        f"{len(same)} of {len(pairs)} streams, {tokens} tokens; {varied} do not repeat one token",
        len(same) == len(pairs) < 2 * varied,
    )


def check_after(fresh: Sequence[StreamLog], tokens: int, wanted: int, before: Gauges, after: Gauges) -> list[Check]:
    done = [log for log in fresh if log.ended_once and log.reason == "length" and log.num_tokens == tokens]
    blocks = None if before.free_blocks is None else before.free_blocks == after.free_blocks
    complete = f"resume and {wanted} new requests complete"
    return [
        Check("after", complete, f"{len(done)} of {len(fresh)}", len(done) == wanted),
        _idle_check("after", "metrics at zero at the end", after),
        Check("after", "KV blocks at the end as at the start", _blocks(before, after), blocks),
    ]


def token_gap(log: StreamLog, resume_called_at: float) -> float | None:
    """Return the seconds between the last token before the resume and the first one after it; None without both."""
    before = [event.at for event in log.tokens if event.at <= resume_called_at]
    after = [event.at for event in log.tokens if event.at > resume_called_at]
    return after[0] - before[-1] if before and after else None


def is_refusal(log: StreamLog) -> bool:
    """Return whether a request was refused properly: 503, Retry-After, a typed JSON error, no token."""
    if log.status != 503 or log.tokens or "retry-after" not in log.headers:
        return False
    try:
        error = json.loads(log.error or "")["error"]
    except (ValueError, KeyError, TypeError):
        return False
    return isinstance(error, dict) and {"message", "type", "code"} <= error.keys()


def _refusal_check(run: PauseRun, rejects: bool) -> Check:
    refused = [probe for probe in run.probes if is_refusal(probe)]
    promise = "refused while paused: 503, Retry-After, typed error, 0 tokens"
    if not rejects:
        return run.check(promise, "held by this dialect", None)
    others = sorted({f"HTTP {probe.status}" for probe in run.probes if not is_refusal(probe)})
    seen = f"{len(refused)} of {len(run.probes)}" + (f", others: {', '.join(others)}" if others else "")
    return run.check(promise, seen, bool(run.probes) and len(refused) == len(run.probes))


def _window_check(run: PauseRun, rejects: bool) -> Check:
    """Check the probe between the two flags: it is refused while is_paused is false, so before the pause's reply."""
    promise = "refused in the window: rejecting_new_requests true, is_paused false"
    if not rejects:
        return run.check(promise, "no such flag in this dialect", None)
    probe = run.window_probe
    if probe is None or run.window_seen_at is None:
        return run.check(promise, "the window was never seen", False)
    inside = probe.closed_at is not None and probe.closed_at <= run.replied_at
    seen = f"HTTP {probe.status}, {probe.num_tokens} tokens, {'before' if inside else 'after'} the pause replied"
    return run.check(promise, seen, is_refusal(probe) and inside)


def _blocks(before: Gauges, after: Gauges) -> str:
    if before.free_blocks is not None:
        return f"{before.free_blocks} -> {after.free_blocks}"
    if before.kv_usage is not None and after.kv_usage is not None:
        return f"no block count; usage {before.kv_usage:.4f} -> {after.kv_usage:.4f}"
    return "no such metric"


def _idle_check(scenario: str, promise: str, gauges: Gauges) -> Check:
    seen = f"{gauges.running} running, {gauges.waiting} waiting"
    return Check(scenario, promise, seen, gauges.running == gauges.waiting == 0)


# ---------------------------------------------------------------------- an update under live streams


class VersionSpan(NamedTuple):
    """Output tokens [start, end) were sampled by the weights (version, weight_epoch)."""

    version: str
    weight_epoch: int
    start: int
    end: int


class BadSpans(Exception):
    """A token of the stream is in no span, or in two."""


def version_spans(log: StreamLog) -> list[VersionSpan]:
    """Return the spans of all chunks; adjacent spans of the same weights are joined. Raises BadSpans."""
    all_spans = [
        VersionSpan(str(raw["version"]), raw["weight_epoch"], raw["start"], raw["end"])
        for event in log.tokens
        for raw in event.weight_versions
    ]
    if fault := uncovered([(span.start, span.end) for span in all_spans], log.num_tokens):
        raise BadSpans(f"{log.request_id}: {fault}")
    spans: list[VersionSpan] = []
    for span in all_spans:
        if spans and spans[-1][:2] == span[:2]:
            spans[-1] = spans[-1]._replace(end=span.end)
        else:
            spans.append(span)
    return spans


def check_update(
    logs: Sequence[StreamLog], undisturbed: Sequence[StreamLog], after: StreamLog, version: str, tokens: int
) -> list[Check]:
    """Check streams during which the weights were updated to ``version``. undisturbed: the same prompts under the old
    weights, in the same order. after: a request sent after the update was answered."""
    scenario = "update under live streams"
    whole = [log for log in logs if log.ended_once and log.reason == "length" and log.num_tokens == tokens]
    switches: list[int] = []
    same: list[StreamLog] = []
    problems: list[str] = []
    for log, old in zip(logs, undisturbed, strict=True):
        try:
            spans = version_spans(log)
        except BadSpans as bad:
            problems.append(str(bad))
            continue
        if len(spans) == 2 and spans[1].version == version and spans[0].weight_epoch < spans[1].weight_epoch:
            switches.append(spans[1].start)
            if is_prefix(log.token_ids[: spans[1].start], old.token_ids):
                same.append(log)
    try:
        fresh = version_spans(after)
    except BadSpans as bad:
        fresh, problems = [], [*problems, str(bad)]
    where = f", at token {min(switches)} to {max(switches)}" if switches else ""
    trouble = f"; {problems[0]}" if problems else ""
    longest = max((gap for log in logs for gap in gaps(log)), default=0.0)
    labels = ", ".join(f"{span.version} for {span.end - span.start} tokens" for span in fresh) or "no label"
    checks = [
        Check(scenario, promise, f"{len(right)} of {len(logs)}{more}", 0 < len(right) == len(logs))
        for promise, right, more in (
            ("streams go on and complete", whole, f", {tokens} tokens each, longest gap {longest * 1000:.0f} ms"),
            ("each token is labelled, and the label switches at one token", switches, f" streams{where}{trouble}"),
            ("up to the switch the tokens are those of the old weights", same, " streams"),
        )
    ]
    new = "a request sent afterwards is made by the new weights alone"
    return [*checks, Check(scenario, new, labels, len(fresh) == 1 and fresh[0].version == version)]
