"""The engines of benchmarks/fleet.py, its load and its report."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from benchmarks import fleet_pauses
from benchmarks.fleet import POLICIES, Doors, Figures, Outcome, figures_of, median_of, run
from benchmarks.lib.fleet.engines import FakeEngines
from benchmarks.lib.fleet.loads import COSTS, ENGINE, Load, alone_s, make_agents, make_rollouts
from benchmarks.lib.fleet.runner import Costs, expected_tokens
from benchmarks.lib.fleet.virtual import run_virtually
from e2e.server import until
from fastdeploy.client.engine_client import EngineClient
from fastdeploy.core.errors import EngineDead
from fastdeploy.core.process import is_alive
from fastdeploy.core.request_fields import AddRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.fleet.launcher import Placement
from fastdeploy.inter_communicator.zmq_transport import ZmqConnector


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
            tokens += [token for output in stream.read() for token in output.token_ids]
    return tokens


@pytest.mark.slow
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


PROGRAM = """
import time
from benchmarks.lib.fleet.engines import FakeEngines
if __name__ == "__main__":
    engines = FakeEngines()
    engines.start(2)
    engines.stop(1)
    print(*(process.pid for process in engines._processes.values()), flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
def test_engines_even_stopped_ones_end_when_their_program_is_killed(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, path], stdout=subprocess.PIPE, text=True, env=environment) as program:
        assert program.stdout is not None
        pids = [int(pid) for pid in program.stdout.readline().split()]
        assert len(pids) == 2 and all(map(is_alive, pids))
        program.kill()
    until(lambda: not any(map(is_alive, pids)), 20, "the engines have ended")


def test_each_seed_has_its_own_sessions_with_a_heavy_tail():
    sessions = make_agents(1, 100)
    assert make_agents(1, 1) == make_agents(1, 1) != make_agents(2, 1)
    turns = sorted(len(session.turns) for session in sessions)
    assert turns[0] == 2 and turns[50] <= 4 and turns[-1] == 24
    assert 3 * sum(turns[-10:]) > sum(turns), "a tenth of the sessions has more than a third of the turns"


def test_the_samples_of_a_rollout_begin_with_their_prompt():
    sessions = make_rollouts(0, prompts=3, answer=50)
    firsts = [session.turns[0].new_tokens for session in sessions]
    assert [firsts.count(first) for first in firsts] == [8] * 24
    assert len({len(session.turns) for session in sessions}) > 3


def test_figures_count_what_was_cached_of_the_history_only():
    first = figures_of([Outcome(3.0, 400, 300), Outcome(1.0, 0, 0), Outcome(2.0, 0, 0)])
    assert first == Figures(3.0, 2.0, 0.75, 100)
    assert median_of([first, Figures(5.0, 4.0, 0.5, 7), Figures(4.0, 9.0, 0.1, 50)]) == Figures(4.0, 4.0, 0.5, 50)


def small_load(sessions: int, replicas: int) -> Load:
    return Load(partial(make_agents, num=sessions, max_turns=2), replicas, COSTS, ENGINE)


@pytest.mark.parametrize("policy", POLICIES)
def test_each_policy_answers_all_turns(policy):
    assert run_virtually(run(policy, small_load(2, 2), seed=0)).longest_s > 0


def test_equal_runs_in_virtual_time_give_equal_figures():
    first, second = (run_virtually(run("ours", small_load(4, 2), seed=0)) for _ in range(2))
    assert first == second and first.hit_rate > 0.9


@pytest.mark.parametrize("sticky", [False, True])
def test_sessions_over_two_gateways_take_hardly_longer_than_over_one(sticky):
    one, two = (run_virtually(run("ours", small_load(4, 2), 0, Doors(num, sticky))) for num in (1, 2))
    assert two.hit_rate > 0.9 and two.longest_s < 1.05 * one.longest_s


def test_a_session_that_is_alone_takes_as_long_as_computed():
    load = small_load(1, 1)
    (session,) = load.make(3)
    assert run_virtually(run("ours", load, seed=3)).longest_s == pytest.approx(alone_s(session, load), rel=0.03)


@pytest.mark.parametrize("gateways", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_an_idle_fleet_is_paused_and_updated_and_comes_back_with_its_hold_when_all_engines_died(gateways):
    with fleet_pauses.Fleet(3, gateways) as fleet:
        found = dict(fleet_pauses.measure(fleet, 2, idle_s=0.01))
        assert min(fleet.memory()) > 0
    assert len(found["pause"]) == len(found["resume"]) == 2
    for rounds in found.values():
        assert min(figures.leader_s for figures in rounds) > 0 and (rounds[0].others_s > 0) == (gateways > 1)
    assert found["all killed"][0].engines_s > found["a tenth killed"][0].engines_s > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_256_replicas_are_paused_killed_and_back_behind_8_gateways(capsys: pytest.CaptureFixture[str]):
    assert fleet_pauses.main(["--replicas", "256", "--gateways", "8", "--rounds", "3"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split()[:4] == ["256", "8", "all", "killed"]
