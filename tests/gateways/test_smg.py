"""smg in front of our servers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from e2e.server import Server
from gateways import behaviour
from gateways.gateway import ROUND_ROBIN, Gateway

pytestmark = pytest.mark.slow
MODULE = "smg.launch_router"
ALL = "selector=engine%3Dvllm"  # smg takes our servers for vLLM's


@pytest.fixture(scope="module")
def gateway(servers: list[Server]) -> Iterator[Gateway]:
    with Gateway(MODULE, servers, *ROUND_ROBIN, "--enable-rl") as gateway:
        yield gateway


def register(gateway: Gateway, server: Server) -> None:
    assert gateway.post("/workers", {"url": server.url, "worker_type": "regular"}).status_code == 202


def test_both_servers_are_workers(gateway, servers):
    behaviour.check_both_are_workers(gateway, servers)


def test_a_generation_through_the_gateway_is_that_of_the_server(gateway, servers):
    """smg names the model "unknown"."""
    behaviour.check_generation_is_that_of_the_server(gateway, servers)


def test_a_chat_is_served_by_the_name_of_the_model(gateway, servers):
    name = gateway.get("/v1/models").json()["data"][0]["id"]
    body = {"model": name, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "ignore_eos": True}
    assert gateway.post("/v1/chat/completions", body).json()["usage"]["completion_tokens"] == 3


def test_a_paused_server_stays_in_the_gateway_and_holds_new_requests(gateway, servers):
    behaviour.check_kept_server_stays(gateway, servers)


def test_requests_leave_a_server_that_rejects_and_come_back(gateway, servers):
    behaviour.check_rejecting_server_is_avoided(gateway, servers)


def test_its_control_plane_pauses_and_resumes_both(gateway, servers):
    report = gateway.post(f"/v1/rl/engine/pause?{ALL}&mode=keep").json()
    assert len(report["results"]) == 2 and not report["failed"], report
    assert all(server.get("/is_paused").ok()["is_paused"] for server in servers)
    assert len(gateway.post(f"/v1/rl/engine/resume?{ALL}").json()["results"]) == 2
    assert not any(server.get("/is_paused").ok()["is_paused"] for server in servers)


def test_a_server_dies_and_another_is_added():
    behaviour.check_lost_and_found_server(MODULE, register, *ROUND_ROBIN)
