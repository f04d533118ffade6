"""Sessions of agents, as the trainer sees them: addresses for an agent's own client, and rows to train on.

async with client.session() as session:
    await run_agent(base_url=session.openai_url, api_key=session.api_key)
    rows = await session.rows()
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from fastdeploy.core.errors import UnknownSession
from fastdeploy.rl.connection import Connection

NO_KEY = "none"  # clients of OpenAI and Anthropic want a key, also for a server without keys


@dataclass(frozen=True)
class SessionRow:
    """One conversation of a session as tokens, from its first prompt to its last answer.

    loss_mask: 1 for each token that was sampled. logprobs: 0.0 for each token that was not. num_shared: so many tokens
    are those of an earlier row of the same session. turns: what the server says of each answer in the row; see
    "Sessions that remember" in docs/operations.md."""

    token_ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    num_shared: int
    turns: list[dict[str, Any]]

    @classmethod
    def read(cls, row: Mapping[str, Any]) -> SessionRow:
        """Return the row in a reply of the server."""
        shared = row["shared_prefix"]
        lists = (row["token_ids"], row["loss_mask"], row["logprobs"])
        return cls(*lists, 0 if shared is None else shared["length"], row["turns"])

    @property
    def new_mask(self) -> list[int]:
        """``loss_mask`` without the tokens that an earlier row has. With it, each token of the session is used once."""
        return [0] * self.num_shared + self.loss_mask[self.num_shared :]

    @property
    def prompt_ids(self) -> list[int]:
        """The tokens before the first one that was sampled."""
        return self.token_ids[: self.loss_mask.index(1)]

    @property
    def output_ids(self) -> list[int]:
        """The tokens from the first one that was sampled to the end, also those between the answers."""
        return self.token_ids[self.loss_mask.index(1) :]


class AgentSession:
    """A session of an agent. The end of ``async with`` aborts what runs, and makes the server forget the session.

    openai_url, anthropic_url: base URLs for the clients of these APIs. api_key: the key for them."""

    def __init__(self, connection: Connection, control_s: float, name: str | None = None):
        self.name = name or uuid.uuid4().hex
        self._path = quote(self.name, safe=":@=+")  # so that "?" and "#" end no path: the server refuses them by name
        self.anthropic_url = f"{connection.url}/sessions/{self._path}"
        self.openai_url = f"{self.anthropic_url}/v1"
        self.api_key = connection.data_key or NO_KEY
        self._connection = connection
        self._control_s = control_s

    async def __aenter__(self) -> AgentSession:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.end()

    async def rows(self) -> list[SessionRow]:
        """Return the conversations of the session. [] before its first answer."""
        try:
            reply = await self._call("GET")
        except UnknownSession:
            return []
        return [SessionRow.read(row) for row in reply["rows"]]

    async def abort(self) -> list[dict[str, Any]]:
        """End the requests that run. Their clients get the tokens so far. Return their ids and numbers of tokens."""
        try:
            return (await self._call("POST", "/abort"))["aborted"]
        except UnknownSession:
            return []

    async def end(self) -> None:
        """Abort what runs, and make the server forget the session. Nothing happens if it has done so already."""
        with contextlib.suppress(UnknownSession):
            await self._call("DELETE")

    async def _call(self, method: str, action: str = "") -> dict[str, Any]:
        return await self._connection.call(method, f"/v1/sessions/{self._path}{action}", self._control_s)
