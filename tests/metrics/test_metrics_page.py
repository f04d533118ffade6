"""docs/metrics.md has each metric, with its type and labels, and each of FastDeploy's names."""

from __future__ import annotations

from pathlib import Path

import yaml

from support.markdown import ROOT, names, tables

PAGE = tables(ROOT / "docs" / "metrics.md")
METRICS = {names(row[0])[0]: row for note, rows in PAGE.items() if note.startswith("metrics: ") for row in rows}
NOT_HERE = {name for row in PAGE["metrics that are not here"] for name in names(row[0])}
OWN_LABELS = {"histogram": {"le"}}  # that the type brings


def short(name: str) -> str:
    return name.removeprefix("fastdeploy:")


def test_the_page_has_every_metric_with_its_type_and_labels(families):
    found = {}
    for family in families:
        name = short(family.name) + ("_total" if family.type == "counter" else "")
        labels = {label for sample in family.samples for label in sample.labels} - OWN_LABELS.get(family.type, set())
        found[name] = (family.type, labels)
    told = {name: (row[1], set(names(row[2]))) for name, row in METRICS.items()}
    without_samples = {"adapter_requests": ("gauge", {"lora_name"})}  # there are no adapters
    assert told == found | without_samples


def test_every_metric_of_fastdeploy_is_here_or_the_page_says_why_not():
    lines = Path(__file__).with_name("fastdeploy_names.txt").read_text().splitlines()
    theirs = {short(line) for line in lines if not line.startswith("#")}
    marked = {name for name, row in METRICS.items() if row[4].startswith("yes")}
    assert {name if name in theirs else name.removesuffix("_total") for name in marked} == theirs - NOT_HERE
    assert theirs >= NOT_HERE and not NOT_HERE & METRICS.keys()


def test_the_page_has_every_alert():
    groups = yaml.safe_load((ROOT / "deploy" / "alerts.yml").read_text())["groups"]
    alerts = [rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule]
    assert [names(row[0])[0] for row in PAGE["alerts"]] == alerts
