"""Unmodified clients with a real engine through the recorder, and then with the replay: they get the same objects."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from fastdeploy.rl.client import RolloutClient
from fastdeploy.testing import ServerProcess, serve
from fastdeploy.traffic.file import read_recording
from rl.embedded_weights import embedded_weights

KEY = "sk-the-key-of-this-test"
PROMPT = list(range(40, 60))
pytestmark = pytest.mark.processes


def openai_objects(url: str) -> list[Any]:
    client = openai.OpenAI(base_url=url + "/v1", api_key=KEY, max_retries=0)
    model = client.models.list().data[0].id
    ask = {"model": model, "prompt": "12+34=", "max_tokens": 8, "temperature": 0, "logprobs": 1}
    found: list[Any] = [client.completions.create(**ask), *client.completions.create(**ask, stream=True)]
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(**ask | {"max_tokens": -1})
    return [one.model_dump() for one in found] + [refused.value.body]


async def many_objects(url: str) -> list[Any]:
    client = openai.AsyncOpenAI(base_url=url + "/v1", api_key=KEY, max_retries=0)

    async def ask(number: int) -> Any:
        messages: list[Any] = [{"role": "user", "content": f"{number}+3="}]
        reply = await client.chat.completions.create(model="default", messages=messages, max_tokens=8, temperature=0)
        return reply.model_dump()

    return await asyncio.gather(*map(ask, range(6)))


def new_weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    return {
        name: tensor + rng.normal(0, 0.02, tensor.shape).astype(np.float32)
        for name, tensor in embedded_weights().items()
    }


async def training_step(url: str) -> list[Any]:
    """A rollout, new weights under a pause, and a rollout by those."""
    sampling = {"max_tokens": 24, "temperature": 1.0, "seed": 3, "ignore_eos": True}
    async with RolloutClient(url, api_key=KEY) as client:
        before = await client.generate(PROMPT, sampling)
        async with client.paused(mode="keep"):
            published = await client.publish(new_weights(), version="step-41", via="upload")
        after = await client.generate(PROMPT, sampling)
    return [dataclasses.asdict(before), published.version, dataclasses.asdict(after)]


def whole_run(url: str) -> list[Any]:
    return [openai_objects(url), asyncio.run(many_objects(url)), asyncio.run(training_step(url))]


def started(*words: str, ready: str) -> ServerProcess:
    process = ServerProcess((sys.executable, "-m", "fastdeploy", *words))
    process.wait_ready(60, ready)
    return process


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[Any]]]:
    """The file of a run, and what its clients got."""
    out = tmp_path_factory.mktemp("traffic") / "run.fdt"
    with serve(
        None, "--max-num-seqs", "4", "--num-gpu-blocks-override", "1024", "--served-model-name", "default"
    ) as engine:
        recorder = started("record", "--upstream", engine.url, "--out", str(out), ready="/ready")
        try:
            objects = whole_run(recorder.url)
            assert recorder.stop(signal.SIGINT) == 0
        finally:
            recorder.close()
    yield out, objects


@pytest.mark.parametrize("speed", ["recorded", "0"])
def test_clients_get_the_same_objects_from_the_replay(recorded, speed):
    out, objects = recorded
    replay = started("replay", str(out), "--speed", speed, ready="/replay/report")
    try:
        assert whole_run(replay.url) == objects
        assert replay.stop(signal.SIGINT) == 0, replay.log()
    finally:
        replay.close()


def test_a_trainer_that_does_not_pause_is_told_so(recorded):
    out, _ = recorded
    replay = started("replay", str(out), "--speed", "0", ready="/replay/report")

    async def step_without_a_pause() -> None:
        async with RolloutClient(replay.url) as client:
            await client.publish(new_weights(), version="step-41", via="upload")

    try:
        openai_objects(replay.url)
        asyncio.run(many_objects(replay.url))
        asyncio.run(step_without_a_pause())
        assert replay.stop(signal.SIGINT) == 1
        log = replay.log()
        assert "never_asked: POST /v1/pause" in log and "never_asked: POST /v1/resume" in log
    finally:
        replay.close()


def test_the_recording_has_the_pause_and_the_versions_and_no_key(recorded):
    out, _ = recorded
    recording = read_recording(str(out))
    paths = [one.path for one in recording.exchanges]
    assert paths.index("/v1/pause") < paths.index("/v1/weights/commit") < paths.index("/v1/resume")
    upload = next(one for one in recording.exchanges if one.path == "/v1/weights/chunk")
    assert upload.request is None and upload.request_size > 100_000 and len(upload.request_hash) == 64
    assert KEY not in repr(recording) and KEY.encode() not in out.read_bytes()
    assert "step-41" in repr(recording)
