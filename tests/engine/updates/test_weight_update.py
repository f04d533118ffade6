"""Weight updates in one call: staged while steps run, committed between two steps, or refused."""

from __future__ import annotations

import pytest

from fastdeploy.core.weight_source import FolderSource
from fastdeploy.inter_communicator import messages as m
from support.fake_runner import FakeRunner, expected_tokens, next_token
from support.harness import Harness, one_running


def assert_follows_its_spans(h: Harness, request_id: str, prompt: list[int], weights: dict[int, int]) -> None:
    """Assert that each token was sampled by the weights of its span. weights: by weight_epoch."""
    stream, so_far = h.stream(request_id), list(prompt)
    assert [(s.start, s.end) for s in stream.spans] == [(i, i + 1) for i in range(len(stream.tokens))]
    for token, span in zip(stream.tokens, stream.spans, strict=True):
        assert token == next_token(so_far, weights[span.weight_epoch], h.runner.info.vocab_size), span
        so_far.append(token)


@pytest.mark.parametrize("folder", ["/bad", "/garbage"])
def test_the_old_weights_serve_on_if_a_folder_cannot_be_read(folder):
    h = one_running()
    reply = h.update(folder, version="v1")
    assert reply.failure.code == "weight_update_refused"
    assert (reply.result["version"], reply.result["weight_epoch"]) == ("0", 0)
    h.run_out()
    assert h.stream("r").tokens == expected_tokens([1, 2, 3], 20)
    assert h.update("/w1").failure is None, "the next update is accepted"


@pytest.mark.parametrize("path", ["", "zero\0byte", "/" + "x" * 256, "/" + "x/" * 2500, "\ud800"], ids=ascii)
def test_a_path_that_can_name_no_folder_is_refused_before_anything_is_staged(path):
    h = Harness()
    h.assert_refused(m.UpdateWeightsArgs(FolderSource(path)), "model_path")
    assert not h.runner.stagings
    assert h.update("/w1").failure is None


def test_without_model_roots_no_path_is_allowed():
    Harness(model_roots=()).assert_refused(m.UpdateWeightsArgs(FolderSource("/w1")), "model_path")


def test_kv_must_be_keep_or_recompute():
    assert Harness().update("/w1", kv="drop").failure.detail["param"] == "kv"


def test_steps_go_on_while_an_update_is_staged_and_a_second_update_is_refused():
    h = Harness()
    h.add("r", [1, 2, 3], max_tokens=20)
    h.runner.may_stage.clear()
    first = h.call(m.UpdateWeightsArgs(FolderSource("/w1")))
    h.run_rounds(5)
    assert h.update("/w2").failure.code == "update_in_progress"
    assert h.reply(first) is None and len(h.stream("r").tokens) >= 5 and h.served.weight_epoch == 0
    h.runner.may_stage.set()
    h.run_rounds(2)
    assert h.reply(first).failure is None and h.runner.weights == 1
    h.run_out()
    assert_follows_its_spans(h, "r", [1, 2, 3], {0: 0, 1: 1})


def test_a_version_may_repeat_and_the_weight_epoch_counts_commits():
    h = Harness()
    for folder, version, label in (("/w1", "same", "same"), ("/w2", "same", "same"), ("/w1", None, "3")):
        result = h.update(folder, version=version).result
        assert result["version"] == label
    assert h.served.weight_epoch == 3 and result["previous_version"] == "same" and result["previous_weight_epoch"] == 2


def test_an_update_does_not_resume_and_frozen_requests_go_on_under_the_new_weights():
    h = one_running(rounds=5)
    h.pause(mode="keep")
    result = h.update("/w1", version="v1").result
    assert result["state"] == "paused" and h.status()["is_paused"] and h.status()["version"] == "v1"
    seen = len(h.stream("r").tokens)
    h.resume()
    h.run_out()
    assert_follows_its_spans(h, "r", [1, 2, 3], {0: 0, 1: 1})
    assert [s.weight_epoch for s in h.stream("r").spans] == [0] * seen + [1] * (20 - seen)


