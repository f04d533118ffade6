"""Loads, unloads and aborts of an adapter whose name is paused. See also known failure 28."""

from __future__ import annotations

import pytest

from fastdeploy.core.served_weights import adapter_scope
from fastdeploy.inter_communicator import messages as m
from support.fake_runner import expected_tokens
from support.harness import Harness
from support.tenants import CONTENT, LONG, A, counts, exact, paused_adapters, resume, run_out_exactly, tenants

NEW = 5  # content of the adapter that takes the place of "a"


def unload(h: Harness, name: str = "a") -> None:
    """Unload an adapter, which must need one round only."""
    assert h.ask(m.UnloadAdapterArgs(name), rounds=1).failure is None


def label_of(h: Harness, request_id: str) -> set[tuple[str, int]]:
    return {(span.adapter, span.adapter_epoch) for span in h.stream(request_id).spans}


@pytest.mark.parametrize("mode", ["keep", "wait"])
def test_an_unload_during_a_pause_is_done_at_once_and_old_requests_finish_on_their_weights(mode):
    h = tenants()
    call = h.call(m.PauseArgs(mode=mode, scope=A))
    h.run_rounds()
    unload(h)
    h.add("late", [5], adapter="a")
    h.run_rounds(150)
    assert h.rejected("late").code == "model_not_found" and h.reply(call).result["is_paused"]
    assert paused_adapters(h)[0]["lora_name"] == "a" and counts(h, "a")[2] == 0, "the hold outlives the name"
    assert len(resume(h, A)["released"]) == 1
    run_out_exactly(h)
    assert label_of(h, "a0") == label_of(h, "a2") == {("a", 1)}
    h.run_rounds()
    assert h.failure(m.PauseStatusArgs(A)).code == "model_not_found", "nothing of the name is left"


def test_an_unload_behind_an_abort_leaves_a_hold_that_a_resume_by_name_releases():
    h = tenants()
    h.pause(mode="abort", scope=A, hold_id="mine")
    unload(h)
    assert h.failure(m.PauseArgs(mode="keep", scope="adapter:c")).code == "model_not_found"
    assert h.pause(mode="keep", scope=A, hold_id="other").result["is_paused"], "a name with a hold may be paused"
    assert resume(h, A, "mine")["still_held_by"] == ["other"]
    assert resume(h, A, "other")["status"] == "running"
    h.run_rounds()
    assert h.failure(m.ResumeArgs(scope=A)).code == "model_not_found"


def test_a_hold_that_rejects_does_so_between_an_unload_and_the_next_load():
    """A client is told to come again, and not that there is no such adapter."""
    h = tenants(requests=0)
    h.pause(mode="abort", scope=A)
    unload(h)
    for request_id in ("gone", "back"):
        h.add(request_id, [9], max_tokens=5, adapter="a")
        h.run_rounds()
        assert h.rejected(request_id).code == "rejecting_new_requests"
        h.load_adapter("a", NEW)
    resume(h, A)
    h.add("after", [9], max_tokens=5, adapter="a")
    h.run_out()
    assert h.stream("after").tokens == expected_tokens([9], 5, adapter=NEW)


def test_a_hold_of_a_name_holds_the_requests_of_the_next_adapter_of_that_name():
    h = tenants()
    h.pause(mode="keep", scope=A)
    unload(h)
    h.load_adapter("a", NEW)
    h.add("new", [9], max_tokens=5, adapter="a")
    h.run_rounds(10)
    assert not h.stream("new").tokens and h.stream("b0").tokens
    resume(h, A)
    run_out_exactly(h)
    assert h.stream("new").tokens == expected_tokens([9], 5, adapter=NEW)


def test_a_name_that_comes_and_goes_under_a_pause_has_one_scope():
    """Each adapter of the name finishes its requests on its own weights."""
    h = tenants(requests=0, num_blocks=256, max_num_seqs=8)
    contents = [1, 3, 4, 6]
    for content in contents:
        h.load_adapter("a", content)
        h.add(f"r{content}", [2, content], max_tokens=20, adapter="a")
        h.run_rounds(2)
        h.pause(mode="keep", scope=A, hold_id="mine")
        unload(h)
        if content == contents[1]:
            resume(h, A, "mine")
    assert len(paused_adapters(h)) == 1
    resume(h, A, "mine")
    h.run_out()
    for content in contents:
        assert h.stream(f"r{content}").tokens == expected_tokens([2, content], 20, adapter=content)


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_a_reload_of_a_paused_adapter_changes_the_weights_of_its_frozen_requests(kv):
    h = tenants()
    h.pause(mode="keep", scope=A)
    before = counts(h, "a")
    report = h.load_adapter("a", f"a{NEW}-recompute" if kv == "recompute" else NEW, kv=kv).result
    assert report["replaced"] and report["adapter_epoch"] == 2 and counts(h, "a") == before
    assert resume(h, A)["adapter_epoch"] == 2
    h.run_out()
    for i, count in enumerate(before):
        stream, prompt = h.stream(f"a{i}"), [i + 1, 7]
        assert stream.tokens[:count] == expected_tokens(prompt, count, adapter=CONTENT["a"])
        assert stream.tokens[count:] == expected_tokens(prompt + stream.tokens[:count], LONG - count, adapter=NEW)
        epochs = [span.adapter_epoch for span in stream.spans]
        assert epochs == [1] * count + [2] * (LONG - count), "each token tells the weights that drew it"
        assert stream.spans[-1].recomputed == (kv == "recompute" and count > 0)
    assert all(exact(h, f"b{i}") for i in range(3))


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_a_load_that_is_under_way_when_its_name_is_paused_does_not_wait_for_the_resume(mode):
    h = tenants()
    h.runner.may_stage.clear()
    load = h.call(m.LoadAdapterArgs("a", h.adapter_folder(f"a{NEW}")))
    h.run_rounds(3)
    h.pause(mode=mode, scope=A, rounds=100)
    h.runner.may_stage.set()
    h.run_rounds(6)
    assert h.reply(load).result["adapter_epoch"] == 2 and paused_adapters(h)[0]["is_paused"]
    resume(h, A)
    h.add("new", [9], max_tokens=5, adapter="a")
    h.run_out()
    assert h.stream("new").tokens == expected_tokens([9], 5, adapter=NEW) and label_of(h, "new") == {("a", 2)}


