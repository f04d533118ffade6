"""Logits that are not finite end one sequence with an error, and leave the others of the batch as they are."""

from __future__ import annotations

import logging

import pytest

from fastdeploy.core.errors import NonFiniteLogits
from support.fake_runner import FakeRunner, expected_tokens
from support.harness import Harness


def poisoned(*tokens: int) -> Harness:
    """Return a harness whose logits behind each of ``tokens`` are not finite."""
    runner = FakeRunner()
    runner.poison = set(tokens)
    return Harness(runner)


def test_the_sequence_ends_with_an_error_and_its_tokens_and_the_others_go_on():
    prompt = [5, 6, 7]
    path = expected_tokens(prompt, 8)
    h = poisoned(path[3])
    h.add("bad", prompt, logprobs=0)
    h.add("good", [1, 2, 3])
    h.run_out()
    bad, good = h.stream("bad"), h.stream("good")
    assert bad.tokens == path[:4] and len(bad.logprobs) == 4 and [s.end for s in bad.spans] == [1, 2, 3, 4]
    final = bad.finals[0]
    assert (final.finish_reason, final.stop_reason) == ("error", NonFiniteLogits.code)
    assert "position 7 " in final.message and "not finite" in final.message and "weights '0'" in final.message
    assert good.tokens == expected_tokens([1, 2, 3], 8) and good.reason == "length"
    assert h.metric("non_finite_rows_total") == 1 and h.metric("non_finite_commits_total") == 0
    assert h.engine.kv.num_free == h.engine.info.num_blocks


def test_each_choice_of_a_poisoned_prompt_ends_with_an_error_and_no_token():
    h = poisoned(9)
    h.add("bad", [5, 6, 9], n=3)
    h.add("same prefix", [5, 6, 8])
    h.run_out()
    for choice in range(3):
        stream = h.stream("bad", choice)
        assert stream.tokens == [] and stream.reason == "error" and len(stream.finals) == 1
    assert h.stream("same prefix").tokens == expected_tokens([5, 6, 8], 8)


@pytest.mark.parametrize("budget", [3, 64])
def test_a_prompt_logprob_that_is_not_finite_ends_the_choice_that_asks_for_it(budget):
    h = Harness(max_num_batched_tokens=budget)
    h.runner.poison = {6}
    h.add("bad", list(range(1, 12)), prompt_logprobs=0)
    h.add("good", [40, 41], prompt_logprobs=0)
    h.run_out()
    bad = h.stream("bad")
    assert bad.tokens == [] and bad.reason == "error" and "position 6 " in bad.finals[0].message
    assert len(bad.finals[0].prompt_logprobs) == (3 if budget == 3 else 0), "the known prompt logprobs are sent"
    assert h.stream("good").tokens == expected_tokens([40, 41], 8)


def test_a_commit_whose_first_step_is_not_finite_is_counted_and_logged_once(caplog):
    h = Harness()
    h.runner.bad_weights = {2}
    h.add("before", [1, 2], max_tokens=40)
    h.run_rounds(3)
    with caplog.at_level(logging.WARNING, "fastdeploy.engine"):
        assert h.update("/w1").failure is None
        h.run_rounds(2)
        assert caplog.messages == [] and h.metric("non_finite_commits_total") == 0
        assert h.update("/w2", version="step-7").failure is None
        for i in range(3):
            h.add(f"r{i}", [3, i])
        h.run_out()
        assert h.stream("before").reason == "error" and h.stream("before").tokens
        assert [h.stream(f"r{i}").reason for i in range(3)] == ["error"] * 3
        assert len(caplog.messages) == 1 and "'step-7'" in caplog.messages[0]
        assert h.metric("non_finite_commits_total") == 1 and h.metric("non_finite_rows_total") == 4
        assert h.update("/w3").failure is None
        h.add("after", [1, 2])
        h.run_out()
    assert h.stream("after").tokens == expected_tokens([1, 2], 8, weights=3)
    assert h.metric("non_finite_commits_total") == 1 and len(caplog.messages) == 1


def test_a_retained_result_with_an_error_is_replayed():
    h = poisoned(9)
    h.connect("b")
    for client in "ab":
        h.add("r", [5, 9], client, retain_s=60, fingerprint="f")
        h.run_rounds(4)
        assert h.stream("r", client=client).finals[0].stop_reason == NonFiniteLogits.code
