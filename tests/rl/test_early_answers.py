"""A server may refuse a large upload before the client has sent it: the client raises the server's error."""

from __future__ import annotations

import asyncio

import pytest

from fastdeploy.core.errors import FastDeployError
from fastdeploy.http.guards.keys import Keys
from fastdeploy.rl.client import RolloutClient
from fastdeploy.rl.errors import Unreachable
from support.upload_engine import SESSION, UploadEngine

LARGE = bytes(64 << 20)  # more than all buffers between client and server hold


async def upload(client: RolloutClient, body: bytes = LARGE) -> dict:
    return await client.connection.call(
        "POST", "/v1/weights/chunk", upload=[body[:1000], body[1000:]], params={"session_id": SESSION}
    )


async def test_a_refusal_before_the_whole_upload_was_sent_is_the_error_that_the_client_raises(make_stack, tmp_path):
    stack = make_stack(keys=Keys(control=(b"secret",)), max_upload_mb=60, upload_dir=str(tmp_path))
    uploads = UploadEngine(stack.engine)
    async with RolloutClient(stack.server.url, control_key="wrong") as stranger:
        for _ in range(3):
            with pytest.raises(FastDeployError) as refused:
                await upload(stranger, LARGE[: 60 << 20])
            assert refused.value.detail["status"] == 401
    async with RolloutClient(stack.server.url, control_key="secret") as client:
        for _ in range(3):
            with pytest.raises(FastDeployError, match="more than 62914560 bytes") as refused:
                await upload(client)
            assert refused.value.code == "request_too_large"
        fitting = LARGE[: 16 << 20]
        await upload(client, fitting)
    assert uploads.bodies == [fitting]


async def test_a_server_that_closes_without_an_answer_is_unreachable():
    async def close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(close, "127.0.0.1", 0)
    async with server, RolloutClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}") as client:
        with pytest.raises(Unreachable):
            await upload(client)
