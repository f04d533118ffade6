"""Unknown names that are looked up in the adapter root: each request is answered exactly once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.adapters.test_adapter_loads import HangingSources
from engine.fleet_calls import GATEWAY, lead
from fastdeploy.core.weight_source import FolderSource
from fastdeploy.engine.staging_thread import MAX_LEFT_BEHIND
from fastdeploy.inter_communicator import messages as m
from support.fake_runner import expected_tokens, write_adapter
from support.harness import PROMPT, Harness


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for k in range(1, 4):
        write_adapter(tmp_path / "root" / f"a{k}", f"a{k}")
    write_adapter(tmp_path / "root" / "model" / "7", "a7")
    write_adapter(tmp_path / "root" / "broken", "broken")
    write_adapter(tmp_path / "outside", "a9")
    (tmp_path / "root" / "link").symlink_to(tmp_path / "outside")
    return tmp_path / "root"


def with_root(root: Path, **config) -> Harness:
    return Harness(adapter_root=str(root), **{"model_roots": (), **config})


def test_an_unknown_name_is_found_in_the_root_and_its_requests_wait_for_it(root):
    h = with_root(root)
    for i in range(3):
        h.add(f"r{i}", PROMPT, adapter="a1", n=2)
    h.add("other", PROMPT, adapter="model/7")
    h.run_out()
    for i in range(3):
        assert h.stream(f"r{i}", choice=1).tokens == expected_tokens(PROMPT, 8, adapter=1)
    assert h.stream("other").tokens == expected_tokens(PROMPT, 8, adapter=7)
    known = h.ask(m.AdaptersArgs()).result["adapters"]
    assert [(a["lora_name"], a["path"]) for a in known] == [("a1", f"{root}/a1"), ("model/7", f"{root}/model/7")]
    assert h.runner.adapter_reads == 2, "one lookup for a name"


@pytest.mark.parametrize(
    "name", ["nobody", "link", "../outside", "/etc", ".", "a1/..", "a1/", "", "x" * 300, "\0", "default"]
)
def test_a_name_that_is_not_in_the_root_is_not_found(root, name):
    h = with_root(root)
    h.add("r", PROMPT, adapter=name or "model")
    h.run_rounds(3)
    assert h.rejected("r").code == "model_not_found" and not h.runner.plans
    assert not len(h.engine.lifecycle.requests) and not h.engine.scopes.adapters
    h.add("again", PROMPT, adapter="a1")
    h.run_out()
    assert h.stream("again").reason == "length"


def test_an_adapter_that_appears_later_is_found_then(root):
    h = with_root(root)
    for _ in range(2):
        h.add("r", PROMPT, adapter="late", retain_s=60.0, fingerprint="f")
        h.run_rounds(3)
    assert [x.failure.code for x in h.sent(m.Rejected)] == ["model_not_found"] * 2
    write_adapter(root / "late", "a5")
    h.add("r", PROMPT, adapter="late", retain_s=60.0, fingerprint="f")
    h.run_out()
    assert h.stream("r").tokens == expected_tokens(PROMPT, 8, adapter=5)


def test_a_broken_adapter_in_the_root_is_refused_with_the_reason(root):
    h = with_root(root)
    h.add("r", PROMPT, adapter="broken")
    h.run_rounds(4)
    assert (
        h.rejected("r").code == "weight_update_refused" and "not the tensors of an adapter" in h.rejected("r").message
    )


def waiting_for_a_lookup(root: Path, name: str = "a1", **config) -> Harness:
    """Return a harness whose requests r0 and r1 wait for the lookup of a name."""
    h = with_root(root, **config)
    h.runner.may_stage.clear()
    for i in range(2):
        h.add(f"r{i}", PROMPT, adapter=name)
    h.run_rounds(2)
    assert not h.engine.scheduler.has_work
    return h


def test_a_cancelled_request_gets_nothing_and_a_disconnected_client_leaves_nothing(root):
    h = waiting_for_a_lookup(root, name="nobody")
    h.connect("b")
    h.add("b0", PROMPT, client="b", adapter="nobody")
    h.send(m.CancelRequest("r0"))
    h.run_rounds()
    h.transport.gone.add("b")
    h.now += 2
    h.run_rounds(2)
    h.runner.may_stage.set()
    h.join_staging()
    h.run_rounds()
    assert [x.request_id for x in h.sent(m.Rejected)] == ["r1"] and not h.sent(m.Rejected, "b")
    assert not len(h.engine.lifecycle.requests) and not h.engine.scopes.adapters


def test_requests_that_wait_for_a_lookup_can_be_aborted(root):
    h = waiting_for_a_lookup(root)
    assert h.ask(m.AbortArgs(["r0"])).result["aborted"] == [{"request_id": "r0", "output_token_count": 0}]
    assert h.stream("r0").finals[0].message.startswith("Abort before prefill")
    h.runner.may_stage.set()
    h.run_out()
    assert h.stream("r1").tokens == expected_tokens(PROMPT, 8, adapter=1)


def test_pauses_hold_reject_and_abort_requests_of_a_name_that_is_looked_up(root):
    h = waiting_for_a_lookup(root)
    assert h.pause(mode="keep", scope="adapter:a1").result["counts"]["queued"] == 2
    h.runner.may_stage.set()
    h.run_rounds(6)
    assert not h.stream("r0").tokens and h.ask(m.AdaptersArgs()).result["adapters"][0]["requests"] == 2
    h.ask(m.ResumeArgs(scope="adapter:a1"))
    h.run_out()
    assert h.stream("r1").tokens == expected_tokens(PROMPT, 8, adapter=1)
    h = waiting_for_a_lookup(root)
    assert sorted(h.pause(mode="abort", admission="reject").result["aborted_ids"]) == ["r0", "r1"]
    h.add("late", PROMPT, adapter="a2")
    h.run_rounds()
    assert h.rejected("late").code == "rejecting_new_requests"
    h.runner.may_stage.set()
    h.run_rounds(4)
    assert [a["lora_name"] for a in h.ask(m.AdaptersArgs()).result["adapters"]] == ["a1"]


def test_the_end_of_the_engine_answers_requests_that_wait_for_a_lookup(root):
    h = waiting_for_a_lookup(root, model_roots=("/",))
    call = h.call(m.LoadAdapterArgs("x", h.adapter_folder("a1")))
    h.engine.stop()
    h.run_rounds()
    h.engine.run()
    assert [h.stream(f"r{i}").reason for i in range(2)] == ["abort", "abort"]
    assert h.reply(call).failure.code == "engine_dead"
    h.runner.may_stage.set()


def test_requests_that_wait_for_lookups_count_as_waiting(root):
    h = waiting_for_a_lookup(root, max_waiting=2)
    h.add("r2", PROMPT, adapter="unknown")
    h.run_rounds()
    assert h.rejected("r2").code == "queue_full" and len(h.engine.scopes.adapters) == 1, "nothing is looked up for it"
    h.runner.may_stage.set()  # else later tests wait for this thread


def test_a_load_takes_over_from_a_lookup(root):
    h = waiting_for_a_lookup(root, name="nobody", model_roots=("/",))
    call = h.call(m.LoadAdapterArgs("nobody", h.adapter_folder("a6")))
    h.run_rounds()
    h.runner.may_stage.set()
    h.run_out()
    assert h.reply(call).result["adapter_epoch"] == 1
    assert h.stream("r1").tokens == expected_tokens(PROMPT, 8, adapter=6)
    assert not h.sent(m.Rejected)


def test_requests_wait_for_the_root_if_a_load_of_their_name_fails(root):
    h = with_root(root, model_roots=("/",))
    h.runner.may_stage.clear()
    calls = [h.call(m.LoadAdapterArgs(name, h.adapter_folder("bad"))) for name in ("a1", "nobody")]
    h.run_rounds()
    for name in ("a1", "nobody"):
        h.add(name, PROMPT, adapter=name)
    h.run_rounds()
    h.runner.may_stage.set()
    h.run_out()
    assert [h.reply(call).failure.code for call in calls] == ["weight_update_refused"] * 2
    assert h.stream("a1").tokens == expected_tokens(PROMPT, 8, adapter=1)
    assert h.rejected("nobody").code == "model_not_found"


def test_a_cleared_cache_of_a_name_that_is_looked_up_leaves_the_cache_of_the_base_model(root):
    h = with_root(root)
    prompt = list(range(1, 13))
    h.add("first", prompt, max_tokens=2)
    h.run_out()
    h.runner.may_stage.clear()
    h.add("r", PROMPT, adapter="a1")
    h.run_rounds(2)
    assert h.pause(mode="keep", clear_cache=True, scope="adapter:a1").failure is None
    h.add("again", prompt, max_tokens=2)
    h.run_rounds(5)
    assert h.engine.kv.hit_tokens == 11
    h.runner.may_stage.set()


def test_the_number_of_lookups_that_hang_is_limited(root):
    h = HangingSources(adapter_root=str(root))
    for i in range(MAX_LEFT_BEHIND):
        h.add(f"r{i}", PROMPT, adapter=f"dead{i}")
        h.run_rounds()
        h.now += 61
        h.run_rounds(2)
        assert h.rejected(f"r{i}").code == "staging_timeout"
    h.add("r", PROMPT, adapter="a1")
    h.run_rounds()
    assert h.rejected("r").code == "update_in_progress" and not h.engine.scopes.adapters
    h.mend()
    h.run_rounds()
    h.add("r", PROMPT, adapter="a1")
    h.run_out()
    assert h.stream("r").tokens == expected_tokens(PROMPT, 8, adapter=1)


def test_a_reset_ends_lookups_and_loads_and_forgets_all_adapters(root):
    h = with_root(root, model_roots=("/",))
    h.load_adapter("loaded", 4)
    h.add("looked up", PROMPT, adapter="a3")
    h.run_out()
    h.runner.may_stage.clear()
    h.add("r", PROMPT, adapter="a1")
    call = h.call(m.LoadAdapterArgs("new", h.adapter_folder("a6")))
    h.run_rounds()
    result = h.ask(m.ResetArgs()).result
    assert sorted(result["loads_aborted"]) == ["a1", "new"] and h.stream("r").reason == "abort"
    assert sorted(result["adapters_unloaded"]) == ["a3", "loaded"] and not h.engine.scopes.adapters
    assert h.reply(call).failure.code == "wrong_order"
    h.runner.may_stage.set()
    h.run_rounds(3)
    assert os.listdir(Path(h.engine.adapters.store.path(1)).parent) == [], "no copy is left"
    write_adapter(root / "a3", "a8")  # by the next run
    h.add("after", PROMPT, adapter="a3")
    h.add("unknown", PROMPT, adapter="loaded")
    h.run_out()
    assert h.stream("after").tokens == expected_tokens(PROMPT, 8, adapter=8)
    assert h.rejected("unknown").code == "model_not_found"


def test_an_engine_that_a_gateway_leads_looks_up_no_name_of_a_request(root):
    h = with_root(root)
    h.runner.may_stage.clear()
    h.add("before", PROMPT, adapter="a1")
    h.run_rounds()
    assert lead(h).failure is None
    h.runner.may_stage.set()
    h.add("after", PROMPT, adapter="a2")
    h.run_rounds(3)
    assert h.rejected("before").code == "wrong_order" and "a gateway leads" in h.rejected("before").message
    failure = h.rejected("after")
    assert failure.code == "model_not_found" and "whose gateway looks names up" in failure.message
    assert not h.engine.scopes.adapters and h.ask(m.AdaptersArgs()).result["adapters"] == []


def test_a_gateway_looks_names_up_by_calls(root):
    h = with_root(root)
    assert lead(h).failure is None
    assert h.ask(m.LookUpAdapterArgs("a1"), GATEWAY, rounds=3).result == {"lora_name": "a1", "path": f"{root}/a1"}
    for name in ("nobody", "link", "../outside"):
        for args in (m.LookUpAdapterArgs(name), m.LoadAdapterArgs(name, FolderSource("/"), prepare=True, lookup=True)):
            assert h.ask(args, GATEWAY, rounds=3).failure.code == "model_not_found"
    args = m.LoadAdapterArgs("a1", FolderSource("/elsewhere"), prepare=True, lookup=True)
    assert h.ask(args, GATEWAY, rounds=4).result["status"] == "prepared"
    assert h.ask(m.EndLoadArgs("a1", True, 7), GATEWAY).result["adapter_epoch"] == 7
    h.add("r", PROMPT, adapter="a1")
    h.run_out()
    assert h.stream("r").tokens == expected_tokens(PROMPT, 8, adapter=1)
    [known] = h.ask(m.AdaptersArgs()).result["adapters"]
    assert known["path"] == f"{root}/a1"


def test_no_lookup_of_a_gateway_reaches_anything_without_an_adapter_root(tmp_path):
    h = Harness(model_roots=())
    write_adapter(tmp_path / "a1", "a1")
    load = m.LoadAdapterArgs("a1", FolderSource(str(tmp_path / "a1")), lookup=True)
    for args in (m.LookUpAdapterArgs("a1"), load):
        assert h.failure(args).code == "model_not_found"
