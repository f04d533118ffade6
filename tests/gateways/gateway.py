"""A real gateway in front of two of our servers. The environment of the gateways is made by `make test-gateways`."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from e2e.server import PROMPT, Server, until
from fastdeploy.testing.process import free_port

ROOT = Path(__file__).resolve().parents[2]
PYTHON = os.environ.get("GATEWAYS_PYTHON") or str(ROOT / ".venv-gateways" / "bin" / "python")
# All three read these. Without them a dead worker is found after minutes.
HEALTH = ("--health-check-interval-secs", "1", "--health-failure-threshold", "2", "--health-success-threshold", "1")
ROUND_ROBIN = ("--policy", "round_robin")


class Gateway:
    """The gateway that the Python module ``module`` starts, in front of ``servers``. more: its arguments."""

    def __init__(self, module: str, servers: Sequence[Server], *more: str):
        port, metrics = free_port(), free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [PYTHON, "-m", module, "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics)]
        urls = [server.url for server in servers]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [*command, *HEALTH, "--worker-urls", *urls, *more], stdout=self._log, stderr=subprocess.STDOUT
        )

    def __enter__(self) -> Gateway:
        try:
            until(self._ready, 60, "the gateway is ready")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(10)
        self._log.close()

    def _ready(self) -> bool:
        assert self._process.poll() is None, self._log_end()
        try:
            return self.get("/readiness").status_code == 200
        except httpx.TransportError:
            return False

    def _log_end(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-2000:]

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=20)

    def post(self, path: str, body: Any = None, headers: dict[str, str] | None = None) -> httpx.Response:
        return httpx.post(self.url + path, json={} if body is None else body, headers=headers, timeout=20)

    @property
    def workers(self) -> dict[str, bool]:
        """Return whether each worker is healthy, by URL."""
        return {worker["url"]: worker["is_healthy"] for worker in self.get("/workers").json()["workers"]}

    def generate(self, tokens: int = 6, **body: Any) -> Any:
        """Make a call of SGLang's /generate that must succeed."""
        reply = self.post("/generate", generation(tokens, **body))
        assert reply.status_code == 200, reply.text
        return reply.json()


def generation(tokens: int, **body: Any) -> dict[str, Any]:
    """Return the body of a greedy call of SGLang's /generate."""
    sampling = {"max_new_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
    return {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True, **body}


def served(server: Server) -> int:
    """Return the number of tokens that ``server`` has generated."""
    return int(server.metric("generation_tokens_total"))
