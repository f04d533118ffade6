"""Drawn conversations with tools: each prompt begins with the ids of the turn before, and each captured row has the log
probabilities of its weights to the bit, whatever happens to the server meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from e2e.conversations import CONVERSATIONS, HARD, MILD, Trial, troubles
from e2e.fleet_server import KINDS, server_of
from examples.agent_grpo.start_policy import START_POLICY
from fastdeploy.testing.tensors import perturbed_copy
from support.search import TIMES

FLAGS = ("--model", str(START_POLICY), "--max-num-seqs", "16", "--num-gpu-blocks-override", "4096")


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("versions")
    for seed, name in enumerate(("one", "two")):
        perturbed_copy(START_POLICY, folder / name, 0.02, seed)
    return {name: folder / name for name in ("one", "two")}


def held(kind: str, versions: dict[str, Path], kinds: tuple[str, ...], examples: int) -> Trial:
    """Hold ten conversations in each of so many examples. Returns the counts."""
    with server_of(kind, *FLAGS) as server:
        trial = Trial(server, START_POLICY, versions)

        @settings(max_examples=examples, phases=[Phase.generate])  # the timing of a failure is not drawn
        @given(st.lists(CONVERSATIONS, min_size=10, max_size=10), troubles(kinds), st.integers(0, 2**32))
        def hold(conversations, happens, seed):
            trial.run(conversations, happens, seed)

        hold()
    return trial


@pytest.fixture(scope="module")
def few(versions: dict[str, Path]) -> Iterator[Trial]:
    yield held("serve", versions, MILD, 3)


def test_conversations_stay_token_exact_beside_pauses_aborts_and_updates(few):
    assert few.conversations == 30 and few.turns > 60 and few.mixed > 0, few.counts


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_a_thousand_conversations_stay_token_exact_beside_kills_too(kind, versions):
    trial = held(kind, versions, HARD, 50 * TIMES)
    assert trial.conversations == 500 * TIMES and trial.mixed > 0
    print(f"{kind}: {trial.counts}")
