"""The fuzzed server, and the conditions that it must meet for any request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx

from e2e.server import Server
from fastdeploy.embedded import MODEL_DIR

PROMPT = [5, 6, 7, 8]
MAX_ERROR_BYTES = 8192
# Expected errors with a 5xx status: a pause rejects requests, a disk is full, or a time limit of the call has passed.
EXPECTED_5XX = {"rejecting_new_requests", "out_of_space", "pause_timeout", "staging_timeout"}
CLIENT_TIMEOUT_S = 3.0  # ends requests that are held, or that generate many tokens


class FuzzedServer:
    """A real server of the embedded model. It may read weights from ``folder`` and from the folder of that model."""

    def __init__(self, folder: Path):
        self.folder = folder
        flags = ("--max-num-seqs", "4", "--num-gpu-blocks-override", "512", "--model-root", str(folder))
        self.server = Server(*flags, "--model-root", str(MODEL_DIR))
        self.server.wait_ready()
        self.url = self.server.url
        self.http = httpx.Client(base_url=self.url, timeout=60)
        self._boot_id = self._health()["boot_id"]
        self._checksum = self._weights()["checksum"]
        self._tokens = self._continuation()

    def send(self, method: str, path: str, **kwargs: Any) -> httpx.Response | None:
        """Return the checked answer, or None after CLIENT_TIMEOUT_S seconds. kwargs: of httpx."""
        try:
            reply = self.http.request(method, path, timeout=httpx.Timeout(60, read=CLIENT_TIMEOUT_S), **kwargs)
        except httpx.ReadTimeout:
            self.check_alive()
            return None
        self.check_answer(reply.status_code, reply.headers, reply.content)
        return reply

    def check_answer(self, status: int, headers: Any, content: bytes) -> None:
        """Check that an error is JSON of a bounded size, and is not an internal error."""
        if status >= 400:
            assert headers["content-type"].startswith("application/json"), (status, headers, content[:500])
            assert len(content) <= MAX_ERROR_BYTES, (status, len(content), content[:500])
        if status >= 500:
            code = json.loads(content).get("error", {}).get("code")
            assert code in EXPECTED_5XX, (status, content[:2000])
        self.check_alive()

    def check_alive(self) -> None:
        """Check that the engine has not restarted."""
        assert self._health()["boot_id"] == self._boot_id, self.server.log()

    def restore(self) -> None:
        """Undo the legal effects of calls, and check that the server is as before."""
        self.server.reset()
        assert not self._holds() and not self.http.get("/v1/adapters").json()["result"]["adapters"]
        assert self._weights()["checksum"] == self._checksum
        assert self._continuation() == self._tokens
        self.check_alive()

    def check_weights_unchanged(self) -> None:
        assert self._weights()["checksum"] == self._checksum

    def close(self) -> None:
        self.http.close()
        self.server.close()

    def _health(self) -> dict[str, Any]:
        reply = self.http.get("/health")
        assert reply.status_code == 200, (reply.text, self.server.log())
        return reply.json()

    def _weights_info(self) -> dict[str, Any]:
        return self.http.get("/v1/weights").json()["result"]

    def _weights(self) -> dict[str, Any]:
        reply = self.http.get("/v1/weights", params={"checksums": "true"})
        assert reply.status_code == 200, reply.text
        return reply.json()["result"]

    def _holds(self) -> list[dict[str, Any]]:
        status = self.http.get("/v1/is_paused").json()["result"]
        return [hold for scope in (status, *status["scopes"]) for hold in scope["holds"]]

    def _continuation(self) -> list[int]:
        body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
        reply = self.http.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()["choices"][0]["token_ids"]
