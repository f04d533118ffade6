"""The age of a token is that of its span's weights, not of the reply's arrival."""

from __future__ import annotations

import asyncio

import pytest

from fastdeploy.rl.client import RolloutClient
from fastdeploy.rl.errors import TooStale
from fastdeploy.rl.rollout import TokenSpan
from fastdeploy.rl.staleness import PublicationLedger
from rl.fake_server import FakeServer, Fault

PROMPT = [11, 12, 13]
PARAMS = {"max_tokens": 8, "seed": 1, "ignore_eos": True}


async def straddling(client: RolloutClient, server: FakeServer, commits: int = 1, **options):
    """Generate a rollout with two tokens from before ``commits`` publications and the others from after them."""
    await client.update_weights("/w", version="first")
    server.faults.append(Fault("hang", 2))
    task = asyncio.create_task(client.generate(PROMPT, PARAMS, **options))
    while not server.streams:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.02)
    for _ in range(commits):
        await client.update_weights("/w")
    server.drop_all()
    return await task


async def test_the_staleness_of_a_rollout_is_that_of_its_oldest_token():
    async with FakeServer() as server, RolloutClient(server.url) as client:
        r = await straddling(client, server, commits=2)
        assert [(s.version, s.weight_epoch, s.start, s.end, s.publication) for s in r.spans] == [
            ("first", 1, 0, 2, 1),
            ("3", 3, 2, 8, 3),
        ]
        assert r.staleness == 2 and (r.min_version, r.max_version) == ("first", "3")
        assert (await client.generate(PROMPT, PARAMS)).staleness == 0


@pytest.mark.parametrize("bound", [0, 1, 2])
async def test_a_rollout_beyond_the_bound_is_raised_retried_or_marked_as_asked(bound):
    async def generate(policy):
        async with FakeServer() as server, RolloutClient(server.url, max_staleness=bound, on_stale=policy) as client:
            return await straddling(client, server, commits=2)

    if bound == 2:
        assert (await generate("raise")).staleness == 2
        return
    with pytest.raises(TooStale) as stale:
        await generate("raise")
    assert stale.value.rollouts[0].staleness == 2
    assert (await generate("mark")).staleness == 2
    again = await generate("retry")
    assert again.staleness == 0 and [(s.version, s.start, s.end) for s in again.spans] == [("3", 0, 8)]


def test_weights_are_compared_by_publication_and_not_by_epoch_or_label():
    """An engine that restarts counts its epochs from 0 again; labels repeat."""
    ledger = PublicationLedger()
    for number, (boot_id, epoch) in enumerate([("a", 7), ("a", 8), ("b", 1), ("b", 2)], 1):
        assert ledger.begin_publication() == number
        ledger.end_publication(boot_id, epoch)
    assert ledger.begin_publication() == 5
    ledger.end_publication()  # failed
    sampled = [("a", 7), ("a", 9), ("a", 6), ("b", 2), ("z", 3)]
    spans = [TokenSpan("same", epoch, 0, 1, boot_id=boot_id) for boot_id, epoch in sampled]
    assert [ledger.publication_of(span) for span in spans] == [1, 2, 0, 4, 0] and ledger.newest == 4


def test_tokens_of_new_weights_that_arrive_before_the_commits_answer_belong_to_it():
    ledger = PublicationLedger()
    ledger.begin_publication()
    ledger.end_publication("boot", 1)
    ledger.begin_publication()
    assert ledger.publication_of(TokenSpan("2", 2, 0, 1, boot_id="boot")) == 2
    assert ledger.publication_of(TokenSpan("1", 1, 0, 1, boot_id="boot")) == 1
