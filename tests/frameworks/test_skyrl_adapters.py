"""Many tenants with SkyRL's own client on a real server, in three ways: see skyrl_adapters_child.py."""

from __future__ import annotations

from typing import Any

import pytest

from e2e.fleet_server import server_of
from frameworks.adapters import adapter_folder
from frameworks.conftest import run_child

pytestmark = pytest.mark.slow
POLICIES = ("A1", "A2", "B1", "B2", "C")
WAYS = ("plain", "native", "abort")
SCOPED = ("native", "abort")  # ways that hold back the requests of one adapter only
RUNNING, PAUSED = [False, False], [True, True]


@pytest.fixture(scope="module")
def results(kind: str, tmp_path_factory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("adapters")
    policies = [adapter_folder(folder / name, seed) for seed, name in enumerate(POLICIES)]
    # float32, so that an answer is the same ids whether its KV was computed token by token or at once.
    flags = ("--dtype", "float32", "--max-num-seqs", "16", "--num-gpu-blocks-override", "2048")
    with server_of(kind, *flags) as server:
        return run_child("skyrl_adapters_child.py", server.url, *policies)


def whole(results: dict[str, Any], answers: list[dict[str, Any]]) -> bool:
    """Check that no answer was aborted or has lost a token or a logprob: SkyRL trains on each as finished."""
    tokens = results["tokens"]
    return all((len(a["ids"]), a["logprobs"], a["stop"]) == (tokens, tokens, "length") for a in answers)


def ids(answers: list[dict[str, Any]]) -> list[list[int]]:
    return [answer["ids"] for answer in answers]


def heads(results: dict[str, Any], policy: str, tokens: int = 100) -> list[list[int]]:
    return [answer[:tokens] for answer in results["alone"][policy]]


def test_the_policies_give_different_answers(results):
    """All other tests need this."""
    for k in range(4):
        assert len({tuple(results["alone"][policy][k][:20]) for policy in POLICIES}) == len(POLICIES)


@pytest.mark.parametrize("way", WAYS)
def test_the_first_sync_of_a_new_tenant_succeeds(results, way):
    seen = results[way]["first_sync"]
    assert seen["held"] == 0 and whole(results, [seen["answer"]])
    assert seen["answer"]["ids"] == results["alone"]["A1"][0]


@pytest.mark.parametrize("way", WAYS)
def test_a_tenants_pause_does_not_stop_another_tenant(results, way):
    seen = results[way]["paused"]
    assert seen["state"] == (RUNNING if way in SCOPED else PAUSED)
    assert seen["early"] == 0, "A's requests wait"
    assert ids(seen["served"]) == ([heads(results, "B1")[0]] if way in SCOPED else [])
    assert whole(results, seen["after"]) and ids(seen["after"]) == results["alone"]["A1"]


@pytest.mark.parametrize("way", WAYS)
def test_of_eight_running_requests_the_paused_four_wait_and_all_complete(results, way):
    seen = results[way]["in_flight"]
    assert seen["early"] == 0, "A's did not end in the pause"
    assert seen["aborts"] == (4 if way == "abort" else 0)
    assert whole(results, seen["a"] + seen["b"])
    assert ids(seen["a"]) == results["alone"]["A1"] and ids(seen["b"]) == results["alone"]["B1"]


@pytest.mark.parametrize("way", WAYS)
def test_an_answer_that_spans_a_swap_has_tokens_of_both_policies(results, way):
    seen = results[way]["swap"]
    assert not seen["early"] and whole(results, [seen["answer"], seen["again"]])
    answer, at = seen["answer"]["ids"], seen["rest"]["at"]
    assert 0 < at < results["tokens"] and answer[:at] == results["alone"]["A1"][0][:at]
    assert seen["again"]["ids"] == results["alone"]["A2"][0]
    assert len(set(seen["lora_int_ids"])) == 1, "the same adapter, reloaded"
    first, last = seen["spans"]
    assert {span["lora_name"] for span in seen["spans"]} == {"A"}
    if way == "abort":  # the client has to join the attempts: here the raw request ended with the abort
        assert seen["aborts"] >= 1 and last["end"] < results["tokens"]
        assert answer[at:] == seen["rest"]["ids"], "the rest is computed by the new policy alone"
    else:
        assert (first["start"], last["end"]) == (0, results["tokens"]), "no token is lost or doubled"
        assert last["adapter_epoch"] == first["adapter_epoch"] + 1


@pytest.mark.parametrize("way", WAYS)
def test_a_pause_of_the_whole_engine_still_works(results, way):
    seen = results[way]["whole_engine"]
    assert seen["state"] == seen["still"] == PAUSED and seen["early"] == 0
    assert whole(results, seen["a"] + seen["b"])
    assert ids(seen["a"]) == results["alone"]["A1"] and ids(seen["b"]) == results["alone"]["B1"]


@pytest.mark.parametrize("way", WAYS)
def test_two_controllers_sync_at_once_while_a_third_tenant_is_served(results, way):
    seen = results[way]["two_controllers"]
    assert len(seen["a"]) == len(seen["b"]) == 12 and whole(results, seen["a"] + seen["b"])
    # Three rounds, in each of which C was served after both had paused, and before either loaded.
    assert ids(seen["c"]) == (heads(results, "C") * 3 if way in SCOPED else [])
    assert seen["last"] == {"A": heads(results, "A2")[0], "B": heads(results, "B2")[0]}
    assert seen["state"] == RUNNING
