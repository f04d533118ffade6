"""Names that are looked up in the adapter root: all members have one adapter, with one number."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx
import pytest

from e2e.server import in_background, until
from fastdeploy.fleet import dispatch
from fastdeploy.fleet.config import FleetConfig
from fleet.fake_fleet import FakeEngine, FakeFleet, fake_fleet
from support.fake_runner import adapter_fingerprint, expected_tokens, write_adapter

PROMPT = [1, 2, 3]
CONFIG = FleetConfig(fleet_id="fleet-1", rebuild_s=0.2, lease_s=1.0)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_adapter(tmp_path / "root" / "alice", "a1")
    return tmp_path / "root"


@pytest.fixture
def fleet(root: Path, tmp_path: Path) -> Iterator[FakeFleet]:
    (tmp_path / "store").mkdir()
    settings = {"adapter_root": str(root), "adapter_store": str(tmp_path / "store"), "model_roots": ()}
    with fake_fleet(2, config=CONFIG, **settings) as fleet:
        yield fleet


def ask(fleet: FakeFleet, name: str = "alice", max_tokens: int = 4, **body: Any) -> httpx.Response:
    body = {"model": name, "prompt": PROMPT, "max_tokens": max_tokens, "ignore_eos": True, **body}
    return fleet.http.post("/v1/completions", json={"return_token_ids": True, **body})


def asked(fleet: FakeFleet, name: str = "alice", max_tokens: int = 4, **body: Any) -> Future[httpx.Response]:
    return in_background(ask, fleet, name, max_tokens, **body)


def answer(reply: httpx.Response) -> tuple[list[int], set[int]]:
    """Return the tokens and the adapter epochs of a reply."""
    assert reply.status_code == 200, reply.text
    [choice] = reply.json()["choices"]
    return choice["token_ids"], {span["adapter_epoch"] for span in choice["weight_versions"]}


def made_by(adapter: int, epoch: int, max_tokens: int = 4) -> tuple[list[int], set[int]]:
    return expected_tokens(PROMPT, max_tokens, adapter=adapter), {epoch}


def known(fleet: FakeFleet) -> list[list[tuple[str, int, str]]]:
    """Return (name, epoch, fingerprint) of all adapters, of each engine."""
    of_engines = [engine.engine.adapters.describe()["adapters"] for engine in fleet.engines]
    fields = ("lora_name", "adapter_epoch", "fingerprint")
    return [[tuple(adapter[field] for field in fields) for adapter in found] for found in of_engines]


def only_on(fleet: FakeFleet, at: int) -> None:
    """Let one replica take all new requests."""
    for i, engine in enumerate(fleet.engines):
        assert fleet.http.post(f"/v1/replicas/{'un' * (i == at)}drain", json={"name": engine.name}).is_success


def call(fleet: FakeFleet, path: str, **body: Any) -> dict[str, Any]:
    reply = fleet.http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()["result"]


def stop_reads(fleet: FakeFleet) -> None:
    for engine in fleet.engines:
        engine.runner.may_stage.clear()


def let_read(fleet: FakeFleet) -> None:
    for engine in fleet.engines:
        engine.runner.may_stage.set()


def waits(fleet: FakeFleet, num: int = 1) -> None:
    until(lambda: fleet.client.num_waiting == num, 20, "requests wait for the lookup")


def test_a_stream_whose_adapter_was_looked_up_goes_on_elsewhere_with_the_same_adapter(fleet, root):
    for engine in fleet.engines:
        engine.runner.pace_s = 0.05
    stream = asked(fleet, max_tokens=40)

    def busy() -> list[FakeEngine]:
        return [e for e in fleet.engines if (r := e.engine.scheduler.running) and r[0].num_output_tokens >= 4]

    until(busy, 20, "the stream runs")
    write_adapter(root / "alice", "a2")
    busy()[0].kill()
    for engine in fleet.engines:
        engine.runner.pace_s = 0.0
    assert answer(stream.result(30)) == made_by(1, 1, 40)


def test_all_members_have_the_adapter_that_one_of_them_was_asked_for(fleet, root):
    only_on(fleet, 0)
    assert answer(ask(fleet)) == made_by(1, 1)
    write_adapter(root / "alice", "a2")
    only_on(fleet, 1)
    assert answer(ask(fleet)) == made_by(1, 1)
    assert known(fleet) == [[("alice", 1, adapter_fingerprint("a1"))]] * 2


@pytest.mark.parametrize("end", ["/v1/adapters/unload", "/v1/reset"])
def test_a_name_that_is_looked_up_again_has_another_number_wherever_it_was_before(fleet, root, end):
    only_on(fleet, 0)
    assert answer(ask(fleet)) == made_by(1, 1)
    call(fleet, end, **({"lora_name": "alice"} if "unload" in end else {}))
    assert known(fleet) == [[], []]
    write_adapter(root / "alice", "a2")
    only_on(fleet, 1)
    assert answer(ask(fleet)) == made_by(2, 2)
    assert known(fleet) == [[("alice", 2, adapter_fingerprint("a2"))]] * 2


def test_requests_that_come_at_once_wait_for_one_lookup(fleet):
    stop_reads(fleet)
    replies = [asked(fleet) for _ in range(6)]
    waits(fleet, 6)
    let_read(fleet)
    assert all(answer(reply.result(20)) == made_by(1, 1) for reply in replies)
    assert [engine.engine.adapters._num_loads for engine in fleet.engines] == [1, 1]
    assert fleet.client._lookups._running == {}


def test_names_without_a_folder_are_not_found_and_leave_nothing_behind(fleet, root):
    state = fleet.client.membership.state
    before = (state.changes, state.revision)
    for name in ("nobody", "../root/alice"):
        error = ask(fleet, name)
        assert error.status_code == 404 and error.json()["error"]["code"] == "model_not_found"
        assert (
            error.json()["error"]["message"].startswith("model: there is no adapter") and "replicas" not in error.json()
        )
    assert (state.changes, state.revision) == before, "a replica that joins need not look again"
    assert all(replica.in_quorum for replica in fleet.client.membership.replicas.values())
    assert fleet.client._lookups._running == {} and fleet.client._relays == {} and fleet.client.num_waiting == 0
    assert not any(engine.engine.scopes.adapters or engine.engine.adapters._loads for engine in fleet.engines)
    write_adapter(root / "nobody", "a3")
    assert answer(ask(fleet, "nobody")) == made_by(3, 1)


def test_a_folder_that_is_no_adapter_is_refused_with_the_reason_and_costs_no_member(fleet, root):
    write_adapter(root / "broken", "broken")
    error = ask(fleet, "broken")
    assert error.json()["error"]["code"] == "weight_update_refused" and "not the tensors" in error.text
    assert all(replica.in_quorum for replica in fleet.client.membership.replicas.values()) and known(fleet) == [[], []]


def test_a_lookup_while_too_many_run_is_refused(fleet, monkeypatch, root):
    monkeypatch.setattr(dispatch, "MAX_LOOKUPS", 1)
    write_adapter(root / "bob", "a2")
    stop_reads(fleet)
    first = asked(fleet)
    waits(fleet)
    assert ask(fleet, "bob").json()["error"]["code"] == "update_in_progress"
    let_read(fleet)
    assert answer(first.result(20)) == made_by(1, 1) and answer(ask(fleet, "bob")) == made_by(2, 1)


def test_a_replica_that_joins_gets_what_was_looked_up_and_not_what_the_folder_holds_by_now(fleet, root):
    answer(ask(fleet))
    write_adapter(root / "alice", "a2")
    fleet.engines[1].kill()
    until(lambda: not fleet.replica("replica-1").in_quorum, 20, "the loss is noticed")
    fleet.engines[1].start()
    fleet.wait_members(2)
    assert known(fleet) == [[("alice", 1, adapter_fingerprint("a1"))]] * 2


@pytest.mark.parametrize("gateway", ["stays", "is replaced"])
def test_a_fleet_that_has_lost_all_engines_reads_the_adapter_root_again(fleet, gateway):
    answer(ask(fleet))
    boot_id = fleet.client.membership.boot_id
    if gateway == "is replaced":
        fleet.replace_gateway()
        fleet.wait_members(2)
    for engine in fleet.engines:
        engine.kill()
    until(lambda: not fleet.client.membership.quorum, 20, "the loss is noticed")
    for engine in fleet.engines:
        engine.start()
    fleet.wait_members(2)
    assert known(fleet) == [[("alice", 1, adapter_fingerprint("a1"))]] * 2
    assert fleet.client.membership.boot_id == boot_id


def test_a_request_waits_for_a_member_and_then_for_its_lookup(fleet):
    for engine in fleet.engines:
        engine.kill()
    until(lambda: not fleet.client.membership.quorum, 20, "the loss is noticed")
    reply = asked(fleet)
    waits(fleet)
    fleet.engines[0].start()
    assert answer(reply.result(20)) == made_by(1, 1)


def test_a_lookup_goes_on_when_a_member_is_lost_in_it(fleet):
    stop_reads(fleet)
    reply = asked(fleet)
    until(lambda: all(engine.engine.adapters._loads for engine in fleet.engines), 20, "both load")
    fleet.engines[0].runner.may_stage.set()
    fleet.engines[0].kill()
    let_read(fleet)
    assert answer(reply.result(20)) == made_by(1, 1)


def test_a_lookup_is_made_while_all_members_are_drained(fleet):
    for engine in fleet.engines:
        assert fleet.http.post("/v1/replicas/drain", json={"name": engine.name}).is_success
    assert ask(fleet, "nobody").status_code == 404
    reply = asked(fleet)
    until(lambda: all(known(fleet)), 20, "both have it")
    only_on(fleet, 0)
    assert answer(reply.result(20)) == made_by(1, 1)


def test_a_lookup_is_made_while_the_fleet_is_paused_or_asleep(fleet):
    call(fleet, "/v1/pause", mode="keep")
    reply = asked(fleet)
    until(lambda: all(known(fleet)), 20, "both have it")
    call(fleet, "/v1/resume")
    assert answer(reply.result(20)) == made_by(1, 1)
    call(fleet, "/v1/adapters/unload", lora_name="alice")
    call(fleet, "/v1/sleep")
    reply = asked(fleet)
    until(lambda: all(known(fleet)), 20, "both have it")
    call(fleet, "/v1/wakeup")
    assert answer(reply.result(20)) == made_by(1, 2)


def test_requests_that_wait_for_a_lookup_end_with_a_reset_and_later_ones_are_looked_up_again(fleet):
    stop_reads(fleet)
    reply = asked(fleet, request_id="early")
    waits(fleet)
    until(lambda: all(engine.engine.adapters._loads for engine in fleet.engines), 20, "both load")
    assert call(fleet, "/v1/reset")["aborted"] == 1
    assert reply.result(20).json()["choices"][0]["finish_reason"] == "abort"
    later = asked(fleet)
    let_read(fleet)
    assert answer(later.result(20)) == made_by(1, 1)
    assert all(replica.in_quorum for replica in fleet.client.membership.replicas.values())


def test_a_request_that_waits_for_a_lookup_is_found_by_an_abort(fleet):
    stop_reads(fleet)
    reply = asked(fleet, request_id="mine")
    waits(fleet)
    assert not call(fleet, "/v1/abort_requests", req_ids=["mine"])["not_found"]
    assert reply.result(20).json()["choices"][0]["finish_reason"] == "abort"
    let_read(fleet)


def test_a_load_follows_a_lookup_of_its_name_and_requests_wait_for_a_load(tmp_path, root):
    with fake_fleet(2, config=CONFIG, adapter_root=str(root)) as fleet:
        path = write_adapter(tmp_path / "other", "a5")
        stop_reads(fleet)
        first = asked(fleet)
        waits(fleet)
        load = in_background(call, fleet, "/v1/adapters/load", lora_name="alice", lora_path=path)
        until(lambda: fleet.client._lookups._loads["alice"], 20, "the load waits")
        let_read(fleet)
        assert load.result(20)["adapter_epoch"] == 2
        first.result(20)
        stop_reads(fleet)
        load = in_background(call, fleet, "/v1/adapters/load", lora_name="new", lora_path=path)
        until(lambda: fleet.client._lookups._loads["new"], 20, "the load runs")
        reply = asked(fleet, "new")
        waits(fleet)
        let_read(fleet)
        assert answer(reply.result(20)) == made_by(5, load.result(20)["adapter_epoch"])


def test_an_adapter_whose_folder_is_gone_stays_known(fleet, root):
    answer(ask(fleet))
    shutil.rmtree(root / "alice")
    assert answer(ask(fleet)) == made_by(1, 1)
