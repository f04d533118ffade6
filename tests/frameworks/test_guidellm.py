"""guidellm (vLLM's load generator) on a real server: its program sends made-up prompts, and its report is checked."""

from __future__ import annotations

import json
from typing import Any

import pytest

from e2e.server import Server
from fastdeploy.embedded import MODEL_DIR
from frameworks.conftest import run_program

pytestmark = pytest.mark.slow

REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 9, 30, 20
# The embedded model's template puts <|user|> before a message and <|assistant|> after it.
ROUTES = {"/v1/completions": PROMPT_TOKENS, "/v1/chat/completions": PROMPT_TOKENS + 2}


def tokens_made(server: Server) -> float:
    """Return how many tokens all replicas have sampled since the start."""
    lines = server.get("/metrics").body.decode().split("\n")
    return sum(float(line.split()[1]) for line in lines if line.startswith("fastdeploy:generation_tokens_total"))


@pytest.fixture(scope="module", params=list(ROUTES))
def route(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def benchmark(live: Server, route: str, tmp_path_factory) -> dict[str, Any]:
    """Run guidellm with one load. Return its report, with the tokens that the server made."""
    folder = tmp_path_factory.mktemp("guidellm")
    before = tokens_made(live)
    run_program(
        "guidellm", "run",
        "--backend", f"kind=openai_http,target={live.url},request_format={route}",
        "--profile", "kind=concurrent,streams=3",
        "--constraint", f"kind=max_requests,count={REQUESTS}",
        "--tokenizer", f"kind=hf_auto,model={MODEL_DIR}",
        "--data", f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}",
        "--output", f"kind=json,path={folder / 'report.json'}",
        "--disable-console",
        HF_HOME=str(folder / "hub"),
    )  # fmt: skip
    [report] = json.loads((folder / "report.json").read_text())["benchmarks"]
    return report | {"tokens_made": tokens_made(live) - before}


def test_every_request_is_counted_as_a_success(benchmark):
    totals = {"successful": REQUESTS, "errored": 0, "incomplete": 0, "total": REQUESTS}
    assert benchmark["metrics"]["request_totals"] == totals


def test_each_request_has_the_tokens_that_were_asked_for(benchmark, route):
    """guidellm takes them from the usage that it gets with each event (``continuous_usage_stats``)."""
    requests = benchmark["requests"]["successful"]
    assert [request["output_metrics"]["text_tokens"] for request in requests] == [OUTPUT_TOKENS] * REQUESTS
    assert [request["input_metrics"]["text_tokens"] for request in requests] == [ROUTES[route]] * REQUESTS
    assert all('"continuous_usage_stats":true' in request["request_args"] for request in requests)


def test_the_server_made_the_tokens_that_the_report_counts(benchmark):
    assert benchmark["tokens_made"] == REQUESTS * OUTPUT_TOKENS
