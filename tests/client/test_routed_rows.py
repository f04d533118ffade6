"""A choice has the rows of its tokens and of no others, however its outputs are cut, joined or ended."""

from __future__ import annotations

import pytest

from fastdeploy.client.choice import Choice, TextOptions, pieces
from fastdeploy.client.request_stream import joined
from fastdeploy.client.routed_rows import RoutedRows
from fastdeploy.core.experts import ExpertsInfo, experts_of
from fastdeploy.inter_communicator.messages import Output
from support.fake_runner import EXPERTS, expected_rows

PROMPT, TOKENS = [1, 2, 3], [4, 5, 6, 7, 8]
ROWS = expected_rows(PROMPT + TOKENS, EXPERTS)
SIZE = EXPERTS.row_bytes


def choice(start: int = 0, tokenizer=None, **options) -> Choice:
    rows = RoutedRows(EXPERTS, len(PROMPT), start)
    return Choice(tokenizer, PROMPT, TextOptions(**options), rows=rows)


def outputs(start: int = 0) -> list[Output]:
    """Return one output for each token, the first with the rows of the prompt."""
    ends = [len(PROMPT) + i for i in range(len(TOKENS))]
    edges = [start, *ends]
    rows = [ROWS[a * SIZE : b * SIZE] for a, b in zip(edges, edges[1:], strict=False)]
    last = len(TOKENS) - 1
    return [Output("r", 0, [t], finish_reason="length" if i == last else None, routed=rows[i])
            for i, t in enumerate(TOKENS)]  # fmt: skip


@pytest.mark.parametrize("start", [0, 2, 3])
def test_the_rows_of_a_choice_are_those_of_all_tokens_but_the_last(start):
    one = choice(start)
    for output in outputs(start):
        one.feed(output)
    whole = one.routed_experts
    assert whole.data == ROWS[start * SIZE :] and (whole.start, whole.num_rows) == (start, 7 - start)
    array = whole.array()
    assert array.shape == (7 - start, 2, 2) and array.dtype == "uint8" and array.tobytes() == whole.data


@pytest.mark.parametrize("start", [0, 2, 3])
def test_new_rows_are_those_up_to_a_token_of_the_choice_and_come_once(start):
    one, end = choice(start), start
    for output in outputs(start):
        one.feed(output)
    for num_tokens in (1, 3, 3, 5):
        new, wanted = one.new_routed_experts(num_tokens), len(PROMPT) + num_tokens - 1
        assert (new is None) == (wanted == end)
        assert new is None or (new.start, new.data) == (end, ROWS[end * SIZE : wanted * SIZE])
        end = wanted


@pytest.mark.parametrize("size", [1, 2, 10])
def test_a_piece_of_joined_outputs_has_the_rows_of_its_tokens(size):
    one, [output] = choice(), joined(outputs())
    assert output.routed == ROWS
    for piece in pieces(output, size):
        one.feed(piece)
        assert len(one.routed_experts.data) == (len(PROMPT) + len(one.token_ids) - 1) * SIZE
    assert one.routed_experts.data == ROWS


def test_tokens_that_the_choice_drops_have_no_rows(tokenizer):
    one = choice(prompt_only=True)
    one.feed(outputs()[0])
    assert one.routed_experts.data == ROWS[: 2 * SIZE]
    stopped = choice(tokenizer=tokenizer, stops=("a",))
    stopped.feed(Output("r", 0, [ord("a"), ord("b")], routed=ROWS[: 4 * SIZE]))
    assert stopped.finish_reason == "stop" and len(stopped.token_ids) == 1
    assert stopped.routed_experts.data == ROWS[: 3 * SIZE]


def test_a_choice_that_was_aborted_within_its_prompt_has_no_rows():
    one = choice()
    one.feed(Output("r", 0, finish_reason="abort", message="Abort before prefill"))
    assert one.routed_experts is None and one.new_routed_experts(0) is None


def test_a_choice_that_does_not_ask_has_none():
    one = Choice(None, PROMPT, TextOptions())
    one.feed(outputs()[0])
    assert one.routed_experts is None and one.new_routed_experts(1) is None


def test_ids_take_the_smallest_type_and_the_description_of_a_model_is_read_back():
    many = ExpertsInfo((0,), 1, 257, 8)
    assert (EXPERTS.dtype, many.dtype, many.row_bytes) == ("uint8", "<u2", 16)
    described = {"layers": [1, 3], "num_layers": 4, "num_experts": 8, "top_k": 2}
    assert experts_of({"experts": described}) == EXPERTS and experts_of({"experts": None}) is None
