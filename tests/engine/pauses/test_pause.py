"""Pause and resume of the whole engine: the three modes, the caches, the state and the report."""

from __future__ import annotations

import pytest

from engine.pause_calls import busy, call_pause, tokens_of
from fastdeploy.inter_communicator import messages as m
from support.fake_runner import FakeRunner, expected_tokens
from support.harness import Harness

# --------------------------------------------------------------------------- the three modes


def test_abort_ends_all_requests_with_exactly_the_tokens_they_had():
    h = busy()
    computed = h.runner.computed_tokens
    report = h.pause(mode="abort").result
    assert h.runner.computed_tokens == computed
    streams = [h.stream(f"r{i}") for i in range(6)]
    assert [s.reason for s in streams] == ["abort"] * 6
    assert [bool(s.tokens) for s in streams] == [True] * 4 + [False] * 2
    for i, stream in enumerate(streams):
        assert stream.tokens == expected_tokens([i + 1] * 3, len(stream.tokens)), "no invented EOS, no lost token"
        assert stream.finals[0].message.startswith("Abort before prefill") == (i >= 4)
    assert report["counts"] == {"aborted": 6, "drained": 0, "kept": 0, "queued": 0}
    assert report["tokens_returned"] == sum(tokens_of(h))
    assert sorted(report["aborted_ids"]) == [f"r{i}" for i in range(6)] and report["forced_ids"] == []
    assert h.pause(mode="abort").result["aborted_ids"] == [], "no request is left"


def test_abort_does_not_prefill_the_rest_of_a_half_prefilled_prompt():
    h = Harness(FakeRunner(num_blocks=64, max_model_len=200), max_num_batched_tokens=8)
    h.add("long", [1] * 100)
    h.run_rounds(2)
    assert h.runner.computed_tokens == 16
    h.pause(mode="abort")
    assert h.runner.computed_tokens == 16 and h.stream("long").reason == "abort"
    assert h.engine.kv.num_free == 64


@pytest.mark.parametrize("clear_cache", [False, True])
def test_tokens_of_an_aborted_request_that_is_sent_again_count_as_recomputed_without_prefix_hits(clear_cache):
    h, prompt = Harness(), list(range(1, 30))
    h.add("first", prompt, max_tokens=20)
    h.run_rounds(6)
    h.pause(mode="abort", clear_cache=clear_cache)
    tokens, once = h.stream("first").tokens, h.runner.computed_tokens
    h.resume()
    h.add("again", prompt + tokens, max_tokens=20 - len(tokens), resumed_tokens=len(tokens))
    h.run_out()
    hits = h.engine.kv.hit_tokens
    assert hits == (0 if clear_cache else len(prompt + tokens) - 1)
    assert h.metric("recomputed_tokens") == len(prompt + tokens) - 1 - hits
    assert h.runner.computed_tokens == once + h.metric("recomputed_tokens") + 20 - len(tokens)


def test_no_request_starts_while_an_abort_waits_for_its_fence():
    h = busy()
    h.transport.mute.add("a")
    call_pause(h, mode="abort", admission="hold")
    computed = h.runner.computed_tokens
    h.add("new", [1, 2])
    h.run_rounds(3)
    assert h.status()["phase"] == "draining" and h.runner.computed_tokens == computed


def test_keep_freezes_running_half_prefilled_and_waiting_requests():
    h = Harness(max_num_batched_tokens=8)
    for i in range(6):
        h.add(f"r{i}", [i + 1] * 9, max_tokens=12)
    h.run_rounds(3)
    report = h.pause(mode="keep").result
    assert report["counts"]["kept"] >= 1 and report["counts"]["kept"] + report["counts"]["queued"] == 6
    before, blocks = h.runner.computed_tokens, h.engine.kv.num_free
    h.run_rounds(10)
    assert h.runner.computed_tokens == before and h.engine.kv.num_free == blocks, "frozen requests keep their KV"
    h.resume()
    h.run_out()
    for i in range(6):
        assert h.stream(f"r{i}").tokens == expected_tokens([i + 1] * 9, 12)