def test_the_spans_of_every_choice_have_the_new_label():
    h = Harness()
    h.add("g", [1, 2, 3], n=3, max_tokens=15)
    h.run_rounds(5)
    h.update("/w1", version="v1")
    h.run_out()
    for choice in range(3):
        assert {s.version for s in h.stream("g", choice).spans} == {"0", "v1"}


def test_only_recompute_computes_kv_again():
    """The fake runner refuses KV of the old weights after a commit of "/w1-recompute"."""
    computed = {}
    for kv, folder in (("keep", "/w1"), ("recompute", "/w1-recompute")):
        h = Harness()
        h.add("r", list(range(1, 21)), max_tokens=10)
        h.run_rounds(4)
        h.pause(mode="keep")
        result = h.update(folder, kv=kv).result
        assert result["requests_in_flight"] == 1
        assert result["tokens_to_recompute"] == (0 if kv == "keep" else 20 + 3)
        h.resume()
        h.run_out()
        assert_follows_its_spans(h, "r", list(range(1, 21)), {0: 0, 1: 1})
        assert {s.recomputed for s in h.stream("r").spans if s.weight_epoch == 1} == {kv == "recompute"}
        computed[kv] = h.runner.computed_tokens
        assert h.metric("recomputed_tokens") == result["tokens_to_recompute"]
    assert computed["recompute"] == computed["keep"] + 20 + 3


def test_there_is_no_prefix_hit_on_kv_of_the_old_weights():
    h = Harness()
    prompt = list(range(1, 17))
    h.add("before", prompt, max_tokens=4)
    h.run_out()
    h.update("/w1")
    h.add("after", prompt, max_tokens=4)
    h.run_out()
    assert h.engine.kv.hit_tokens == 0 and h.stream("after").tokens == expected_tokens(prompt, 4, weights=1)
    h.add("again", prompt, max_tokens=4)
    h.run_out()
    assert h.engine.kv.hit_tokens == 15


def test_blocks_whose_context_spans_two_weight_epochs_are_never_shared():
    """Neither blocks from before the commit nor later blocks of the request are shared."""
    h = Harness()
    prompt = list(range(1, 10))
    h.add("r", prompt, max_tokens=30)
    h.run_rounds(4)
    h.update("/w1")
    h.run_rounds(12)
    known = prompt + h.stream("r").tokens
    h.add("curious", known, max_tokens=2)
    h.run_rounds(2)
    assert h.engine.kv.hit_tokens == 0
    h.run_out()
    assert h.stream("curious").tokens == expected_tokens(known, 2, weights=1)


def test_blocks_of_a_prompt_that_is_half_computed_at_the_commit_are_not_shared():
    h = Harness(max_num_batched_tokens=8)
    prompt = list(range(1, 30))
    h.add("first", prompt, max_tokens=3)
    h.run_rounds(2)
    h.update("/w1")
    h.add("second", prompt, max_tokens=3)
    h.run_out()
    assert h.engine.kv.hit_tokens == 0
    assert h.stream("second").tokens == expected_tokens(prompt, 3, weights=1)


def test_a_request_whose_kv_spans_two_weight_epochs_is_preempted_last():
    h = Harness(FakeRunner(num_blocks=20, max_model_len=64))
    h.add("kept", [1, 2, 3], max_tokens=40, priority=5)
    h.run_rounds(4)
    h.update("/w1")
    for i in range(3):
        h.add(f"new{i}", [i + 4] * 8, max_tokens=30)
    h.run_out()
    assert h.engine.scheduler.num_preemptions > 0
    assert h.stream("kept").finals[0].num_preempted == 0, "not preempted, despite the lowest priority"
    assert not any(s.recomputed for s in h.stream("kept").spans)
    for i in range(3):
        assert h.stream(f"new{i}").tokens == expected_tokens([i + 4] * 8, 30, weights=1)
        assert not any(s.recomputed for s in h.stream(f"new{i}").spans), "no KV of an earlier weight_epoch was lost"


