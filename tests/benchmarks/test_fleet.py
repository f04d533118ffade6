"""The engines of benchmarks/fleet.py, its load and its report."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import msgspec
import pytest

from benchmarks.fleet import run
from benchmarks.lib.fleet.engines import FakeEngines
from benchmarks.lib.fleet.load import COSTS, Figures, Outcome, figures_of, make_sessions, median_of
from benchmarks.lib.fleet.runner import Costs, expected_tokens
from fastdeploy.client.engine_client import EngineClient
from fastdeploy.core.errors import EngineDead
from fastdeploy.core.request_fields import AddRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.fleet.launcher import Placement
from fastdeploy.inter_communicator.zmq_transport import ZmqConnector

FAST = msgspec.structs.replace(COSTS, step_s=1e-4, prompt_s=1e-7, decode_s=0.0)


@pytest.fixture
def engines() -> Iterator[FakeEngines]:
    with FakeEngines(Costs(step_s=0.001)) as engines:
        yield engines


async def connected(placement: Placement) -> EngineClient:
    client = EngineClient(ZmqConnector(placement.endpoint), kills_stalled=False)
    client.start()
    await asyncio.wait_for(client.connected.wait(), 30)
    return client


async def generate(client: EngineClient, request_id: str, prompt: list[int], count: int) -> list[int]:
    sampling = SamplingParams(max_tokens=count, temperature=0.0)
    stream = await client.submit(AddRequest(request_id, prompt, sampling))
    tokens: list[int] = []
    with stream:
        while not stream.ended or len(tokens) < count:
            await stream.reader.wait()
            tokens += [token for output in stream.take() for token in output.token_ids]
    return tokens


def test_engines_answer_die_and_start_again(engines):
    async def run() -> None:
        clients = [await connected(placement) for placement in engines.start(2)]
        for i, client in enumerate(clients):
            assert await generate(client, "a", [i, 5, 6], 4) == expected_tokens([i, 5, 6], 4)
        boot = clients[0].welcome.boot_id
        slow = asyncio.ensure_future(generate(clients[0], "b", [9], 2000))
        engines.kill(0)
        assert not engines.alive(0) and engines.alive(1)
        with pytest.raises(EngineDead):
            await slow
        engines.restart(0)
        await asyncio.wait_for(clients[0].connected.wait(), 30)
        assert clients[0].welcome.boot_id != boot
        assert await generate(clients[0], "c", [7], 3) == expected_tokens([7], 3)
        await asyncio.gather(*(client.close() for client in clients))

    asyncio.run(run())


def test_a_stopped_engine_goes_on_where_it_was(engines):
    async def run() -> None:
        client = await connected(engines.start(1)[0])
        engines.stop(0)
        answer = asyncio.ensure_future(generate(client, "a", [1, 2], 5))
        done, _ = await asyncio.wait([answer], timeout=0.05)
        assert not done and engines.alive(0)
        engines.cont(0)
        assert await answer == expected_tokens([1, 2], 5)
        await client.close()

    asyncio.run(run())


def test_each_seed_has_its_own_sessions_with_a_heavy_tail():
    sessions = make_sessions(100, seed=1)
    assert sessions == make_sessions(100, seed=1) != make_sessions(100, seed=2)
    turns = sorted(len(session.turns) for session in sessions)
    assert turns[0] == 2 and turns[50] <= 4 and turns[-1] == 24
    assert 3 * sum(turns[-10:]) > sum(turns), "a tenth of the sessions has more than a third of the turns"


def test_figures_count_what_was_cached_of_the_history_only():
    runs = [figures_of([Outcome(3.0, 900, 400, 300), Outcome(1.0, 100, 0, 0)]), Figures(5.0, 4.0, 0.5, 7)]
    assert runs[0] == Figures(3.0, 2.0, 0.75, 100)
    assert median_of([*runs, Figures(4.0, 9.0, 0.1, 50)]) == Figures(4.0, 4.0, 0.5, 50)


@pytest.mark.parametrize("policy", ["ours", "two choices"])
def test_a_policy_answers_all_turns(policy):
    figures = asyncio.run(run(policy, replicas=2, sessions=3, seed=0, max_turns=2, costs=FAST))
    assert figures.longest_s > 0
    if policy == "ours":
        assert figures.hit_rate > 0.9
