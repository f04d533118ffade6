"""Sessions that remember, with the unmodified ``openai`` and ``anthropic`` packages: an agent sees no pause, no update
and no death, and the rows of its session are what the engine sampled."""

from __future__ import annotations

import asyncio
import os
import signal
import uuid
from collections.abc import Iterator
from typing import Any

import anthropic
import numpy as np
import openai
import pytest

from e2e.fleet_server import FleetServer
from e2e.server import SMALL, Server, in_background, until
from fastdeploy.embedded import MODEL_DIR
from fastdeploy.http.sessions.store import SessionStore
from fastdeploy.http.sessions.trajectory import rows
from fastdeploy.rl.scoring import Scorer

USER = [{"role": "user", "content": "12+7="}]
LENGTH = 800


class Agent:
    """An agent in a session of its own, which talks by the openai package."""

    def __init__(self, server: Server, key: str = "none"):
        self.server, self.name = server, f"agent-{uuid.uuid4().hex}"
        self.http = {"headers": {"Authorization": f"Bearer {key}"}} if key != "none" else {}
        url = f"{server.url}/sessions/{self.name}/v1"
        self.client = openai.OpenAI(base_url=url, api_key=key, max_retries=5)
        self.messages: list[dict[str, Any]] = list(USER)

    def ask(self, **fields: Any) -> Any:
        """Send the conversation, and return the choice."""
        fields = {"max_tokens": 12, "temperature": 1.0, **fields}
        extra = {"return_token_ids": True, "ignore_eos": True, **fields.pop("extra_body", {})}
        reply = self.client.chat.completions.create(model="default", messages=self.messages, extra_body=extra, **fields)
        return reply.choices[0]

    def turn(self, then: str = "and?", **fields: Any) -> Any:
        """Ask, and go on with the conversation."""
        choice = self.ask(**fields)
        self.messages += [{"role": "assistant", "content": choice.message.content}, {"role": "user", "content": then}]
        return choice

    def rows(self) -> list[dict[str, Any]]:
        reply = self.server.http.get(f"/v1/sessions/{self.name}", **self.http)
        assert reply.status_code == 200, reply.text
        return reply.json()["rows"]


def assert_rows_say(row: dict[str, Any], turns: list[Any]) -> None:
    """Check that a row is the prompts and answers of ``turns``, which begin each other."""
    assert row["token_ids"] == turns[-1].prompt_token_ids + turns[-1].token_ids
    assert [t["start"] for t in row["turns"]] == [len(turn.prompt_token_ids) for turn in turns]
    mask = [0] * len(row["token_ids"])
    for shown, turn in zip(row["turns"], turns, strict=True):
        assert row["token_ids"][shown["start"] : shown["end"]] == turn.token_ids
        mask[shown["start"] : shown["end"]] = [1] * len(turn.token_ids)
    assert row["loss_mask"] == mask
    assert all((logprob < 0) == bool(sampled) for logprob, sampled in zip(row["logprobs"], mask, strict=True))


def test_each_prompt_begins_with_the_ids_of_the_turn_before_and_the_session_is_one_row(server):
    agent = Agent(server)
    turns = [agent.turn(max_tokens=length) for length in (5, 12, 1)]
    for before, after in zip(turns, turns[1:], strict=False):
        ids = before.prompt_token_ids + before.token_ids
        assert after.prompt_token_ids[: len(ids)] == ids
    (row,) = agent.rows()
    assert_rows_say(row, turns)
    assert [turn["continues"] for turn in row["turns"]] == [None, 0, 1]


def test_a_stream_is_remembered_like_a_whole_answer(server):
    agent = Agent(server)
    events = list(agent.client.chat.completions.create(model="default", messages=USER, max_tokens=9, stream=True))
    text = "".join(event.choices[0].delta.content or "" for event in events)
    agent.messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "and?"}]
    agent.turn()
    (row,) = agent.rows()
    assert [turn["continues"] for turn in row["turns"]] == [None, 0] and row["turns"][0]["message"]["content"] == text


def test_a_branch_and_a_compaction_are_rows_of_their_own(server):
    agent = Agent(server)
    agent.turn()
    fork = list(agent.messages)
    agent.turn()
    agent.messages = [*fork[:-1], {"role": "user", "content": "else?"}]
    agent.turn()
    agent.messages = [{"role": "user", "content": "in short: 19"}]
    agent.turn()
    rows = agent.rows()
    assert [row["turns"][-1]["turn"] for row in rows] == [1, 2, 3]
    assert rows[1]["shared_prefix"] == {"leaf": 1, "length": rows[0]["turns"][0]["end"]}
    assert rows[2]["turns"][0]["begins_anew"] == "its messages continue no earlier turn"


