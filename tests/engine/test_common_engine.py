"""The engine's loop on a fake runner: requests, aborts, errors of handlers, heartbeats."""

from __future__ import annotations

import pytest

from fastdeploy.core.errors import EngineError
from fastdeploy.core.weight_source import FolderSource
from fastdeploy.inter_communicator import messages as m
from support.fake_runner import FakeRunner, expected_tokens
from support.harness import PROMPT, Harness, one_running


def test_a_request_gets_the_tokens_of_the_model_and_one_final_output():
    h = one_running(10, [5, 6, 7])
    h.run_out()
    stream = h.stream("r")
    assert stream.tokens == expected_tokens([5, 6, 7], 10)
    assert stream.reason == "length" and len(stream.finals) == 1
    assert [(s.start, s.end) for s in stream.spans] == [(i, i + 1) for i in range(10)]


def test_more_requests_than_max_num_seqs_all_complete():
    h = Harness()
    for i in range(11):
        h.add(f"r{i}", [i + 1] * (i + 1), max_tokens=5)
    h.run_out()
    for i in range(11):
        assert h.stream(f"r{i}").tokens == expected_tokens([i + 1] * (i + 1), 5)


def test_a_group_is_prefilled_once_and_its_partial_block_is_copied_on_write():
    h = Harness()
    prompt = list(range(1, 24))  # 5 full blocks of 4 and 3 more tokens
    h.add("g", prompt, n=4, max_tokens=6)
    h.run_out()
    for choice in range(4):
        assert h.stream("g", choice).tokens == expected_tokens(prompt, 6)
    assert h.runner.computed_tokens == len(prompt) + 3 * 1 + 4 * 5
    assert sum(len(p.copies) for p in h.runner.plans) == 3


def test_the_same_prompt_sent_many_times_at_once_is_prefilled_once():
    h = Harness()
    prompt = list(range(1, 25))  # ends on a block boundary
    for i in range(4):
        h.add(f"r{i}", prompt, max_tokens=2)
    h.run_out()
    assert h.runner.computed_tokens == len(prompt) + 3 * 1 + 4 * 1
    assert h.stream("r3").finals[0].cached_tokens in (0, 23)


def test_preemption_recomputes_without_losing_or_doubling_a_token():
    h = Harness(FakeRunner(num_blocks=34, max_model_len=128), max_num_seqs=4)
    for i in range(4):
        h.add(f"r{i}", [i + 1] * 10, max_tokens=60)
    h.run_out()
    assert h.engine.scheduler.num_preemptions > 0
    computed_once = 4 * (10 + 60 - 1)  # the last token of a sequence is sampled only
    assert 0 < h.metric("recomputed_tokens") == h.runner.computed_tokens - computed_once
    for i in range(4):
        stream = h.stream(f"r{i}")
        assert stream.tokens == expected_tokens([i + 1] * 10, 60)
        assert len(stream.finals) == 1


def test_an_update_between_two_steps_changes_the_label_at_exactly_one_token():
    h = one_running(rounds=5)
    before = len(h.stream("r").tokens)
    assert h.update("/w7", version="v7").result["version"] == "v7"
    h.run_out()
    stream = h.stream("r")
    old = [s.weight_epoch for s in stream.spans].count(0)
    assert before < old < 20 and [s.version for s in stream.spans] == ["0"] * old + ["v7"] * (20 - old)
    assert stream.tokens[:old] == expected_tokens(PROMPT, old)
    assert stream.tokens[old:] == expected_tokens(PROMPT + stream.tokens[:old], 20 - old, weights=7)


def test_logprobs_are_aligned_when_asked_for_and_absent_when_not():
    h = Harness()
    h.add("with", [1, 2], max_tokens=5, logprobs=0)
    h.add("without", [1, 2], max_tokens=5)
    h.run_out()
    assert [x.logprob for x in h.stream("with").logprobs] == [-float(t) for t in h.stream("with").tokens]
    assert h.stream("without").logprobs == []


