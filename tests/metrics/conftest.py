"""The metrics of a server with a fake engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from support.engine_stack import engine_stack


@pytest.fixture(scope="package")
def families(model_dir, tokenizer, tmp_path_factory) -> Iterator[list[Metric]]:
    """Return what an answer of /metrics describes, without the times that the library adds to each counter."""
    folder = str(tmp_path_factory.mktemp("faults"))
    with engine_stack(model_dir, tokenizer, faults="on", faults_dir=folder) as server:
        server.http.get("/metrics")  # so that one answer is counted
        found = text_string_to_metric_families(server.http.get("/metrics").text)
        yield [family for family in found if not family.name.endswith("_created")]
