"""Uploads of a client."""

from __future__ import annotations

import httpx
import numpy as np

from fastdeploy.rl import connection, state_encoding
from fastdeploy.rl.connection import SLICE_BYTES, Connection

STATE = {
    "long": np.arange(SLICE_BYTES // 2 + 1, dtype=np.float32),
    "empty": np.zeros((0, 2), np.float32),
    "short": np.ones(3, np.float16),
}


class Recorder(httpx.AsyncBaseTransport):
    """Accepts every call. calls: the headers and the buffers of each body."""

    def __init__(self) -> None:
        self.calls: list[tuple[httpx.Headers, list[bytes]]] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.calls.append((request.headers, [bytes(part) async for part in request.stream]))
        return httpx.Response(200, json={})


async def test_an_upload_is_sent_in_slices_with_its_length_and_can_be_sent_again(monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(connection, "http_client", lambda headers: httpx.AsyncClient(transport=recorder))
    server = Connection("http://server")
    upload = list(state_encoding.pieces(state_encoding.host_tensors(STATE)))
    for _ in range(2):
        await server.call("POST", "/v1/weights/chunk", upload=upload)
    content = b"".join(upload)
    assert len(recorder.calls) == 2
    for headers, parts in recorder.calls:
        assert b"".join(parts) == content and max(map(len, parts)) <= SLICE_BYTES
        assert headers["content-length"] == str(len(content)) and "transfer-encoding" not in headers
        assert headers["content-type"] == "application/octet-stream"