def test_the_log_probabilities_are_those_that_the_server_gives_to_others(server):
    agent = Agent(server)
    turn = agent.turn(seed=3)
    plain = {"prompt": turn.prompt_token_ids, "max_tokens": 12, "seed": 3, "temperature": 1.0, "logprobs": 0}
    same = server.complete(**plain, ignore_eos=True)
    (row,) = agent.rows()
    assert turn.token_ids == same["token_ids"] and turn.logprobs is None
    assert row["logprobs"][len(turn.prompt_token_ids) :] == same["logprobs"]["token_logprobs"]


def test_the_trainer_computes_the_same_log_probabilities_to_the_bit(server):
    agent = Agent(server)
    for _ in range(3):
        agent.turn()
    agent.messages = agent.messages[:3]
    agent.turn()
    scorer = Scorer(str(MODEL_DIR), dtype=server.weights()["dtype"])
    for row in agent.rows():
        first = row["loss_mask"].index(1)
        scored = scorer.logprobs([(row["token_ids"][:first], row["token_ids"][first:])]).numpy()
        sampled = np.array(row["loss_mask"][first:], bool)
        assert scored[sampled].tolist() == np.array(row["logprobs"][first:], np.float32)[sampled].tolist()


def test_a_completion_of_ids_continues_the_turn_that_they_begin_with(server):
    agent = Agent(server)
    first = agent.turn()
    ids = first.prompt_token_ids + first.token_ids + [50, 51]
    agent.client.completions.create(model="default", prompt=ids, max_tokens=4)
    (row,) = agent.rows()
    assert row["token_ids"][: len(ids)] == ids and len(row["turns"]) == 2


PAUSES = [
    {"mode": "abort"},
    {"mode": "keep"},
    pytest.param({"mode": "wait", "timeout_s": 0.2}, marks=pytest.mark.slow),
    pytest.param({"mode": "keep", "clear_cache": True}, marks=pytest.mark.slow),
]


def num_running(server: Server) -> int:
    """Return the number of sequences that the engine runs, or all engines of a fleet."""
    lines = server.get("/metrics").body.decode().split("\n")
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith("fastdeploy:num_requests_running"))


def running_turn(agent: Agent, **fields: Any) -> Any:
    """Begin a long turn, and return its future when the engine has it."""
    future = in_background(agent.turn, max_tokens=LENGTH, **fields)
    until(lambda: num_running(agent.server) > 0 or future.done(), 30, "the turn runs")
    return future


@pytest.mark.parametrize("pause", PAUSES, ids=str)
def test_a_pause_of_any_mode_only_delays_a_turn(live, pause):
    alone = Agent(live).ask(max_tokens=LENGTH, seed=5)
    agent = Agent(live)
    future = running_turn(agent, seed=5)
    live.post("/v1/pause", {**pause, "hold_id": "h"})
    late = Agent(live)
    waiting = in_background(late.turn, seed=5)
    live.post("/v1/resume", {"hold_id": "h"}).ok()
    turn = future.result(60)
    assert (turn.finish_reason, turn.token_ids) == ("length", alone.token_ids)
    assert waiting.result(60).token_ids == alone.token_ids[:12]
    assert_rows_say(agent.rows()[0], [turn])


@pytest.mark.slow
def test_a_sleep_that_aborts_only_delays_a_turn(live):
    alone = Agent(live).ask(max_tokens=LENGTH, seed=9)
    agent = Agent(live)
    future = running_turn(agent, seed=9)
    live.post("/v1/sleep", {"mode": "abort"}).ok()
    assert not future.done() or future.result().token_ids == alone.token_ids
    live.post("/v1/wakeup").ok()
    assert future.result(60).token_ids == alone.token_ids


