"""AReaL's own RemoteInfEngine on a real server, with its SGLang and its vLLM backend: see areal_child.py."""

from __future__ import annotations

from typing import Any

import pytest

from e2e.server import perturbed
from frameworks.conftest import run_child

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(live, tmp_path_factory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("weights")
    return run_child("areal_child.py", live.url, perturbed(folder / "policy-1"), perturbed(folder / "policy-2"))


@pytest.mark.parametrize("backend", ["sglang", "vllm"])
def test_an_aborted_answer_is_continued_to_the_same_tokens(results, backend):
    seen = results[backend]
    assert len(seen["alone"]["ids"]) == len(seen["alone"]["logprobs"]) == seen["tokens"]
    assert seen["resumed"]["ids"] == seen["alone"]["ids"] and seen["resumed"]["stop"] == "length"
    assert len(seen["resumed"]["logprobs"]) == seen["tokens"]


def test_weights_from_a_folder_serve_after_the_update(results):
    seen = results["sglang"]
    assert seen["straddling"]["versions"] == [0, 1], "this answer spans the update"
    assert len(seen["straddling"]["ids"]) == seen["tokens"]
    assert seen["after"]["versions"] == [1] and seen["after"]["ids"] != seen["alone"]["ids"]
    again = results["vllm"]
    assert again["alone"]["ids"] == seen["after"]["ids"], "the same folder's values, by the other backend's words"
    assert again["after"]["ids"] == again["alone"]["ids"], "its update brings the same values once more"


def test_logprobs_of_given_tokens(results):
    assert results["sglang"]["scored"] == 10
