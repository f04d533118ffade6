"""SkyRL's own RemoteInferenceClient and SkyrlWeightSyncClient on a real server: see skyrl_child.py."""

from __future__ import annotations

from typing import Any

import pytest

from e2e.server import perturbed
from frameworks.conftest import run_child

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(live, tmp_path_factory) -> dict[str, Any]:
    return run_child("skyrl_child.py", live.url, perturbed(tmp_path_factory.mktemp("weights") / "policy-1"))


def whole(answers: dict[str, Any], tokens: int) -> bool:
    """Check that every answer has all tokens and logprobs and was not aborted; SkyRL trains on every answer as
    finished."""
    lengths = [len(row) for row in answers["ids"] + answers["logprobs"]]
    return lengths == [tokens] * 8 and answers["stops"] == ["length"] * 4 and all(answers["texts"])


def test_answers_are_complete_and_a_pause_does_not_change_them(results):
    assert results["world"] == [1, 1]
    assert whole(results["alone"], results["tokens"])
    assert results["frozen"] == [4, True], "all four were frozen"
    assert results["kept"] == results["alone"]


def test_a_weight_sync_keeps_running_requests_and_later_ones_use_the_new_weights(results):
    assert whole(results["straddling"], results["tokens"]) and whole(results["after"], results["tokens"])
    assert results["straddling"]["ids"] != results["alone"]["ids"] != results["after"]["ids"]
    assert results["version"] == "step-1"
    assert results["asleep"] == [["weight"], []], "the KV of frozen requests stayed"


def test_our_weight_sender_publishes_as_skyrls_own_client_does(results):
    assert results["sent_version"] == "1"
    assert results["again"] == results["after"], "the same weights, another way"


def test_the_clients_tinker_interface_works(results):
    assert results["sample"] == [[5, 5], [5, 5]] and results["prompt_logprobs"] == 21
    assert results["tokenized"] == ["hello there"]
    assert results["sleeping"] == [True, False]


def test_a_refused_call_raises_an_error_that_says_why(results):
    adapter, delta, fetch = results["refused"]
    assert "lora_path: there is no folder '/nowhere'" in adapter
    assert "local_checkpoint_dir" in delta and "--pull-root" in delta and "--pull-root" in fetch
