"""The loop on a fake runner: what a request gets, whatever happens around it."""

from __future__ import annotations

import pytest

from fastdeploy.core.errors import EngineError
from fastdeploy.core.request import TRANSITIONS, Group, Request, RequestEvent, RequestState
from fastdeploy.core.request_fields import AddRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.core.scope import WHOLE_ENGINE, Scope
from fastdeploy.core.weight_source import FolderSource
from fastdeploy.inter_communicator import messages as m
from support.fake_runner import FakeRunner, expected_tokens
from support.harness import Harness, one_running


def test_a_request_gets_the_tokens_of_the_model_and_one_final_output():
    h = Harness()
    h.add("r", [5, 6, 7], max_tokens=10)
    h.run_out()
    stream = h.stream("r")
    assert stream.tokens == expected_tokens([5, 6, 7], 10)
    assert stream.reason == "length" and len(stream.finals) == 1
    assert [(s.start, s.end) for s in stream.spans] == [(i, i + 1) for i in range(10)]


def test_more_requests_than_places_all_complete_in_arrival_order():
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
    for i in range(4):
        stream = h.stream(f"r{i}")
        assert stream.tokens == expected_tokens([i + 1] * 10, 60)
        assert len(stream.finals) == 1


def test_abort_pause_returns_partials_of_running_and_nothing_of_waiting():
    h = Harness()
    for i in range(10):
        h.add(f"r{i}", [i + 1] * 3, max_tokens=100)
    h.run_rounds(6)
    before = h.runner.computed_tokens
    reply = h.pause(mode="abort")
    assert reply.failure is None and reply.result["is_paused"]
    assert h.runner.computed_tokens == before, "a pause must not compute anything for those it ends"
    counts = [len(h.stream(f"r{i}").tokens) for i in range(10)]
    assert all(c > 0 for c in counts[:4]) and counts[4:] == [0] * 6
    assert all(h.stream(f"r{i}").reason == "abort" for i in range(10))
    assert reply.result["counts"]["aborted"] == 10 and reply.result["tokens_returned"] == sum(counts)
    h.add("late", [1, 2])
    h.run_rounds()
    assert h.rejected("late").code == "rejecting_new_requests"
    h.resume()
    h.add("after", [1, 2], max_tokens=4)
    h.run_out()
    assert h.stream("after").tokens == expected_tokens([1, 2], 4)


def test_keep_freezes_and_goes_on_with_the_same_tokens():
    h = one_running(rounds=5)
    h.pause(mode="keep")
    seen = len(h.stream("r").tokens)
    h.run_rounds(5)
    assert len(h.stream("r").tokens) == seen
    h.resume()
    h.run_out()
    assert h.stream("r").tokens == expected_tokens([1, 2, 3], 20)


def test_wait_ends_what_has_started_and_keeps_the_rest_queued():
    h = Harness()
    for i in range(6):
        h.add(f"r{i}", [i + 1] * 3, max_tokens=12)
    h.run_rounds(3)
    reply = h.pause(mode="wait")
    assert reply.result["counts"] == {"aborted": 0, "drained": 4, "kept": 0, "queued": 2}
    assert [h.stream(f"r{i}").reason for i in range(6)] == ["length"] * 4 + [None] * 2
    h.resume()
    h.run_out()
    assert h.stream("r5").tokens == expected_tokens([6] * 3, 12)


def test_an_update_between_two_steps_changes_the_label_at_exactly_one_token():
    h = one_running(rounds=5)
    before = len(h.stream("r").tokens)
    reply = h.update("/w7", version="v7")
    assert reply.failure is None and reply.result["version"] == "v7" and reply.result["weight_epoch"] == 1
    h.run_out()
    stream = h.stream("r")
    old = [s for s in stream.spans if s.weight_epoch == 0]
    assert before < len(old) < 20 and [s.version for s in stream.spans] == ["0"] * len(old) + ["v7"] * (20 - len(old))
    assert stream.tokens[: len(old)] == expected_tokens([1, 2, 3], len(old))
    assert stream.tokens[len(old) :] == expected_tokens([1, 2, 3, *stream.tokens[: len(old)]], 20 - len(old), weights=7)


