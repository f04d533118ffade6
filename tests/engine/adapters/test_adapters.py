"""Adapters in the engine: load, replace, unload, and the requests that name them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from fastdeploy.inter_communicator import messages as m
from support.fake_runner import adapter_fingerprint, expected_tokens
from support.harness import PROMPT, Harness

LONG = 40


def test_requests_are_computed_by_the_adapter_that_they_name():
    h = Harness()
    report = h.load_adapter("one", 1).result
    assert report == {
        "status": "loaded",
        "lora_name": "one",
        "lora_int_id": 1,
        "adapter_epoch": 1,
        "version": "1",
        "weight_epoch": 0,
        "boot_id": "boot",
        "fingerprint": adapter_fingerprint("a1"),
        "rank": 8,
        "nbytes": 1 << 20,
        "replaced": False,
        "kv": "keep",
        "requests_in_flight": 0,
        "tokens_to_recompute": 0,
        "timings_ms": {"copy": 0.0, "read": 0.0, "commit": 0.0, "total": 0.0} | report["timings_ms"],
    }
    assert h.load_adapter("two", 2).result["lora_int_id"] == 2
    for name, adapter in (("r0", ""), ("r1", "one"), ("r2", "two"), ("r3", "one")):
        h.add(name, PROMPT, adapter=adapter)
    h.run_out()
    for name, content in (("r0", 0), ("r1", 1), ("r2", 2), ("r3", 1)):
        assert h.stream(name).tokens == expected_tokens(PROMPT, 8, adapter=content), name
    span, base = h.stream("r2").spans[0], h.stream("r0").spans[0]
    assert (span.adapter, span.adapter_epoch, span.version) == ("two", 1, "1")
    assert (base.adapter, base.adapter_epoch, base.version) == ("", 0, "0")


def test_an_unknown_name_is_not_found_and_never_served_by_the_base_model():
    h = Harness()
    h.add("r", PROMPT, adapter="nobody")
    h.run_rounds()
    assert h.rejected("r").code == "model_not_found" and not h.runner.plans
    for args in (m.UnloadAdapterArgs("nobody"), m.UnloadAdapterArgs("")):
        assert h.failure(args).code == "model_not_found"


def test_the_same_name_again_is_the_same_adapter_with_a_new_epoch():
    h = Harness()
    h.load_adapter("a", 1)
    again = h.load_adapter("a", 2, version="step-2").result
    assert (again["lora_int_id"], again["adapter_epoch"], again["version"], again["replaced"]) == (1, 2, "step-2", True)
    assert list(h.runner.adapters.values()) == [(2, True)], "the adapter before is freed"
    for path in ("", "/elsewhere"):
        args = m.LoadAdapterArgs("a", h.adapter_folder("a3"), path=path, replace=False)
        assert h.failure(args).code == "adapter_loaded"
    h.add("r", PROMPT, adapter="a")
    h.run_out()
    assert h.stream("r").tokens == expected_tokens(PROMPT, 8, adapter=2)
    assert {(s.version, s.adapter_epoch) for s in h.stream("r").spans} == {("step-2", 2)}


@pytest.mark.parametrize(("path", "replaces"), [("/x/./pol/", True), ("/x//y/../pol", True), ("/x/pol2", False)])
def test_a_folder_is_the_same_however_its_path_is_spelled(path, replaces):
    """A trainer that was restarted may be given the path of its output folder with a slash at the end."""
    h = Harness()
    h.load_adapter("a", 1, path="/x/pol")
    reply = h.load_adapter("a", 2, path=path, replace=False)
    if replaces:
        assert reply.result["replaced"] is True
    else:
        assert reply.failure.code == "adapter_loaded"


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_running_requests_go_on_with_the_new_adapter_and_their_spans_say_so(kv):
    h = Harness()
    h.load_adapter("a", 1)
    h.load_adapter("b", 7)
    for name in ("a", "b"):
        h.add(name, PROMPT, max_tokens=LONG, adapter=name)
    h.run_rounds(5)
    report = h.load_adapter("a", "a2-recompute" if kv == "recompute" else "a2", kv=kv).result
    known = report["tokens_to_recompute"]
    assert report["requests_in_flight"] == 1 and (known > 3 if kv == "recompute" else known == 0)
    h.run_out()
    spans, tokens = h.stream("a").spans, h.stream("a").tokens
    switched = next(i for i, span in enumerate(spans) if span.adapter_epoch == 2)
    assert 0 < switched < LONG and [s.adapter_epoch for s in spans] == [1] * switched + [2] * (LONG - switched)
    assert tokens[:switched] == expected_tokens(PROMPT, switched, adapter=1)
    assert tokens[switched:] == expected_tokens(PROMPT + tokens[:switched], LONG - switched, adapter=2)
    assert {s.recomputed for s in spans[switched:]} == {kv == "recompute"}
    assert h.stream("b").tokens == expected_tokens(PROMPT, LONG, adapter=7), "another adapter is not touched"


def test_an_unload_removes_the_name_at_once_and_frees_on_the_last_reference():
    h = Harness()
    h.load_adapter("a", 1)
    for name in ("r0", "r1"):
        h.add(name, PROMPT, max_tokens=20 if name == "r0" else LONG, adapter="a")
    h.run_rounds(3)
    report = h.unload_adapter("a").result
    assert report["requests_in_flight"] == 2 and h.ask(m.AdaptersArgs()).result == {"adapters": []}
    h.add("late", PROMPT, adapter="a")
    h.run_rounds()
    assert h.rejected("late").code == "model_not_found"
    h.load_adapter("a", 2)
    h.add("new", PROMPT, max_tokens=8, adapter="a")
    h.run_rounds(2)
    assert sorted(packed.content for packed in h.runner.adapters.values()) == [1, 2]
    h.run_out()
    h.run_rounds()
    assert [packed.content for packed in h.runner.adapters.values()] == [2]
    assert h.stream("r1").tokens == expected_tokens(PROMPT, LONG, adapter=1), "on the weights that it started with"
    assert h.stream("new").tokens == expected_tokens(PROMPT, 8, adapter=2)
    assert len(os.listdir(Path(h.engine.adapters.store.path(1)).parent)) == 1, "the copy is removed too"


def test_a_request_that_a_pause_froze_finishes_on_the_adapter_that_was_unloaded_meanwhile():
    h = Harness()
    h.load_adapter("a", 1)
    h.add("r", PROMPT, max_tokens=20, adapter="a")
    h.run_rounds(4)
    h.pause(mode="keep")
    h.unload_adapter("a")
    h.run_rounds(3)
    assert h.runner.adapters
    h.resume()
    h.run_out()
    h.run_rounds()
    assert h.stream("r").tokens == expected_tokens(PROMPT, 20, adapter=1) and not h.runner.adapters


@pytest.mark.parametrize("content", ["bad", "garbage"])
def test_a_refused_adapter_leaves_the_old_one_serving(content):
    h = Harness()
    h.load_adapter("a", 1)
    assert h.load_adapter("a", content).failure.code == "weight_update_refused"
    assert h.load_adapter("b", content).failure.code == "weight_update_refused"
    h.add("r", PROMPT, adapter="a")
    h.add("r2", PROMPT, adapter="b")
    h.run_out()
    assert h.stream("r").tokens == expected_tokens(PROMPT, 8, adapter=1)
    assert h.rejected("r2").code == "model_not_found"
    assert os.listdir(Path(h.engine.adapters.store.path(1)).parent) == ["1"], "nothing of the others is left"


def test_a_base_update_keeps_the_adapters_under_a_new_namespace():
    h = Harness()
    h.load_adapter("a", 1)
    prompt = list(range(1, 13))
    h.add("before", prompt, max_tokens=2, adapter="a")
    h.run_out()
    h.update("/w5")
    hits = h.engine.kv.hit_tokens
    h.add("after", prompt, max_tokens=2, adapter="a")
    h.run_out()
    assert h.stream("after").tokens == expected_tokens(prompt, 2, weights=5, adapter=1)
    assert h.engine.kv.hit_tokens == hits, "no prefix hit in KV of the base weights before"
    span = h.stream("after").spans[0]
    assert (span.weight_epoch, span.adapter, span.adapter_epoch, span.version) == (1, "a", 1, "1")


def test_prefix_hits_are_of_one_adapter_only():
    h = Harness()
    for name, content in (("a", 1), ("b", 2)):
        h.load_adapter(name, content)
    prompt = list(range(1, 13))
    for i, adapter in enumerate(["", "a", "b", "a", ""]):
        hits = h.engine.kv.hit_tokens
        h.add(f"r{i}", prompt, max_tokens=2, adapter=adapter)
        h.run_out()
        assert h.engine.kv.hit_tokens - hits == (11 if i > 2 else 0), i
    h.load_adapter("a", 3)
    h.add("new", prompt, max_tokens=2, adapter="a")
    h.add("old", prompt, max_tokens=2, adapter="b")
    h.run_out()
    assert h.stream("new").tokens == expected_tokens(prompt, 2, adapter=3)
    assert h.stream("old").tokens == expected_tokens(prompt, 2, adapter=2)


def test_no_name_has_an_adapter_epoch_twice_and_no_name_is_remembered():
    """The first load of a name has number 1, and a name that was unloaded begins above all that were unloaded."""
    h = Harness()
    loads = [h.load_adapter(name, k).result for k, name in enumerate(["a", "a", "b"], start=1)]
    assert [load["adapter_epoch"] for load in loads] == [1, 2, 1]
    h.add("old", PROMPT, max_tokens=20, adapter="a")
    h.run_rounds(3)
    assert h.ask(m.UnloadAdapterArgs("a")).result["adapter_epoch"] == 2
    h.ask(m.ResetArgs())  # unloads b, too
    again = [h.load_adapter(name, k).result for k, name in enumerate(["a", "b", "c"], start=4)]
    assert [load["adapter_epoch"] for load in again] == [3, 3, 3]
    assert len({load["lora_int_id"] for load in [*loads, *again]}) == 5, (
        "a new adapter gets a new one, a reload does not"
    )
    h.add("new", PROMPT, max_tokens=2, adapter="a")
    h.run_out()
    assert {(s.adapter, s.adapter_epoch, s.version) for s in h.stream("old").spans} == {("a", 2, "2")}
    assert {(s.adapter, s.adapter_epoch, s.version) for s in h.stream("new").spans} == {("a", 3, "3")}
    for k in range(10, 30):
        assert h.load_adapter(f"policy-{k}", k).result["adapter_epoch"] == k - 7
        h.ask(m.UnloadAdapterArgs(f"policy-{k}"))
    assert h.ask(m.FleetStateArgs()).result["past_adapter_epoch"] == 22


def test_a_trainer_may_delete_its_folder_after_the_reply():
    h = Harness()
    source = h.adapter_folder("a1")
    h.ask(m.LoadAdapterArgs("a", source), rounds=4)
    for file in Path(source.path).iterdir():
        file.unlink()
    store = Path(h.engine.adapters.store.path(1))
    assert stat.S_IMODE(store.parent.stat().st_mode) == 0o700
    assert (store / "adapter_model.safetensors").read_text() == "a1"


def test_an_exception_that_leaves_an_adapter_without_a_name_ends_the_engine(monkeypatch):
    h = Harness()
    h.load_adapter("a", 1)

    def broken(*_: object) -> None:
        raise RuntimeError("half-done")

    monkeypatch.setattr(h.engine.adapters, "_give_up", broken)  # an unload has removed the name before
    call = h.call(m.UnloadAdapterArgs("a"))
    with pytest.raises(AssertionError):
        h.engine.run_once(block=False)
    assert h.reply(call).failure.code == "internal_error"
