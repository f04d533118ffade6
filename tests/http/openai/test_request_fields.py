"""Every route takes the fields of RequestFields and SamplingParams with their limits, without another declaration."""

from __future__ import annotations

from typing import Annotated

import msgspec.inspect
import numpy as np
import pytest

from fastdeploy.core.errors import InvalidField
from fastdeploy.core.request_fields import AddRequest, RequestFields, part_id
from fastdeploy.core.sampling_params import SamplingParams, check_limits
from fastdeploy.http.body import given_fields, parse_body
from fastdeploy.http.dialects.sglang.generate_body import OUTSIDE, SamplingBody
from fastdeploy.http.dialects.vllm.generate import parse_generate
from fastdeploy.http.openai.protocol import UNSUPPORTED, ChatBody, CompletionBody
from fastdeploy.http.openapi import schema_of

ALL_FIELDS = {field.name: field.type for field in msgspec.inspect.type_info(RequestFields).fields}
SWITCHES = [name for name, kind in ALL_FIELDS.items() if isinstance(kind, msgspec.inspect.BoolType)]
FIELDS = {name: kind for name, kind in ALL_FIELDS.items() if name not in SWITCHES}  # those with limits


def beyond(kind) -> object:
    """Return a value of the right type just outside of the limits."""
    kind = kind.types[0] if isinstance(kind, msgspec.inspect.UnionType) else kind
    return "x" * (kind.max_length + 1) if isinstance(kind, msgspec.inspect.StrType) else type(kind.le)(kind.le + 1)


@pytest.mark.parametrize("name", FIELDS)
def test_http_bodies_take_every_field_and_keep_its_limits(name):
    value = "x" if isinstance(FIELDS[name], msgspec.inspect.StrType) else 2
    body = parse_body({"prompt": "a", name: value}, CompletionBody, UNSUPPORTED)
    assert getattr(body.request_fields, name) == value
    if name != "n":  # in vLLM's body n is one of sampling_params
        asked = parse_generate({"token_ids": [1], "sampling_params": {}, name: value})
        assert getattr(asked.request_fields, name) == value
    with pytest.raises(InvalidField) as info:
        parse_body({"prompt": "a", name: beyond(FIELDS[name])}, CompletionBody, UNSUPPORTED).request_fields  # noqa: B018
    assert info.value.field == name
    described = schema_of(CompletionBody)["properties"][name]["anyOf"][0]
    assert {"maxLength", "maximum"} & described.keys()


@pytest.mark.parametrize("name", FIELDS)
def test_the_engine_refuses_a_value_beyond_a_limit(name):
    add = AddRequest("r", [1], SamplingParams(), **{name: beyond(FIELDS[name])})
    with pytest.raises(InvalidField) as info:
        add.check_fields()
    assert info.value.field == name


@pytest.mark.parametrize("name", SWITCHES)
def test_http_bodies_take_every_switch(name):
    body = parse_body({"prompt": "a", name: True}, CompletionBody, UNSUPPORTED)
    asked = parse_generate({"token_ids": [1], "sampling_params": {}, name: True})
    assert getattr(body.request_fields, name) is getattr(asked.request_fields, name) is True
    with pytest.raises(InvalidField) as info:
        parse_body({"prompt": "a", name: "perhaps"}, CompletionBody, UNSUPPORTED)
    assert info.value.field == name


@pytest.mark.parametrize("kind", [CompletionBody, ChatBody])
def test_a_client_may_name_its_request_as_it_likes_but_for_the_sign_of_parts(kind):
    prompt = {"messages": [{"role": "user", "content": "a"}]} if kind is ChatBody else {"prompt": "a"}
    for name in ("x-0", "x~0.1", "x\x1f0", "a b\n"):
        assert parse_body(prompt | {"request_id": name}, kind, UNSUPPORTED).request_id == name
    with pytest.raises(InvalidField) as refused:
        parse_body(prompt | {"request_id": part_id("x", 0)}, kind, UNSUPPORTED)
    assert refused.value.field == "request_id"


# ------------------------------------------------------------------ sampling parameters

SAMPLING = {field.name: field.type for field in msgspec.inspect.type_info(SamplingParams).fields}
NUMBERS = (msgspec.inspect.IntType, msgspec.inspect.FloatType)


def outside(kind) -> list[object]:
    """Return values of the right type just outside of the limits."""
    kind = kind.types[0] if isinstance(kind, msgspec.inspect.UnionType) else kind
    if isinstance(kind, msgspec.inspect.VarTupleType):
        return [tuple(range(kind.max_length + 1)), *((value,) for value in outside(kind.item_type))]
    if isinstance(kind, msgspec.inspect.LiteralType):
        return ["cooked"]
    if not isinstance(kind, NUMBERS):
        return []
    low = [] if kind.ge is None and kind.gt is None else [kind.ge - 1 if kind.gt is None else kind.gt]
    nan = [float("nan")] if isinstance(kind, msgspec.inspect.FloatType) else []
    return [*low, *([kind.le + 1] if kind.le is not None else []), *nan]


@pytest.mark.parametrize("name", SAMPLING)
def test_sampling_parameters_are_checked_as_they_are_declared(name):
    for value in outside(SAMPLING[name]):
        with pytest.raises(InvalidField, match="expected ") as info:
            SamplingParams(**{name: value}).check()
        assert info.value.field == name


class WithBias(msgspec.Struct):
    bias: dict[Annotated[int, msgspec.Meta(ge=0)], float]


@pytest.mark.parametrize("bias", [{-1: 0.5}, {1: "much"}])
def test_a_wrong_key_or_value_of_an_object_names_the_field(bias):
    with pytest.raises(InvalidField, match="bias: expected ") as info:
        check_limits(WithBias(bias), WithBias)
    assert info.value.field == "bias"


def test_numbers_of_numpy_are_numbers():
    assert SamplingParams(temperature=np.float64(0.5), max_tokens=np.int64(3), top_p=np.float32(0.5)).check()
    with pytest.raises(InvalidField, match="temperature: expected a number <= 100"):
        SamplingParams(temperature=np.float32(101)).check()


@pytest.mark.parametrize("name", sorted(SAMPLING.keys() - {"logprobs", "grammar", "logit_bias", "bad_words"}))
def test_http_bodies_take_every_sampling_parameter_and_describe_it(name):
    ids = {
        "stop_token_ids": [5],
        "logprob_token_ids": [5],
        "allowed_token_ids": [5],
        "reasoning_ids": [5],
        "reasoning_end": [5],
    }
    sent = (ids | {"logprobs_mode": "temperature", "ignore_eos": True}).get(name, 1)
    body = parse_body({"prompt": "a", name: sent}, CompletionBody, UNSUPPORTED)
    taken = given_fields(body, SamplingParams)[name]
    assert (list(taken) if name in ids else taken) == sent
    assert parse_generate({"token_ids": [1], "sampling_params": {name: sent}})
    sglang = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}.get(name, name)
    for schema in (schema_of(CompletionBody)["properties"], schema_of(SamplingBody)["properties"]):
        assert name in schema or sglang in schema or name in OUTSIDE


@pytest.mark.parametrize("name", ["web_search_options"])
def test_an_empty_object_that_asks_for_something_is_refused(name):
    with pytest.raises(InvalidField, match=name):
        parse_body({"prompt": "a", name: {}}, CompletionBody, UNSUPPORTED)
    parse_body({"prompt": "a", name: None}, CompletionBody, UNSUPPORTED)
