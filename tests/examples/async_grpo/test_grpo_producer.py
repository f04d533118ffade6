"""The producer of the example trainer: staleness, and the fate of every token. The client is a stand-in."""

from __future__ import annotations

import asyncio
import itertools
import json
from contextlib import suppress

import pytest

from examples.async_grpo.config import Settings
from examples.async_grpo.problems import Curriculum
from examples.async_grpo.records import Records
from examples.async_grpo.rollouts import Producer
from fastdeploy.rl.errors import RolloutFailed
from fastdeploy.rl.rollout import Rollout, TokenSpan

TOKENS = 3  # of each answer
LIMIT_S = 60


class Client:
    """Answers at once, by the weights of ``publication``. fails: instead, it gives up with one answer."""

    def __init__(self):
        self.publication, self.sampled, self.fails = 1, 0, False

    async def generate_group(self, prompt, params, n):
        await asyncio.sleep(0)
        count = 1 if self.fails else n
        self.sampled += count * TOKENS
        spans = [TokenSpan(str(self.publication), 1, 0, TOKENS)]
        answers = [Rollout(prompt, [65] * TOKENS, [0.0] * TOKENS, spans, "stop", None, "", 0) for _ in range(count)]
        if self.fails:
            raise RolloutFailed("the server is gone", answers)
        return answers


@pytest.fixture(autouse=True)
def every_second_answer_is_right(monkeypatch):
    right = itertools.cycle([True, False])
    monkeypatch.setattr("examples.async_grpo.problems.is_correct", lambda problem, text: next(right))


@pytest.fixture
def records(tmp_path):
    return Records(tmp_path / "events.jsonl", None)


def producer(client, records, **chosen) -> Producer:
    settings = Settings(**{"group": 2, "groups": 2, "concurrency": 2, "max_staleness": 0} | chosen)
    return Producer(client, settings, Curriculum(0), records)


async def idle() -> None:
    """Let the workers run until they have nothing to do."""
    for _ in range(100):
        await asyncio.sleep(0)


def test_groups_that_are_dropped_as_stale_are_replaced(records):
    client = Client()

    async def run():
        made = producer(client, records)
        async with made.running():
            await idle()  # all groups of an update are ready, and nothing is in flight
            client.publication = 2
            groups = await asyncio.wait_for(made.batch(2), LIMIT_S)
            for group in groups:
                made.settle(group, "trained")
        return groups

    assert [group.oldest for group in asyncio.run(run())] == [2, 2]
    assert records.ledger["discarded"] > 0
    assert records.ledger.total() == client.sampled


def test_in_the_synchronous_way_nothing_starts_while_the_trainer_trains(records):
    client = Client()

    async def run():
        made = producer(client, records, sync="synchronous")
        async with made.running():
            await made.batch(1)
            before = client.sampled
            await idle()
            assert client.sampled == before
            await made.go_on()
            await idle()
            assert client.sampled > before

    asyncio.run(run())


def test_tokens_of_a_failed_generation_are_recorded_as_discarded(records, tmp_path):
    client = Client()
    client.fails = True

    async def run():
        made = producer(client, records, concurrency=1)
        async with made.running():
            await asyncio.wait_for(made.batch(1), LIMIT_S)

    with suppress(ExceptionGroup):
        asyncio.run(run())
    (event,) = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    assert (event["fate"], event["why"], event["tokens"]) == ("discarded", "the server is gone", TOKENS)
    assert event["spans"] == [[1, 0, TOKENS]]
    assert records.ledger.total() == client.sampled


def test_groups_that_are_ready_when_the_run_fails_have_a_fate(records):
    client = Client()

    async def run():
        async with producer(client, records).running():
            await idle()
            raise OSError("disk full")

    with pytest.raises(ExceptionGroup):
        asyncio.run(run())
    assert records.ledger["in_flight"] == client.sampled > 0
