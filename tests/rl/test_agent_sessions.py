"""Sessions of a trainer's client: addresses for agents, and rows to train on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from fastdeploy.core.errors import InvalidField
from fastdeploy.rl.client import RolloutClient
from fastdeploy.rl.sessions import SessionRow
from fastdeploy.rl.sync_client import SyncRolloutClient
from rl.real_server import RealServer, real_server


@pytest.fixture(scope="module")
def served(tokenizer) -> Iterator[RealServer]:
    with real_server(tokenizer=tokenizer, runner={"vocab": 264, "max_model_len": 512, "num_blocks": 512}) as server:
        yield server


def act(url: str, turns: int = 2) -> list[Any]:
    """Be an agent: talk for some turns, and return the choices."""
    messages, choices = [{"role": "user", "content": "hello"}], []
    with httpx.Client(timeout=20) as http:
        for _ in range(turns):
            body = {"messages": messages, "max_tokens": 5, "ignore_eos": True, "return_token_ids": True}
            reply = http.post(f"{url}/chat/completions", json=body)
            (choice,) = reply.json()["choices"]
            choices.append(choice)
            messages = [*messages, choice["message"], {"role": "user", "content": "on"}]
    return choices


def test_the_rows_of_a_session_are_those_of_its_agent_and_its_end_forgets_them(served):
    async def run() -> None:
        async with RolloutClient(served.url) as client:
            async with client.session() as session:
                assert await session.rows() == [] and await session.abort() == []
                choices = await asyncio.to_thread(act, session.openai_url)
                (row,) = await session.rows()
                sampled = [token for token, mask in zip(row.token_ids, row.loss_mask, strict=True) if mask]
                assert sampled == choices[0]["token_ids"] + choices[1]["token_ids"]
                assert row.prompt_ids == choices[0]["prompt_token_ids"]
                assert row.prompt_ids + row.output_ids == row.token_ids and row.new_mask == row.loss_mask
                assert await session.abort() == []
            assert served.http.get("/v1/sessions").json()["data"] == []
            await session.end()

    asyncio.run(run())


def test_a_session_without_an_event_loop(served):
    with SyncRolloutClient(served.url) as client, client.session("named") as session:
        assert session.openai_url == f"{served.url}/sessions/named/v1" and session.api_key == "none"
        assert session.anthropic_url == f"{served.url}/sessions/named"
        act(session.openai_url, turns=1)
        assert len(session.rows()) == 1 and session.abort() == []
    assert served.http.get("/v1/sessions/named").status_code == 404


def test_the_new_mask_leaves_out_what_an_earlier_row_has():
    row = {"token_ids": [1, 2, 3, 4], "loss_mask": [0, 1, 0, 1], "logprobs": [0.0, -1.0, 0.0, -1.0], "turns": []}
    read = SessionRow.read({**row, "shared_prefix": {"leaf": 0, "length": 2}})
    assert read.new_mask == [0, 0, 0, 1] and read.loss_mask == [0, 1, 0, 1]
    assert SessionRow.read({**row, "shared_prefix": None}).num_shared == 0


@pytest.mark.parametrize("name", ["a b", "named?", "named#1"])
def test_a_name_that_is_none_is_refused(served, name):
    with SyncRolloutClient(served.url) as client:
        act(client.session("named").openai_url, turns=1)
        with pytest.raises(InvalidField, match="session"):
            client.session(name).end()
        assert len(client.session("named").rows()) == 1
        client.session("named").end()
