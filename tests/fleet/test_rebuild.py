"""The state of a fleet, built from the answers of its engines."""

from __future__ import annotations

from typing import Any

import pytest

from fastdeploy.core.weight_source import FolderSource
from fastdeploy.fleet.rebuild import fleet_of, new_fleet, rebuild, reference
from fastdeploy.fleet.state import TTL_MARGIN_S

FLEET = "fleet-1/abc"
NOW = 1000.0


def report(fleet: str = FLEET, epoch: int = 0, fingerprint: str | None = "f0", **fields: Any) -> dict[str, Any]:
    label = {"version": str(epoch), "weight_epoch": epoch, "fingerprint": fingerprint, "eos_token_ids": [0]}
    lists: dict[str, Any] = {"holds": [], "adapters": [], "asleep": [], "last_change": [1, 7]}
    return {"fleet": fleet, "controller": "c", "term": 1, "past_adapter_epoch": 0, **label, **lists, **fields}


def hold(hold_id: str = "trainer", mode: str = "keep", **fields: Any) -> dict[str, Any]:
    terms = {"mode": mode, "admission": "hold", "clear_cache": False, "named": True, "ttl_left_s": None}
    return {"id": hold_id, "scope": "engine", "placed_by": "native", "age_s": 1.0, **terms, **fields}


def adapter(name: str, epoch: int, path: str = "/adapters/a", fingerprint: str = "fa") -> dict[str, Any]:
    label = {"lora_name": name, "adapter_epoch": epoch, "version": f"v{epoch}"}
    return {**label, "path": path, "fingerprint": fingerprint}


def test_new_engines_make_a_new_fleet_with_a_boot_id_of_its_own():
    assert fleet_of("fleet-1", [report(fleet=""), report(fleet="")]) is None
    assert new_fleet("fleet-1") != new_fleet("fleet-1")
    assert fleet_of("fleet-1", [report(fleet=""), report(fleet=new_fleet("fleet-1"))]).startswith("fleet-1/")


def test_an_engine_of_another_fleet_does_not_count():
    reports = [report(epoch=1), report(fleet="other/xyz", epoch=7, holds=[hold("foreign")])]
    state = rebuild(FLEET, reports, NOW)
    assert fleet_of("fleet-1", reports) == FLEET
    assert (state.weight_epoch, state.holds) == (1, {})


def test_the_newest_weights_win_over_those_of_most_engines():
    reports = [report(epoch=1, fingerprint="f1"), report(epoch=2, fingerprint="f2"), report(epoch=1, fingerprint="f1")]
    state = rebuild(FLEET, reports, NOW)
    assert (state.weight_epoch, state.version, state.fingerprint) == (2, "2", "f2")


def test_among_new_engines_most_say_which_model_the_fleet_has():
    reports = [report(fleet="", fingerprint="odd"), report(fleet=""), report(fleet="")]
    assert reference("", reports)["fingerprint"] == "f0"
    assert rebuild(FLEET, reports, NOW).fingerprint == "f0"


def test_a_hold_of_one_engine_is_a_hold_of_the_fleet():
    state = rebuild(FLEET, [report(), report(holds=[hold("trainer"), hold("tenant", scope="adapter:a")])], NOW)
    assert set(state.holds) == {("engine", "trainer"), ("adapter:a", "tenant")}
    assert state.holds["engine", "trainer"].args.mode == "keep"
    assert state.holds["engine", "trainer"].expires_at is None


def test_a_hold_of_an_engine_with_old_weights_is_over():
    """Such an engine was fenced. The others released the hold without it."""
    reports = [report(epoch=1, holds=[hold("old"), hold("new")]), report(epoch=2, holds=[hold("new")]), report(epoch=2)]
    assert set(rebuild(FLEET, reports, NOW).holds) == {("engine", "new")}


@pytest.mark.parametrize("missed", [[1, 6], [0, 0], [0, 9]])
def test_an_engine_that_missed_the_last_change_has_no_say_about_holds_and_adapters(missed):
    """Such an engine was fenced, but lives on. The others have released its hold and unloaded its adapter."""
    late = report(last_change=missed, holds=[hold("old")], adapters=[adapter("a", 1)], asleep=["kv_cache"])
    state = rebuild(FLEET, [late, report(holds=[hold("new")], asleep=["kv_cache", "weight"])], NOW)
    assert (set(state.holds), state.adapters, state.changes) == ({("engine", "new")}, {}, 7)
    assert state.asleep == ("kv_cache", "weight")
    assert set(rebuild(FLEET, [late], NOW).holds) == {("engine", "old")}, "nobody else is left"


