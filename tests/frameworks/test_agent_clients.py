"""Unmodified agents in sessions, by the packages openai, anthropic, openai-agents and litellm: see agents_child.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from e2e.fleet_server import server_of
from e2e.server import SMALL, Server
from examples.agent_grpo.start_policy import START_POLICY
from frameworks.conftest import run_child

pytestmark = pytest.mark.slow

QUESTIONS = ("47*38+512", "12+345", "786-51+998-424", "520*95")
CLIENTS = [f"{name}-{stream}" for name in ("openai", "anthropic", "agents", "litellm") for stream in (0, 1)]


@pytest.fixture(scope="module")
def server(kind: str) -> Iterator[Server]:
    with server_of(kind, "--model", str(START_POLICY), *SMALL) as server:
        yield server


@pytest.fixture(scope="module")
def answers(server: Server) -> dict[str, list[str]]:
    return run_child("agents_child.py", server.url, *QUESTIONS)


def rows_of(server: Server, client: str) -> list[dict[str, Any]]:
    """Return the row of each conversation. Each has only one."""
    found = [server.get(f"/v1/sessions/{client}-{i}").json["rows"] for i in range(len(QUESTIONS))]
    assert [len(rows) for rows in found] == [1] * len(QUESTIONS), "a turn was not recognised"
    return [rows[0] for rows in found]


@pytest.mark.parametrize("client", CLIENTS)
def test_each_client_has_the_same_conversations_and_each_is_one_row(client, answers, server):
    rows, expected = rows_of(server, client), rows_of(server, "openai-0")
    assert [row["token_ids"] for row in rows] == [row["token_ids"] for row in expected]
    assert [row["logprobs"] for row in rows] == [row["logprobs"] for row in expected]
    assert answers[client] == [row["turns"][-1]["message"]["content"] for row in rows]
    assert max(len(row["turns"]) for row in rows) > 2, "nobody has called the calculator"