def test_keep_recomputes_no_token():
    h, undisturbed = busy(max_tokens=12), busy(max_tokens=12)
    h.pause(mode="keep")
    h.run_rounds(5)
    h.resume()
    h.run_out()
    undisturbed.run_out()
    assert h.runner.computed_tokens == undisturbed.runner.computed_tokens


def test_wait_completes_running_requests_and_starts_no_others():
    h = busy(max_tokens=12)
    report = h.pause(mode="wait").result
    assert [h.stream(f"r{i}").reason for i in range(6)] == ["length"] * 4 + [None] * 2
    assert tokens_of(h) == [12] * 4 + [0] * 2
    assert report["counts"] == {"aborted": 0, "drained": 4, "kept": 0, "queued": 2}


def test_wait_completes_all_choices_of_a_request_of_which_one_has_started():
    h = Harness(FakeRunner(num_blocks=128), max_num_seqs=2)
    h.add("g", [1, 2, 3], n=5, max_tokens=6)
    h.add("other", [9, 9], max_tokens=6)
    h.run_rounds(2)
    assert h.stream("g", 0).tokens and not h.stream("g", 4).tokens
    report = h.pause(mode="wait").result
    assert [h.stream("g", i).tokens for i in range(5)] == [expected_tokens([1, 2, 3], 6)] * 5
    assert report["counts"]["drained"] == 5 and report["counts"]["queued"] == 1


def test_wait_does_not_wait_for_a_prompt_that_is_half_prefilled():
    h = Harness(FakeRunner(num_blocks=64, max_model_len=200), max_num_batched_tokens=8)
    h.add("short", [1, 2], max_tokens=4)
    h.add("long", [3] * 100, max_tokens=4)
    h.run_rounds(3)
    assert len(h.engine.scheduler.running) == 2
    report = h.pause(mode="wait").result
    assert h.stream("short").reason == "length" and h.stream("long").reason is None
    assert report["counts"]["queued"] == 1
    h.resume()
    h.run_out()
    assert h.stream("long").tokens == expected_tokens([3] * 100, 4)


# --------------------------------------------------------------------------- caches


def watch_clears(h: Harness) -> list[int]:
    """Return a list that grows with every clearing of the prefix cache."""
    clears: list[int] = []
    clear = h.engine.kv.index.clear
    h.engine.kv.index.clear = lambda: (clears.append(1), clear())
    return clears


def test_clear_cache_gives_all_kv_back_and_the_same_tokens_follow():
    h = busy(max_tokens=20)
    h.pause(mode="keep", clear_cache=True)
    assert h.engine.kv.num_free == h.runner.info.num_blocks
    h.resume()
    h.run_out()
    for i in range(6):
        assert h.stream(f"r{i}").tokens == expected_tokens([i + 1] * 3, 20)
    undisturbed = busy(max_tokens=20)
    undisturbed.run_out()
    # Four had computed their prompt of 3 and all of their 4 tokens but the last.
    assert h.runner.computed_tokens == undisturbed.runner.computed_tokens + 4 * (3 + 3)


@pytest.mark.parametrize(("mode", "hits"), [("abort", 0), ("wait", 0), ("keep", 15)])
def test_each_mode_has_its_own_default_for_the_prefix_cache(mode, hits):
    h = Harness()
    h.add("first", list(range(1, 17)), max_tokens=2)
    h.run_out()
    h.pause(mode=mode)
    h.resume()
    h.add("again", list(range(1, 17)), max_tokens=2)
    h.run_out()
    assert h.engine.kv.hit_tokens == hits


