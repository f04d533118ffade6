"""benchmarks/speculation.py: a run on two servers of the embedded model, the replay, and refused arguments."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from benchmarks import speculation
from benchmarks.speculation import Load, body, compare, loads_of, run_load, tokens_per_step
from fastdeploy.bench.client import Client
from fastdeploy.client.tokenizer import load_tokenizer
from fastdeploy.embedded import MODEL_DIR
from fastdeploy.scheduler.drafts import NoDrafts
from fastdeploy.scheduler.ngram_drafter import NgramDrafter
from fastdeploy.worker.model_runner import ModelRunner
from support.drafters import free
from support.engine_stack import engine_stack


@pytest.fixture(scope="module")
def urls():
    """Return the addresses of a server with drafts in every step and of one without."""
    with contextlib.ExitStack() as stack:
        made = []
        for drafter in (NgramDrafter(free), NoDrafts()):
            runner = ModelRunner(str(MODEL_DIR), num_blocks=256, standby_weights="off")
            settings = {"served_model_name": speculation.SERVED}
            server = engine_stack(str(MODEL_DIR), load_tokenizer(str(MODEL_DIR)), runner, drafter, **settings)
            made.append(stack.enter_context(server).url)
        yield made


def short(load: Load) -> Load:
    """Return the same load with 40 tokens for each choice."""
    return load._replace(body=lambda number: load.body(number) | {"max_tokens": 40})


def test_groups_and_their_tails_are_compared_token_by_token(urls):
    loads = [short(load) for load in loads_of("groups")]
    rows = asyncio.run(compare(urls, loads, repeats=2))
    assert [row["load"] for row in rows] == ["groups of 8", "tail of a group of 8"]
    for row in rows:
        assert row["same"] and row["drafted_per_token"] > 0 and 0 < row["accepted"] < 1
        assert row["ratios"] == sorted(row["ratios"]) and len(row["ratios"]) == 2


def test_the_tail_of_a_group_is_one_choice_with_the_number_behind_its_siblings(urls):
    group, tail = [short(load) for load in loads_of("groups")]
    of_group = asyncio.run(run_load(Client(urls[1]), group._replace(requests=1), 0))
    of_tail = asyncio.run(run_load(Client(urls[1]), tail, 0))
    assert of_tail.choices == of_group.choices[-1:] and of_tail.tokens == len(of_tail.choices[0][0])


def test_other_tokens_are_seen(urls):
    class Unequal(Client):
        async def call(self, method, path, fields, timeout):
            return await super().call(method, path, fields | {"seed": 7}, timeout)

    load = Load("l", lambda number: body([5, 6], number, 20, ignore_eos=True), 1, 1)
    runs = [asyncio.run(run_load(kind(urls[0]), load, 0)) for kind in (Client, Unequal)]
    assert runs[0].choices != runs[1].choices and runs[0].tokens == runs[1].tokens == 20


@pytest.mark.parametrize(("most", "steps"), [(2, 36 + 12), (8, 36 + 4)])
def test_a_replay_counts_the_steps_of_each_sample(most, steps):
    """The second sample is the first one again: each of its steps makes one token more than it has drafts."""
    sample = ([1, 2, 3, 4, 5], list(range(100, 136)))
    assert tokens_per_step([[sample]], most, together=False) == 1.0
    assert tokens_per_step([[sample, sample]], most, together=False) == 72 / steps


def test_arguments():
    assert speculation.parse(["--loads", "edits,random"]).loads == ["edits", "random"]
    with pytest.raises(SystemExit):
        speculation.parse(["--loads", "nothing"])