def test_a_request_without_a_seed_gets_one_that_its_choices_share():
    h = Harness()
    for name in ("a", "b"):
        h.add(name, [1, 2], n=2, max_tokens=3)
    h.add("c", [1, 2], seed=5, max_tokens=3)
    h.run_out()
    seeds: dict[str, set] = {}
    for plan in h.runner.plans:
        for chunk in plan.chunks:
            if (new := chunk.new) is not None:
                seeds.setdefault(new.key[0], set()).add(new.sampling.seed)
    assert [len(seeds[name]) for name in "abc"] == [1, 1, 1] and None not in seeds["a"] | seeds["b"]
    assert seeds["a"] != seeds["b"] and seeds["c"] == {5}


def test_eos_and_stop_ids_end_a_request_but_not_before_min_tokens():
    runner = FakeRunner(vocab=4)
    h = Harness(runner)
    h.add("eos", [1, 2], max_tokens=40, ignore_eos=False)
    h.add("ignored", [1, 2], max_tokens=40)
    h.add("stop", [1, 2], max_tokens=40, stop_token_ids=(3,))
    h.add("min", [1, 2], max_tokens=40, min_tokens=20, ignore_eos=False, stop_token_ids=(3,))
    h.run_out()
    eos, stop, late = h.stream("eos"), h.stream("stop"), h.stream("min")
    assert eos.tokens[-1] == 0 and eos.reason == "stop" and eos.finals[0].stop_reason is None
    assert 0 not in eos.tokens[:-1]
    assert h.stream("ignored").reason == "length" and 0 in h.stream("ignored").tokens
    assert stop.tokens[-1] == 3 and stop.finals[0].stop_reason == 3 and 3 not in stop.tokens[:-1]
    assert len(late.tokens) > 20 and not {0, 3} & set(late.tokens[:20])


def test_abort_by_the_id_of_a_group_aborts_all_of_its_requests():
    h = Harness()
    for i in range(3):
        h.add(f"http-{i}", [i + 1] * 3, group="http", max_tokens=50)
    h.run_rounds(3)
    reply = h.ask(m.AbortArgs(["http"])).result
    tokens = sum(len(h.stream(f"http-{i}").tokens) for i in range(3))
    assert reply == {"aborted": [{"request_id": "http", "output_token_count": tokens}], "not_found": []}
    assert [h.stream(f"http-{i}").reason for i in range(3)] == ["abort"] * 3


def test_abort_all_names_each_client_request_once():
    h = Harness()
    for i in range(2):
        h.add(f"http-{i}", [i + 1] * 3, group="http")
    h.add("r", [5], n=2)
    h.run_rounds(2)
    reply = h.ask(m.AbortArgs(abort_all=True)).result
    assert [x["request_id"] for x in reply["aborted"]] == ["http", "r"]
    assert h.ask(m.AbortArgs(abort_all=True)).result == {"aborted": [], "not_found": []}


def test_an_abort_call_without_ids_is_refused():
    Harness().assert_refused(m.AbortArgs(), "req_ids")


def test_a_cancelled_choice_gets_no_more_outputs_and_the_other_choices_go_on():
    h = Harness()
    h.add("g", [1, 2, 3], n=3, max_tokens=10)
    h.run_rounds(3)
    seen = len(h.stream("g", 1).tokens)
    h.send(m.CancelRequest("g", 1, "stop"))
    h.run_out()
    assert len(h.stream("g", 1).tokens) == seen and h.stream("g", 1).reason is None
    assert h.stream("g", 0).tokens == h.stream("g", 2).tokens == expected_tokens([1, 2, 3], 10)


def test_only_the_client_that_sent_a_request_can_cancel_it():
    h = Harness()
    h.connect("b")
    h.add("r", [1, 2, 3], max_tokens=10)
    h.send(m.CancelRequest("r"), "b")
    h.send(m.CancelRequest("nobody"))
    h.run_out()
    assert h.stream("r").reason == "length"


def test_a_request_id_can_be_used_again_only_after_its_request_has_ended():
    h = Harness()
    h.add("r", [1, 2, 3], max_tokens=4)
    h.add("r", [9], max_tokens=4)
    h.run_rounds()
    assert h.rejected("r").code == "duplicate_request_id"
    h.run_out()
    h.transport.sent["a"].clear()
    h.add("r", [9], max_tokens=4)
    h.run_out()
    assert h.stream("r").tokens == expected_tokens([9], 4)