def test_a_pause_that_keeps_the_cache_does_not_clear_it_for_the_pause_before():
    h = Harness()
    h.pause(mode="wait", hold_id="x")
    clears = watch_clears(h)
    h.pause(mode="keep", hold_id="y")
    h.run_rounds(5)
    h.resume("x")
    h.resume("y")
    h.run_rounds(5)
    assert not clears


def test_a_resume_during_a_drain_clears_no_cache():
    h = busy()
    call = call_pause(h, mode="wait", clear_cache=True)
    clears = watch_clears(h)
    h.resume()
    assert h.reply(call).failure.code == "pause_interrupted"
    h.run_out()
    h.pause(mode="keep")
    assert not clears and h.reply(call).failure is not None, "one reply, and no effect after it"


# --------------------------------------------------------------------------- questions and aborts while paused


def test_a_status_query_is_answered_during_a_drain():
    h = busy()
    call_pause(h, mode="wait")
    status = h.ask(m.PauseStatusArgs()).result
    assert status["phase"] == "draining" and status["rejecting_new_requests"] and not status["is_paused"]
    assert status["counts"] == {"running": 4, "frozen": 0, "queued": 2}


def test_status_describes_holds_and_frozen_requests():
    h = busy()
    h.pause(mode="keep", hold_id="x", ttl_s=10.0, placed_by="vllm")
    h.now += 4
    status = h.status()
    assert status["counts"] == {"running": 0, "frozen": 4, "queued": 2} and status["mode"] == "keep"
    hold = status["holds"][0]
    assert (hold["age_s"], hold["ttl_left_s"], hold["placed_by"], hold["named"]) == (4.0, 6.0, "vllm", True)


def test_a_client_may_abort_and_cancel_while_paused():
    h = busy()
    h.pause(mode="keep")
    reply = h.ask(m.AbortArgs(["r0", "r0", "nobody"])).result
    assert reply["aborted"] == [{"request_id": "r0", "output_token_count": len(h.stream("r0").tokens)}]
    assert reply["not_found"] == ["nobody"] and h.stream("r0").reason == "abort"
    h.send(m.CancelRequest("r1"))
    h.run_rounds()
    assert h.stream("r1").reason is None and not h.engine.lifecycle.requests.get("r1")
    assert h.status()["is_paused"]


# --------------------------------------------------------------------------- arguments and report


@pytest.mark.parametrize(
    ("field", "args"),
    [("mode", {"mode": "stop"}), ("admission", {"admission": "no"}), ("on_timeout", {"on_timeout": "wait"}),
     ("timeout_s", {"timeout_s": -1.0}), ("timeout_s", {"timeout_s": float("nan")}), ("ttl_s", {"ttl_s": 0.0}),
     ("hold_id", {"hold_id": ""})],
)  # fmt: skip
def test_an_invalid_argument_is_named_and_changes_nothing(field, args):
    h = busy()
    h.assert_refused(m.PauseArgs(**args), field)
    assert h.status()["phase"] == "running" and h.status()["holds"] == []


def test_the_report_has_every_documented_field():
    h = busy()
    h.now += 1
    report = h.pause(mode="abort", hold_id="x", placed_by="sglang").result
    assert set(report) >= {
        "status", "state", "mode", "scope", "hold", "admission", "version", "weight_epoch", "counts", "tokens_returned",
        "aborted_ids", "forced_ids", "escalated_by", "elapsed_ms", "is_paused", "rejecting_new_requests",
        "slow_api_servers", "dropped_api_servers",
    }  # fmt: skip
    assert (report["status"], report["state"], report["scope"]) == ("paused", "paused", "engine")
    assert report["hold"]["id"] == "x" and report["hold"]["placed_by"] == "sglang"


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_a_paused_engine_sends_heartbeats(mode):
    h = Harness(heartbeat_s=1.0)
    h.pause(mode=mode)
    for _ in range(3):
        before = len(h.sent(m.Heartbeat))
        h.now += 1.1
        h.run_rounds()
        assert len(h.sent(m.Heartbeat)) == before + 1