def test_an_abort_of_all_and_a_reset_do_not_end_a_turn_and_its_own_abort_does(live):
    alone = Agent(live).ask(max_tokens=LENGTH, seed=6).token_ids
    agent = Agent(live)
    future = running_turn(agent, seed=6)
    live.post("/v1/abort_requests", {"abort_all": True}).ok()
    live.post("/v1/reset", {}).ok()
    assert future.result(60).token_ids == alone
    future = in_background(agent.ask, max_tokens=3500)
    until(lambda: num_running(live) > 0, 30, "the turn runs")
    report = live.post(f"/v1/sessions/{agent.name}/abort").ok()
    assert future.result(60).finish_reason == "abort" and len(report["aborted"]) == 1
    assert agent.rows()[0]["turns"][-1]["finish_reason"] == "abort"


def test_a_commit_in_the_middle_of_a_turn_is_in_its_spans(to_update, new_weights):
    agent = Agent(to_update)
    future = running_turn(agent)
    to_update.post("/v1/pause", {"mode": "abort", "hold_id": "h"}).ok()
    to_update.post("/v1/update_weights", {"model_path": str(new_weights), "version": "v2"}).ok()
    to_update.post("/v1/resume", {"hold_id": "h"}).ok()
    turn = future.result(60)
    (row,) = agent.rows()
    assert_rows_say(row, [turn])
    spans = row["turns"][0]["weight_versions"]
    assert spans[-1]["version"] == "v2" and spans[0]["start"] == row["turns"][0]["start"]
    assert spans[-1]["end"] == len(row["token_ids"]) and [s["end"] for s in spans[:-1]] == [
        s["start"] for s in spans[1:]
    ]


@pytest.mark.slow
def test_the_deaths_of_api_servers_and_of_the_engine_lose_nothing_and_the_folder_outlives_the_server(
    start_server, tmp_path
):
    with start_server("--workers", "2", "--session-dir", str(tmp_path)) as server:
        alone = Agent(server).ask(max_tokens=LENGTH, seed=7).token_ids
        agent = Agent(server)
        turns = [agent.turn()]
        for pid in server.api_pids:
            os.kill(pid, signal.SIGKILL)
        until(lambda: len(server.api_pids) == 2, 30, "new API servers")
        server.wait_ready()
        turns.append(agent.turn())
        assert_rows_say(agent.rows()[0], turns)
        other = Agent(server)
        future = running_turn(other, seed=7)
        os.kill(server.engine_pid, signal.SIGKILL)
        turns.append(agent.turn())  # waits for the next engine
        assert future.result(60).token_ids == alone
        assert_rows_say(agent.rows()[0], turns)
        server.stop()
    _, stored = asyncio.run(SessionStore(str(tmp_path), 1 << 30, 100.0).read(b"", agent.name))
    assert_rows_say(next(rows(stored)), turns)


@pytest.fixture(scope="module")
def fleet() -> Iterator[FleetServer]:
    with FleetServer(2, *SMALL) as fleet:
        yield fleet


@pytest.mark.slow
def test_in_a_fleet_a_session_survives_its_replica_and_its_gateway(fleet):
    agent = Agent(fleet)
    turns = [agent.turn()]
    future = running_turn(agent, seed=8)
    engine = until(lambda: next((fleet.engine_of(name) for name in fleet.replicas()), None), 30, "an engine")
    os.kill(engine, signal.SIGKILL)
    turns.append(future.result(60))
    fleet.wait_members(2)
    os.kill(fleet.gateway_pid, signal.SIGKILL)
    fleet.wait_ready()
    turns.append(agent.turn())
    assert_rows_say(agent.rows()[0], turns)


def test_an_anthropic_agent_has_the_same_session(server):
    agent = Agent(server)
    client = anthropic.Anthropic(base_url=f"{server.url}/sessions/{agent.name}", api_key="none", max_retries=0)
    ask = {"model": "default", "max_tokens": 12, "system": "add"}
    first = client.messages.create(messages=[{"role": "user", "content": "12+7="}], **ask)
    assert first.type == "message" and first.stop_reason in ("max_tokens", "end_turn")
    history = [
        {"role": "user", "content": "12+7="},
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [{"type": "text", "text": "and?"}]},
    ]
    count = client.messages.count_tokens(model="default", messages=history, system="add").input_tokens
    with client.messages.stream(messages=history, **ask) as stream:
        last = stream.get_final_message()
    assert last.usage.input_tokens + (last.usage.cache_read_input_tokens or 0) >= count - 1
    (row,) = agent.rows()
    assert [turn["continues"] for turn in row["turns"]] == [None, 0]
    assert row["turns"][1]["message"]["content"] == "".join(block.text for block in last.content)
