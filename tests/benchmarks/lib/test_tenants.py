"""Sorting gaps into phases, and the checks that a measurement of two tenants is not vacuous, on made-up streams."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.lib.tenants import ALONE, LIVE, LOAD, PAUSE, QUIET, RESUME, Phases, gaps_by_phase, vacuous
from benchmarks.lib.timeline import StreamLog, TokenEvent

# One cycle. B's tokens come once a second, A's too except while A is paused.
PHASES = Phases(
    {
        QUIET: [(0.0, 10.5), (22.5, 30.5), (31.6, 40.5)],
        PAUSE: [(10.5, 11.2)],
        ALONE: [(11.2, 20.5)],
        LOAD: [(20.5, 22.2)],
        RESUME: [(22.2, 22.5)],
        LIVE: [(30.5, 31.6)],
    }
)


def stream(times: list[float], epoch: Callable[[float], int] = lambda at: 1) -> StreamLog:
    tokens = [TokenEvent(at, [7], "", [{"version": "1", "adapter_epoch": epoch(at)}]) for at in times]
    return StreamLog("s", 0.0, 200, tokens)


def tenant_b() -> StreamLog:
    return stream([float(at) for at in range(41)])


def tenant_a() -> StreamLog:
    times = [float(at) for at in range(41) if not 11 < at < 23]
    return stream(times, lambda at: 1 + (at > 22) + (at > 31))


def test_a_gap_that_overlaps_a_call_counts_for_the_call_and_a_quiet_gap_lies_inside():
    log = stream([0.0, 1.0, 9.0, 11.5, 12.0, 20.0, 21.0, 23.0])
    found = {phase.phase: phase for phase in gaps_by_phase([log], PHASES)}
    assert list(found) == list(PHASES.windows)
    assert found[QUIET].gaps == (1.0, 8.0)
    assert found[PAUSE].gaps == (2.5,)
    assert found[ALONE].gaps == (0.5, 8.0)
    assert found[LOAD].gaps == (1.0, 2.0)
    assert found[RESUME].gaps == (2.0,)
    assert found[LIVE].gaps == ()
    assert found[LOAD].took_s == pytest.approx(1.7) and not found[LOAD].is_quiet


def test_the_figures_of_a_phase_are_in_its_json():
    [quiet, *_] = gaps_by_phase([tenant_b()], PHASES)
    told = quiet.to_json()
    assert (told["median"], told["p99"], told["longest"]) == (1.0, 1.0, 1.0)
    assert told["took_s"] == pytest.approx(8.9)


def test_a_measurement_in_which_both_do_what_the_phases_say_is_not_vacuous():
    assert vacuous([tenant_a()], [tenant_b()], PHASES, scoped=True) == []


def test_a_server_without_labels_is_checked_for_its_streams_only():
    unlabelled = StreamLog("s", 0.0, 200, [TokenEvent(float(at), [7]) for at in range(41)])
    assert vacuous([unlabelled], [unlabelled], PHASES, scoped=False) == []


@pytest.mark.parametrize(
    ("a", "b", "why"),
    [
        (stream([0.0, 10.0, 18.0], lambda at: 1 + (at > 9) + (at > 17)), tenant_b(), "while A was paused"),
        (stream([0.0, 23.0], lambda at: 1 + (at > 22)), tenant_b(), "2 adapter epochs after 2 loads"),
        (tenant_a(), stream([0.0, 1.0, 24.0, 33.0]), "a stream of B has no token"),
        (tenant_a(), StreamLog("lost", 0.0, 200, tenant_b().tokens, error="connection lost"), "lost ended"),
        (tenant_a(), StreamLog("short", 0.0, 200, tenant_b().tokens, [(40.0, "length")]), "short ended: length"),
    ],
)
def test_a_measurement_that_proves_nothing_says_why(a: StreamLog, b: StreamLog, why: str):
    [error] = vacuous([a], [b], PHASES, scoped=True)
    assert why in error
