"""RolloutClient at a plain server, and at the gateway of a fleet of two engines: the same calls mean the same."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.server import until
from fastdeploy.core.errors import ModelNotFound, OutOfSpace
from fastdeploy.rl.client import RolloutClient
from fastdeploy.rl.errors import HoldLost
from fastdeploy.rl.rollout import Rollout
from fleet.fake_fleet import FakeEngine, FakeFleet, fake_fleet
from rl.real_server import RealServer, real_server
from support.fake_runner import expected_tokens, write_adapter

TOKENS = 60
PARAMS = {"max_tokens": TOKENS, "ignore_eos": True}
PROMPTS = [[20 + k, 11, 12] for k in range(4)]
SLOW_S = 0.03  # of a step, until a test has disturbed the requests


class Site:
    """A plain server. weights: that tests have committed; also their weight_epoch."""

    def __init__(self, server: RealServer):
        self.weights = 0
        self.engines: list[RealServer | FakeEngine] = [server]
        self._server = server
        self.url = server.url

    def restart(self) -> None:
        """Restart the first engine, and return when it serves again."""
        self._server.restart_engine()
        self._server.wait_ready()


class Fleet(Site):
    """The gateway of two engines."""

    def __init__(self, fleet: FakeFleet):
        self.weights = 0
        self.engines = list(fleet.engines)
        self._fleet = fleet
        self.url = fleet.url

    def restart(self) -> None:
        engine = self._fleet.engines[0]
        engine.kill()
        until(lambda: not self._fleet.replica(engine.name).in_quorum, 20, "the loss is noticed")
        engine.start()
        self._fleet.wait_members(2)


@contextlib.contextmanager
def make_site(kind: str) -> Iterator[Site]:
    if kind == "fleet":
        with fake_fleet(2) as fleet:
            yield Fleet(fleet)
    else:
        with real_server() as server:
            yield Site(server)


@pytest.fixture(scope="module", params=["server", "fleet"])
def shared(request: pytest.FixtureRequest) -> Iterator[Site]:
    with make_site(request.param) as site:
        yield site


@pytest.fixture
def site(shared: Site) -> Site:
    """Return the shared engines, which serve the weights ``site.weights``."""
    pace(shared, 0.0)
    assert_weights(shared)
    return shared


def assert_weights(site: Site) -> None:
    """Check that every engine has the weights ``site.weights``."""
    assert {engine.runner.weights for engine in site.engines} == {site.weights}


def pace(site: Site, step_s: float) -> None:
    for engine in site.engines:
        engine.runner.pace_s = step_s


async def start(site: Site, client: RolloutClient) -> list[asyncio.Task[Rollout]]:
    """Start a generation for each prompt, and return when all have a few tokens. Steps are slow from now on."""
    pace(site, SLOW_S)
    tasks = [asyncio.create_task(client.generate(prompt, PARAMS)) for prompt in PROMPTS]
    while sum(r.num_output_tokens > 2 for e in site.engines for r in list(e.engine.scheduler.running)) < len(tasks):
        assert not any(task.done() for task in tasks), "too fast"
        await asyncio.sleep(0.005)
    return tasks


async def finish(site: Site, tasks: list[asyncio.Task[Rollout]]) -> list[Rollout]:
    pace(site, 0.0)
    return await asyncio.gather(*tasks)


def assert_undisturbed(rollouts: list[Rollout], weights: int) -> None:
    assert [r.token_ids for r in rollouts] == [expected_tokens(prompt, TOKENS, weights) for prompt in PROMPTS]
    assert [r.logprobs for r in rollouts] == [[-float(token) for token in r.token_ids] for r in rollouts]
    assert {r.finish_reason for r in rollouts} == {"length"}


async def test_one_answer_a_group_and_a_session_of_turns(site):
    async with RolloutClient(site.url) as client:
        group = await client.generate_group(PROMPTS[0], PARAMS, n=3)
        tokens = expected_tokens(PROMPTS[0], TOKENS, site.weights)
        assert [(r.index, r.token_ids) for r in group] == [(k, tokens) for k in range(3)]
        prompt = [5, 6, 7]
        for turn in range(4):
            rollout = await client.generate(prompt, {"max_tokens": 16, "ignore_eos": True}, session_id="tools")
            assert rollout.token_ids == expected_tokens(prompt, 16, site.weights)
            assert (rollout.num_resumes, len(rollout.spans), rollout.staleness) == (0, 1, 0)
            assert not turn or rollout.cached_tokens > 0, "a turn went to another engine than the one before"
            prompt += [*rollout.token_ids, 8 + turn]


async def test_an_update_within_a_pause_that_keeps_splits_the_answers_into_spans(site):
    async with RolloutClient(site.url) as client:
        before, site.weights = site.weights, site.weights + 1
        tasks = await start(site, client)
        async with client.paused("keep") as report:
            assert report["is_paused"] and await client.is_paused()
            done = await client.update_weights(f"/w{site.weights}", "step")
            assert (done.number, done.version) == (1, "step")
        assert not await client.is_paused()
        for prompt, rollout in zip(PROMPTS, await finish(site, tasks), strict=True):
            old, new = rollout.spans
            assert (old.weight_epoch, old.publication, old.start, new.start) == (before, 0, 0, old.end)
            assert (new.version, new.weight_epoch, new.publication, new.end) == ("step", site.weights, 1, TOKENS)
            head = expected_tokens(prompt, old.end, before)
            assert rollout.token_ids == head + expected_tokens(prompt + head, TOKENS - old.end, site.weights)
            assert (rollout.staleness, rollout.num_resumes) == (1, 0)
        again = await client.generate(PROMPTS[0], PARAMS, max_staleness=0)
        assert again.token_ids == expected_tokens(PROMPTS[0], TOKENS, site.weights)


@pytest.mark.parametrize("how", ["paused", "abort_all"])
async def test_answers_that_were_aborted_are_continued(site, how):
    async with RolloutClient(site.url) as client:
        tasks = await start(site, client)
        if how == "paused":
            async with client.paused("abort") as report:
                assert report["counts"]["aborted"] == len(tasks)
                assert not any(task.done() for task in tasks)
        else:
            await client.abort_all()
        rollouts = await finish(site, tasks)
        assert_undisturbed(rollouts, site.weights)
        assert all(r.num_resumes >= 1 for r in rollouts)


async def test_a_hold_that_another_client_releases_is_lost(site):
    async with RolloutClient(site.url) as client, RolloutClient(site.url) as other:
        with pytest.raises(HoldLost):
            async with client.paused("keep"):
                [hold] = (await client.connection.call("GET", "/v1/is_paused"))["holds"]
                await other.resume(hold["id"])
                assert not await client.is_paused()
                with pytest.raises(HoldLost):
                    await client.update_weights(f"/w{site.weights + 1}")
        assert_weights(site)


async def test_an_update_that_one_engine_refuses_commits_nowhere(site, monkeypatch):
    def refuse(*args: object, **options: object) -> None:
        raise OutOfSpace("no room for new weights")

    monkeypatch.setattr(site.engines[-1].runner, "begin_update", refuse)
    async with RolloutClient(site.url) as client:
        with pytest.raises(OutOfSpace, match="no room for new weights") as failed:
            await client.update_weights(f"/w{site.weights + 1}", "refused")
        if len(site.engines) == 2:
            entries = failed.value.detail["replicas"]
            assert {e["name"]: e["status"] for e in entries} == {"replica-0": "rolled_back", "replica-1": "refused"}
        assert_weights(site)
        rollouts = await asyncio.gather(*[client.generate(prompt, PARAMS) for prompt in PROMPTS])
        assert {s.weight_epoch for r in rollouts for s in r.spans} == {site.weights}
        monkeypatch.undo()
        site.weights += 1
        assert (await client.update_weights(f"/w{site.weights}", "taken")).version == "taken"
        assert_weights(site)


async def test_an_adapter_is_loaded_used_and_unloaded(site, tmp_path: Path):
    write_adapter(tmp_path, "a3")
    async with RolloutClient(site.url) as client:
        done = await client.load_adapter("tenant", tmp_path, version="first")
        assert (done.number, done.version) == (1, "first") and not await client.is_paused(lora_name="tenant")
        rollouts = await asyncio.gather(*[client.generate(p, PARAMS, lora_name="tenant") for p in PROMPTS])
        for prompt, rollout in zip(PROMPTS, rollouts, strict=True):
            assert rollout.token_ids == expected_tokens(prompt, TOKENS, site.weights, adapter=3)
            (span,) = rollout.spans
            assert (span.lora_name, span.version, span.adapter_epoch, span.publication) == ("tenant", "first", 1, 1)
        await client.unload_adapter("tenant")
        for call in (client.generate(PROMPTS[0], PARAMS, lora_name="tenant"), client.unload_adapter("tenant")):
            with pytest.raises(ModelNotFound):
                await call
        base = await client.generate(PROMPTS[0], PARAMS)
        assert base.token_ids == expected_tokens(PROMPTS[0], TOKENS, site.weights)


@pytest.mark.parametrize("kind", ["server", "fleet"])
async def test_an_engine_that_restarts_changes_no_answer_and_answers_with_no_older_weights(kind):
    with make_site(kind) as site:
        async with RolloutClient(site.url) as client:
            tasks = await start(site, client)
            assert site.engines[0].engine.scheduler.running, "the requests are not spread"
            await asyncio.to_thread(site.restart)
            assert_undisturbed(await finish(site, tasks), 0)
            await client.update_weights("/w1", "one")
            await asyncio.to_thread(site.restart)
            rollouts = asyncio.gather(*[client.generate(prompt, PARAMS, max_staleness=0) for prompt in PROMPTS])
            if kind == "fleet":
                assert_undisturbed(await rollouts, 1)
            await client.update_weights("/w2", "two")
            assert_undisturbed(await rollouts, 1 if kind == "fleet" else 2)  # a server without the weights is not asked
            site.weights = 2
            assert_weights(site)


@pytest.mark.parametrize("kind", ["server", "fleet"])
async def test_a_hold_is_lost_with_a_plain_server_that_restarts_and_stands_in_a_fleet(kind):
    with make_site(kind) as site:
        async with RolloutClient(site.url) as client:
            with pytest.raises(HoldLost) if kind == "server" else contextlib.nullcontext():
                async with client.paused("keep"):
                    await asyncio.to_thread(site.restart)
                    assert await client.is_paused() == (kind == "fleet")
            assert not await client.is_paused()
