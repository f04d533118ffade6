"""The engine's histograms say what the library's own would."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from fastdeploy.metrics.metrics import _SECONDS, Durations


def test_a_histogram_fed_by_the_step_reads_like_one_fed_by_the_value():
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    durations = Durations("seconds", "Some", ours)
    reference = Histogram("seconds", "Some", buckets=tuple(_SECONDS), registry=theirs)
    for step in ([], [0.0, 0.005, 0.25], [0.251, 1e-9, 1000.0], [300.0]):  # bounds belong to the bucket below them
        durations.observe(step)
        for value in step:
            reference.observe(value)
    lines = [line for line in generate_latest(theirs).decode().splitlines() if "_created" not in line]
    assert generate_latest(ours).decode().splitlines() == lines


def test_a_clock_that_was_set_back_counts_as_no_time():
    registry = CollectorRegistry()
    Durations("seconds", "Some", registry).observe([-5.0])
    assert registry.get_sample_value("seconds_sum") == 0.0
    assert registry.get_sample_value("seconds_bucket", {"le": "0.005"}) == 1.0