def test_the_spans_of_a_request_preempted_after_a_commit_say_recomputed():
    h = Harness(FakeRunner(num_blocks=20, max_model_len=64))
    for i in range(4):
        h.add(f"r{i}", [i + 4] * 8, max_tokens=30)
    h.run_rounds(3)
    h.update("/w1")
    h.run_out()
    streams = {i: h.stream(f"r{i}") for i in range(4)}
    assert streams[3].finals[0].num_preempted > 0 and streams[0].finals[0].num_preempted == 0
    for i, stream in streams.items():
        assert_follows_its_spans(h, f"r{i}", [i + 4] * 8, {0: 0, 1: 1})
        flags = [s.recomputed for s in stream.spans]
        assert flags == sorted(flags) and flags[-1] == (stream.finals[0].num_preempted > 0)
        assert not any(s.recomputed for s in stream.spans if s.weight_epoch == 0)


def test_spans_say_recomputed_if_kv_was_lost_before_the_commit_and_rebuilt_after_it():
    h = one_running(12, rounds=4)
    h.pause(mode="keep", clear_cache=True)
    h.update("/w1")
    h.resume()
    h.run_out()
    assert [s.recomputed for s in h.stream("r").spans] == [s.weight_epoch == 1 for s in h.stream("r").spans]


def test_an_engine_that_lost_a_commit_is_held_until_the_next_commit():
    commits = []
    h = Harness(lost_commit=True)
    h.engine._switch._on_commit = commits.append
    h.add("r", [1, 2], max_tokens=3)
    h.run_rounds(3)
    assert h.status()["is_paused"] and h.status()["holds"][0]["id"] == "republish"
    h.resume()
    h.run_rounds(3)
    assert h.stream("r").tokens == [], "no token of the old weights"
    h.update("/w1")
    h.run_out()
    assert h.stream("r").tokens == expected_tokens([1, 2], 3, weights=1) and commits == [False]


def test_a_commit_says_whether_the_next_engine_will_begin_with_the_same_weights_and_version():
    commits = []
    h = Harness(lost_commit=True)
    h.engine._switch._on_commit = commits.append
    for folder, version in (("/w1", "0"), ("/w0", "0"), ("/w0", "1"), ("/w0", "0")):
        h.update(folder, version=version)
        h.run_rounds()
    assert commits == [False, True, False, True]


def test_a_commit_releases_only_the_republish_hold():
    h = Harness(lost_commit=True)
    h.pause(mode="keep", hold_id="mine")
    h.update("/w1")
    assert h.status()["is_paused"] and [hold["id"] for hold in h.status()["holds"]] == ["mine"]


@pytest.mark.parametrize("name", ["republish", "sleep"])
def test_a_hold_of_a_client_cannot_have_the_name_of_a_hold_of_the_system(name):
    h = Harness()
    h.assert_refused(m.PauseArgs("keep", hold_id=name), "hold_id")
    assert not h.status()["rejecting_new_requests"]


def test_an_update_is_committed_even_if_its_caller_dies():
    h = Harness()
    h.connect("b")
    h.call(m.UpdateWeightsArgs(FolderSource("/w1")), "b")
    h.run_rounds()
    h.transport.gone.add("b")
    h.run_rounds(2)
    assert h.served.weight_epoch == 1
    assert h.update("/w2").failure is None


def test_spans_say_recomputed_once_a_prompt_computed_across_a_commit_is_rebuilt():
    """The first token is of the new weight_epoch, but part of the prompt's KV is not until it is rebuilt."""
    h = one_running(12, list(range(1, 11)), rounds=1, max_num_batched_tokens=4)
    h.update("/w1")
    while not h.stream("r").tokens:
        h.run_rounds()
    h.pause(mode="keep", clear_cache=True)
    before = len(h.stream("r").tokens)
    h.resume()
    h.run_out()
    spans = h.stream("r").spans
    assert {s.weight_epoch for s in spans} == {1}
    assert [s.recomputed for s in spans] == [False] * before + [True] * (12 - before)
