"""Each attempt is a request with an id of its own, also for each choice of a group."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from fastdeploy.core.errors import InvalidField
from fastdeploy.rl.client import RolloutClient
from fastdeploy.rl.continuation import PartialRollout, RolloutRequest
from rl.coroutines import until_running
from rl.real_server import RealServer, real_server
from support.fake_runner import expected_tokens

PROMPT = [11, 12, 13]
PARAMS = {"max_tokens": 60, "ignore_eos": True}


@pytest.fixture(scope="module")
def shared() -> Iterator[RealServer]:
    with real_server(max_num_seqs=8) as server:
        yield server


@pytest.fixture
def server(shared: RealServer) -> RealServer:
    """A server whose steps are slow until a test has disturbed its request, which would take 3 s."""
    shared.runner.pace_s = 0.05
    return shared


async def test_a_named_group_that_is_aborted_twice_loses_no_token(server):
    async with RolloutClient(server.url) as client:
        task = asyncio.create_task(client.generate_group(PROMPT, PARAMS, n=4, request_id="g"))
        for _ in range(2):
            await until_running(client, 4, task)
            await client.abort_all()
        server.runner.pace_s = 0.0
        rollouts = await task
    assert [r.token_ids for r in rollouts] == [expected_tokens(PROMPT, 60)] * 4
    assert all(r.num_resumes >= 1 for r in rollouts), "every choice was aborted"


async def test_a_stale_answer_is_generated_again_although_the_server_retained_it(server, tmp_path):
    for name in ("w1", "w2"):
        (tmp_path / name).mkdir()
    async with RolloutClient(server.url) as client:
        await client.update_weights(str(tmp_path / "w1"))
        options = {"request_id": "stale", "max_staleness": 0, "timeout_s": 30.0}
        task = asyncio.create_task(client.generate(PROMPT, PARAMS | {"retain_s": 600.0}, **options))
        await until_running(client, 1, task)
        await client.update_weights(str(tmp_path / "w2"))
        server.runner.pace_s = 0.0
        rollout = await task
    assert rollout.staleness == 0 and len(rollout.spans) == 1
    assert rollout.token_ids == expected_tokens(PROMPT, 60, weights=2)


def attempts(request: RolloutRequest, index: int, count: int, choices: list[PartialRollout] | None = None) -> list[str]:
    """Return the ids of ``count`` attempts of a choice, or of the group ``choices``."""
    group = choices or [PartialRollout(request, index)]
    ids = []
    for _ in range(count):
        for choice in group:
            choice.begin_attempt()
        ids.append(request.body(group)["request_id"])
    return ids


def test_no_two_attempts_of_one_request_share_an_id_and_the_first_has_the_callers():
    request = RolloutRequest(PROMPT, PARAMS, n=3, request_id="mine")
    ids: list[str] = []
    for _ in range(3):
        group = [PartialRollout(request, k) for k in range(3)]
        ids += attempts(request, 0, 2, group)
        for choice in group:
            ids += attempts(request, choice.index, 3, [choice])
        request.start_over()
    assert ids[0] == "mine" and len(set(ids)) == len(ids) == 33
    assert all(name.startswith("mine~") for name in ids[1:])


def test_a_request_id_too_long_for_the_ids_of_later_attempts_is_refused():
    with pytest.raises(InvalidField, match="request_id"):
        RolloutRequest(PROMPT, PARAMS, request_id="x" * 500)