def test_the_id_of_a_group_and_the_id_of_a_request_must_differ():
    h = Harness()
    for name, group in (("g-0", "g"), ("g-1", "g"), ("g", ""), ("s", ""), ("s-0", "s")):
        h.add(name, [1, 2], group=group)
    h.run_rounds()
    assert [n for n in ("g-0", "g-1", "g", "s", "s-0") if h.rejected(n)] == ["g", "s-0"]


@pytest.mark.parametrize(("field", "prompt", "n"), [("prompt", [], 1), ("prompt", [1] * 128, 1), ("prompt", [-1], 1),
                                                    ("prompt", [1000], 1), ("n", [1], 0)])  # fmt: skip
def test_a_request_that_cannot_be_served_is_refused_and_the_field_is_named(field, prompt, n):
    h = Harness()
    h.add("r", prompt, n=n)
    h.run_rounds()
    assert h.rejected("r").detail["param"] == field


def test_a_prompt_that_is_too_long_is_refused_in_the_words_that_clients_look_for():
    h = Harness()
    h.add("r", [1] * 128)
    h.run_rounds()
    assert h.rejected("r").code == "context_length_exceeded"
    assert h.rejected("r").message.startswith("This model's maximum context length is 128 tokens.")


def test_a_cached_prompt_that_fills_the_whole_pool_is_served():
    """A copy on write would need one block more than the pool has."""
    h = Harness(FakeRunner(num_blocks=8, block_size=4, max_model_len=32))
    for name in ("first", "again"):
        h.add(name, [5] * 31, max_tokens=1)
        h.run_out(limit=20)
        assert h.stream(name).tokens == expected_tokens([5] * 31, 1)


def test_a_failing_step_answers_every_request_and_call_and_ends_the_loop():
    h = Harness()
    h.connect("b")
    h.transport.mute.add("b")
    h.add("a1", [1, 2], max_tokens=50)
    h.add("b1", [3, 4], client="b", n=2, max_tokens=50)
    h.run_rounds(3)
    h.runner.may_stage.clear()
    calls = [h.call(m.UpdateWeightsArgs(FolderSource("/w1"))), h.call(m.PauseArgs(mode="wait"), "b")]
    h.run_rounds()
    h.runner.fail_next = True
    with pytest.raises(EngineError, match="the worker died"):
        h.engine.run()
    h.runner.may_stage.set()
    assert [h.stream("a1").reason, h.stream("b1", 0, "b").reason, h.stream("b1", 1, "b").reason] == ["error"] * 3
    assert h.reply(calls[0]).failure.code == h.reply(calls[1], "b").failure.code == "engine_error"


def test_a_commit_that_fails_answers_its_caller():
    h = Harness()
    h.runner.commit = None
    call = h.call(m.UpdateWeightsArgs(FolderSource("/w1")))
    h.run_rounds()
    with pytest.raises(EngineError):
        h.engine.run()
    assert h.reply(call).failure.code == "engine_error"


def test_the_standby_copy_of_the_weights_is_made_when_the_loop_starts():
    h = Harness()
    h.run_rounds()
    assert h.runner.refreshes == 0
    h.engine.stop()
    h.engine.run()
    h.join_staging()
    assert h.runner.refreshes == 1


def test_stop_ends_the_loop_and_answers_open_requests_and_calls():
    h = one_running(50, [1, 2], rounds=2)
    call = h.call(m.PauseArgs(mode="wait"))
    h.run_rounds()
    h.engine.stop()
    h.engine.run()
    assert h.stream("r").reason == "abort" and h.reply(call).failure.code == "engine_dead"


def test_a_heartbeat_finds_a_dead_client_and_its_requests_end():
    h = Harness(heartbeat_s=1.0)
    h.connect("b")
    h.add("r", [1, 2], client="b", max_tokens=50)
    h.run_rounds(2)
    h.pause(mode="keep")
    h.transport.gone.add("b")
    h.run_rounds(3)
    assert h.engine.lifecycle.requests.get("r")
    h.now += 1.1
    h.run_rounds(2)
    assert not h.engine.lifecycle.requests.get("r") and h.engine.kv.num_free == h.runner.info.num_blocks