def test_a_drain_goes_on_under_the_weights_of_a_reload():
    h = tenants()
    call = h.call(m.PauseArgs(mode="wait", scope=A))
    h.run_rounds(3)
    h.load_adapter("a", NEW)
    h.run_rounds(150)
    assert h.reply(call).result["counts"]["drained"] == 2 and counts(h, "a") == [LONG, LONG, 0]
    assert label_of(h, "a0") == {("a", 1), ("a", 2)} and label_of(h, "b0") == {("b", 1)}


def test_a_reload_leaves_no_prefix_hit_on_kv_of_the_adapter_before():
    h = tenants(requests=0)
    prompt, hits = list(range(1, 13)), []
    for content in (CONTENT["a"], NEW):
        for name in ("a", "b"):
            if name == "a":
                h.load_adapter("a", content)
            before = h.engine.kv.hit_tokens
            h.add(f"{name}-{content}", prompt, max_tokens=4, adapter=name)
            h.run_out()
            hits.append(h.engine.kv.hit_tokens - before)
            expected = expected_tokens(prompt, 4, adapter=content if name == "a" else CONTENT[name])
            assert h.stream(f"{name}-{content}").tokens == expected
    assert hits == [0, 0, 0, 11]


# --------------------------------------------------------------------------- aborts by name


@pytest.mark.parametrize("paused", [None, A, "engine"])
def test_an_abort_by_name_ends_every_request_of_the_adapter_and_no_other(paused):
    h = tenants()
    if paused is not None:
        h.pause(mode="keep", scope=paused)
    reply = h.ask(m.AbortArgs(lora_name="a")).result
    told = {entry["request_id"]: entry["output_token_count"] for entry in reply["aborted"]}
    assert told == {f"a{i}": count for i, count in enumerate(counts(h, "a"))} and reply["not_found"] == []
    assert [h.stream(f"a{i}").reason for i in range(3)] == ["abort"] * 3
    assert h.ask(m.AbortArgs(lora_name="a")).result["aborted"] == []
    if paused is not None:
        resume(h, paused)
    h.add("after", [5], max_tokens=4, adapter="a")
    h.run_out()
    assert exact(h, "after", [5], 4, adapter="a") and all(exact(h, f"b{i}") for i in range(3))


def test_an_abort_by_name_reaches_the_requests_of_a_name_that_was_unloaded():
    h = tenants()
    unload(h)
    assert len(h.ask(m.AbortArgs(lora_name="a")).result["aborted"]) == 3
    h.run_rounds()
    assert h.ask(m.AbortArgs(lora_name="a")).result == {"aborted": [], "not_found": ["a"]}, "as for an unknown id"
    h.run_out()
    assert all(exact(h, f"b{i}") for i in range(3))


def test_an_abort_by_name_ends_only_its_part_of_a_group_of_requests():
    """The prompts of one HTTP request may name different adapters."""
    h = tenants(requests=0)
    for name in ("a", "b"):
        h.add(f"g-{name}", [3], max_tokens=9, adapter=name, group="g")
    h.run_rounds(2)
    aborted = h.ask(m.AbortArgs(lora_name="a")).result["aborted"]
    assert aborted == [{"request_id": "g", "output_token_count": len(h.stream("g-a").tokens)}]
    h.run_out()
    assert h.stream("g-a").reason == "abort" and exact(h, "g-b", [3], 9, adapter="b")


@pytest.mark.parametrize(
    "args",
    [m.AbortArgs(), m.AbortArgs(["a0"], abort_all=True), m.AbortArgs(["a0"], lora_name="a"),
     m.AbortArgs(abort_all=True, lora_name="a")],
)  # fmt: skip
def test_an_abort_names_requests_in_one_way(args):
    h = tenants()
    h.assert_refused(args, "req_ids")
    assert not h.stream("a0").finals


def test_the_pauses_of_many_names_that_come_and_go_leave_nothing_behind():
    h = tenants(requests=0)
    for k in range(40):
        h.load_adapter(f"t{k}", k + 1)
        h.pause(mode="keep", scope=adapter_scope(f"t{k}"), ttl_s=5.0)
        unload(h, f"t{k}")
    assert len(paused_adapters(h)) == 40
    h.now += 6.0
    h.run_rounds()
    assert paused_adapters(h) == []
    assert all(h.failure(m.PauseStatusArgs(adapter_scope(f"t{k}"))).code == "model_not_found" for k in range(40))
