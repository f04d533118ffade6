"""The agent learns from its sessions: a short run against a real server."""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from openai import AsyncOpenAI

from examples.agent_grpo.__main__ import DEFAULTS
from examples.agent_grpo.start_policy import START_POLICY
from examples.agent_grpo.task import AgentTask
from examples.async_grpo.config import Settings
from examples.async_grpo.learner import scored
from examples.async_grpo.serving import served
from fastdeploy.rl.client import RolloutClient
from fastdeploy.rl.scoring import Scorer

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[3]

SHORT = ["--groups", "2", "--group", "4", "--concurrency", "2", "--updates", "1", "--eval-problems", "4"]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    settings = Settings(**(DEFAULTS | {"concurrency": 4, "group": 4}))
    with served(settings, tmp_path_factory.mktemp("server") / "server.log") as server:
        yield server.url


@pytest.mark.slow
def test_captured_conversations_are_rescored_to_the_bit(url):
    async def converse() -> list:
        task = AgentTask(1)
        async with RolloutClient(url) as client:
            await client.set_version("7")
            problems = [task.draw() for _ in range(4)]
            runs = [task.answers(client, Settings(group=4), problem, seed) for problem, seed in problems]
            return [sample for samples, _ in await asyncio.gather(*runs) for sample in samples]

    samples = asyncio.run(converse())
    open_clients = [item for item in gc.get_objects() if issubclass(type(item), AsyncOpenAI) and not item.is_closed()]
    assert open_clients == [], "an open client closes itself in the event loop of whatever runs next"
    assert len(samples) == 16, "each conversation is one row"
    assert any(not sample.sampled.all() for sample in samples), "no conversation has a reply of the tool"
    assert {span.publication for sample in samples for span in sample.spans} == {7}
    for sample in samples:
        assert len(sample.logprobs) == sample.sampled.sum() == sample.spans[-1].end and sample.sampled[0]
    found = scored(Scorer(str(START_POLICY)), samples).numpy()
    np.testing.assert_array_equal(found, np.concatenate([sample.logprobs for sample in samples]))


def test_an_update_trains_on_sessions_and_accounts_for_every_token(url, tmp_path):
    command = [sys.executable, "-m", "examples.agent_grpo", *SHORT, "--url", url, "--out", str(tmp_path)]
    subprocess.run(command, check=True, cwd=ROOT)
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    (update,) = [event for event in events if event["kind"] == "update"]
    assert update["samples"] == 8 and update["mismatch"]["max_abs"] == 0
    assert events[-1]["unexplained"] == 0 and events[-1]["trained"] == update["tokens"]
