"""Sequences with a grammar, allowed_token_ids, bad_words or a limit of reasoning draw only what these allow, with the
same bits whatever the drafts are and however often the sequence loses its state."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import pytest

from examples.embedded_model.tokenizer import END_ID
from fastdeploy.client import grammars
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.embedded import MODEL_DIR
from fastdeploy.worker.model_runner import ModelRunner
from support.step_driver import Driver, Sequence, fresh

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy"]}},
    "required": ["a", "b"],
}
REGEX = r"[a-c]{3,12}-(\d{2})+;"
JSON = grammars.json_schema(SCHEMA, whitespace_flexible=False)
COUNT = 24
SETTINGS = [
    {"grammar": grammars.regex(REGEX), "logprobs": 2},
    {"grammar": grammars.regex(REGEX), "logprobs": 2, "logprobs_mode": "processed", "return_sampling_mask": True},
    {"grammar": JSON, "top_p": 0.9, "logprobs": 1, "logprobs_mode": "processed"},
    {"grammar": grammars.regex("[ab]{2,9}"), "temperature": 0.0, "ignore_eos": True, "logprobs": 0},
    {"grammar": grammars.regex(REGEX), "allowed_token_ids": (*b"ab-12;", END_ID), "logit_bias": ((98, 3.0),)},
    {"bad_words": (tuple(b"ab"), tuple(b"ba"), tuple(b"b1")), "allowed_token_ids": tuple(b"ab1")},
    {"logprobs": 1},
    {"reasoning_max_tokens": 5, "reasoning_ids": tuple(b"=;"), "reasoning_end": tuple(b"ok;"), "ignore_eos": True},
    {"reasoning_max_tokens": 4, "reasoning_ids": tuple(b"a;"), "reasoning_end": tuple(b";"),
     "temperature": 9.0, "allowed_token_ids": tuple(b"abc;"), "bad_words": (tuple(b"bb"),)},
]  # fmt: skip
OPEN_FROM_THE_PROMPT, OPEN_IN_THE_OUTPUT = 7, 8


def requests() -> list[Sequence]:
    return [
        Sequence(f"r{i}", [*b"1+2="], SamplingParams(**{"seed": i, "max_tokens": 64} | one), i, ends=(END_ID,))
        for i, one in enumerate(SETTINGS)
    ]


def text(sequence: Sequence) -> str:
    return bytes(token for token in sequence.output if token < 256).decode()


@pytest.fixture(scope="module")
def make_driver() -> Callable[..., Driver]:
    runner = ModelRunner(str(MODEL_DIR), num_blocks=256)
    return lambda **fields: Driver(runner, **fields)


@pytest.fixture(scope="module")
def alone(make_driver) -> list[Sequence]:
    """Return the requests after undisturbed runs."""
    return [make_driver().generate([one], COUNT)[0] for one in requests()]


def test_drafts_change_no_bit_of_masked_sequences(make_driver, alone):
    outputs, draw = {s.name: s.output for s in alone}, random.Random(1)

    def guess(s: Sequence) -> list[int]:
        right = outputs[s.name][len(s.output) :][: draw.randint(0, 7)]
        kind = draw.choice(["right", "then wrong", "random"])
        if kind == "random":
            return [draw.choice([*b"abc-1;{", END_ID]) for _ in right]
        return [*right[:-1], (right[-1] + 1) % 256] if kind == "then wrong" and right else right

    driver = make_driver(guess=guess)
    for one, other in zip(alone, driver.generate([fresh(s) for s in alone], COUNT), strict=True):
        assert other.output[:COUNT] == one.output and other.logprobs[:COUNT] == one.logprobs
    assert driver.steps < COUNT


def test_a_sequence_that_lost_everything_goes_on_where_it_was(make_driver, alone):
    driver = make_driver()
    sequences = [fresh(s) for s in alone]
    while todo := [s for s in sequences if len(s.output) < COUNT]:
        driver.step(todo)
        if driver.steps % 3 == 0:
            driver.release(todo[driver.steps % len(todo)])
    for one, other in zip(alone, sequences, strict=True):
        assert other.output == one.output


def test_the_output_of_an_earlier_attempt_continues_the_grammar(make_driver, alone):
    for one in [*alone[:4], *alone[OPEN_FROM_THE_PROMPT:]]:
        for known in (1, 9, 17):
            ids = [*one.ids[: one.prompt_len], *one.output[:known]]
            again = Sequence(one.name, ids, one.sampling, one.choice, ends=one.ends, prompt_len=one.prompt_len)
            make_driver().generate([again], COUNT)
            assert again.output == one.output


def test_logprobs_in_mode_raw_do_not_see_the_mask(make_driver, alone):
    """Teacher forcing: a free run over the same tokens has the same raw logprobs."""
    raw, processed = alone[0], alone[1]
    assert all(one.logprob < other.logprob for one, other in zip(raw.logprobs[:3], processed.logprobs[:3], strict=True))
    mask = {int.from_bytes(processed.logprobs[0].mask_ids[i : i + 4], "little") for i in (0, 4, 8)}
    assert mask == set(b"abc") and len(processed.logprobs[0].mask_ids) == 12


def test_logprobs_of_both_modes_in_one_step_are_those_of_each_alone(make_driver, alone):
    for one, beside in zip(alone, make_driver().generate(requests()[:2], COUNT), strict=False):
        assert (beside.output, beside.logprobs) == (one.output, one.logprobs)


def test_masks_bad_words_and_biases_are_kept(alone):
    assert all(re.fullmatch(REGEX, text(one).partition(";")[0] + ";") for one in alone[:2] if ";" in text(one))
    assert set(text(alone[4])) <= set("ab-12;")
    assert not re.search("ab|ba|b1", text(alone[5])) and set(text(alone[5])) <= set("ab1")


def test_reasoning_ends_behind_its_budget_with_the_tokens_that_end_it(alone):
    output = alone[OPEN_FROM_THE_PROMPT].output
    first = output.index(ord(";"))
    assert output[first - 2 : first + 1] == [*b"ok;"] and first == 7


def test_reasoning_that_the_output_opens_counts_over_all_its_parts(alone):
    output = alone[OPEN_IN_THE_OUTPUT].output
    is_open, used = False, 0
    for token in output:
        assert not is_open or used < 4 or token == ord(";")
        used += is_open and token != ord(";")
        is_open = token != ord(";") if is_open else token == ord("a")
    assert used == 4 and output.count(ord(";")) > 1


def test_an_ignored_end_is_followed_by_ends_alone(alone):
    output = alone[3].output
    assert END_ID in output and set(output[output.index(END_ID) :]) == {END_ID}


def test_min_tokens_does_not_end_a_grammar_that_may_go_on(make_driver):
    params = SamplingParams(temperature=0.0, grammar=grammars.regex("a{1,9}"))
    one = Sequence("r", [1], params, banned=(END_ID,), ends=(END_ID,))  # the driver bans it for 1000 tokens
    make_driver().generate([one], 10)
    assert one.output == [*b"a" * 9, END_ID]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"grammar": grammars.regex("b")}, "does not follow the grammar"),
        ({"grammar": grammars.regex("a{1000000000}")}, "too many expressions"),  # a limit of llguidance
        ({"grammar": grammars.regex("ab"), "allowed_token_ids": (97,)}, "leave no token"),
        ({"grammar": grammars.regex(r"a[^\s\S]")}, ""),
        (
            {"allowed_token_ids": (98,), "reasoning_max_tokens": 0, "reasoning_ids": (97, 99), "reasoning_end": (99,)},
            "leave no token",
        ),
        ({"grammar": grammars.lark("start: nothing")}, ""),
        ({"bad_words": tuple((token,) for token in range(272))}, "leave no token"),  # 272 ids fill 8.5 words of a mask
    ],
)
def test_a_sequence_without_a_token_ends_alone_and_says_why(make_driver, fields, why):
    free = Sequence("free", [1], SamplingParams(temperature=0.0))
    [undisturbed] = make_driver().generate([fresh(free)], 5)
    stuck = Sequence("stuck", [1, 97], SamplingParams(**{"temperature": 0.0} | fields), ends=(END_ID,), prompt_len=1)
    make_driver().generate([free, stuck], 5)
    assert free.output == undisturbed.output
    assert stuck.non_finite is not None and re.search(why, stuck.non_finite.why)
