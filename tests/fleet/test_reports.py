"""Reports of many replicas become one, in the form of a single engine's report."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from fastdeploy.core.errors import FleetCallFailed, InvalidField, PauseTimeout
from fastdeploy.fleet.reports import merge, merge_metrics, refusal, with_boot_id
from fastdeploy.metrics.metrics import EngineMetrics

# All characters that end a line for str.splitlines, and those that mean something in a sample.
SEPARATORS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
NAMES = st.text(st.sampled_from('a {}",=#\\' + SEPARATORS) | st.characters(codec="utf-8"), min_size=1)


def test_counts_are_added_and_times_are_those_of_the_slowest():
    reports = [
        {"counts": {"aborted": 1, "kept": 2}, "elapsed_ms": 5.0, "aborted_ids": ["a"], "timings_ms": {"commit": 1.0}},
        {
            "counts": {"aborted": 2, "kept": 0},
            "elapsed_ms": 9.0,
            "aborted_ids": ["a", "b"],
            "timings_ms": {"commit": 3.0},
        },
    ]
    assert merge(reports) == {
        "counts": {"aborted": 3, "kept": 2},
        "elapsed_ms": 9.0,
        "aborted_ids": ["a", "b"],
        "timings_ms": {"commit": 3.0},
    }


def test_the_fleet_is_paused_only_if_all_members_are_and_rejects_if_one_does():
    merged = merge(
        [
            {"is_paused": True, "rejecting_new_requests": True, "phase": "paused", "mode": "wait", "admission": "hold"},
            {"is_paused": False, "rejecting_new_requests": False, "phase": "running", "mode": None, "admission": None},
        ]
    )
    assert merged == {
        "is_paused": False,
        "rejecting_new_requests": True,
        "phase": "draining",
        "mode": "wait",
        "admission": "hold",
    }


def test_holds_adapters_and_aborted_requests_of_one_name_are_one_entry():
    holds = [{"holds": [{"id": "h", "age_s": 1.0}]}, {"holds": [{"id": "h", "age_s": 2.0}, {"id": "i", "age_s": 0.0}]}]
    assert merge(holds) == {"holds": [{"id": "h", "age_s": 2.0}, {"id": "i", "age_s": 0.0}]}
    adapters = [{"adapters": [{"lora_name": "x", "requests": n, "in_memory": n > 1}]} for n in (1, 2)]
    assert merge(adapters) == {"adapters": [{"lora_name": "x", "requests": 3, "in_memory": False}]}
    aborted = [{"aborted": [{"request_id": "r", "output_token_count": n}], "not_found": ["s"] * n} for n in (1, 2)]
    assert merge(aborted)["aborted"] == [{"request_id": "r", "output_token_count": 3}]
    assert merge([{"unknown": ["h"]}, {"unknown": []}]) == {"unknown": []}


def test_other_fields_are_those_of_the_newest_weights_and_the_boot_id_is_that_of_the_fleet():
    merged = merge(
        [{"version": "1", "weight_epoch": 1}, {"version": "2", "weight_epoch": 2, "pause": {"boot_id": "x"}}]
    )
    assert with_boot_id(merged | {"boot_id": "y"}, "fleet") == {
        "version": "2",
        "weight_epoch": 2,
        "pause": {"boot_id": "fleet"},
        "boot_id": "fleet",
    }


def test_equal_refusals_keep_their_class_and_different_ones_are_a_failed_fleet_call():
    entries = [{"name": "r0"}, {"name": "r1"}]
    timeouts = {f"r{n}": PauseTimeout("late", report={"counts": {"kept": n}, "boot_id": f"of r{n}"}) for n in (1, 2)}
    error = refusal(timeouts, entries, "fleet")
    assert isinstance(error, PauseTimeout) and (error.status, error.message) == (504, "late")
    assert error.detail == {"replicas": entries, "report": {"counts": {"kept": 3}, "boot_id": "fleet"}}
    field = refusal({"r0": InvalidField("mode", "expected wait")}, entries, "fleet")
    assert isinstance(field, InvalidField) and field.field == "mode"
    mixed = refusal({"r0": PauseTimeout("late"), "r1": InvalidField("mode", "expected wait")}, entries, "fleet")
    assert isinstance(mixed, FleetCallFailed) and mixed.detail == {"replicas": entries}


def test_metrics_of_all_replicas_are_one_exposition_with_one_help_line_each():
    text = '# HELP a Of a.\n# TYPE a counter\na{x="1"} 2.0\na{} 4.0\n# HELP b Of b.\n# TYPE b histogram\nb_sum 3.0\n'
    assert merge_metrics({"r0": text, 'r"1': text}).splitlines() == [
        "# HELP a Of a.",
        "# TYPE a counter",
        'a{replica="r0",x="1"} 2.0',
        'a{replica="r0"} 4.0',
        'a{replica="r\\"1",x="1"} 2.0',
        'a{replica="r\\"1"} 4.0',
        "# HELP b Of b.",
        "# TYPE b histogram",
        'b_sum{replica="r0"} 3.0',
        'b_sum{replica="r\\"1"} 3.0',
    ]


def samples(text: str) -> list[tuple[str, dict[str, str], float]]:
    """Return (name, labels, value) of every sample, as a reader of Prometheus' format finds them."""
    families = text_string_to_metric_families(text)
    return [(sample.name, sample.labels, sample.value) for family in families for sample in family.samples]


@given(names=st.lists(NAMES, min_size=1, max_size=3, unique=True))
@example(names=[f'a{separator}fastdeploy:forged{{x="y"}} 7' for separator in SEPARATORS])
def test_names_of_adapters_neither_break_nor_add_a_sample(names):
    metrics = EngineMetrics()
    metrics.add_series("adapter_requests", "Of each", "lora_name", lambda: dict.fromkeys(names, 2.0))
    text = metrics.render()
    alone = samples(text)
    found = [labels["lora_name"] for name, labels, _ in alone if name == "fastdeploy:adapter_requests"]
    assert found == names
    merged = samples(merge_metrics({"r0": text, "r1": text}))
    assert sorted(map(str, merged)) == sorted(
        str((name, {"replica": replica, **labels}, value)) for name, labels, value in alone for replica in ("r0", "r1")
    )
