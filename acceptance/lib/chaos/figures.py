"""The figures of a run, as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from acceptance.lib.chaos.run import Chaos, Pause
from benchmarks.lib.report import percentile, plain_table

TARGET_MS = 50.0  # above one step


def excess_ms(pauses: Sequence[Pause], step_s: float) -> list[float]:
    """Return the milliseconds of each pause above one step."""
    return [(pause.seconds - step_s) * 1000 for pause in pauses]


def report(chaos: Chaos) -> str:
    """Return the tables of a run."""
    step_s = chaos.options.step_s
    at_once = [pause for pause in chaos.pauses if pause.mode != "wait"]
    rows = []
    for name, pauses in (
        ("all", at_once),
        ("cycles without harm", [pause for pause in at_once if not pause.harmed]),
        ("cycles with harm", [pause for pause in at_once if pause.harmed]),
        ("with a fence", [pause for pause in at_once if pause.fenced]),
        ("without a fence", [pause for pause in at_once if not pause.fenced]),
    ):
        if pauses:
            excess = excess_ms(pauses, step_s)
            rows.append([name, str(len(pauses)), *(f"{percentile(excess, part):.1f}" for part in (50, 90, 99, 100))])
    restarts = Counter(
        (restart.harm or "not harmed", restart.why.partition(":")[0]) for restart in chaos.launcher.restarts
    )
    return "\n".join(
        [
            f"keep and abort: ms above one step of {step_s * 1000:g} ms",
            plain_table(["pauses", "number", "median", "p90", "p99", "max"], rows),
            f"target: p99 at most {TARGET_MS:g} ms: {'met' if p99_ms(chaos) <= TARGET_MS else 'MISSED'}",
            "",
            plain_table(
                ["engine was", "fenced or restarted because", "number"],
                [[harm, why, str(number)] for (harm, why), number in restarts.most_common()],
            ),
            "",
            plain_table(["count", ""], [[what, f"{number:,}"] for what, number in sorted(chaos.ledger.counts.items())]),
        ]
    )


def p99_ms(chaos: Chaos) -> float:
    """Return the p99 of the pauses that wait for no request, in milliseconds above one step."""
    return percentile(excess_ms([p for p in chaos.pauses if p.mode != "wait"], chaos.options.step_s), 99)