def test_logprobs_are_aligned_when_asked_for_and_absent_when_not():
    h = Harness()
    h.add("with", [1, 2], max_tokens=5, logprobs=0)
    h.add("without", [1, 2], max_tokens=5)
    h.run_out()
    assert [x.logprob for x in h.stream("with").logprobs] == [-float(t) for t in h.stream("with").tokens]
    assert h.stream("without").logprobs == []


def test_requests_without_a_seed_get_one_each_that_their_choices_share():
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


def test_abort_takes_the_id_that_the_client_knows_though_its_prompts_became_several_requests():
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


def test_abort_of_nothing_in_particular_is_an_error_that_names_the_field():
    assert Harness().ask(m.AbortArgs()).failure.detail["param"] == "req_ids"


def test_a_cancelled_choice_is_silent_and_its_siblings_go_on():
    h = Harness()
    h.add("g", [1, 2, 3], n=3, max_tokens=10)
    h.run_rounds(3)
    seen = len(h.stream("g", 1).tokens)
    h.send(m.CancelRequest("g", 1, "stop"))
    h.run_out()
    assert len(h.stream("g", 1).tokens) == seen and h.stream("g", 1).reason is None
    assert h.stream("g", 0).tokens == h.stream("g", 2).tokens == expected_tokens([1, 2, 3], 10)


def test_a_stranger_cannot_cancel_a_request_and_an_unknown_id_is_ignored():
    h = Harness()
    h.connect("b")
    h.add("r", [1, 2, 3], max_tokens=10)
    h.send(m.CancelRequest("r"), "b")
    h.send(m.CancelRequest("nobody"))
    h.run_out()
    assert h.stream("r").reason == "length"


def test_a_request_id_that_is_alive_is_refused_and_may_be_used_again_afterwards():
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


def test_an_id_that_a_group_is_known_by_is_taken_too():
    h = Harness()
    for name, group in (("g-0", "g"), ("g-1", "g"), ("g", ""), ("s", ""), ("s-0", "s")):
        h.add(name, [1, 2], group=group)
    h.run_rounds()
    assert [n for n in ("g-0", "g-1", "g", "s", "s-0") if h.rejected(n)] == ["g", "s-0"]


@pytest.mark.parametrize(("field", "prompt", "n"), [("prompt", [], 1), ("prompt", [1] * 128, 1), ("prompt", [-1], 1),
                                                    ("prompt", [1000], 1), ("n", [1], 0)])  # fmt: skip
def test_a_request_that_cannot_be_served_is_refused_with_the_field(field, prompt, n):
    h = Harness()
    h.add("r", prompt, n=n)
    h.run_rounds()
    assert h.rejected("r").detail["param"] == field


def test_a_request_that_fills_the_whole_pool_is_served_though_its_prompt_is_cached():
    """With a block to copy from it would need one block more than there are."""
    h = Harness(FakeRunner(num_blocks=8, block_size=4, max_model_len=32))
    for name in ("first", "again"):
        h.add(name, [5] * 31, max_tokens=1)
        h.run_out(limit=20)
        assert h.stream(name).tokens == expected_tokens([5] * 31, 1)


def test_a_failing_step_answers_everything_once_and_ends_the_loop():
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


def test_a_commit_that_fails_answers_its_caller_too():
    h = Harness()
    h.runner.commit = None
    call = h.call(m.UpdateWeightsArgs(FolderSource("/w1")))
    h.run_rounds()
    with pytest.raises(EngineError):
        h.engine.run()
    assert h.reply(call).failure.code == "engine_error"


def test_stop_ends_the_loop_and_answers_what_is_open():
    h = one_running(50, [1, 2], rounds=2)
    call = h.call(m.PauseArgs(mode="wait"))
    h.run_rounds()
    h.engine.stop()
    h.engine.run()
    assert h.stream("r").reason == "abort" and h.reply(call).failure.code == "engine_dead"


def test_a_dead_client_is_found_by_the_heartbeat_and_its_requests_are_reaped():
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


