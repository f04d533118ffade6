"""deploy/grafana.json shows the metrics that exist: none of its expressions names another, and none is missing."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
FUNCTIONS = {"rate", "increase", "changes", "sum", "topk", "histogram_quantile", "time"}
# Metrics that are on no panel, since a panel shows the same by others.
LEFT_OUT = {
    f"fastdeploy:{name}"
    for name in (
        "available_batch_size", "available_gpu_resource", "cache_config_info", "faults_injected",
        "gpu_cache_usage_perc", "gpu_hit_token_rate", "hit_token_rate", "prefix_gpu_cache_token_num",
        "spec_decode_draft_acceptance_rate",
    )
}  # fmt: skip
OPEN = {"(": ")", "[": "]", "{": "}"}


@pytest.fixture(scope="module")
def board() -> dict[str, Any]:
    return json.loads((DEPLOY / "grafana.json").read_text())


@pytest.fixture(scope="module")
def samples(families) -> dict[str, str]:
    """Return the metric of each sample name of a real answer of /metrics. A metric whose labels have no values yet has
    no samples: its own name stands for them."""
    found = {}
    for family in families:
        names = {sample.name for sample in family.samples}
        own = family.name + "_total" if family.type == "counter" else family.name
        found |= dict.fromkeys(names or {own}, family.name)
    return found


def expressions(board: dict[str, Any]) -> list[str]:
    of_panels = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    return of_panels + [entry["expr"] for entry in board["annotations"]["list"]]


def metrics_of(expression: str) -> set[str]:
    return set(re.findall(r"(?:fastdeploy:|http_)\w+", expression))


def test_every_metric_of_the_dashboard_exists(board, samples):
    named = {name for expression in expressions(board) for name in metrics_of(expression)}
    named |= {name for entry in board["templating"]["list"] for name in metrics_of(json.dumps(entry["query"]))}
    assert named and named <= set(samples), sorted(named - set(samples))


def test_every_metric_is_on_the_dashboard_or_left_out_on_purpose(board, samples):
    shown = {samples[name] for expression in expressions(board) for name in metrics_of(expression)}
    assert set(samples.values()) - shown == LEFT_OUT


def test_the_expressions_are_well_formed(board):
    for expression in expressions(board):
        bare = re.sub(r'"[^"]*"', "", expression)  # without label values
        closing = []
        for character in bare:
            if character in OPEN:
                closing.append(OPEN[character])
            elif character in OPEN.values():
                assert closing and closing.pop() == character, expression
        assert not closing, expression
        assert set(re.findall(r"(\w+)\s*\(", re.sub(r"\bby \(", "", bare))) <= FUNCTIONS, expression
        for window in re.findall(r"\[([^]]*)\]", bare):
            assert re.fullmatch(r"\$__rate_interval|\d+[smhd]", window), expression
        selectors = re.findall(r"(?:fastdeploy:\w+|http_\w+|\bup)(\{[^}]*\})?", expression)
        assert all('job=~"$job",instance=~"$instance"' in selector for selector in selectors), expression


def test_a_counter_is_shown_as_a_rate_and_a_gauge_is_not_summed_over_time(board, samples):
    for expression in expressions(board):
        for name in metrics_of(expression):
            cumulative = name.endswith(("_total", "_bucket", "_sum", "_count"))
            assert not cumulative or re.search(r"(rate|increase)\(" + name + r"\b", expression), expression


def test_the_dashboard_can_be_imported(board):
    """Grafana needs a schema version, panels with ids of their own that do not overlap, and a data source to choose."""
    assert board["schemaVersion"] >= 36 and board["uid"] and board["title"]
    assert [entry["name"] for entry in board["templating"]["list"]] == ["datasource", "job", "instance"]
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    rows = [panel["title"] for panel in panels if panel["type"] == "row"]
    assert rows == [
        "Traffic", "Latency", "KV cache and prefix hits", "Pauses and holds", "Weights", "Adapters", "Processes",
    ]  # fmt: skip
    cells = set()
    for panel in panels:
        at = panel["gridPos"]
        mine = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24 and not mine & cells, panel["title"]
        cells |= mine
        for target in panel.get("targets", ()):
            assert target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def test_the_scrape_example_reads_the_route_of_the_metrics():
    (job,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    assert job["metrics_path"] == "/metrics" and job["static_configs"]
