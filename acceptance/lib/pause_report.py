"""The tables of pauses: verdicts, and times."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from acceptance.lib.scenarios import Outcome
from acceptance.lib.verdicts import Check, PauseRun, token_gap
from benchmarks.lib.report import Printer, optional

VERDICT = {True: ("pass", "green"), False: ("FAIL", "bold red"), None: ("n/a", "dim")}
# (item, scenario, beginning of the promise, what FastDeploy reported on its own machine and model)
ACCEPTANCE = (
    ("running streams", "abort", "running streams return partial", "8 streams, about 157 tokens each"),
    ("waiting streams", "abort", "waiting streams return 0", "12 at once"),
    ("KV blocks, before and after", "abort", "KV blocks", "11472 -> 11472"),
    ("requests while paused", "abort", "refused while paused", "refused, 0 tokens"),
    ("requests between the two flags", "wait", "refused in the window", "refused"),
    ("new requests after the resume", "after", "resume and", "5 of 5"),
    ("metrics", "after", "metrics at zero", "0 running, 0 waiting"),
    ("no token while kept", "keep", "no token in the gap", "-"),
    ("gap while kept", "keep", "the token gap equals", "-"),
    ("text after keep", "against an undisturbed run of the same prompts", "keep: ", "-"),
)
TIMES = {"pause_s": "pause s", "pause_steps": "in steps", "step_ms": "step ms", "all_answered_s": "all answered s",
         "resume_ms": "resume ms", "next_token_ms": "next token ms"}  # fmt: skip


def show_checks(printer: Printer, checks: Sequence[Check]) -> None:
    for scenario in dict.fromkeys(check.scenario for check in checks):
        mine = [check for check in checks if check.scenario == scenario]
        rows = [(check.promise, check.seen, VERDICT[check.ok][0]) for check in mine]
        printer.table(scenario, ("promise", "seen", "verdict"), rows, [VERDICT[check.ok][1] for check in mine])


def show_outcome(printer: Printer, outcome: Outcome) -> None:
    """Print the acceptance table of FastDeploy's own pause, with its figures and those seen here, and the times."""
    rows = [
        (item, theirs, check.seen, VERDICT[check.ok][0])
        for item, scenario, promise, theirs in ACCEPTANCE
        for check in outcome.checks
        if check.scenario == scenario and check.promise.startswith(promise)
    ]
    paused = "; ".join(f"{run.scenario} {run.pause_s:.3f} s" for run in outcome.runs)
    rows.insert(0, ("pause time", "abort 0.342 s", paused, "-"))
    printer.table("acceptance", ("item", "FastDeploy", "seen", "verdict"), rows)
    times = [(run.scenario, *(optional(measure(run)[name], "g") for name in TIMES)) for run in outcome.runs]
    printer.table("pause times", ("scenario", *TIMES.values()), times)


def show_peer(printer: Printer, ours: Sequence[PauseRun], theirs: Sequence[PauseRun]) -> None:
    """Print the medians over the repeats of each scenario, ours and the peer's. The ratio is the peer's over ours,
    above 1 if ours is faster."""
    rows = []
    for scenario in dict.fromkeys(run.scenario for run in ours):
        for name, shown in TIMES.items():
            found = [
                [value for run in runs if run.scenario == scenario and (value := measure(run)[name]) is not None]
                for runs in (ours, theirs)
            ]
            if all(found) and name != "step_ms":
                mine, other = map(median, found)
                rows.append((scenario, shown, f"{mine:g}", f"{other:g}", f"{other / mine:.2f}" if mine else "-"))
    printer.table("beside the peer", ("scenario", "figure", "ours", "peer", "peer / ours"), rows)


def measure(run: PauseRun) -> dict[str, Any]:
    """Return the figures of one run, in seconds unless the name says otherwise; None for a figure it does not have."""
    nexts = [
        min(event.at for event in log.tokens if event.at > run.resume_called_at) - run.resume_called_at
        for log in run.started
        if token_gap(log, run.resume_called_at) is not None
    ]
    return {
        "scenario": run.scenario,
        "pause_s": round(run.pause_s, 4),
        "pause_steps": round(run.pause_steps, 2) if run.step_s else None,
        "step_ms": round(run.step_s * 1000, 3),
        "all_answered_s": round(run.answered_s, 4) if run.scenario.startswith("abort") else None,
        "resume_ms": round((run.resume_replied_at - run.resume_called_at) * 1000, 2),
        "next_token_ms": round(max(nexts) * 1000, 1) if nexts else None,
        "streams": len(run.streams),
        "running_tokens": [log.num_tokens for log in run.started],
        "waiting_tokens": sum(log.num_tokens for log in run.waiting),
        "free_blocks": [run.before.free_blocks, run.loaded.free_blocks, run.paused.free_blocks],
    }
