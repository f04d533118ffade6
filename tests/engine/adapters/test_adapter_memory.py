"""Adapters beyond the memory budget: evicted, read again by themselves, and no request starves."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from engine.test_staging_thread import HangingHarness, HangingRunner
from fastdeploy.core.request import Preemption
from fastdeploy.inter_communicator import messages as m
from support.fake_runner import FakeRunner, expected_tokens
from support.harness import PROMPT, Harness

LONG = 40


def with_adapters(number: int, adapter_memory_mb: int = 2, **config) -> Harness:
    """Return a harness with the adapters a1, a2 ... of 1 MiB each."""
    h = Harness(FakeRunner(num_blocks=256), adapter_memory_mb=adapter_memory_mb, **config)
    for k in range(1, number + 1):
        h.load_adapter(f"a{k}", k)
    return h


def contents(h: Harness) -> list[int]:
    return sorted(packed.content for packed in h.runner.adapters.values())


def assert_exact(h: Harness, request: str, adapter: int, count: int = 8) -> None:
    assert h.stream(request).tokens == expected_tokens(PROMPT, count, adapter=adapter), request


def test_the_least_recently_used_adapter_is_evicted_and_read_again_when_it_is_named():
    h = with_adapters(3)
    assert contents(h) == [2, 3]
    h.add("r2", PROMPT, adapter="a2")
    h.run_out()
    h.add("r1", PROMPT, adapter="a1")
    h.run_out()
    assert contents(h) == [1, 2], "a3 was used least recently"
    assert_exact(h, "r2", 2)
    assert_exact(h, "r1", 1)
    known = h.ask(m.AdaptersArgs()).result["adapters"]
    assert [(a["lora_name"], a["in_memory"]) for a in known] == [("a1", True), ("a2", True), ("a3", False)]


def test_kv_of_an_adapter_that_was_read_again_is_hit_again():
    h = with_adapters(3)
    prompt = list(range(1, 13))
    for name, adapter in (("r0", "a1"), ("r1", "a2"), ("r2", "a3"), ("r3", "a1")):
        hits = h.engine.kv.hit_tokens
        h.add(name, prompt, max_tokens=2, adapter=adapter)
        h.run_out()
    assert h.engine.kv.hit_tokens - hits == 11 and h.stream("r3").tokens == expected_tokens(prompt, 2, adapter=1)


def test_younger_requests_run_while_an_adapter_is_read():
    h = with_adapters(3)
    h.runner.may_stage.clear()
    h.add("reads", PROMPT, adapter="a1")
    h.add("base", PROMPT)
    h.add("here", PROMPT, adapter="a3")
    h.run_rounds(20)
    assert h.stream("base").reason == h.stream("here").reason == "length" and not h.stream("reads").tokens
    assert not h.engine.scheduler.has_work, "the loop blocks while everything waits for a read"
    h.runner.may_stage.set()
    h.run_out()
    assert_exact(h, "reads", 1)


def test_no_younger_request_takes_the_room_that_an_older_one_waits_for():
    h = with_adapters(4, max_num_seqs=8)
    for name in ("a1", "a2"):
        h.add(f"long-{name}", PROMPT, max_tokens=LONG, adapter=name)
    h.run_rounds(6)
    assert contents(h) == [1, 2], "both are in use"
    h.add("old", PROMPT, adapter="a3")
    h.add("base", PROMPT, max_tokens=60)
    for i in range(4):
        h.add(f"young{i}", PROMPT, max_tokens=LONG, adapter="a1")
    h.run_rounds(5)
    assert h.stream("base").tokens, "needs no room"
    assert not any(h.stream(f"young{i}").tokens for i in range(4)), "would keep a1 in use"
    h.run_out()
    assert_exact(h, "old", 3)
    for i in range(4):
        assert_exact(h, f"young{i}", 1, LONG)
    ends = [o.request_id for x in h.sent(m.Outputs) for o in x.outputs if o.finish_reason]
    assert ends.index("old") < min(ends.index(f"young{i}") for i in range(4))


def test_frozen_requests_give_up_the_room_of_their_adapters():
    h = with_adapters(4)
    for name in ("a1", "a2"):
        h.add(name, PROMPT, max_tokens=20, adapter=name)
    h.run_rounds(6)
    h.pause(mode="keep", scope="adapter:a1")
    h.add("a3", PROMPT, adapter="a3")
    h.run_rounds(15)
    assert h.stream("a3").reason == "length" and not h.stream("a1").finals
    h.ask(m.ResumeArgs(scope="adapter:a1"))
    h.run_out()
    assert_exact(h, "a1", 1, 20)
    assert h.stream("a1").finals[0].num_preempted == 1


def test_an_adapter_that_exceeds_the_budget_is_evicted_once_when_its_frozen_request_gives_way():
    h = with_adapters(3)
    for name in ("a2", "a3"):
        h.add(name, PROMPT, max_tokens=20, adapter=name)
    h.run_rounds(6)
    h.load_adapter("a2", "a5:2000000")
    h.pause(mode="keep", scope="adapter:a2")
    evictions = h.metric("adapter_evictions")
    h.add("a1", PROMPT, adapter="a1")
    h.run_rounds(15)
    assert_exact(h, "a1", 1)
    assert h.metric("adapter_evictions") == evictions + 1 and contents(h) == [1, 3]


def test_an_adapter_read_for_a_request_that_a_pause_holds_now_may_be_evicted():
    h = with_adapters(3, adapter_memory_mb=1, max_num_seqs=1)
    h.add("base", PROMPT, max_tokens=10)
    h.run_rounds(2)
    h.runner.may_stage.clear()
    h.add("held", PROMPT, adapter="a1")
    h.run_rounds(12)
    h.pause(mode="keep", scope="adapter:a1")
    h.runner.may_stage.set()
    h.add("free", PROMPT, adapter="a2")
    h.run_rounds(20)
    assert_exact(h, "free", 2)
    h.ask(m.ResumeArgs(scope="adapter:a1"))
    h.run_out()
    assert_exact(h, "held", 1)


def test_a_drain_waits_for_a_started_request_whose_adapter_is_read_again():
    h = with_adapters(2, adapter_memory_mb=1, max_num_seqs=1)
    h.add("started", PROMPT, max_tokens=20, adapter="a1")
    h.run_rounds(6)
    h.runner.may_stage.clear()
    h.engine.scheduler.retract(h.engine.scheduler.running[0], Preemption.MEMORY)
    h.engine.scheduler.adapters.evict(next(iter(h.engine.scheduler.adapters.models())))
    h.add("not-started", PROMPT, adapter="a2")
    h.run_rounds(2)
    call = h.call(m.PauseArgs(mode="wait"))
    h.run_rounds(5)
    assert h.reply(call) is None and not h.engine.scheduler.has_work
    h.runner.may_stage.set()
    h.run_rounds(30)
    assert h.reply(call).result["counts"]["queued"] == 1, "the drain starts no other request"
    assert_exact(h, "started", 1, 20)
    h.resume()
    h.run_out()
    assert_exact(h, "not-started", 2)


def test_an_adapter_that_nobody_can_name_any_more_is_not_kept_when_its_read_ends():
    h = with_adapters(3)
    h.runner.may_stage.clear()
    h.add("r", PROMPT, adapter="a1")
    h.run_rounds(2)
    h.unload_adapter("a1")
    h.ask(m.AbortArgs(["r"]))
    h.run_rounds(2)
    h.runner.may_stage.set()
    h.run_rounds(3)
    assert contents(h) == [3] and len(h.engine.scopes.adapters) == 2


def test_loads_do_not_evict_the_adapter_that_was_read_for_a_waiting_request():
    h = with_adapters(3, adapter_memory_mb=1, max_num_seqs=1)
    h.runner.may_stage.clear()
    h.add("r", PROMPT, adapter="a1")
    h.add("base", PROMPT, max_tokens=LONG)
    h.run_rounds(2)
    h.runner.may_stage.set()
    h.run_rounds(2)
    assert contents(h) == [1] and h.stream("base").tokens and not h.stream("r").tokens, "the batch is full"
    assert h.load_adapter("new", 7).failure is None and contents(h) == [1]
    h.run_out()
    assert_exact(h, "r", 1)
    assert h.engine.scheduler.adapters.num_reads == 1


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_an_adapter_in_use_is_replaced_even_by_a_larger_one(kv):
    h = with_adapters(2)
    for name in ("a1", "a2"):
        h.add(name, PROMPT, max_tokens=LONG, adapter=name)
    h.run_rounds(6)
    assert h.load_adapter("a1", f"a5{'-recompute' if kv == 'recompute' else ''}:2000000", kv=kv).failure is None
    h.run_out()
    tokens = h.stream("a1").tokens
    switched = sum(span.adapter_epoch == 1 for span in h.stream("a1").spans)
    assert tokens[switched:] == expected_tokens(PROMPT + tokens[:switched], LONG - switched, adapter=5)
    assert_exact(h, "a2", 2, LONG)
    h.add("after", PROMPT, adapter="a2")
    h.run_out()
    assert h.engine.scheduler.adapters.nbytes <= 2 << 20


def test_a_load_while_the_old_adapter_is_read_again_serves_the_new_one():
    h = with_adapters(3)
    h.runner.may_stage.clear()
    h.add("r", PROMPT, adapter="a1")
    h.run_rounds(2)
    call = h.call(m.LoadAdapterArgs("a1", h.adapter_folder("a9")))
    h.run_rounds(2)
    h.runner.may_stage.set()
    h.run_out()
    h.run_rounds(4)
    assert h.reply(call).result["adapter_epoch"] == 2
    h.add("after", PROMPT, adapter="a1")
    h.run_out()
    assert_exact(h, "after", 9)
    assert h.stream("r").reason == "length"


def test_a_request_for_an_evicted_adapter_does_not_wait_for_the_loads_of_others():
    h = with_adapters(3)
    loads = [h.call(m.LoadAdapterArgs(f"new{i}", h.adapter_folder("a5"))) for i in range(30)]
    h.run_rounds(5)  # all are copied, and wait to be read
    h.add("r", PROMPT, adapter="a1")
    h.run_rounds(12)
    assert_exact(h, "r", 1)
    assert h.reply(loads[-1]) is None
    h.run_rounds(40)
    assert all(h.reply(call).failure is None for call in loads)


class HangingReadRunner(HangingRunner):
    """The read of the copy of the first load hangs, from the second time on, until the runner is mended."""

    def begin_adapter(self):
        runner, staging = self, super().begin_adapter()
        read = staging.read

        def read_or_hang(path):
            if path.endswith("/1") and runner.adapter_reads:
                runner.hang()
            return read(path)

        staging.read = read_or_hang
        return staging


def test_a_late_read_of_a_replaced_adapter_is_not_served_in_place_of_the_new_one():
    """The read of the old adapter is under way while the new one is committed, evicted, and asked for again."""
    h = HangingHarness(HangingReadRunner(), adapter_memory_mb=2)
    for k in (1, 2, 3):
        h.load_adapter(f"a{k}", k)
    h.add("gone", PROMPT, adapter="a1")
    h.run_rounds()
    h.ask(m.AbortArgs(["gone"]))
    assert h.load_adapter("a1", 9).result["adapter_epoch"] == 2 and contents(h) == [3, 9]
    h.add("r3", PROMPT, adapter="a3")
    h.run_rounds(12)
    for k in (2, 1):
        h.add(f"r{k}", PROMPT, adapter=f"a{k}")
    h.run_rounds(2)
    assert contents(h) == [], "both have left for the two that are to be read"
    h.mend()
    h.run_out()
    assert h.stream("r1").spans[0].adapter_epoch == 2
    assert_exact(h, "r1", 9)
    assert_exact(h, "r2", 2)


def test_an_adapter_larger_than_the_budget_is_refused_and_the_flag_is_named():
    h = with_adapters(1)
    failure = h.load_adapter("a1", f"a2:{(2 << 20) + 1}").failure
    assert failure.code == "weight_update_refused" and "--adapter-memory-mb" in failure.message
    huge = h.adapter_folder("a3")
    with open(Path(huge.path) / "adapter_model.safetensors", "a") as file:
        file.truncate((2 << 20) + 1)
    failure = h.ask(m.LoadAdapterArgs("a1", huge), rounds=4).failure
    assert failure.code == "weight_update_refused" and "--adapter-memory-mb" in failure.message
    assert h.runner.adapter_reads == 2, "refused before it was copied and read"
    h.add("r", PROMPT, adapter="a1")
    h.run_out()
    assert_exact(h, "r", 1)


def test_requests_whose_adapter_cannot_be_read_again_end_with_an_error():
    h = with_adapters(3)
    shutil.rmtree(h.engine.adapters.store.path(1))
    for i in range(2):
        h.add(f"r{i}", PROMPT, adapter="a1", n=2)
    h.add("other", PROMPT, adapter="a2")
    h.run_out()
    for i in range(2):
        final = h.stream(f"r{i}", choice=1).finals[0]
        assert final.finish_reason == "error" and "adapter 'a1' was evicted" in final.message
    assert_exact(h, "other", 2)


def test_a_sleep_frees_the_adapters_that_nobody_uses():
    h = with_adapters(2)
    h.add("r", PROMPT, max_tokens=20, adapter="a1")
    h.run_rounds(4)
    freed = h.ask(m.SleepArgs(("weight",)), rounds=10).result["freed_bytes"]
    assert freed == 1000 + (1 << 20) and contents(h) == [1], "the frozen request keeps its own"
    assert h.load_adapter("a3", 3).failure is None and contents(h) == [1]
    h.ask(m.WakeArgs(), rounds=3)
    h.run_out()
    assert_exact(h, "r", 1, 20)
    for k in (2, 3):
        h.add(f"after{k}", PROMPT, adapter=f"a{k}")
    h.run_out()
    for k in (2, 3):
        assert_exact(h, f"after{k}", k)


@pytest.mark.parametrize("number", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_many_adapters_stay_addressable_in_the_memory_of_a_few(number):
    store = {"adapter_store": "/dev/shm"}
    h = Harness(FakeRunner(num_blocks=512), adapter_memory_mb=4, max_num_seqs=16, max_waiting=number, **store)
    engine = h.engine
    folders = [h.adapter_folder(f"a{k}:{400_000}") for k in range(1, 101)]
    for k in range(number):
        h.call(m.LoadAdapterArgs(f"policy-v{k}", folders[k % 100]))
    while h.transport.inbox or engine.adapters.busy:
        engine.run_once(block=False)
        h.join_staging()
    assert len(h.ask(m.AdaptersArgs()).result["adapters"]) == number and len(h.runner.adapters) == 10
    for k in range(number):
        h.add(f"r{k}", [k % 900 + 1, 7], max_tokens=2, adapter=f"policy-v{k}")
    while len(engine.lifecycle.requests) or h.transport.inbox:
        engine.run_once(block=False)
        h.join_staging()
    got = {}
    for message in h.sent(m.Outputs):
        for output in message.outputs:
            got.setdefault(output.request_id, []).extend(output.token_ids)
    assert not h.sent(m.Rejected), "never a 404 after an eviction"
    for k in range(number):
        assert got[f"r{k}"] == expected_tokens([k % 900 + 1, 7], 2, adapter=k % 100 + 1), k
    engine.lifecycle.check_integrity()
    engine.adapters.check_integrity()
    engine.adapters.store.close()


def test_metrics_count_adapters_and_name_a_bounded_number_of_them():
    h = with_adapters(3, max_waiting=1000)
    h.load_adapter("bad", "bad")
    h.add("r", PROMPT, adapter="a1")
    h.run_out()
    assert (h.metric("adapters_known"), h.metric("adapters_in_memory"), h.metric("adapter_bytes")) == (3, 2, 2 << 20)
    assert (h.metric("adapter_evictions"), h.metric("adapter_reads"), h.metric("adapter_loads_failed")) == (2, 1, 1)
    h.pause(mode="keep")
    for k in range(70):
        h.load_adapter(f'n"{k}', 1)
        h.add(f"n{k}", PROMPT, adapter=f'n"{k}', n=2 if k == 69 else 1, max_tokens=LONG)
    h.run_rounds()
    lines = h.ask(m.MetricsArgs()).result["text"].splitlines()
    series = [line for line in lines if line.startswith("fastdeploy:adapter_requests{")]
    assert len(series) == 64 and series[0] == 'fastdeploy:adapter_requests{lora_name="n\\"69"} 2.0'
