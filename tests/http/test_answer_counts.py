"""http_requests_total: every answer counts once, by its route, and all API servers of a server count together."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fastdeploy.core.process import ANSWER_COUNTS_FOLDER
from fastdeploy.http.answer_counts import AnswerCounts

CHILD = """
from fastdeploy.http.answer_counts import AnswerCounts
AnswerCounts().add({"method": "GET"}, 404)
"""


def counts(text: str) -> dict[str, float]:
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("http_requests_total{")]
    return {labels.partition("{")[2].rstrip("}"): float(value) for labels, value in lines}


def test_each_answer_counts_by_its_route_and_status(stack):
    for path in ("/health", "/health/", "/nothing", "/v1/models/no/such/model"):
        stack.http.get(path)
    stack.http.request("PROPFIND", "/health")
    stack.post("/v1/completions", prompt=[1], n=-1)
    found = counts(stack.http.get("/metrics").text)
    health = found.pop('method="GET",path="/health",status_code="200"')
    assert health >= 2, "the stack has waited for the engine, too"
    assert {labels: count for labels, count in found.items() if 'status_code="503"' not in labels} == {
        'method="GET",path="",status_code="404"': 1,
        'method="GET",path="/v1/models/{model_id:text}",status_code="404"': 1,
        'method="OTHER",path="/health",status_code="405"': 1,
        'method="POST",path="/v1/completions",status_code="400"': 1,
    }


@pytest.mark.processes
def test_processes_count_together_also_after_their_end(tmp_path, monkeypatch):
    monkeypatch.setenv(ANSWER_COUNTS_FOLDER, str(tmp_path))
    for _ in range(2):
        subprocess.run([sys.executable, "-c", CHILD], check=True, timeout=60)
    text = AnswerCounts().render()
    assert counts(text) == {'method="GET",path="",status_code="404"': 2}
    assert "# HELP http_requests_total HTTP requests that were answered" in text
