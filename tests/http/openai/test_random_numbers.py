"""The seed and the number of a choice, on every route. Together they decide which tokens are drawn."""

from __future__ import annotations

import pytest

from fastdeploy.core.request_fields import AddRequest
from support.fake_engine_server import reply_with

SAME = [1, 2, 3]


def sent(stack, count: int) -> list[AddRequest]:
    return [stack.engine.expect(AddRequest) for _ in range(count)]


@pytest.mark.parametrize(
    ("path", "body", "first"),
    [
        ("/v1/completions", {"prompt": [SAME] * 3, "n": 2, "seed": 7}, 0),
        ("/v1/completions", {"prompt": [SAME] * 3, "n": 2, "seed": 7, "first_choice": 5}, 5),
        ("/generate", {"input_ids": [SAME] * 3, "sampling_params": {"n": 2, "sampling_seed": 7}}, 0),
    ],
)
def test_choices_are_numbered_over_all_prompts_of_a_body(stack, path, body, first):
    stack.script(reply_with([97]))
    assert stack.post(path, **body).status_code == 200
    adds = sent(stack, 3)
    assert [add.first_choice for add in adds] == [first, first + 2, first + 4]
    assert [add.sampling.seed for add in adds] == [7, 7, 7]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": SAME}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/inference/v1/generate", {"token_ids": SAME, "sampling_params": {}}),
        ("/generate", {"input_ids": SAME, "sampling_params": {}}),
        ("/v1/completions", {"prompt": SAME, "seed": -1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "seed": -1}),
        ("/inference/v1/generate", {"token_ids": SAME, "sampling_params": {"seed": -1}}),
        ("/generate", {"input_ids": SAME, "sampling_params": {"sampling_seed": -1}}),
    ],
)
def test_without_a_seed_or_with_minus_1_the_engine_chooses_one(module_stack, path, body):
    module_stack.script(reply_with([97]))
    assert module_stack.post(path, **body).status_code == 200
    assert sent(module_stack, 1)[0].sampling.seed is None


def test_a_first_choice_outside_of_31_bits_is_refused(module_stack):
    for first in (2**31 - 1, -1):
        reply = module_stack.post("/v1/completions", prompt=[SAME] * 2, first_choice=first)
        assert reply.status_code == 400 and reply.json()["error"]["param"] == "first_choice"
