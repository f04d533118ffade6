"""The turns of a rollout: ids are sent back as they came, beside aborts, pauses and new weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from e2e.server import Server
from examples.embedded_model import arithmetic, tokenizer
from examples.tool_rollout import disturb
from examples.tool_rollout.__main__ import cached_share, report, run, run_disturbed
from examples.tool_rollout.agent import EQUALS, Agent
from examples.tool_rollout.rollout import ToolRollout
from fastdeploy.rl.client import RolloutClient
from rl.fake_server import EOS, FakeServer, Fault

PROBLEMS = arithmetic.problems(seed=0, n=1000)
SUM = arithmetic.make_problem("add", 1, (12, 34))
SEVERAL_TURNS = 5  # a seed with which the fake server's model calls the tool
FAULTS = [Fault("abort"), Fault("abort", 1), Fault("drop", 2), Fault("reject"), None, Fault("engine_dead", 3)]


def content(r: ToolRollout) -> tuple:
    return r.ids, r.mask, r.logprobs, r.replies, r.tries, r.tool_errors


def intact(rollouts: list[ToolRollout]) -> bool:
    return [fault for rollout in rollouts for fault in rollout.faults()] == []


async def on_fake_server(seed: int, *faults: Fault | None) -> tuple[ToolRollout, FakeServer]:
    async with FakeServer(*faults) as server, RolloutClient(server.url, eos_ids=[EOS]) as client:
        return await Agent(client, max_tokens=200).solve(SUM, seed), server


@pytest.mark.parametrize("seed", [0, 2, 5])
async def test_each_request_has_exactly_the_ids_so_far_and_faults_change_no_rollout(seed):
    alone, server = await on_fake_server(seed)
    assert intact([alone]) and alone.ids[0] == tokenizer.USER_ID
    assert [request["prompt"] for request in server.requests] == [turn.prompt_ids for turn in alone.turns]
    disturbed, server = await on_fake_server(seed, *FAULTS)
    assert content(disturbed) == content(alone) and intact([disturbed])
    for request in server.requests:
        assert request["prompt"] == alone.ids[: len(request["prompt"])]
    assert sum(turn.num_resumes for turn in disturbed.turns) > 0


@pytest.mark.parametrize("seed", [12, 49])
async def test_ids_that_no_text_gives_are_sent_back_as_they_came(seed, monkeypatch):
    monkeypatch.setattr("rl.fake_server.VOCAB", tokenizer.VOCAB_SIZE)  # special tokens, and bytes that are no UTF-8
    rollout, server = await on_fake_server(seed)
    assert len(rollout.turns) > 1 and intact([rollout])
    for turn, request in zip(rollout.turns, server.requests, strict=True):
        assert turn.token_ids != tokenizer.encode(tokenizer.decode(turn.token_ids))
        assert request["prompt"] == turn.prompt_ids == rollout.ids[: len(turn.prompt_ids)]


async def test_a_call_that_is_no_expression_is_counted_and_the_model_goes_on():
    rollouts = [(await on_fake_server(seed))[0] for seed in (0, 2)]
    assert intact(rollouts) and sum(r.tool_errors for r in rollouts) > 0
    for r in rollouts:
        assert r.tool_errors == r.replies.count([])
        assert all(turn.token_ids[-1] == EQUALS for turn, reply in zip(r.turns, r.replies, strict=False) if not reply)


def damage(r: ToolRollout, what: str) -> None:
    at = len(r.turns[0].prompt_ids)
    match what:
        case "a sampled id":
            r.ids[at] += 1
        case "an id of the prompt":
            r.ids[0] += 1
        case "an id too many":
            r.ids.append(1)
        case "the mask":
            r.mask[at] = 0
        case "a logprob":
            r.logprobs[at] -= 1e-7
        case "a span":
            r.spans[0] = replace(r.spans[0], start=r.spans[0].start + 1)
        case "the next prompt":
            r.turns[1].prompt_ids.pop()
        case "a reply":
            r.replies[0].append(1)


@pytest.mark.parametrize("what", ["a sampled id", "an id of the prompt", "an id too many", "the mask", "a logprob",
                                  "a span", "the next prompt", "a reply"])  # fmt: skip
async def test_the_check_of_a_rollout_finds_any_damage(what):
    rollout, _ = await on_fake_server(SEVERAL_TURNS)
    assert rollout.faults() == [] and len(rollout.turns) > 1
    damage(rollout, what)
    assert rollout.faults() != []


# ---------------------------------------------------------------- with the embedded model


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = Server("--max-num-seqs", "32")
    try:
        yield server.wait_ready().url
    finally:
        server.remove()


@pytest.mark.processes
async def test_the_history_comes_from_the_prefix_cache_and_the_tool_writes_the_results(url, capsys):
    async with RolloutClient(url, eos_ids=[tokenizer.END_ID]) as client:
        rollouts = await run(Agent(client, max_tries=2), PROBLEMS[:16], concurrency=8)
        plain = await run(Agent(client, with_tool=False), PROBLEMS[:16], concurrency=16)
    assert report(rollouts, 1.0) and report(plain, 1.0) and "intact: 16 of 16" in capsys.readouterr().out
    assert cached_share(rollouts) == 1.0
    assert {len(r.turns) for r in plain} == {1} and max(len(r.turns) for r in rollouts) > 4
    assert max(len(r.tries) for r in rollouts) == 2, "no problem was put again"
    for problem, r in zip(PROBLEMS, rollouts, strict=False):
        for turn, reply in zip(r.turns, r.replies, strict=False):
            if turn.token_ids[-1] == tokenizer.END_ID:
                assert reply == tokenizer.prompt_ids(problem, chat=True)
            else:
                assert not reply or bytes(reply).removeprefix(b"-").isdigit()


@pytest.mark.processes
async def test_the_prefix_cache_has_a_history_that_no_text_gives(url):
    async with RolloutClient(url, eos_ids=[tokenizer.END_ID]) as client:
        rollouts = await run(Agent(client, temperature=4.0, max_tokens=300), PROBLEMS[:8], concurrency=8)
    assert intact(rollouts) and cached_share(rollouts) == 1.0
    texts = [tokenizer.decode([i for i in r.ids if i != tokenizer.END_ID]) for r in rollouts]
    assert any(tokenizer.encode(text) != r.ids for text, r in zip(texts, rollouts, strict=True))
    assert sum(len(r.turns) > 1 for r in rollouts) > 0


@pytest.mark.processes
async def test_pauses_and_new_weights_of_equal_values_change_no_rollout(url, monkeypatch):
    monkeypatch.setattr(disturb, "PERIOD_S", 0.02)
    async with RolloutClient(url, eos_ids=[tokenizer.END_ID]) as client:
        agent = Agent(client, max_tries=1)
        alone = await run(agent, PROBLEMS[:6], concurrency=6)
        disturbed = await run_disturbed(agent, PROBLEMS[:6], concurrency=6)
    assert intact(disturbed) and [content(r) for r in disturbed] == [content(r) for r in alone]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(3600)
async def test_a_thousand_rollouts_are_intact_across_aborts_and_new_weights(url):
    async with RolloutClient(url, eos_ids=[tokenizer.END_ID]) as client:
        agent = Agent(client)
        alone = await run(agent, PROBLEMS, concurrency=64)
        disturbed = await run_disturbed(agent, PROBLEMS, concurrency=64)
    assert intact(alone) and intact(disturbed)
    assert [content(r) for r in disturbed] == [content(r) for r in alone]
    assert cached_share(alone) >= 0.99 and cached_share(disturbed) >= 0.99
    assert sum(turn.num_resumes for r in disturbed for turn in r.turns) > 0
    assert sum(len({span.weight_epoch for span in r.spans}) > 1 for r in disturbed) > 0
    solved = [sum(r.tries[0] for r in alone), sum(any(r.tries) for r in alone)]
    assert solved[1] > 1.3 * solved[0], "a second answer helps"
