"""Each route gets its key, at its address. A wrong key is the caller's error."""

from __future__ import annotations

import asyncio
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest

from fastdeploy.core.errors import FastDeployError
from fastdeploy.rl.client import RolloutClient
from fastdeploy.rl.frameworks.verl_server import Limits, VerlServer
from rl.fake_server import FakeServer

PROMPT = [11, 12, 13]
PARAMS = {"max_tokens": 4, "seed": 1, "ignore_eos": True}
DATA = {"/v1/completions", "/v1/chat/completions/render", "/health", "/ready"}
LIMITS = Limits(prompt_length=10, response_length=20, max_model_len=64)


async def use_everything(client: RolloutClient) -> None:
    await client.generate(PROMPT, PARAMS)
    async with client.paused():
        await client.publish({"a": np.ones(2, np.float32)}, 1, via="upload")
    await client.abort_all()
    await client.set_version(2)
    await client.is_paused()
    await client.sleep("kv_cache")
    await client.wake()
    await client.reset()
    await client.health()


async def use_verls(url: str, **access) -> None:
    verl = VerlServer(url, LIMITS, SimpleNamespace, **access)
    await verl.generate(PROMPT, PARAMS, "r1")
    await verl.set_global_steps(3)
    await verl.clear_kv_cache()
    await verl.wait_for_requests_to_drain()
    await verl.close()


@pytest.mark.parametrize("given", ["arguments", "environment"])
async def test_data_routes_get_the_data_key_and_all_others_the_control_key(given, monkeypatch):
    access = {"api_key": "d", "control_key": "c"}
    if given == "environment":
        monkeypatch.setenv("FASTDEPLOY_API_KEY", "d")
        monkeypatch.setenv("FASTDEPLOY_CONTROL_KEY", "c")
        access = {}
    async with FakeServer() as server:
        async with RolloutClient(server.url, **access) as client:
            await use_everything(client)
        await use_verls(server.url, **access)
        assert len({path for path, _ in server.keys}) > 12
        assert {(path, "d" if path in DATA else "c") for path, _ in server.keys} == set(server.keys)


async def test_the_renewals_of_a_hold_carry_the_control_key_and_the_callers_headers():
    async with FakeServer() as server:
        client = RolloutClient(server.url, control_key="c", headers={"X-Tenant": "t"})
        async with client, client.paused():
            while not any(path == "/v1/renew" for path, _ in server.keys):
                await asyncio.sleep(0.01)
        assert {key for path, key in server.keys if path == "/v1/renew"} == {"c"}
        assert server.tenants == {"t"}


@pytest.mark.parametrize("keys", [("", "c"), ("d", ""), ("", "")])
async def test_a_single_key_is_sent_to_all_routes_and_without_keys_none_is_sent(keys, monkeypatch):
    monkeypatch.setenv("FASTDEPLOY_API_KEY", "of the environment")
    api_key, control_key = keys
    async with FakeServer() as server, RolloutClient(server.url, api_key=api_key, control_key=control_key) as client:
        await use_everything(client)
    assert {key for _, key in server.keys} == {api_key or control_key}


async def test_control_routes_are_called_at_their_own_port():
    async with FakeServer() as data, FakeServer() as control:
        control.boot_id = data.boot_id
        async with RolloutClient(data.url, control_url=control.url) as client:
            await use_everything(client)
        await use_verls(data.url, control_url=control.url)
        assert {path for path, _ in data.keys} == DATA - {"/v1/chat/completions/render"}
        assert control.keys and not {path for path, _ in control.keys} & DATA


@pytest.mark.parametrize("path", ["/v1/completions", "/health", "/v1/pause"])
@pytest.mark.parametrize("status", [401, 403])
async def test_a_wrong_key_raises_at_once_without_a_second_attempt(path, status):
    async with FakeServer() as server, RolloutClient(server.url) as client:
        server.refuse[path] = deque([(status, "invalid_api_key")] * 9)
        with pytest.raises(FastDeployError, match="invalid_api_key"):
            await (client.pause() if path == "/v1/pause" else client.generate(PROMPT, PARAMS))
        assert [each for each, _ in server.keys].count(path) == 1
        assert not server.holds
