"""Abort and resubmit: the prompt with the tokens so far and the same seed continues with the same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from fastdeploy import LLM, SamplingParams
from support.specs import prompt

LENGTH = 40
PARAMS = {
    "temperature": 1.0,
    "top_p": 0.9,
    "presence_penalty": 0.7,
    "frequency_penalty": 0.4,
    "repetition_penalty": 1.1,
    "seed": 99,
    "logprobs": 2,
    "logprobs_mode": "processed",
    "ignore_eos": True,
}


@pytest.fixture(params=["qwen3", "qwen3_bf16"])
def llm(request, checkpoints) -> Iterator[LLM]:
    with LLM(str(checkpoints[request.param]), num_gpu_blocks_override=256, max_model_len=128) as llm:
        yield llm


def params(tokens: int, **more: object) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, **PARAMS, **more)


def test_a_request_resubmitted_at_any_point_continues_with_the_same_tokens(llm):
    ids = prompt(21, 211)
    whole = llm.generate([ids], params(LENGTH))[0].outputs[0]
    assert len(set(whole.token_ids)) > 10, "too few different tokens for a comparison"
    prompts = [ids + whole.token_ids[:k] for k in range(LENGTH)]
    each = [params(LENGTH - k) for k in range(LENGTH)]
    replies = llm.generate(prompts, each, resumed_tokens=range(LENGTH), first_choice=[0] * LENGTH)
    for k, reply in enumerate(replies):
        rest = reply.outputs[0]
        assert whole.token_ids[:k] + rest.token_ids == whole.token_ids, f"resubmitted after {k} tokens"
        assert whole.logprobs[:k] + rest.logprobs == whole.logprobs, f"resubmitted after {k} tokens"


def test_the_rest_of_a_request_has_the_rows_that_its_beginning_lacks(checkpoints):
    ids, asked = prompt(21, 211), {"routed_experts": True}
    settings = {"num_gpu_blocks_override": 64, "max_model_len": 64, "enable_return_routed_experts": True}
    with LLM(str(checkpoints["qwen3_moe"]), **settings) as llm:
        whole = llm.generate([ids], params(12, n=2, **asked))[0].outputs
        for k, choice in [(k, choice) for k in (1, 5, 11) for choice in whole]:
            rows, at = choice.routed_experts.array(), len(ids) + k - 1
            assert len(rows) == len(ids) + 11 and len(choice.token_ids) == 12
            more = params(12 - k, routed_experts_start=at, **asked)
            [again] = llm.generate([ids + choice.token_ids[:k]], more, resumed_tokens=k, first_choice=choice.index)
            [rest] = again.outputs
            assert rest.token_ids == choice.token_ids[k:]
            assert (rest.routed_experts.start, rest.routed_experts.array().tolist()) == (at, rows[at:].tolist())
        *before, last = [step[0].outputs[0] for step in llm.generate([ids], params(12, **asked), stream=True)]
        assert last.routed_experts == whole[0].routed_experts and not any(one.routed_experts for one in before)


def test_without_resumed_tokens_the_penalties_would_draw_others(llm):
    ids = prompt(21, 211)
    whole = llm.generate([ids], params(LENGTH))[0].outputs[0]
    rest = llm.generate([ids + whole.token_ids[:20]], params(LENGTH - 20))[0].outputs[0]
    assert rest.logprobs != whole.logprobs[20:]


def test_one_choice_of_a_group_can_be_resubmitted_alone(llm):
    ids = prompt(9, 211)
    group = llm.generate([ids], params(LENGTH, n=4))[0].outputs
    assert len({tuple(choice.token_ids) for choice in group}) == 4
    for k in (0, 13):
        again = llm.generate([ids + group[2].token_ids[:k]], params(LENGTH - k), resumed_tokens=k, first_choice=2)[
            0
        ].outputs[0]
        assert again.token_ids == group[2].token_ids[k:] and again.logprobs == group[2].logprobs[k:]


def texts(replies: list) -> list[tuple[int, ...]]:
    return [tuple(choice.token_ids) for reply in replies for choice in reply.outputs]


def test_a_seed_draws_the_same_beside_any_prompts_and_other_choices_draw_apart(llm):
    ids, other = prompt(9, 211), prompt(12, 211)
    drawn = texts(llm.generate([ids], params(LENGTH, n=6)))
    assert len(set(drawn)) == 6
    assert texts(llm.generate([other, ids], params(LENGTH, n=2)))[2:] == drawn[:2], "the place in a batch counts"
    assert texts(llm.generate([ids] * 2, params(LENGTH))) == [drawn[0]] * 2
    assert texts(llm.generate([ids] * 2, params(LENGTH, n=2), first_choice=2)) == drawn[2:4] * 2
    assert texts(llm.generate([ids] * 2, params(LENGTH), first_choice=[5, 0])) == [drawn[5], drawn[0]]


def test_without_a_seed_every_call_draws_anew(llm):
    ids, unseeded = prompt(9, 211), SamplingParams(max_tokens=LENGTH, ignore_eos=True)
    pair = replace(unseeded, n=2)
    replies = [llm.generate([ids], pair) for _ in range(3)]
    replies += [llm.generate([ids] * 2, [unseeded, unseeded])]
    assert len({ids for reply in replies for ids in texts(reply)}) == 8
