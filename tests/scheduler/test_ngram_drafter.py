"""Drafts come from text that came before, of requests that may share it, and only as many as pay."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdeploy.core.request import Group, Request, Scope, ServedModel
from fastdeploy.core.request_fields import AddRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.core.served_weights import ServedWeights
from fastdeploy.scheduler import ngram_drafter
from fastdeploy.scheduler.ngram_drafter import INDEXED_PER_STEP, MOST, PIECE, PROBE_STEPS, NgramDrafter
from fastdeploy.scheduler.ngram_index import LENGTHS, SLOTS, NgramIndex, Text
from fastdeploy.scheduler.step_cost import chunk_keys
from support.drafters import free, per_row
from support.fake_runner import FakeRunner, expected_tokens
from support.harness import Harness

MODEL = Scope("engine").model
TEXT = list(range(100, 140))


def request(tokens: list[int], prompt: int = 4, salt: str = "", model: ServedModel = MODEL, left: int = 50) -> Request:
    """Return a request that has these tokens, of which ``prompt`` are its prompt, and may get ``left`` more."""
    sampling = SamplingParams(max_tokens=1000)
    group = Group("a", AddRequest("r", tokens[:prompt], sampling, cache_salt=salt), model)
    made = Request(group, 0, (0.0,), len(tokens) - prompt + left)
    made.token_ids = list(tokens)
    return made


def drafts(drafter: NgramDrafter, of: Request, most: int = 100) -> list[int]:
    return list(drafter.draft([of], 0, most).get(of, []))


def drafter_that_read(*texts: Request, cost=free) -> NgramDrafter:
    drafter = NgramDrafter(cost)
    for text in texts:
        for _ in range(-(-text.num_tokens // INDEXED_PER_STEP)):
            drafter.draft([text], 0, 0)
    return drafter


def test_a_request_is_drafted_from_its_own_text():
    assert drafts(drafter_that_read(), request(TEXT + TEXT[:6])) == TEXT[6 : 6 + MOST]


def test_the_last_continuation_counts():
    text = [1, 2, 3, 4, 5, 9, 9, 1, 2, 3, 7, 8, 9, 9, 1, 2, 3]
    assert drafts(drafter_that_read(), request(text))[:2] == [7, 8]


def test_the_longest_known_context_predicts():
    text = [*range(50, 58), 1, 2, 77, 30, 31, 32, 33, 34, 35, 1, 2, 88, *range(50, 58), 1, 2]
    assert drafts(drafter_that_read(), request(text))[0] == 77


def test_siblings_and_earlier_requests_of_the_model_share_their_text():
    drafter = drafter_that_read(first := request(TEXT))
    assert drafts(drafter, request(TEXT[:10])) == TEXT[10 : 10 + MOST]
    drafter.ended(first)
    assert drafts(drafter, request(TEXT[:12])) == TEXT[12 : 12 + MOST]


@pytest.mark.parametrize("what", ["salt", "model"])
def test_requests_of_another_model_or_cache_salt_share_nothing(what):
    other = request(TEXT[:10], salt="s") if what == "salt" else request(
        TEXT[:10], model=ServedModel(Scope("adapter:a", "", MODEL.scope), ServedWeights(adapter=1)))  # fmt: skip
    assert drafts(drafter_that_read(request(TEXT)), other) == []


def test_the_last_tokens_of_a_request_that_ends_are_known():
    drafter = NgramDrafter(free)
    text = request(TEXT[:20])
    drafter.draft([text], 0, 9)
    text.token_ids += TEXT[20:29]
    drafter.ended(text)
    assert drafts(drafter, request(TEXT[:25])) == TEXT[25:29]


def test_the_end_of_many_requests_at_once_indexes_no_long_text():
    """An abort of all requests must not stop the loop."""
    drafter, one = NgramDrafter(free), request(TEXT[:20])
    drafter.draft([one], 0, 9)
    before = list(drafter._index._slots)
    one.token_ids += range(1000)
    drafter.ended(one)
    assert list(drafter._index._slots) == before


def test_no_draft_is_behind_the_last_token_that_a_request_may_get():
    for left in range(1, 5):
        assert len(drafts(drafter_that_read(), request(TEXT + TEXT[:9], left=left))) == left - 1


def test_all_requests_together_get_at_most_so_many_drafts_as_fit():
    drafter, requests = drafter_that_read(request(TEXT)), [request(TEXT[:n]) for n in (5, 9, 12)]
    for most in range(30):
        assert sum(map(len, drafter.draft(requests, 0, most).values())) <= most


@pytest.mark.parametrize(("cost", "some"), [
    (free, True), (per_row(0.0, 1.0), False), (per_row(1.0, 0.5), True), (per_row(0.01, 1.0), False),
])  # fmt: skip
def test_drafts_are_made_only_if_they_make_the_step_faster(cost, some):
    drafter = drafter_that_read(request(TEXT), cost=cost)
    assert bool(drafts(drafter, request(TEXT[:20]))) == some


def test_before_the_cost_of_a_step_is_known_nothing_is_drafted():
    assert drafts(drafter_that_read(request(TEXT), cost=lambda *_: 0.0), request(TEXT[:20])) == []


def test_a_wide_step_drafts_less_than_a_narrow_one():
    def cost(rows: int, sampled: int, keys: float) -> float:
        return max(1.0, rows / 16)  # bound by memory up to 16 rows

    drafter = drafter_that_read(request(TEXT), cost=cost)
    per_request = []
    for n in (1, 2, 4, 8, 16, 32):
        found = drafter.draft([request(TEXT[:20]) for _ in range(n)], 0, 1000)
        per_request.append(sum(map(len, found.values())) / n)
    assert per_request == sorted(per_request, reverse=True)
    assert per_request[0] > 1 and per_request[-1] == 0


def test_a_draft_reads_no_keys_again_so_it_is_cheaper_than_a_step_of_its_own():
    def cost(rows: int, sampled: int, keys: float) -> float:
        seen.append((rows, keys))
        return max(1.0, keys * 1e-3)

    seen: list[tuple[int, float]] = []
    drafter, one = drafter_that_read(request(TEXT), cost=cost), request(TEXT[:20])
    seen.clear()
    drafter.draft([one], 0, 2)
    alone = chunk_keys(20, 1)
    assert seen[0] == (1, alone) and (3, alone + 2 * 20) in seen


def test_prompts_in_the_step_that_make_it_wide_leave_fewer_drafts():
    def cost(rows: int, sampled: int, keys: float) -> float:
        return max(1.0, rows / 16)

    drafter, one = drafter_that_read(request(TEXT), cost=cost), request(TEXT[:20])
    assert len(drafter.draft([one], 0, 1000)[one]) == MOST
    many = [request(TEXT[:20]) for _ in range(12)]
    assert drafter.draft(many, 0, 1000) and not drafter.draft(many, 500, 1000)


def test_a_request_whose_text_is_never_predicted_gets_no_drafts_in_the_end():
    draw, drafter = random.Random(0), NgramDrafter(per_row(1.0, 0.6))
    known = [draw.randrange(4) for _ in range(64)]
    one, counts = request(known, left=3000), []
    for _ in range(2000):
        counts.append(len(drafter.draft([one], 0, 100).get(one, [])))
        one.token_ids.append(draw.randrange(4))
    assert sum(counts[-500:]) < 0.2 * 500  # a draft is right once in four times, and must be three times in eight


def test_text_that_repeats_itself_is_drafted_more_and_more():
    drafter, one = NgramDrafter(per_row(1.0, 0.1)), request(TEXT, left=1000)
    counts = []
    for i in range(400):
        counts.append(len(drafter.draft([one], 0, 100).get(one, [])))
        one.token_ids.append(TEXT[i % len(TEXT)])
    assert counts[-1] == MOST and sum(counts[-100:]) > sum(counts[:100])


def test_long_prompts_are_indexed_in_parts():
    text = [i * 7919 % 100_003 for i in range(3 * INDEXED_PER_STEP)]
    drafter, one = NgramDrafter(free), request(text, prompt=len(text))
    steps = []
    for _ in range(4):
        drafter.draft([one], 0, 0)
        steps.append(drafter._texts[one].indexed)
    assert steps == [512, 1024, 1536, 1536]


def test_a_long_prompt_does_not_keep_others_from_their_drafts():
    drafter, long = NgramDrafter(free), request(list(range(1000, 9000)), prompt=8000)
    one = request(TEXT, left=1000)
    for i in range(len(TEXT)):
        found = drafter.draft([long, one], 0, 100)
        one.token_ids.append(TEXT[i])
    assert found[one] == (TEXT + TEXT)[len(TEXT) - 1 :][:MOST]
    assert drafter._texts[long].indexed < 8000 or len(TEXT) * INDEXED_PER_STEP >= 8000


def test_output_that_was_not_followed_is_caught_up_with():
    drafter, one = NgramDrafter(free), request(TEXT[:10])
    drafter.draft([one], 0, 0)
    one.token_ids += range(2000, 2000 + 3 * INDEXED_PER_STEP)
    for _ in range(4):
        drafter.draft([one], 0, 0)
    assert drafter._texts[one].indexed == one.num_tokens


def indexed_slots(drafter: NgramDrafter, prompt: list[int]) -> int:
    """Return how many slots the index changes when it gets a new request with this prompt."""
    before, one = list(drafter._index._slots), request(prompt, prompt=len(prompt))
    for _ in range(-(-len(prompt) // INDEXED_PER_STEP)):
        drafter.draft([one], 0, 0)
    drafter.ended(one)
    return sum(a != b for a, b in zip(before, drafter._index._slots, strict=True))


def test_what_prompts_have_in_common_is_indexed_once():
    """The samples of a group, the turns of a conversation, a system prompt before many questions."""
    system, drafter = list(range(3 * PIECE)), NgramDrafter(free)
    assert indexed_slots(drafter, system) > 3 * 3 * PIECE
    assert indexed_slots(drafter, system) == 0
    assert 0 < indexed_slots(drafter, system + TEXT) <= len(LENGTHS) * len(TEXT)


def test_a_prompt_is_indexed_again_when_newer_ones_have_taken_its_place(monkeypatch):
    monkeypatch.setattr(ngram_drafter, "KEPT_PIECES", 4)
    drafter, prompt = NgramDrafter(free), list(range(PIECE))
    assert indexed_slots(drafter, prompt) > 0
    indexed_slots(drafter, list(range(1000, 1000 + 4 * PIECE)))
    drafter._index = NgramIndex()
    assert indexed_slots(drafter, prompt) > 0


def test_steps_that_take_hardly_longer_than_drafting_are_left_alone():
    """The model of the tests: a step takes less than a millisecond. Nothing is indexed either."""
    for seconds, some in ((0.5e-3, False), (0.1, True)):
        drafter = drafter_that_read(request(TEXT), cost=lambda *_, seconds=seconds: seconds)
        assert bool(drafts(drafter, request(TEXT[:20]))) == bool(drafter._texts) == some


def test_a_cost_that_was_learned_in_a_slow_minute_is_tried_again():
    """Only steps with drafts show what they cost."""
    wide = 3.0

    def cost(rows: int, sampled: int, keys: float) -> float:
        return 1.0 if rows <= 2 else max(1.0, wide * rows)

    drafter, counts = drafter_that_read(request(TEXT), cost=cost), []
    for _ in range(3 * PROBE_STEPS):
        found = drafter.draft([request(TEXT[:20]), request(TEXT[:24])], 0, 100)
        counts.append(sum(map(len, found.values())))
    assert 2 <= sum(map(bool, counts)) <= 3 and max(counts) <= 2
    wide = 0.01
    assert len(drafts(drafter, request(TEXT[:20]))) == MOST


def test_nothing_is_kept_of_requests_that_have_ended():
    drafter = NgramDrafter(free)
    for n in range(20):
        one = request([n, *TEXT])
        drafter.draft([one], 0, 9)
        drafter.ended(one)
        drafter.ended(request(TEXT))  # one that was never in the batch
    assert not drafter._texts


@settings(max_examples=30)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=120), st.integers(0, 2**40))
def test_the_index_predicts_the_last_token_after_the_longest_known_context(tokens, root):
    index, text = NgramIndex(), Text(root)
    index.extend(text, tokens, len(tokens), 0)
    predicted, _ = index.predict(text, tokens, 1, 0.0)
    expected = []
    for length in LENGTHS:
        ends = [at for at in range(length, len(tokens)) if tokens[at - length : at] == tokens[len(tokens) - length :]]
        if ends and len(tokens) >= length:
            expected = [tokens[ends[-1]]]
            break
    assert predicted == expected


def test_the_memory_of_the_index_is_fixed():
    index, text = NgramIndex(), Text(0)
    draw = random.Random(1)
    tokens = [draw.randrange(1 << 20) for _ in range(2000)]
    before = len(index._slots)
    index.extend(text, tokens, len(tokens), 0)
    assert len(index._slots) == before == SLOTS


def test_requests_in_an_engine_get_the_same_tokens_in_fewer_steps():
    """The siblings of a request have the same tokens in the fake runner."""
    steps = {}
    for name in ("without", "with"):
        h = Harness(FakeRunner(), drafter=NgramDrafter(free) if name == "with" else None)
        for n in range(3):
            h.add(f"r{n}", [1, 2, 3, 4, 5], max_tokens=40)
            h.run_out()
            assert h.stream(f"r{n}").tokens == expected_tokens([1, 2, 3, 4, 5], 40)
        steps[name] = len(h.runner.plans)
    assert steps["with"] < 0.6 * steps["without"]