def test_metrics_are_at_zero_when_everything_has_ended():
    h = Harness()
    for i in range(6):
        h.add(f"r{i}", [i + 1] * 5)
    h.run_rounds(2)
    text = h.ask(m.MetricsArgs()).result["text"]
    assert "fastdeploy:num_requests_running 4.0" in text and "fastdeploy:num_requests_waiting 2.0" in text
    h.run_out()
    text = h.ask(m.MetricsArgs()).result["text"]
    assert "fastdeploy:num_requests_running 0.0" in text and "fastdeploy:num_requests_waiting 0.0" in text
    assert f"fastdeploy:available_gpu_block_num {h.runner.info.num_blocks}.0" in text
    assert 'fastdeploy:request_finished_total{reason="length"} 6.0' in text
    assert "fastdeploy:generation_tokens_total 48.0" in text


@pytest.mark.parametrize("state", list(RequestState))
@pytest.mark.parametrize("event", list(RequestEvent))
def test_an_event_of_a_request_that_is_not_in_the_table_raises(state, event):
    request = Request(Group("a", AddRequest("r", [1], SamplingParams()), Scope(WHOLE_ENGINE)), 0, (0, 1), 1)
    request.state = state
    if (state, event) in TRANSITIONS:
        request.advance(event)
        assert request.state is TRANSITIONS[state, event]
    else:
        with pytest.raises(KeyError):
            request.advance(event)
    assert len(TRANSITIONS) == 5


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"top_k": 2**31}, "top_k"),
        ({"temperature": float("nan")}, "temperature"),
        ({"stop_token_ids": (1000,)}, "stop_token_ids"),
        ({"stop_token_ids": (2**40,), "min_tokens": 2}, "stop_token_ids"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_a_row_that_a_step_could_not_compute_is_refused_at_the_engines_door(sampling, field):
    """Whatever an API server lets through: a step that fails is the end of everybody's requests."""
    h = Harness()
    h.add("bad", [1, 2, 3], **sampling)
    h.run_rounds()
    failure = h.rejected("bad")
    assert failure.code == "invalid_field" and failure.detail["param"] == field


def go_idle(h: Harness) -> None:
    """Run one request to its end with the engine's own rounds, up to the one that finds nothing left to do."""
    h.add("r", [1, 2, 3], max_tokens=3)
    h.engine.run_once(block=False)
    while len(h.engine.lifecycle.requests):
        h.engine.run_once(block=True)
    h.engine.run_once(block=True)


@pytest.mark.parametrize("asked", ["", "1"])
def test_becoming_idle_does_not_walk_over_the_kv_cache_unless_asked_to(asked, monkeypatch):
    monkeypatch.setenv("FASTDEPLOY_CHECK_INTEGRITY", asked)
    h = Harness(FakeRunner(num_blocks=1000))
    looked_at: list[int] = []
    is_free = h.engine.kv.pool.is_free
    monkeypatch.setattr(h.engine.kv.pool, "is_free", lambda block: looked_at.append(block) or is_free(block))
    go_idle(h)
    assert len(looked_at) == (1000 if asked else 0)


def test_a_block_that_leaked_is_found_when_the_engine_becomes_idle():
    h = Harness()
    h.engine.kv.pool.allocate(1)
    with pytest.raises(AssertionError):
        go_idle(h)


def prompts_in_memory(h: Harness) -> int:
    """Lists of tokens that the requests of the engine hold."""
    return len({id(request.token_ids) for request in h.engine.lifecycle.requests})


def test_the_choices_that_wait_share_one_copy_of_their_prompt():
    h = Harness(FakeRunner(num_blocks=16, block_size=4, max_model_len=32))
    prompt = list(range(1, 13))
    h.add("r", prompt, n=200, max_tokens=8)
    expected = expected_tokens(prompt, 8)
    while True:
        h.run_rounds()
        if not len(h.engine.lifecycle.requests):
            break
        started = sum(r.state == "waiting" and r.num_output_tokens > 0 for r in h.engine.lifecycle.requests)
        assert prompts_in_memory(h) <= 1 + h.engine.scheduler.max_num_seqs + started
    assert all(h.stream("r", choice).tokens == expected for choice in range(200))


def test_a_prompt_that_is_retracted_before_its_first_token_is_shared_again():
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
    raise RuntimeError("a handler's own mistake")


def test_an_exception_in_the_handling_of_a_call_fails_that_call_and_the_engine_goes_on(monkeypatch):
    h = one_running()
    monkeypatch.setattr(h.engine.lifecycle.requests, "known_as", broken)
    failure = h.ask(m.AbortArgs(["r"])).failure
    assert failure.code == "internal_error" and "a handler's own mistake" in failure.message
    monkeypatch.undo()
    assert "fastdeploy:internal_errors_total 1.0" in h.ask(m.MetricsArgs()).result["text"]
    h.run_out()
    assert h.stream("r").tokens == expected_tokens([1, 2, 3], 20)


def test_an_exception_at_the_door_refuses_that_request_and_nothing_of_it_is_left(monkeypatch):
    h = Harness()
    h.add("other", [9], max_tokens=4)
    h.add("r", [1, 2, 3], n=3, max_tokens=4)
    monkeypatch.setattr("fastdeploy.engine.admission.check_retainable", broken)
    h.run_rounds()
    assert h.rejected("r").code == h.rejected("other").code == "internal_error" and not len(h.engine.lifecycle.requests)
    monkeypatch.undo()
    h.add("r", [1, 2, 3], max_tokens=4)
    h.run_out()
    assert h.stream("r").tokens == expected_tokens([1, 2, 3], 4), "its id is free again"


def test_a_wake_up_that_fails_unexpectedly_is_answered_and_may_be_tried_again(monkeypatch):
    h = Harness()
    assert h.ask(m.SleepArgs(), rounds=5).failure is None
    monkeypatch.setattr(h.runner, "wake", broken)
    assert h.ask(m.WakeArgs()).failure.code == "internal_error"
    monkeypatch.undo()
    assert h.ask(m.WakeArgs()).result["asleep"] == []


def test_a_call_whose_handler_failed_half_way_is_answered_once(monkeypatch):
    h = Harness()
    monkeypatch.setattr(h.engine.lifecycle, "abort_all", broken)
    call = h.call(m.PauseArgs(mode="abort"))  # its hold stands by the time it fails
    h.run_rounds(5)
    assert h.reply(call).failure.code == "internal_error"


def test_a_message_that_cannot_be_read_is_answered_to_whoever_waits():
    h = Harness()
    h.send(m.Malformed("timeout_s: expected a number", call_id=99))
    h.send(m.Malformed("prompt_token_ids: expected integers", request_id="r"))
    h.run_rounds()
    assert "timeout_s" in h.reply(99).failure.message and "prompt_token_ids" in h.rejected("r").message
    assert h.rejected("r").code == "invalid_request_error"


def test_an_exception_that_leaves_the_state_broken_ends_the_engine(monkeypatch):
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


def beats(h: Harness, client: str = "a") -> int:
    return len(h.sent(m.Heartbeat, client))


def test_a_long_step_beats_between_its_layers():
    h = one_running(50, heartbeat_s=1.0)
    counts: list[int] = []

    def long_layer() -> None:
        counts.append(beats(h))
        h.now += 1.1

    h.runner.in_step = long_layer
    h.run_rounds()
    assert beats(h) == counts[0] + 1


def test_a_client_that_a_beat_within_a_step_does_not_reach_is_reaped_after_the_step():
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


@pytest.mark.parametrize("args", [m.SleepArgs(), m.WakeArgs()])
def test_sleeping_and_waking_up_beat_between_their_pieces(args):
    h = Harness(heartbeat_s=1.0)
    if isinstance(args, m.WakeArgs):
        h.ask(m.SleepArgs(), rounds=5)
    counts: list[int] = []

    def ten_pieces(beat) -> None:
        counts.append(beats(h))
        for _ in range(10):
            h.now += 1.1
            beat()
        counts.append(beats(h))

    h.runner.work_in_pieces = ten_pieces
    assert h.ask(args, rounds=5).failure is None
    assert counts[1] == counts[0] + 10
