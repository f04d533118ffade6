"""Spans, reports and metrics name the quantization of the weights."""

from __future__ import annotations

from typing import Any

import pytest

from fastdeploy.inter_communicator import messages as m
from support.fake_runner import FakeRunner
from support.harness import PROMPT, Harness


@pytest.fixture
def h() -> Harness:
    return Harness(FakeRunner(quantization="int8"))


def reports(h: Harness) -> dict[str, dict[str, Any]]:
    return {
        "model": h.ask(m.ModelInfoArgs()).result,
        "commit": h.update("w1").result,
        "weights": h.ask(m.WeightInfoArgs()).result,
        "label": h.ask(m.SetVersionArgs("v2")).result,
        "begin": h.ask(m.BeginUpdateArgs()).result,
        "adapter": h.load_adapter("alice", 1).result,
        "pause": h.pause(mode="keep").result,
    }


def test_every_report_about_weights_names_the_quantization(h):
    assert {name: report.get("quantization") for name, report in reports(h).items()} == dict.fromkeys(
        ("model", "commit", "weights", "label", "begin", "adapter", "pause"), "int8"
    )


def test_without_quantization_no_report_of_weights_has_the_field():
    assert {name for name, report in reports(Harness()).items() if "quantization" in report} == {"model"}


def test_every_span_names_the_quantization_over_updates_new_labels_and_adapters(h):
    h.load_adapter("alice", 1)
    h.add("base", PROMPT, max_tokens=12)
    h.add("adapted", PROMPT, max_tokens=12, adapter="alice")
    h.run_rounds(3)
    h.update("w1")
    h.run_rounds(2)
    h.ask(m.SetVersionArgs("v2"))
    h.load_adapter("alice", 2)
    h.run_out()
    for name in ("base", "adapted"):
        spans = h.stream(name).spans
        assert len({(span.version, span.weight_epoch) for span in spans}) > 1
        assert {span.quantization for span in spans} == {"int8"}


def test_the_gauge_is_1_for_the_quantization_that_serves(h):
    line = 'fastdeploy:quantization{quantization="int8"} '
    for harness, value in ((h, "1.0"), (Harness(), "0.0")):
        assert line + value in harness.ask(m.MetricsArgs()).result["text"].splitlines()