def test_of_two_holds_of_one_name_the_stronger_terms_and_the_later_end_stand():
    weak = hold(mode="wait", ttl_left_s=TTL_MARGIN_S + 5.0)
    strong = hold(mode="abort", admission="reject", ttl_left_s=TTL_MARGIN_S + 2.0)
    for holds in ([weak], [strong]), ([strong], [weak]):
        kept = rebuild(FLEET, [report(holds=found) for found in holds], NOW).holds["engine", "trainer"]
        assert (kept.args.mode, kept.args.admission, kept.args.ttl_s) == ("abort", "reject", None)
        assert kept.expires_at == NOW + 5.0
    endless = rebuild(FLEET, [report(holds=[weak]), report(holds=[hold()])], NOW).holds["engine", "trainer"]
    assert endless.expires_at is None


def test_a_ttl_that_ended_without_a_gateway_ends_now_and_that_of_a_lone_engine_is_its_own():
    late = hold(ttl_left_s=TTL_MARGIN_S - 3.0)
    assert rebuild(FLEET, [report(holds=[late])], NOW).holds["engine", "trainer"].expires_at == NOW
    lone = rebuild(FLEET, [report(fleet="", holds=[hold(ttl_left_s=7.0)])], NOW)
    assert lone.holds["engine", "trainer"].expires_at == NOW + 7.0


def test_an_anonymous_hold_stays_anonymous():
    state = rebuild(FLEET, [report(holds=[hold("anonymous-1", named=False)])], NOW)
    assert state.holds["engine", "anonymous-1"].args.anonymous
    owned = rebuild(FLEET, [report(holds=[hold("x", named=named)]) for named in (False, True)], NOW)
    assert not owned.holds["engine", "x"].args.anonymous


def test_holds_of_the_engines_themselves_are_not_the_fleets_except_for_republish():
    own = [hold("sleep", placed_by="system")]
    republish = hold("republish", placed_by="system")
    assert rebuild(FLEET, [report(holds=own)], NOW).holds == {}
    assert set(rebuild(FLEET, [report(holds=[*own, republish])], NOW).holds) == {("engine", "republish")}
    restarted = report(epoch=0, holds=[republish])  # an engine that lost what the others have
    assert rebuild(FLEET, [restarted, report(epoch=1)], NOW).holds == {}


def test_a_sleep_that_reached_some_engines_is_undone():
    reports = [report(asleep=["kv_cache", "weight"]), report(asleep=["kv_cache"])]
    assert rebuild(FLEET, reports, NOW).asleep == ("kv_cache",)


def test_the_newest_adapter_of_each_name_is_the_fleets():
    reports = [report(adapters=[adapter("a", 1)]), report(adapters=[adapter("a", 2, "/new"), adapter("b", 1)])]
    adapters = rebuild(FLEET, reports, NOW).adapters
    assert {name: adapter.epoch for name, adapter in adapters.items()} == {"a": 2, "b": 1}
    assert (adapters["a"].args.source, adapters["a"].args.version) == (FolderSource("/new"), "v2")


@pytest.mark.parametrize("order", [[0, 1, 2], [0, 2, 1], [1, 0, 2]])
def test_of_two_adapters_with_one_name_and_epoch_that_of_most_engines_is_the_fleets(order):
    adapters = [adapter("a", 1), adapter("a", 1, fingerprint="odd"), adapter("a", 1)]
    state = rebuild(FLEET, [report(adapters=[adapters[i]]) for i in order], NOW)
    assert state.adapters["a"].fingerprint == "fa"


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 0, 2]])
def test_among_engines_with_the_same_tensors_most_say_which_eos_ids_the_fleet_has(order):
    """An engine may differ that was about to get the EOS ids of the fleet when the gateway died."""
    reports = [report(eos_token_ids=[1, 2]), report(), report(eos_token_ids=[1, 2])]
    state = rebuild(FLEET, [reports[i] for i in order], NOW)
    assert (state.fingerprint, state.eos_token_ids) == ("f0", (1, 2))


def test_the_numbers_of_adapters_that_are_gone_are_not_used_again():
    """Engines that were fenced count too: they may have served with the number of a load that failed."""
    late = report(last_change=[1, 6], adapters=[adapter("a", 4), adapter("b", 9)], past_adapter_epoch=2)
    other = report(fleet="other/xyz", past_adapter_epoch=3)
    state = rebuild(FLEET, [late, other, report(adapters=[adapter("a", 5), adapter("b", 9)])], NOW)
    assert state.past_adapter_epoch == 3
    assert (state.next_adapter_epoch("a"), state.next_adapter_epoch("c")) == (6, 4)
    state = rebuild(FLEET, [late, report(adapters=[adapter("a", 3)], past_adapter_epoch=1)], NOW)
    assert (state.past_adapter_epoch, state.next_adapter_epoch("a")) == (9, 10)
