"""SkyRL's Tinker server, which trains adapters with JAX on the CPU, with this server as its external inference engine;
and two of Tinker's own clients, which learn at the same time: see tinker_child.py."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from e2e.fleet_server import server_of
from e2e.server import SMALL, Server, until
from fastdeploy.embedded import MODEL_DIR
from fastdeploy.testing.process import free_port
from frameworks.conftest import PYTHON, run_child

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def serving(kind: str, tmp_path_factory) -> Iterator[Server]:
    """Return a server that looks up adapters in the folder to which the Tinker server extracts its checkpoints."""
    root = tmp_path_factory.mktemp("lora")
    with server_of(kind, *SMALL, "--adapter-root", str(root)) as server:
        server.adapter_root = root
        yield server


@pytest.fixture(scope="module")
def tinker_url(serving, tmp_path_factory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("tinker")
    (folder / "uv").write_text(f'#!/bin/sh\nexec {PYTHON} {HERE / "tinker_uv.py"} "$@"\n')
    (folder / "uv").chmod(0o755)
    port = free_port()
    flags = {
        "base-model": MODEL_DIR,
        "backend": "jax",
        "backend-config": '{"max_lora_adapters": 3, "max_lora_rank": 8}',
        "host": "127.0.0.1",
        "port": port,
        "database-url": f"sqlite:///{folder / 'tinker.db'}",
        "checkpoints-base": folder / "checkpoints",
        "external-inference-url": serving.url,
        "external-inference-lora-base": serving.adapter_root,
    }
    command = [folder / "uv", "run", "-m", "skyrl.tinker.api"]
    command += [str(part) for flag, value in flags.items() for part in (f"--{flag}", value)]
    env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "JAX_PLATFORMS": "cpu"}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env, start_new_session=True)
    url = f"http://127.0.0.1:{port}"

    def ready() -> bool:
        assert process.poll() is None, (folder / "log").read_text()[-4000:]
        try:
            return httpx.get(f"{url}/api/v1/healthz", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    try:
        until(ready, 120, "the Tinker server answers")
        yield url
    finally:
        os.killpg(process.pid, signal.SIGTERM)  # the API server, its trainer and their starters
        process.wait(60)


@pytest.fixture(scope="module")
def results(tinker_url) -> dict[str, Any]:
    return run_child("tinker_child.py", tinker_url, MODEL_DIR)


def share(policy: dict[str, Any], token: int) -> float:
    """Return the share of ``token`` in a policy's samples."""
    tokens = [t for sample in policy["tokens"] for t in sample]
    return tokens.count(token) / len(tokens)


def test_two_clients_learn_at_once_each_its_own_token(results):
    for token, policies in results["learned"].items():
        own, other = int(token), 99 - int(token)
        assert share(policies[0], own) < 0.5 and share(policies[-1], own) > 0.9
        assert share(policies[-1], other) == 0.0
        for policy in policies:
            assert [len(sample) for sample in policy["tokens"]] == policy["logprobs"] == [8] * results["samples"]


def test_each_checkpoint_is_an_adapter_that_the_server_found_by_its_name(results, serving):
    names = {_adapter(policy) for policies in results["learned"].values() for policy in policies}
    known = {adapter["lora_name"]: adapter for adapter in serving.get("/v1/adapters").result["adapters"]}
    assert known.keys() == names and len(names) == sum(map(len, results["learned"].values()))
    assert all(Path(adapter["path"]).parent == serving.adapter_root for adapter in known.values())


def test_samples_are_those_of_the_checkpoint_that_the_client_named(results, serving):
    for policies in results["learned"].values():
        for policy in policies:
            body = {"model": _adapter(policy), "prompt": results["prompt"], "n": results["samples"], "temperature": 1.0,
                    "seed": policy["seed"], "max_tokens": results["tokens"], "return_token_ids": True}  # fmt: skip
            choices = serving.post("/v1/completions", body).ok()["choices"]
            assert [choice["token_ids"] for choice in choices] == policy["tokens"]
            spans = {(span["lora_name"], span["adapter_epoch"]) for c in choices for span in c["weight_versions"]}
            assert spans == {(_adapter(policy), 1)}


def _adapter(policy: dict[str, Any]) -> str:
    """Return the name under which the Tinker server asks for a checkpoint: tinker://MODEL/NAME is MODEL_NAME."""
    return policy["path"].removeprefix("tinker://").replace("/", "_")
