"""vllm-router in front of our servers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from e2e.server import PROMPT, Server
from gateways import behaviour
from gateways.gateway import ROUND_ROBIN, Gateway

pytestmark = pytest.mark.slow
MODULE = "vllm_router.launch_router"


@pytest.fixture(scope="module")
def gateway(servers: list[Server]) -> Iterator[Gateway]:
    with Gateway(MODULE, servers, *ROUND_ROBIN) as gateway:
        yield gateway


def register(gateway: Gateway, server: Server) -> None:
    assert gateway.post("/workers", {"url": server.url, "worker_type": "regular"}).status_code == 200


def test_both_servers_are_workers(gateway, servers):
    behaviour.check_both_are_workers(gateway, servers)
    assert set(gateway.get("/list_workers").json()["urls"]) == {server.url for server in servers}


def test_a_generation_through_the_router_is_that_of_the_server(gateway, servers):
    behaviour.check_generation_is_that_of_the_server(gateway, servers)


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/completions", {"prompt": PROMPT, "max_tokens": 8, "logprobs": 0, "return_token_ids": True}),
     ("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": {"max_tokens": 8, "logprobs": 0}})],
)  # fmt: skip
def test_token_ids_go_straight_through(gateway, servers, path, body):
    sampling = {"temperature": 0, "ignore_eos": True}
    body = {**body, **({} if "sampling_params" in body else sampling)}
    if "sampling_params" in body:
        body["sampling_params"] = {**body["sampling_params"], **sampling}
    through, direct = gateway.post(path, body).json(), servers[0].post(path, body).ok()
    assert through["choices"] == direct["choices"] and len(direct["choices"][0]["token_ids"]) == 8


def test_a_paused_server_stays_in_the_router_and_holds_new_requests(gateway, servers):
    behaviour.check_kept_server_stays(gateway, servers)


def test_requests_leave_a_server_that_rejects_and_come_back(gateway, servers):
    behaviour.check_rejecting_server_is_avoided(gateway, servers)


def test_a_pause_through_the_router_reaches_one_server_only(gateway, servers):
    """The reason why a trainer must pause the servers themselves, or a fleet of ours."""
    assert gateway.post("/v1/pause", {"mode": "keep"}).status_code == 200
    assert sorted(server.get("/is_paused").ok()["is_paused"] for server in servers) == [False, True]
    for server in servers:
        server.post("/v1/resume").ok()


def test_a_server_dies_and_another_is_added():
    behaviour.check_lost_and_found_server(MODULE, register, *ROUND_ROBIN)
