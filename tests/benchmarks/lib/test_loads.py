from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.lib.loads import Figures, Groups, Load, Long, RepeatedGroups, Streams, loads_of
from benchmarks.lib.roofline import Machine, Shape
from fastdeploy.bench.client import Client, Reply
from fastdeploy.bench.timeline import StreamLog, TokenEvent
from support.fake_pause_server import FakeServer

SHAPE = Shape(hidden=4, inner=8, layers=2, heads=2, kv_heads=1, head_dim=2, vocab=10)


class Recorder:
    """A client stand-in that answers every completion after a moment, with ``short`` samples cut short."""

    def __init__(self, short: int = 0) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.most_prompts_at_once = 0
        self._live: Counter[tuple[int, ...]] = Counter()
        self._short = short

    async def call(self, method: str, path: str, body: dict[str, Any], timeout: float) -> Reply:
        self.bodies.append(body)
        prompt = tuple(body["prompt"])
        self._live[prompt] += 1
        self.most_prompts_at_once = max(self.most_prompts_at_once, len(+self._live))
        await asyncio.sleep(0.001)
        self._live[prompt] -= 1
        reasons = ["stop"] * self._short + ["length"] * (body.get("n", 1) - self._short)
        return Reply(200, {"choices": [{"finish_reason": reason} for reason in reasons]})


def send(load: Load, client: Any, seed: str = "s") -> Figures:
    return asyncio.run(load.run(client, "q05", seed))


def test_tokens_that_arrive_all_at_once_have_no_time_between_them():
    """A busy client receives a short stream in one read."""

    class Late:
        async def stream(self, path: str, body: dict[str, Any], request_id: str) -> Any:
            log = StreamLog(request_id, sent_at=0.0, status=200, done_markers=1, finals=[(1.0, "length")])
            log.tokens = [TokenEvent(1.0, [token]) for token in range(body["max_tokens"])]
            return SimpleNamespace(wait_closed=partial(asyncio.sleep, 0, log))

    load = Streams("s", 2, 4, 5, 4)
    figures = send(load, Late())
    assert figures.tokens == 4 * 5 and figures.token_s is None
    assert load.share(SHAPE, Machine(1.0, 1.0), figures) is None


def test_a_group_in_one_request_asks_for_its_samples_at_temperature_one():
    client = Recorder()
    figures = send(Groups("g", 4, 16, 5, 6), client)
    assert figures.tokens == 6 * 8 * 5 and not figures.errors
    assert len(client.bodies) == 6 and client.most_prompts_at_once == 4
    assert all(body["n"] == 8 and body["temperature"] == 1.0 and not body["stream"] for body in client.bodies)
    assert len({tuple(body["prompt"]) for body in client.bodies}) == 6


def test_a_group_as_requests_sends_its_prompt_eight_times_at_once_and_waits_for_all():
    client = Recorder()
    figures = send(RepeatedGroups("g", 4, 16, 5, 6), client)
    assert figures.tokens == 6 * 8 * 5 and not figures.errors
    prompts = Counter(tuple(body["prompt"]) for body in client.bodies)
    assert list(prompts.values()) == [8] * 6 and client.most_prompts_at_once == 4
    assert not any("n" in body for body in client.bodies)


@pytest.mark.parametrize("kind", [Groups, RepeatedGroups])
def test_a_sample_that_is_cut_short_is_an_error(kind: type[Groups]):
    figures = send(kind("g", 2, 4, 5, 2), Recorder(short=1))
    assert figures.errors and "of" in figures.errors[0]


async def run_streams(defect: str | None = None) -> Figures:
    async with FakeServer(defect=defect) as server:
        return await Streams("s", 3, 5, 7, 9).run(Client(server.url), "fake", "s")


def test_streams_measure_every_request_and_token():
    figures = asyncio.run(run_streams())
    assert not figures.errors
    assert figures.tokens == 63 and figures.tokens_per_s == pytest.approx(63 / figures.seconds)
    assert 0 < figures.first_mean_s < figures.prefilled_s < figures.seconds
    assert figures.token_s > 0


def test_a_stream_that_ends_wrongly_is_an_error():
    assert asyncio.run(run_streams("double_end")).errors


def test_all_engines_get_the_same_prompts_and_each_repeat_has_new_ones():
    load = Groups("g", 2, 32, 4, 4)

    def prompts(seed: str) -> set[tuple[int, ...]]:
        client = Recorder()
        send(load, client, seed)
        return {tuple(body["prompt"]) for body in client.bodies}

    assert prompts("0/g/0") == prompts("0/g/0")
    starts = [{prompt[:4] for prompt in prompts(seed)} for seed in ("0/g/0", "0/g/1", "0/other/0", "1/g/0")]
    assert len(set.union(*starts)) == 16  # no common beginning, which a prefix cache could use


class LongPrompts:
    """A client stand-in that notes the prompts, and answers at once."""

    def __init__(self) -> None:
        self.prompts: list[tuple[int, ...]] = []

    async def stream(self, path: str, body: dict[str, Any], request_id: str) -> Any:
        self.prompts.append(tuple(body["prompt"]))
        log = StreamLog(request_id, sent_at=0.0, status=200, done_markers=1, finals=[(1.0, "length")])
        log.tokens = [TokenEvent(0.1 * at, [at]) for at in range(body["max_tokens"])]
        return SimpleNamespace(wait_closed=partial(asyncio.sleep, 0, log))


def test_long_prompts_are_those_of_the_warm_up_in_every_round():
    [load] = loads_of(["long"], 100)
    client = LongPrompts()
    send(load.warm_up(), client, "warm-up")
    send(load, client, "long/0")
    assert len(client.prompts) == 16 and client.prompts[:8] == client.prompts[8:]
    assert len(set(client.prompts)) == 8 and {len(prompt) + load.output for prompt in client.prompts} == {100}


def test_long_streams_are_bounded_by_the_weights_and_the_kv_of_all_streams():
    load = Long("long", 2, 30, 5, 2)
    figures = send(load, LongPrompts())
    assert figures.token_s == pytest.approx(0.1)
    assert load.share(SHAPE, Machine(1e6, None), figures) == pytest.approx((656 + 2 * 30 * 16) / 0.1 / 1e6)
