"""sglang-router in front of our servers, as in slime."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from e2e.server import Server
from gateways import behaviour
from gateways.gateway import ROUND_ROBIN, Gateway

pytestmark = pytest.mark.slow
MODULE = "sglang_router.launch_router"


@pytest.fixture(scope="module")
def gateway(servers: list[Server]) -> Iterator[Gateway]:
    with Gateway(MODULE, servers, *ROUND_ROBIN) as gateway:
        yield gateway


def register(gateway: Gateway, server: Server) -> None:
    """Add a server as slime registers an engine."""
    assert gateway.post("/workers", {"url": server.url, "worker_type": "regular"}).status_code == 202


def test_both_servers_are_workers(gateway, servers):
    behaviour.check_both_are_workers(gateway, servers)


def test_a_generation_through_the_router_is_that_of_the_server(gateway, servers):
    behaviour.check_generation_is_that_of_the_server(gateway, servers)


def test_a_chat_without_a_model_is_served(gateway):
    """The router names the model "unknown"."""
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "ignore_eos": True}
    reply = gateway.post("/v1/chat/completions", body)
    assert reply.json()["usage"]["completion_tokens"] == 3


def test_a_paused_server_stays_in_the_router_and_holds_new_requests(gateway, servers):
    behaviour.check_kept_server_stays(gateway, servers)


def test_requests_leave_a_server_that_rejects_and_come_back(gateway, servers):
    behaviour.check_rejecting_server_is_avoided(gateway, servers)


def test_a_server_dies_and_another_is_added():
    behaviour.check_lost_and_found_server(MODULE, register, *ROUND_ROBIN)
