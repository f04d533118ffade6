"""The routing of a mixture of experts in the callers' own code, on a real server: see routing_child.py."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from e2e.server import SMALL, Server
from fastdeploy.testing.checkpoints import write_checkpoint
from frameworks.conftest import ROOT, run_child
from support.specs import SPECS, prompt

SLIME = os.environ.get("SLIME") or str(ROOT / ".venv-frameworks" / "slime")
pytestmark = pytest.mark.slow

SPEC = SPECS["qwen3_moe"]
IDS, TOKENS, START = prompt(30, SPEC.vocab), 12, 7
GREEDY = {"temperature": 0, "ignore_eos": True, "max_tokens": TOKENS}
REQUEST = {"ids": IDS, "sampling": GREEDY | {"logprobs": 0}, "start": START, "layers": SPEC.layers, "top_k": 2}


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = str(write_checkpoint(tmp_path_factory.mktemp("moe"), SPEC))
    flags = "--enable-return-routed-experts", "--routed-experts-format", "prime-rl"
    with Server(*SMALL, "--model", folder, *flags) as server:
        yield server


@pytest.fixture(scope="module")
def results(moe: Server) -> dict[str, Any]:
    return run_child("routing_child.py", moe.url, json.dumps(REQUEST))


def native_rows(server: Server, ids: list[int]) -> tuple[list[int], list]:
    """Return the answer, and the rows of prompt and answer with zeros for the dense layer."""
    choice = server.complete(ids, **GREEDY, routed_experts=True)
    routed = choice["routed_experts"]
    array = np.zeros((len(ids) + TOKENS - 1, SPEC.layers, 2), int)
    array[:, routed["layers"]] = rows_of(routed)
    return choice["token_ids"], array.tolist()


def rows_of(routed: dict[str, Any]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(routed["data"]), routed["dtype"]).reshape(routed["shape"])


def test_skyrls_client_reads_the_rows_of_the_whole_sequence_and_from_a_position_on(moe, results):
    tokens, rows = native_rows(moe, IDS)
    assert results["skyrl"] == {"tokens": tokens, "whole": rows, "part": rows[START:]}


def test_prime_rls_client_reads_the_rows_from_a_position_on(moe, results):
    tokens, rows = native_rows(moe, IDS)
    assert results["renderers"] == {"tokens": tokens, "start": START, "part": rows[START:]}


@pytest.mark.slime
def test_slimes_sample_takes_the_rows_and_joins_those_of_a_second_turn(moe):
    taken = run_child("routing_child.py", moe.url, json.dumps(REQUEST), SLIME)["slime"]
    tokens, rows = native_rows(moe, IDS)
    assert taken["first"] == rows
    more, both = native_rows(moe, IDS + tokens)
    assert taken["tokens"] == IDS + tokens + more and taken["both"] == both
