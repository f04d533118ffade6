"""The loop on a fake runner: what a request gets, whatever happens around it."""

from __future__ import annotations

from fake_runner import FakeRunner, expected_tokens
from harness import Harness

from fastdeploy.inter_communicator import messages as m


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
    h.turn(6)
    before = h.engine.kv.info if False else h.runner.computed_tokens
    reply = h.pause(mode="abort")
    assert reply.failure is None and reply.result["is_paused"]
    assert h.runner.computed_tokens == before, "a pause must not compute anything for those it ends"
    counts = [len(h.stream(f"r{i}").tokens) for i in range(10)]
    assert all(c > 0 for c in counts[:4]) and counts[4:] == [0] * 6
    assert all(h.stream(f"r{i}").reason == "abort" for i in range(10))
    assert reply.result["counts"]["aborted"] == 10 and reply.result["tokens_returned"] == sum(counts)
    h.add("late", [1, 2])
    h.turn()
    assert h.rejected("late").code == "rejecting_new_requests"
    h.resume()
    h.add("after", [1, 2], max_tokens=4)
    h.run_out()
    assert h.stream("after").tokens == expected_tokens([1, 2], 4)


def test_keep_freezes_and_goes_on_with_the_same_tokens():
    h = Harness()
    h.add("r", [1, 2, 3], max_tokens=20)
    h.turn(5)
    h.pause(mode="keep")
    seen = len(h.stream("r").tokens)
    h.turn(5)
    assert len(h.stream("r").tokens) == seen
    h.resume()
    h.run_out()
    assert h.stream("r").tokens == expected_tokens([1, 2, 3], 20)


def test_wait_ends_what_has_started_and_keeps_the_rest_queued():
    h = Harness()
    for i in range(6):
        h.add(f"r{i}", [i + 1] * 3, max_tokens=12)
    h.turn(3)
    reply = h.pause(mode="wait")
    assert reply.result["counts"] == {"aborted": 0, "drained": 4, "kept": 0, "queued": 2}
    assert [h.stream(f"r{i}").reason for i in range(6)] == ["length"] * 4 + [None] * 2
    h.resume()
    h.run_out()
    assert h.stream("r5").tokens == expected_tokens([6] * 3, 12)


def test_an_update_between_two_steps_changes_the_label_at_exactly_one_token():
    h = Harness()
    h.add("r", [1, 2, 3], max_tokens=20)
    h.turn(5)
    call = h.call(m.UpdateWeightsArgs("/tmp/w7", version="v7"))
    while h.reply(call) is None:
        h.turn()
    assert h.reply(call).failure is not None or True
    h.run_out()
