"""The engine's histograms give the figures of the library's histogram, and counters exist before they count."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from fastdeploy.metrics.figures import SECONDS, Distribution
from fastdeploy.metrics.metrics import EngineMetrics


def test_a_histogram_filled_per_step_equals_the_librarys_histogram():
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    durations = Distribution("seconds", "Some", ours)
    reference = Histogram("seconds", "Some", buckets=SECONDS, registry=theirs)
    for step in ([], [0.0, 0.005, 0.25], [0.251, 1e-9, 1000.0], [300.0]):  # bounds belong to the bucket below them
        durations.observe(step)
        for value in step:
            reference.observe(value)
    lines = [line for line in generate_latest(theirs).decode().splitlines() if "_created" not in line]
    assert generate_latest(ours).decode().splitlines() == lines


def test_a_negative_duration_counts_as_zero():
    registry = CollectorRegistry()
    Distribution("seconds", "Some", registry).observe([-5.0])
    assert registry.get_sample_value("seconds_sum") == 0.0
    assert registry.get_sample_value("seconds_bucket", {"le": "0.005"}) == 1.0


def test_every_labelled_counter_is_zero_before_its_first_event():
    """Prometheus computes rates from differences, so a series that appears with 1 would hide its first event."""
    counters = [family for family in EngineMetrics().registry.collect() if family.type == "counter"]
    for family in counters:
        values = {sample.value for sample in family.samples if sample.name.endswith("_total")}
        assert values == {0.0}, family.name