def test_metrics_count_requests_that_run_wait_and_have_ended():
    h = Harness()
    for i in range(6):
        h.add(f"r{i}", [i + 1] * 5)
    h.run_rounds(2)
    assert (h.metric("num_requests_running"), h.metric("num_requests_waiting")) == (4, 2)
    h.run_out()
    assert (h.metric("num_requests_running"), h.metric("num_requests_waiting")) == (0, 0)
    assert h.metric("available_gpu_block_num") == h.runner.info.num_blocks
    assert h.metric('request_finished_total{reason="length"}') == 6 and h.metric("generation_tokens_total") == 48


@pytest.mark.parametrize(
    ("field", "sampling"),
    [("top_k", {"top_k": 2**31}), ("temperature", {"temperature": float("nan")}), ("max_tokens", {"max_tokens": 0}),
     ("stop_token_ids", {"stop_token_ids": (1000,)}),
     ("stop_token_ids", {"stop_token_ids": (2**40,), "min_tokens": 2})],
)  # fmt: skip
def test_the_engine_refuses_sampling_fields_that_a_step_could_not_compute(field, sampling):
    """A step that fails would end the requests of all clients."""
    h = Harness()
    h.add("bad", PROMPT, **sampling)
    h.run_rounds()
    failure = h.rejected("bad")
    assert failure.code == "invalid_field" and failure.detail["param"] == field


def go_idle(h: Harness) -> None:
    """Run one request to its end, and one round more, without the checks of Harness.run_rounds."""
    h.add("r", [1, 2, 3], max_tokens=3)
    h.engine.run_once(block=False)
    while len(h.engine.lifecycle.requests):
        h.engine.run_once(block=True)
    h.engine.run_once(block=True)


@pytest.mark.parametrize("asked", ["", "1"])
def test_an_engine_that_becomes_idle_checks_every_block_only_if_told_to(asked, monkeypatch):
    monkeypatch.setenv("FASTDEPLOY_CHECK_INTEGRITY", asked)
    h = Harness(FakeRunner(num_blocks=1000))
    looked_at: list[int] = []
    is_free = h.engine.kv.pool.is_free
    monkeypatch.setattr(h.engine.kv.pool, "is_free", lambda block: looked_at.append(block) or is_free(block))
    go_idle(h)
    assert len(looked_at) == (1000 if asked else 0)


def test_an_engine_that_becomes_idle_finds_a_leaked_block():
    h = Harness()
    h.engine.kv.pool.allocate(1)
    with pytest.raises(AssertionError):
        go_idle(h)


def prompts_in_memory(h: Harness) -> int:
    """Count the lists of tokens that the engine's requests hold."""
    return len({id(request.token_ids) for request in h.engine.lifecycle.requests})


def test_waiting_choices_share_one_copy_of_their_prompt():
    h = Harness(FakeRunner(num_blocks=16, block_size=4, max_model_len=32))
    prompt = list(range(1, 13))
    h.add("r", prompt, n=200, max_tokens=8)
    expected = expected_tokens(prompt, 8)
    h.run_rounds()
    while len(h.engine.lifecycle.requests):
        started = sum(r.state == "waiting" and r.num_output_tokens > 0 for r in h.engine.lifecycle.requests)
        assert prompts_in_memory(h) <= 1 + h.engine.scheduler.max_num_seqs + started
        h.run_rounds()
    assert all(h.stream("r", choice).tokens == expected for choice in range(200))


def test_choices_share_their_prompt_again_after_a_drain_puts_it_back_in_the_queue():
    h = Harness()
    h.add("r", list(range(1, 101)), n=4, max_tokens=4)
    h.run_rounds()  # the prompt is half computed
    assert prompts_in_memory(h) == 2
    h.pause(mode="wait")
    assert prompts_in_memory(h) == 1
    h.resume()
    h.run_out()
    assert h.stream("r", 3).tokens == expected_tokens(list(range(1, 101)), 4)


# --------------------------------------------------------------------------- an exception in the handling of a message


def broken(*_: object) -> None:
    raise RuntimeError("a mistake of a handler")


