"""A replica becomes a member with the weights, holds, adapters and sleep of the fleet only."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from e2e.server import in_background, until
from fastdeploy.core.weight_source import FolderSource
from fastdeploy.engine.common_engine import CommonEngine
from fastdeploy.fleet.config import FleetConfig
from fastdeploy.fleet.join import profile_of
from fastdeploy.fleet.replica import ReplicaEvent, ReplicaState
from fastdeploy.inter_communicator import messages as m
from fleet.fake_fleet import FakeFleet, fake_fleet
from support.fake_runner import EXPERTS, adapter_fingerprint, expected_tokens, fingerprint_of, write_adapter

CONFIG = FleetConfig(fleet_id="fleet-1", lease_s=2.0, rebuild_s=0.3)
BODY = {"ignore_eos": True, "return_token_ids": True, "max_tokens": 5}


@pytest.fixture
def fleet() -> Iterator[FakeFleet]:
    with fake_fleet(2, config=CONFIG, restarts=True) as fleet:
        yield fleet


def publish(fleet: FakeFleet, k: int, path: str = "/nowhere") -> None:
    reply = fleet.http.post("/v1/update_weights", json={"model_path": f"{path}/w{k}", "version": f"step-{k}"})
    assert reply.status_code == 200, reply.text


def kill(fleet: FakeFleet, i: int) -> None:
    fleet.engines[i].kill()
    until(lambda: not fleet.replica(f"replica-{i}").in_quorum, 20, "the loss was noticed")


def tokens(fleet: FakeFleet, prompt: list[int], **fields: Any) -> list[int]:
    reply = fleet.http.post("/v1/completions", json=BODY | {"prompt": prompt} | fields)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["token_ids"]


def holds(fleet: FakeFleet) -> list[list[str]]:
    return [list(engine.engine.pause.holds) for engine in fleet.engines]


def test_a_restarted_engine_joins_with_the_weights_and_the_holds_of_the_fleet(fleet):
    publish(fleet, 3)
    assert fleet.http.post("/v1/pause", json={"mode": "keep", "hold_id": "trainer"}).status_code == 200
    kill(fleet, 0)
    fleet.launcher.revive("replica-0")
    fleet.wait_members(2)
    assert fleet.engines[0].runner.fingerprint == fingerprint_of(3)
    assert holds(fleet) == [["trainer"], ["trainer"]]
    assert fleet.engines[0].engine.pause.is_paused
    replica = fleet.replica("replica-0")
    assert (replica.weight_epoch, replica.version) == (1, "step-3")


def test_the_weights_come_from_a_member_if_their_source_is_gone(fleet):
    publish(fleet, 3)
    fleet.client.membership.state.source = None
    kill(fleet, 1)
    fleet.launcher.revive("replica-1")
    fleet.wait_members(2)
    assert fleet.engines[1].runner.fingerprint == fingerprint_of(3)


@pytest.mark.slow
def test_a_source_that_has_other_weights_now_is_not_used(fleet):
    publish(fleet, 3)
    fleet.client.membership.state.source = FolderSource("/nowhere/w8")
    kill(fleet, 1)
    fleet.launcher.revive("replica-1")
    fleet.wait_members(2)
    assert fleet.engines[1].runner.fingerprint == fingerprint_of(3)


def test_an_engine_with_old_weights_never_gets_a_request(fleet):
    publish(fleet, 3)
    kill(fleet, 0)
    replies = [in_background(tokens, fleet, [i]) for i in range(8)]
    fleet.launcher.revive("replica-0")
    replies += [in_background(tokens, fleet, [i]) for i in range(8, 16)]
    fleet.wait_members(2)
    replies += [in_background(tokens, fleet, [i]) for i in range(16, 32)]
    for i, reply in enumerate(replies):
        assert reply.result(20) == expected_tokens([i], 5, weights=3)


@pytest.mark.slow
def test_a_pause_while_an_engine_is_away_reaches_it_before_it_is_a_member(fleet):
    kill(fleet, 0)
    assert fleet.http.post("/v1/pause", json={"mode": "keep"}).status_code == 200
    fleet.launcher.revive("replica-0")
    fleet.wait_members(2)
    assert all(engine.engine.pause.is_paused for engine in fleet.engines)
    assert fleet.http.post("/v1/resume").status_code == 200
    assert holds(fleet) == [[], []]


def test_a_hold_that_was_released_while_an_engine_was_cut_off_is_released_there():
    with fake_fleet(2, config=CONFIG) as fleet:  # the engine is not restarted, and keeps the hold
        assert fleet.http.post("/v1/pause", json={"mode": "keep", "hold_id": "trainer"}).status_code == 200

        async def release() -> None:
            fleet.client.membership.fence(fleet.replica("replica-0"), "a test cuts it off")
            await fleet.client.call(m.ResumeArgs(hold_id="trainer"))

        fleet.run(release())
        fleet.wait_members(2)
        assert holds(fleet) == [[], []]


def test_what_runs_on_an_engine_that_joins_in_a_wait_pause_is_frozen():
    body = BODY | {"prompt": [3], "max_tokens": 90, "stream": True, "request_id": "kept", "retain_s": 60}
    with fake_fleet(2, config=CONFIG, runner={"step_s": 0.2}) as fleet:
        with fleet.http.stream("POST", "/v1/completions", json=body) as stream:
            assert next(stream.iter_lines())
        name = next(engine.placement.name for engine in fleet.engines if len(engine.engine.lifecycle.requests))
        engine = next(engine.engine for engine in fleet.engines if engine.placement.name == name)

        async def pause() -> None:
            fleet.client.membership.cut(fleet.replica(name), "a test cuts it off")
            await fleet.client.call(m.PauseArgs("wait", hold_id="trainer"))

        fleet.run(pause())
        fleet.wait_members(2)
        assert engine.pause.is_paused and len(engine.lifecycle.requests) == 1
        assert fleet.http.post("/v1/resume", json={"hold_id": "trainer"}).status_code == 200


def test_an_adapter_that_was_prepared_on_an_engine_and_never_committed_is_forgotten_when_it_joins(tmp_path):
    adapter = FolderSource(write_adapter(tmp_path / "source", "a1"))
    (tmp_path / "store").mkdir()
    with fake_fleet(2, config=CONFIG, adapter_store=str(tmp_path / "store")) as fleet:  # the engine is not restarted
        replica = fleet.replica("replica-0")

        async def prepare() -> None:
            await replica.client.call(m.LoadAdapterArgs("a", adapter, prepare=True))
            fleet.client.membership.fence(replica, "a test cuts it off")

        fleet.run(prepare())
        fleet.wait_members(2)
        assert fleet.engines[0].engine.adapters.prepared() == []


def load(fleet: FakeFleet, path: str, name: str = "a") -> int:
    """Load an adapter as version "pi-7", and return its adapter_epoch."""
    reply = fleet.http.post("/v1/adapters/load", json={"lora_name": name, "lora_path": path, "version": "pi-7"})
    assert reply.status_code == 200, reply.text
    return reply.json()["result"]["adapter_epoch"]


@pytest.mark.parametrize("loads_again", [False, True])
def test_an_old_adapter_of_an_engine_that_was_cut_off_is_never_taken_for_a_new_one_of_its_name(loads_again, tmp_path):
    old, new = (write_adapter(tmp_path / content, content) for content in ("a1", "a2"))
    with fake_fleet(2, config=CONFIG) as fleet:  # the engine is not restarted, and keeps the adapter
        assert load(fleet, old) == 1

        async def change() -> None:
            fleet.client.membership.fence(fleet.replica("replica-0"), "a test cuts it off")
            await fleet.client.call(m.UnloadAdapterArgs("a"))
            if loads_again:
                await fleet.client.call(m.LoadAdapterArgs("a", FolderSource(new)))

        fleet.run(change())
        fleet.wait_members(2)
        known = [engine.engine.adapters.describe()["adapters"] for engine in fleet.engines]
        assert [[a["adapter_epoch"] for a in adapters] for adapters in known] == [[2] if loads_again else []] * 2
        if loads_again:
            kill(fleet, 1)
            assert tokens(fleet, [1], model="a") == expected_tokens([1], 5, adapter=2)


def test_a_fleet_whose_engines_and_gateway_were_all_replaced_knows_which_adapter_epochs_were_used(fleet, tmp_path):
    path = write_adapter(tmp_path / "a", "a5")
    assert [load(fleet, path) for _ in range(2)] == [1, 2]
    assert fleet.http.post("/v1/adapters/unload", json={"lora_name": "a"}).status_code == 200
    for i in (0, 1):
        kill(fleet, i)
        fleet.launcher.revive(f"replica-{i}")
        fleet.wait_members(2)
        assert fleet.engines[i].engine.adapters.past_epoch == 2
    fleet.replace_gateway()
    fleet.wait_members(2)
    assert load(fleet, path) == 3


def test_a_fleet_learns_the_adapter_epochs_that_an_engine_has_used_without_it(fleet, tmp_path):
    """Such an engine may have served them as a member of a fleet whose gateway died."""
    kill(fleet, 0)
    fleet.engines[0].start(lambda engine: engine.adapters.note_past_epoch(7))
    fleet.wait_members(2)
    assert fleet.client.membership.state.past_adapter_epoch == 7
    assert load(fleet, write_adapter(tmp_path / "a", "a5")) == 8


@pytest.mark.slow
def test_nobody_joins_while_a_weight_session_is_open(fleet):
    session = fleet.http.post("/v1/weights/begin", json={"version": "step-2"}).json()["result"]["session_id"]
    kill(fleet, 0)
    fleet.launcher.revive("replica-0")
    replica = fleet.replica("replica-0")
    until(lambda: replica.report, 20, "the engine is led")
    assert replica.state is ReplicaState.JOINING
    fleet.http.post("/v1/weights/chunk", json={"session_id": session, "model_path": "/nowhere/w2"})
    assert fleet.http.post("/v1/weights/commit", json={"session_id": session}).status_code == 200
    fleet.wait_members(2)
    assert [engine.runner.fingerprint for engine in fleet.engines] == [fingerprint_of(2)] * 2


def test_a_joiner_gets_the_adapters_and_the_sleep_of_the_fleet(fleet, tmp_path):
    path = write_adapter(tmp_path / "a", "a5")
    assert [load(fleet, path) for _ in range(2)] == [1, 2]
    assert fleet.http.post("/v1/sleep", json={"tags": ["kv_cache"]}).status_code == 200
    kill(fleet, 0)
    fleet.launcher.revive("replica-0")
    fleet.wait_members(2)
    assert fleet.engines[0].runner.asleep == {"kv_cache"}
    adapters = fleet.engines[0].engine.adapters.describe()["adapters"]
    assert [(a["lora_name"], a["adapter_epoch"]) for a in adapters] == [("a", 2)]
    assert fleet.http.post("/v1/wakeup").status_code == 200
    assert tokens(fleet, [1], model="a") == expected_tokens([1], 5, adapter=5)


def test_a_replica_joins_after_a_new_gateway_found_the_weights_of_the_fleet_asleep(fleet):
    publish(fleet, 3)
    assert fleet.http.post("/v1/sleep").status_code == 200
    kill(fleet, 0)
    fleet.replace_gateway()
    fleet.wait_members(1)
    fleet.launcher.revive("replica-0")
    assert fleet.http.post("/v1/wakeup").status_code == 200
    fleet.wait_members(2)
    assert [engine.runner.fingerprint for engine in fleet.engines] == [fingerprint_of(3)] * 2


def restart(fleet: FakeFleet, i: int) -> None:
    kill(fleet, i)
    fleet.launcher.revive(f"replica-{i}")
    fleet.wait_members(len(fleet.engines))


def adapters(fleet: FakeFleet, *fields: str) -> list[list[tuple[Any, ...]]]:
    """Return these fields of all adapters, of each engine."""
    of_engines = [engine.engine.adapters.describe()["adapters"] for engine in fleet.engines]
    return [[tuple(adapter[field] for field in fields) for adapter in found] for found in of_engines]


def test_a_joiner_gets_the_adapter_that_was_loaded_though_the_trainer_has_overwritten_the_folder(fleet, tmp_path):
    path = write_adapter(tmp_path / "a", "a5")
    load(fleet, path)
    write_adapter(tmp_path / "a", "a6")
    restart(fleet, 0)
    expected = ("a", 1, "pi-7", adapter_fingerprint("a5"), path)
    fields = ("lora_name", "adapter_epoch", "version", "fingerprint", "path")
    assert adapters(fleet, *fields) == [[expected], [expected]]
    kill(fleet, 1)
    assert tokens(fleet, [1], model="a") == expected_tokens([1], 5, adapter=5)


def test_an_engine_that_was_cut_off_gets_the_adapter_of_the_fleet_in_place_of_its_own(fleet, tmp_path):
    load(fleet, write_adapter(tmp_path / "a", "a5"))
    entry = fleet.client.membership.state.adapters["a"]
    other = FolderSource(write_adapter(tmp_path / "other", "a6"))

    async def cut_off() -> None:
        replica = fleet.replica("replica-0")
        await replica.client.call(m.UnloadAdapterArgs("a"))
        await replica.client.call(m.LoadAdapterArgs("a", other, prepare=True))
        await replica.client.call(m.EndLoadArgs("a", commit=True, adapter_epoch=entry.epoch))
        replica.cut("a test cuts it off")
        replica.advance(ReplicaEvent.LOST)
        replica.connect_again(replica.placement, fleet.client.membership._connector(replica.placement))

    fleet.run(cut_off())
    fleet.wait_members(2)
    assert adapters(fleet, "adapter_epoch", "fingerprint") == [[(entry.epoch, adapter_fingerprint("a5"))]] * 2


def test_a_fleet_without_any_copy_takes_the_source_if_it_is_still_the_same_and_else_forgets_the_name(fleet, tmp_path):
    load(fleet, write_adapter(tmp_path / "a", "a5"), "same")
    load(fleet, write_adapter(tmp_path / "b", "a6"), "other")
    boot_id = fleet.client.membership.boot_id
    for i in (0, 1):
        kill(fleet, i)
    write_adapter(tmp_path / "b", "a7")
    for i in (0, 1):
        fleet.launcher.revive(f"replica-{i}")
    fleet.wait_members(2)
    assert adapters(fleet, "lora_name", "fingerprint") == [[("same", adapter_fingerprint("a5"))]] * 2
    assert fleet.client.membership.boot_id != boot_id
    assert fleet.http.post("/v1/completions", json=BODY | {"prompt": [1], "model": "other"}).status_code == 404
    load(fleet, str(tmp_path / "b"), "other")
    assert tokens(fleet, [1], model="other") == expected_tokens([1], 5, adapter=7)


@pytest.mark.parametrize("gone", [False, True])
def test_a_joiner_ends_texts_at_the_eos_ids_of_the_last_update(fleet, gone):
    first = expected_tokens([1], 3, weights=3)
    publish(fleet, 9)
    reply = fleet.http.post("/v1/update_weights", json={"model_path": f"/nowhere/w3-eos{first[-1]}"})
    assert reply.status_code == 200, reply.text
    if gone:  # the joiner gets the tensors of another member, without a file that names EOS ids
        fleet.client.membership.state.source = None
    restart(fleet, 0)
    kill(fleet, 1)
    body = {"prompt": [1], "max_tokens": 9, "return_token_ids": True}
    [choice] = fleet.http.post("/v1/completions", json=body).json()["choices"]
    assert (choice["token_ids"], choice["finish_reason"]) == (first, "stop")


def test_engines_whose_start_has_the_tensors_of_the_fleet_get_its_eos_ids_too(fleet):
    """All engines die after an update that changed nothing but the EOS ids."""
    reply = fleet.http.post("/v1/update_weights", json={"model_path": "/nowhere/w0-eos7", "version": "same tensors"})
    assert reply.status_code == 200, reply.text
    for i in (0, 1):
        kill(fleet, i)
    for i in (0, 1):
        fleet.launcher.revive(f"replica-{i}")
    fleet.wait_members(2)
    assert [engine.engine.scheduler.eos_token_ids for engine in fleet.engines] == [(7,), (7,)]
    assert {replica.version for replica in fleet.client.membership.quorum} == {"same tensors"}


def test_a_joiner_gets_an_adapter_whose_source_is_gone_from_a_replica_of_its_host(fleet, tmp_path):
    path = write_adapter(tmp_path / "a", "a5")
    load(fleet, path)
    shutil.rmtree(path)
    restart(fleet, 0)
    [adapter] = fleet.engines[0].engine.adapters.describe()["adapters"]
    assert (adapter["lora_name"], adapter["adapter_epoch"], adapter["path"]) == ("a", 1, path)
    kill(fleet, 1)
    assert tokens(fleet, [1], model="a") == expected_tokens([1], 5, adapter=5)


def test_a_joiner_asks_one_replica_for_its_copy_of_an_adapter_and_none_that_lacks_it(tmp_path):
    asked: list[int] = []

    def count(i: int, engine: CommonEngine) -> None:
        export = engine._on_call[m.ExportAdapterArgs]
        engine._on_call[m.ExportAdapterArgs] = lambda *args: (asked.append(i), export(*args))[1]

    with fake_fleet(4, config=CONFIG) as fleet:
        load(fleet, write_adapter(tmp_path / "a", "a5"))
        for i in (0, 1):
            kill(fleet, i)
        fleet.engines[0]._runner_options = {"vocab": 77}  # it never gets so far as to have the adapter
        fleet.engines[0].start(partial(count, 0))
        until(lambda: "vocab_size" in fleet.replica("replica-0").why, 20, "it does not join")
        for i in (2, 3):
            count(i, fleet.engines[i].engine)
        fleet.engines[1].start()
        fleet.wait_members(3)
    assert asked == [2]


@pytest.mark.slow
def test_an_adapter_that_cannot_be_had_keeps_a_replica_out_until_it_is_unloaded(fleet, tmp_path):
    path = write_adapter(tmp_path / "a", "a5")
    assert fleet.http.post("/v1/adapters/load", json={"lora_name": "a", "lora_path": path}).status_code == 200
    (tmp_path / "a" / "adapter_model.safetensors").unlink()
    kill(fleet, 0)
    shutil.rmtree(fleet.engines[1].engine.adapters.export(m.ExportAdapterArgs("a"))["path"])
    fleet.launcher.revive("replica-0")
    replica = fleet.replica("replica-0")
    until(lambda: "lacks adapter 'a'" in replica.why, 20, "the reason is shown")
    assert replica.state is ReplicaState.JOINING
    assert fleet.http.post("/v1/adapters/unload", json={"lora_name": "a"}).status_code == 200
    fleet.wait_members(2)


def test_a_fleet_that_lost_its_weights_is_held_until_they_are_published_again(fleet):
    publish(fleet, 3)
    boot_id = fleet.client.membership.boot_id
    fleet.client.membership.state.source = None
    for i in (0, 1):
        kill(fleet, i)
    for name in ("replica-0", "replica-1"):
        fleet.launcher.revive(name)
    fleet.wait_members(2)
    assert fleet.client.membership.boot_id != boot_id
    assert holds(fleet) == [["republish"], ["republish"]]
    assert {replica.weight_epoch for replica in fleet.client.membership.quorum} == {2}
    waiting = in_background(tokens, fleet, [1])
    publish(fleet, 4)
    assert waiting.result(20) == expected_tokens([1], 5, weights=4)
    assert holds(fleet) == [[], []]
    assert fleet.client.membership.state.holds == {}


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"vocab": 77}, "vocab_size is 77"),
        ({"quantization": "int8"}, "quantization is 'int8'"),
        ({"experts": EXPERTS}, "experts is {'layers': [1, 3]"),
    ],
)
def test_an_engine_with_another_model_or_quantization_is_refused_by_name(fleet, options, why):
    fleet.launcher.find("replica-1")._runner_options = options
    kill(fleet, 1)
    fleet.launcher.revive("replica-1")
    replica = fleet.replica("replica-1")
    until(lambda: why in replica.why, 20, "the reason is shown")
    assert "replica-1" in replica.why
    assert (replica.state, fleet.launcher.restarts) == (ReplicaState.JOINING, [])


def test_engines_that_return_the_routing_of_tokens_and_others_make_no_fleet(fleet):
    replica = fleet.replica("replica-0")
    before = profile_of(replica)
    replica.client.model_info["routed_experts"] = True
    assert profile_of(replica) != before


@pytest.mark.slow
def test_an_engine_with_newer_weights_than_the_fleet_is_restarted(fleet):
    kill(fleet, 1)
    with fleet.stopped_gateway():
        fleet.launcher.revive("replica-1")
        update = m.UpdateWeightsArgs(FolderSource("/nowhere/w9"))
        fleet.engines[1].call(update)
    fleet.wait_members(2)
    assert [name for name, _ in fleet.launcher.restarts] == ["replica-1"]
    assert fleet.engines[1].runner.fingerprint == fingerprint_of(0)
