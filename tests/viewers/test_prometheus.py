"""deploy/prometheus.yml and deploy/grafana.json with a real Prometheus: every panel shows what the engine did."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from e2e.fleet_server import KINDS, server_of
from e2e.server import PROMPT, LiveStream, Server, until
from frameworks.adapters import EMBEDDED
from support.adapters import simple, write_adapter
from viewers.prometheus import JOBS, Prometheus, expressions

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

FLAGS = (
    *("--max-num-seqs", "4", "--block-size", "16", "--num-gpu-blocks-override", "100"),  # long streams are preempted
    *("--adapter-memory-mb", "1", "--max-retained", "1", "--standby-weights", "on"),
)
RANK = 16  # 360 KB for an adapter
# Faults, which a good run has not; and what depends on the speed of the machine, such as steps that may end before a
# pause can stop them.
MAY_BE_ZERO = {
    "non_finite_rows_total", "non_finite_commits_total", "internal_errors_total", "trace_events_dropped_total",
    "steps_abandoned_total", "engine_short_lives", "quantization", "requests_rejected_total",
    "request_version_lag_bucket", "decode_step_seconds_total",
    "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total",  # a slow machine drafts nothing
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_every_panel_has_data_of_what_the_engine_did(kind, prometheus_bin, other_weights, tmp_path):
    """The server, or gateway, is one target. Each replica of a fleet is one more; a server lists itself as well."""
    replicas = 2 if kind == "fleet" else 1
    server = server_of(kind, *FLAGS)
    with server, Prometheus(prometheus_bin, tmp_path, f"127.0.0.1:{server.port}") as prometheus:
        prometheus.wait_targets(1 + replicas)
        work(server, prometheus, other_weights, tmp_path)
        for job in JOBS:
            for expression in expressions():
                check(prometheus, expression, job)
        names = prometheus.get("query", query='fastdeploy:weight_epoch{job="fastdeploy-replicas"}')["result"]
    assert len({one["metric"]["replica"] for one in names}) == replicas


def check(prometheus: Prometheus, expression: str, job: str) -> None:
    """Wait until an expression of the dashboard has a value other than 0."""
    metrics = set(re.findall(r"fastdeploy:(\w+)", expression))
    if metrics & MAY_BE_ZERO or expression.startswith("changes(fastdeploy:start_time_seconds"):
        assert prometheus.largest(expression, job) is not None, expression
    else:
        until(lambda: prometheus.largest(expression, job), 20, f"{job}: data of {expression}")


def work(server: Server, prometheus: Prometheus, other_weights: Path, folder: Path) -> None:
    """Let the server do whatever the dashboard shows. Prometheus scrapes each state that ends."""
    streams = [LiveStream(server, [*PROMPT, i], max_tokens=600) for i in range(14)]
    for stream in streams[:2]:
        stream.wait_for_tokens(5)
    for mode in ("keep", "wait", "abort"):
        server.post("/v1/pause", {"mode": mode, "hold_id": mode, "timeout_s": 0}).ok()
        if mode == "keep":
            prometheus.wait_seen("num_requests_running", "num_requests_waiting", "rejecting_new_requests", "is_paused")
            prometheus.wait_seen("holds", "oldest_hold_seconds", "oldest_waiting_seconds")
        server.post("/v1/resume", {"hold_id": mode}).ok()
        if mode == "wait":
            until(lambda: all(stream.ended.is_set() for stream in streams[:8]), 120, "the streams end")
    for i in range(4):
        body = {"prompt": PROMPT * 3, "request_id": f"kept-{i}", "retain_s": 600, "max_tokens": 4}
        server.post("/v1/completions", body).ok()
    prometheus.wait_seen("retained_bytes")
    adapters(server, prometheus, folder)
    weights(server, prometheus, other_weights, folder)


def weights(server: Server, prometheus: Prometheus, other_weights: Path, folder: Path) -> None:
    running = LiveStream(server, PROMPT).wait_for_tokens(5)
    for version, kv in (("one", "keep"), ("two", "recompute")):
        server.post("/v1/update_weights", {"model_path": str(other_weights), "version": version, "kv": kv}).ok()
    running.wait_end()
    session = server.post("/v1/weights/begin", {}).result["session_id"]
    prometheus.wait_seen("weight_session_open")
    server.post("/v1/weights/abort", {"session_id": session}).ok()
    server.post("/v1/sleep", {}).ok()
    prometheus.wait_seen("asleep")
    server.post("/v1/wakeup", {}).ok()


def adapters(server: Server, prometheus: Prometheus, folder: Path) -> None:
    """Load more adapters than the memory holds, and use them in turns. One more is refused."""
    names = ("alice", "bob", "carol", "dave")
    for seed, name in enumerate(names):
        path = write_adapter(folder / name, EMBEDDED, simple(EMBEDDED, RANK, seed=seed))
        server.post("/v1/adapters/load", {"lora_name": name, "lora_path": str(path)}).ok()
    running = LiveStream(server, PROMPT, model="alice", max_tokens=600).wait_for_tokens(5)
    server.post("/v1/pause", {"lora_name": "alice", "mode": "keep"}).ok()
    prometheus.wait_seen("num_requests_frozen")
    server.post("/v1/resume", {"lora_name": "alice"}).ok()
    running.wait_end()
    for name in names * 2:
        server.complete(PROMPT, model=name, max_tokens=4)
    cut = write_adapter(folder / "cut", EMBEDDED, simple(EMBEDDED, RANK))
    (cut / "adapter_model.safetensors").write_bytes(b"cut")
    assert server.post("/v1/adapters/load", {"lora_name": "cut", "lora_path": str(cut)}).status == 400
