"""Uploads of a client to one server."""

from __future__ import annotations

import httpx
import numpy as np

from fastdeploy.rl import replica as replica_module
from fastdeploy.rl import state_encoding
from fastdeploy.rl.replica import SLICE_BYTES, Replica

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
    monkeypatch.setattr(replica_module, "http_client", lambda headers: httpx.AsyncClient(transport=recorder))
    replica = Replica("http://server", httpx.AsyncClient())
    upload = list(state_encoding.pieces(state_encoding.host_tensors(STATE)))
    for _ in range(2):
        await replica.call("POST", "/v1/weights/chunk", upload=upload)
    content = b"".join(upload)
    assert len(recorder.calls) == 2
    for headers, parts in recorder.calls:
        assert b"".join(parts) == content and max(map(len, parts)) <= SLICE_BYTES
        assert headers["content-length"] == str(len(content)) and "transfer-encoding" not in headers
        assert headers["content-type"] == "application/octet-stream"
