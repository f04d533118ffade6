"""Loads of adapters in two calls, as the gateway of a fleet makes them."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from engine.adapters.test_adapter_loads import assert_serves, copies
from engine.fleet_calls import load_prepared
from engine.views.test_events import Record
from fastdeploy.core.events import EventKind
from fastdeploy.core.served_weights import adapter_scope
from fastdeploy.core.weight_source import FolderSource
from fastdeploy.inter_communicator import messages as m
from support.fake_runner import adapter_fingerprint, write_adapter
from support.harness import PROMPT, Harness


def end(h: Harness, name: str = "a", commit: bool = True, **args) -> m.Reply:
    return h.ask(m.EndLoadArgs(name, commit, **args))


def visible(h: Harness) -> dict:
    """Return all that callers see of adapters, without loads that are prepared."""
    state = h.ask(m.FleetStateArgs()).result
    memory = [h.metric(name) for name in ("adapters_known", "adapters_in_memory", "adapter_loads_failed")]
    return {"adapters": state["adapters"], "memory": memory, "packed": dict(h.runner.adapters)}


def prepared(h: Harness) -> list[str]:
    return h.ask(m.FleetStateArgs()).result["prepared_loads"]


def assert_gone(h: Harness, name: str = "a") -> None:
    """Assert that no load of the name is prepared, and that a new one may come."""
    assert prepared(h) == [] and end(h, name).failure.code == "wrong_order"
    assert h.load_adapter(name, 9).failure is None
    assert_serves(h, name, 9)


def test_a_prepared_load_is_seen_by_nobody_until_its_commit():
    h = Harness()
    before = visible(h)
    load_prepared(h, "a", 1, version="v")
    assert visible(h) == before and prepared(h) == ["a"]
    assert h.failure(m.PauseStatusArgs(adapter_scope("a"))).code == "model_not_found"
    h.add("early", PROMPT, adapter="a")
    h.run_rounds()
    assert h.rejected("early").code == "model_not_found"
    result = end(h).result
    assert (result["status"], result["lora_name"], result["version"]) == ("loaded", "a", "v")
    assert (result["adapter_epoch"], result["replaced"], prepared(h)) == (1, False, [])
    assert_serves(h, "a", 1)


def test_a_replacement_takes_effect_at_its_commit_and_is_told_with_its_epoch():
    h = Harness()
    h.load_adapter("a", 1)
    h.add("r", PROMPT, adapter="a", max_tokens=20)
    h.run_rounds(3)
    record = Record(h)
    load_prepared(h, "a", 2, kv="recompute")
    before = len(h.stream("r").tokens)
    assert end(h, adapter_epoch=7).result["replaced"]
    h.run_out()
    epochs = [span.adapter_epoch for span in h.stream("r").spans]
    assert epochs == [1] * before + [7] * (20 - before)
    assert record.fields(EventKind.COMMITTED, "adapter_epoch", "version", "kv") == [(7, "7", "recompute")]
    assert_serves(h, "a", 2)
    assert h.load_adapter("a", 3).result["adapter_epoch"] == 8 and copies(h) == ["3"]


def test_an_epoch_that_is_not_above_the_replaced_one_is_a_conflict_and_the_load_stays_prepared():
    h = Harness()
    load_prepared(h, "a", 1)
    assert end(h, adapter_epoch=0).failure.code == "version_conflict"
    assert end(h, adapter_epoch=5).result["adapter_epoch"] == 5
    load_prepared(h, "a", 2)
    failure = end(h, adapter_epoch=5).failure
    assert (failure.code, failure.detail["adapter_epoch"]) == ("version_conflict", 5)
    h.assert_refused(m.EndLoadArgs("a", commit=True, adapter_epoch=2**53), "adapter_epoch")
    assert prepared(h) == ["a"] and end(h).result["adapter_epoch"] == 6


def test_a_call_that_names_another_adapter_than_the_prepared_one_leaves_the_load_alone():
    h = Harness()
    load_prepared(h, "a", 1)
    gone, there = adapter_fingerprint("a2"), adapter_fingerprint("a1")
    assert end(h, fingerprint=gone).failure.code == "wrong_order"
    assert end(h, commit=False, fingerprint=gone).result["status"] == "dropped" and prepared(h) == ["a"]
    assert end(h, fingerprint=there).result["fingerprint"] == there
    assert_serves(h, "a", 1)
    load_prepared(h, "a", 2)
    assert end(h, commit=False, fingerprint=gone).result["status"] == "dropped" and prepared(h) == []


def test_a_dropped_load_leaves_no_file_and_changes_nothing():
    h = Harness()
    h.load_adapter("a", 1)
    before, freed = visible(h), []
    h.runner.discard_adapter = freed.append
    load_prepared(h, "a", 2)
    assert copies(h) == ["1", "2"]
    assert end(h, commit=False).result == {"lora_name": "a", "status": "dropped"}
    assert copies(h) == ["1"] and visible(h) == before and [packed.content for packed in freed] == [2]
    assert end(h, commit=False).result["status"] == "dropped", "a reset may have dropped it already"
    assert_serves(h, "a", 1)


def test_a_prepared_load_that_nobody_ends_is_forgotten_a_minute_after_other_engines_had_their_time():
    h = Harness(stage_timeout_s=100.0)
    h.load_adapter("b", 1)
    load_prepared(h, "a", 2)
    h.now += 30.0
    load_prepared(h, "c", 3)
    h.now += 129.9
    h.run_rounds()
    assert prepared(h) == ["a", "c"] and h.engine.adapters.next_deadline() == pytest.approx(h.now + 0.1)
    h.now += 0.2
    h.run_rounds()
    assert prepared(h) == ["c"] and copies(h) == ["1", "3"]
    h.now += 30.0
    h.run_rounds()
    assert copies(h) == ["1"] and h.engine.adapters.next_deadline() is None
    assert_gone(h)


@pytest.mark.parametrize("args", [m.ResetArgs(), m.UnloadAdapterArgs("a")], ids=repr)
def test_a_reset_or_an_unload_forgets_a_prepared_load(args):
    h = Harness()
    h.load_adapter("a", 1)
    load_prepared(h, "a", 2)
    assert h.ask(args).failure is None
    assert "2" not in copies(h)
    assert_gone(h)


def test_another_load_of_the_name_waits_until_the_prepared_one_is_ended():
    h = Harness()
    load_prepared(h, "a", 1)
    assert h.load_adapter("a", 2).failure.code == "update_in_progress"
    end(h, commit=False)
    assert h.load_adapter("a", 2).failure is None


@pytest.mark.parametrize("commit", [True, False])
def test_a_load_that_is_not_prepared_or_not_yet_cannot_be_ended(commit):
    h = Harness()
    if commit:
        assert end(h).failure.code == "wrong_order"
    h.runner.may_stage.clear()
    call = h.call(m.LoadAdapterArgs("a", h.adapter_folder("a1"), prepare=True))
    h.run_rounds()
    assert end(h, commit=commit).failure.code == "wrong_order"
    h.runner.may_stage.set()
    h.run_rounds(4)
    assert h.reply(call).result["status"] == "prepared" and end(h).failure is None
    assert end(h).failure.code == "wrong_order", "it is loaded already"


def test_a_refused_adapter_cannot_be_prepared():
    h = Harness()
    assert h.load_adapter("a", "bad", prepare=True).failure.code == "weight_update_refused"
    assert h.load_adapter("b", f"a1:{1 << 40}", prepare=True).failure.code == "weight_update_refused"
    assert prepared(h) == [] and copies(h) == []


def test_prepared_loads_take_no_more_memory_than_all_adapters_may():
    h = Harness(adapter_memory_mb=2)
    for name in ("a", "b"):
        load_prepared(h, name, 1)
    failure = h.load_adapter("c", 3, prepare=True).failure
    assert failure.code == "weight_update_refused" and "other prepared loads" in failure.message
    assert h.load_adapter("c", 3).failure is None, "a load in one call needs no such room"
    end(h, "a")
    load_prepared(h, "d", 4)


def test_requests_that_wait_for_a_name_get_the_adapter_at_the_commit_or_their_lookup_back(tmp_path):
    for commit in (True, False):
        h = Harness(adapter_root=str(tmp_path))
        h.runner.may_stage.clear()
        h.add("r", PROMPT, adapter="a")
        h.run_rounds()
        call = h.call(m.LoadAdapterArgs("a", h.adapter_folder("a5"), prepare=True))
        h.run_rounds()
        h.runner.may_stage.set()
        h.run_rounds(6)
        assert h.reply(call).result["status"] == "prepared" and not h.stream("r").tokens
        end(h, commit=commit)
        h.run_out()
        if commit:
            assert h.stream("r").reason == "length"
        else:
            assert h.rejected("r").code == "model_not_found", "the adapter root has no such adapter"


def test_a_load_that_names_a_fingerprint_takes_no_other_adapter():
    h = Harness()
    h.load_adapter("a", 1)
    for prepare in (True, False):
        failure = h.load_adapter("a", 2, prepare=prepare, fingerprint=adapter_fingerprint("a1")).failure
        assert (failure.code, failure.detail["key"]) == ("weight_update_refused", "fingerprint")
        assert prepared(h) == []
    assert_serves(h, "a", 1)
    report = h.load_adapter("a", 2, fingerprint=adapter_fingerprint("a2")).result
    [known] = h.ask(m.AdaptersArgs()).result["adapters"]
    assert report["fingerprint"] == known["fingerprint"] == adapter_fingerprint("a2")


def test_only_a_load_that_names_a_fingerprint_may_read_the_copy_of_another_engine(tmp_path):
    """No route names one. So a client reaches nothing outside of --model-root."""
    sources, stores = tmp_path / "sources", tmp_path / "stores"
    stores.mkdir()
    first, second = (Harness(adapter_store=str(stores), model_roots=(str(sources),)) for _ in range(2))
    source = FolderSource(write_adapter(sources / "a1", "a1"))
    assert first.ask(m.LoadAdapterArgs("a", source), rounds=4).failure is None
    exported = first.ask(m.ExportAdapterArgs("a")).result
    assert exported["fingerprint"] == adapter_fingerprint("a1") and exported["adapter_epoch"] == 1
    copy = m.LoadAdapterArgs("a", FolderSource(exported["path"]))
    refused = second.ask(copy, rounds=4).failure
    assert (refused.code, refused.detail["param"]) == ("weight_update_refused", "lora_path")
    assert second.ask(replace(copy, fingerprint=exported["fingerprint"]), rounds=4).failure is None
    assert first.failure(m.ExportAdapterArgs("b")).code == "model_not_found"
