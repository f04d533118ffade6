"""verl's own client, server manager, load balancer and checkpoint manager, unmodified, with our replica class and
checkpoint engine. Two rollout replicas have a real server each, or share the gateway of a fleet. Needs an environment
with verl: FRAMEWORKS_PYTHON, or .venv-frameworks, made by `make test-slow`."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from e2e.fleet_server import FleetServer
from e2e.server import Server, perturbed
from fastdeploy.embedded import MODEL_DIR

ROOT = Path(__file__).resolve().parents[3]
PYTHON = os.environ.get("FRAMEWORKS_PYTHON") or str(ROOT / ".venv-frameworks" / "bin" / "python")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["servers", "fleet"])
def report(request: pytest.FixtureRequest, tmp_path_factory) -> dict[str, Any]:
    """The report of verl_child.py."""
    weights = perturbed(tmp_path_factory.mktemp("weights") / "policy-7") / "model.safetensors"
    flags = ("--max-num-seqs", "4", "--num-gpu-blocks-override", "1024")
    servers = [FleetServer(2, *flags)] if request.param == "fleet" else [Server(*flags) for _ in range(2)]
    with contextlib.ExitStack() as started:
        urls = [started.enter_context(server).url for server in servers]
        child = subprocess.run(
            [PYTHON, str(ROOT / "tests/rl/frameworks/verl_child.py"), str(MODEL_DIR), str(weights), *urls],
            capture_output=True,
            text=True,
            timeout=600,
            env={
                **os.environ,
                "PYTHONPATH": f"{ROOT}:{ROOT}/tests/frameworks",
                "RAY_AUTH_MODE": "disabled",
                "RAY_DEDUP_LOGS": "0",
            },
        )
    lines = [line for line in child.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, child.stdout[-2000:] + child.stderr[-4000:]
    return json.loads(lines[0].removeprefix("RESULT "))


def test_verls_client_gets_whole_answers(report):
    for answer in report["alone"]:
        assert len(answer["ids"]) == len(answer["logprobs"]) == report["max_tokens"]
        assert answer["stop"] == "completed" and answer["steps"] == [0, 0]


def test_an_abort_of_all_requests_does_not_change_the_answers_of_verls_client(report):
    assert report["resumed_after_abort"] > 0, "at least one request was aborted"
    ids = [set(of_replica) for of_replica in report["aborted_ids"]]
    assert sum(map(len, ids)) == report["resumed_after_abort"], "each of them is named"
    for alone, resumed in zip(report["alone"], report["resumed"], strict=True):
        assert resumed["ids"] == alone["ids"] and resumed["logprobs"] == alone["logprobs"]
        assert resumed["steps"] == [0, 0]


def test_a_weight_sync_during_a_generation_shows_in_the_steps_of_its_tokens(report):
    """verl reads the least and the greatest step of a rollout's tokens."""
    assert report["straddling"], "at least one request was running"
    for answer in report["straddling"]:
        assert answer["steps"] == [0, 7] and len(answer["ids"]) == len(answer["logprobs"])
    for answer, alone in zip(report["after"], report["alone"], strict=True):
        assert answer["steps"] == [7, 7] and answer["ids"] != alone["ids"]


def test_a_sync_without_a_step_leaves_the_step_of_the_results_as_it_is(report):
    for answer, labelled in zip(report["unlabelled"], report["after"], strict=True):
        assert answer["steps"] == [7, 7] and answer["ids"] == labelled["ids"]


def test_the_sync_returns_its_timings_to_the_trainer(report):
    assert "weights/sent_bytes" in report["metrics"] and any(name.endswith("_ms") for name in report["metrics"])


def test_the_server_sleeps_and_wakes_as_verl_asks(report):
    assert report["asleep"][0] and all(tags == ["kv_cache"] for tags in report["asleep"][0])
    assert report["asleep"][1] and all(tags == [] for tags in report["asleep"][1])


def test_each_address_gets_one_publication_from_the_workers_of_its_rollout_replicas(report):
    assert report["colocated"] and all(update == ["8", 1] for update in report["colocated"])
