"""Agents that hold drawn conversations by the ``openai`` package while a server is paused, updated and harmed; and the
checks of what the server remembers of them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st
from openai import AsyncOpenAI

from e2e.server import Server, until
from examples.agent_grpo.calculator import TOOLS
from fastdeploy.core.process import is_alive
from fastdeploy.rl.client import RolloutClient
from fastdeploy.rl.scoring import Scorer
from fastdeploy.rl.sessions import AgentSession, SessionRow

WORDS = st.text(alphabet="0123456789+-* aé漢😀\n{}\"'<>", min_size=1, max_size=12)
QUESTIONS = st.sampled_from(["47*38+512", "12+7", "100-58+3-2"]) | WORDS


class Move(NamedTuple):
    """What an agent does next. back: how many answers it goes back before it asks, to branch there. question: of its
    user. results: of the calls in the answers that follow, in turn. tokens: of each answer; None = up to its end."""

    back: int
    question: str
    results: tuple[str, ...]
    tokens: int | None


LENGTHS = st.sampled_from([None, None, 3, 400])
MOVES = st.builds(Move, st.sampled_from([0, 0, 0, 1, 2]), QUESTIONS, st.lists(WORDS, max_size=3).map(tuple), LENGTHS)
CONVERSATIONS = st.lists(MOVES, min_size=2, max_size=4)
MILD = ("keep", "abort", "wait", "live", "abort and update", "keep and update", "abort all", "abort one")
SERVED_S = 60.0  # a supervisor gives up a process that dies again and again without so many seconds of service
HARD = (*MILD, "kill an engine", "kill a server of the API")


class Trouble(NamedTuple):
    """Something that happens to the server. after_s: since the one before."""

    after_s: float
    what: str


def troubles(kinds: Sequence[str]) -> st.SearchStrategy[list[Trouble]]:
    return st.lists(
        st.builds(Trouble, st.sampled_from([0.0, 0.02, 0.1, 0.3]), st.sampled_from(kinds)), min_size=2, max_size=6
    )


class Agent:
    """One agent. seen: of each conversation up to an answer, as texts, the ids that may stand for it. An answer that
    was aborted before its first token is no turn."""

    def __init__(self, session: AgentSession, client: AsyncOpenAI, seed: int):
        self.session, self._seed = session, seed
        self._client = client.with_options(base_url=session.openai_url)
        self._answers: list[list[Any]] = []
        self.seen: dict[str, list[list[int]]] = {}

    async def talk(self, moves: Sequence[Move]) -> None:
        for move in moves:
            before = self._answers[: len(self._answers) - move.back]
            messages = [*(before[-1] if before else []), {"role": "user", "content": move.question}]
            for result in (*move.results, None):
                message = await self._ask(messages, move.tokens)
                messages = [*messages, message.model_dump(exclude_none=True)]
                self._answers.append(messages)
                if result is None or not message.tool_calls:
                    break
                messages = messages + [
                    {"role": "tool", "tool_call_id": call.id, "content": result} for call in message.tool_calls
                ]

    async def _ask(self, messages: list[Any], tokens: int | None) -> Any:
        self._seed += 1
        reply = await self._client.chat.completions.create(
            model="default", messages=messages, tools=TOOLS, max_tokens=tokens or 40, temperature=1.0, seed=self._seed,
            extra_body={"return_token_ids": True, "ignore_eos": tokens is not None},
        )  # fmt: skip
        choice: Any = reply.choices[0]
        earlier = [
            self.seen[text] for end in range(len(messages), 0, -1) if (text := told(messages[:end])) in self.seen
        ]
        ids = choice.prompt_token_ids
        assert not earlier or any(ids[: len(known)] == known for known in earlier[0]), "ids of an earlier turn changed"
        if choice.token_ids:
            self.seen.setdefault(told([*messages, choice.message.model_dump()]), []).append(ids + choice.token_ids)
        return choice.message


def told(messages: Sequence[Any]) -> str:
    """Return what the messages say, without the ids of calls."""
    said = [
        (m["role"], (m.get("content") or "").strip(), [call["function"] for call in m.get("tool_calls") or []])
        for m in messages
    ]
    return json.dumps(said)


class Trial:
    """Conversations on ``server``. versions: the folder of each version that is published; any other version is that of
    ``start``."""

    def __init__(self, server: Server, start: Path, versions: dict[str, Path]):
        self._server, self._versions = server, versions
        self._scorers = {name: Scorer(str(folder)) for name, folder in {"": start, **versions}.items()}
        self._killed = dict.fromkeys(HARD, 0.0)  # when that was done last
        self.conversations = self.turns = self.rows = self.tokens = self.mixed = self.kills = 0

    def run(self, conversations: Sequence[Sequence[Move]], happens: Sequence[Trouble], seed: int) -> None:
        """Hold the conversations at once while ``happens``, and check all that the server remembers of them."""
        asyncio.run(self._run(conversations, happens, seed))

    async def _run(self, conversations: Sequence[Sequence[Move]], happens: Sequence[Trouble], seed: int) -> None:
        kills = any(trouble.what.startswith("kill") for trouble in happens)
        async with (
            RolloutClient(self._server.url) as client,
            AsyncOpenAI(base_url="http://x", api_key="none", max_retries=20 if kills else 0, timeout=120) as openai,
        ):
            agents = [Agent(client.session(), openai, seed + 1000 * i) for i in range(len(conversations))]
            async with asyncio.TaskGroup() as group:
                for agent, moves in zip(agents, conversations, strict=True):
                    group.create_task(agent.talk(moves))
                group.create_task(self._harm(client, happens, agents))
            for agent in agents:
                rows = await agent.session.rows()
                self._check(agent, rows)
                await agent.session.end()
        self.conversations += len(conversations)

    @property
    def counts(self) -> str:
        """What was held and checked."""
        told = f"{self.conversations} conversations, {self.turns} turns, {self.rows} rows, {self.tokens} tokens"
        return f"{told}, {self.mixed} answers of several versions, {self.kills} kills"

    async def _harm(self, client: RolloutClient, happens: Sequence[Trouble], agents: Sequence[Agent]) -> None:
        names = list(self._versions)
        for i, trouble in enumerate(happens):
            await asyncio.sleep(trouble.after_s)
            await self._once(client, trouble.what, names[i % len(names)], agents[i % len(agents)].session)

    async def _once(self, client: RolloutClient, what: str, version: str, session: AgentSession) -> None:
        if what.startswith("kill"):
            if time.monotonic() - self._killed[what] < SERVED_S:
                return
            self._killed[what] = time.monotonic()
            self.kills += 1

        async def update() -> None:
            await client.update_weights(str(self._versions[version]), version, kv="recompute")

        match what:
            case "keep" | "abort" | "wait":
                async with client.paused(what):
                    await asyncio.sleep(0.05)
            case "live":
                await update()
            case "abort and update" | "keep and update":
                async with client.paused("abort" if "abort" in what else "keep"):
                    await update()
            case "abort all":
                await client.abort_all()
            case "abort one":
                await session.abort()
            case "kill an engine":
                await self._kill("fastdeploy.entrypoints.engine_main")
                await update()  # an engine that has lost an update waits for the next one
            case "kill a server of the API":
                await self._kill("entrypoints.gateway", "entrypoints.api_server")

    async def _kill(self, *kinds: str) -> None:
        pid = next(pid for kind in kinds for pid in self._server.pids(kind))
        os.kill(pid, signal.SIGKILL)
        await asyncio.to_thread(until, lambda: not is_alive(pid), 60, "the process is gone")
        await asyncio.to_thread(self._server.wait_ready)

    def _check(self, agent: Agent, rows: Sequence[SessionRow]) -> None:
        """Each turn that the agent saw is in a row, and the logprobs of the rows are those of their weights."""
        for ids in (ids for found in agent.seen.values() for ids in found):
            assert any(row.token_ids[: len(ids)] == ids for row in rows), "no row has a turn of the agent"
            self.turns += 1
        pairs = [(row.prompt_ids, row.output_ids) for row in rows]
        lengths = np.cumsum([0, *(len(output) for _, output in pairs)])
        made_by = [versions_of(row) for row in rows]
        for version in {name for names in made_by for name in names.values()}:
            found = self._scorers.get(version, self._scorers[""]).logprobs(pairs).numpy()
            for row, names, first in zip(rows, made_by, lengths, strict=False):
                at = np.array([i for i, name in names.items() if name == version], int)
                np.testing.assert_array_equal(
                    found[at - len(row.prompt_ids) + first], np.asarray(row.logprobs, np.float32)[at]
                )
        self.rows += len(rows)
        self.tokens += sum(map(len, made_by))
        turns = {turn["turn"]: turn["weight_versions"] for row in rows for turn in row.turns}
        self.mixed += sum(len({span["version"] for span in spans}) > 1 for spans in turns.values())


def versions_of(row: SessionRow) -> dict[int, str]:
    """Return the version that sampled each token, by its position in the row."""
    spans = [span for turn in row.turns for span in turn["weight_versions"]]
    found = {at: span["version"] for span in spans for at in range(span["start"], span["end"])}
    assert sorted(found) == np.flatnonzero(row.loss_mask).tolist(), "the spans do not cover the sampled tokens"
    return found