def test_an_exception_while_a_call_is_handled_fails_that_call_alone(monkeypatch):
    h = one_running()
    monkeypatch.setattr(h.engine.lifecycle.requests, "known_as", broken)
    failure = h.ask(m.AbortArgs(["r"])).failure
    assert failure.code == "internal_error" and "a mistake of a handler" in failure.message
    monkeypatch.undo()
    assert h.metric("internal_errors_total") == 1
    h.run_out()
    assert h.stream("r").tokens == expected_tokens([1, 2, 3], 20)


def test_an_exception_at_admission_refuses_the_request_and_leaves_nothing_of_it(monkeypatch):
    h = Harness()
    h.add("other", [9], max_tokens=4)
    h.add("r", [1, 2, 3], n=3, max_tokens=4)
    monkeypatch.setattr("fastdeploy.engine.admission.check_retainable", broken)
    h.run_rounds()
    assert h.rejected("r").code == h.rejected("other").code == "internal_error" and not len(h.engine.lifecycle.requests)
    monkeypatch.undo()
    h.add("r", [1, 2, 3], max_tokens=4)
    h.run_out()
    assert h.stream("r").tokens == expected_tokens([1, 2, 3], 4), "the id is free again"


def test_a_wake_up_that_raises_is_answered_and_may_be_repeated(monkeypatch):
    h = Harness()
    assert h.ask(m.SleepArgs(), rounds=5).failure is None
    monkeypatch.setattr(h.runner, "wake", broken)
    assert h.ask(m.WakeArgs(), rounds=3).failure.code == "engine_error"
    monkeypatch.undo()
    assert h.ask(m.WakeArgs(), rounds=3).result["asleep"] == []


def test_a_pause_that_raises_after_it_placed_its_hold_is_answered_once(monkeypatch):
    h = Harness()
    monkeypatch.setattr(h.engine.lifecycle, "abort_all", broken)
    call = h.call(m.PauseArgs(mode="abort"))  # places its hold, then raises
    h.run_rounds(5)
    assert h.reply(call).failure.code == "internal_error"


def test_a_malformed_message_is_answered():
    h = Harness()
    h.send(m.Malformed("timeout_s: expected a number", call_id=99))
    h.send(m.Malformed("prompt_token_ids: expected integers", request_id="r"))
    h.run_rounds()
    assert "timeout_s" in h.reply(99).failure.message and "prompt_token_ids" in h.rejected("r").message
    assert h.rejected("r").code == "invalid_request_error"


def test_an_exception_that_leaks_a_block_ends_the_engine(monkeypatch):
    h = Harness()

    def lose_a_block(*_: object) -> None:
        h.engine.kv.pool.allocate(1)
        raise RuntimeError("half-done")

    monkeypatch.setattr(h.engine.lifecycle.requests, "known_as", lose_a_block)
    call = h.call(m.AbortArgs(["r"]))
    with pytest.raises(EngineError):
        h.engine.run()
    assert h.reply(call).failure.code == "internal_error"


# --------------------------------------------------------------------------- heartbeats during long work


def beats(h: Harness) -> int:
    return len(h.sent(m.Heartbeat))


def test_a_long_step_sends_heartbeats_between_its_layers():
    h = one_running(50, heartbeat_s=1.0)
    counts: list[int] = []

    def long_layer() -> None:
        counts.append(beats(h))
        h.now += 1.1

    h.runner.in_step = long_layer
    h.run_rounds()
    assert beats(h) == counts[0] + 1


def test_a_client_found_dead_within_a_step_is_dropped_after_the_step():
    h = Harness(heartbeat_s=1.0)
    h.connect("b")
    h.add("a1", [1, 2], max_tokens=50)
    h.add("b1", [3, 4], client="b", max_tokens=50)
    h.run_rounds(3)
    seen: list[str] = []
    layers = h.engine._between_layers

    def in_step() -> None:
        h.transport.gone.add("b")
        h.now += 1.1
        layers()
        seen.extend(r.state for r in h.engine.lifecycle.requests)

    h.runner.in_step = in_step
    h.run_rounds()
    assert seen == ["running"] * 2, "requests must not change within a step"
    h.run_rounds()
    assert not h.engine.lifecycle.requests.get("b1") and h.engine.lifecycle.requests.get("a1")
