"""Every route takes the fields of RequestFields with their limits, without another declaration."""

from __future__ import annotations

import msgspec.inspect
import pytest

from fastdeploy.core.errors import InvalidField
from fastdeploy.core.request_fields import AddRequest, RequestFields, part_id
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.http.body import parse_body
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
    assert getattr(body.request_fields(), name) == value
    if name != "n":  # in vLLM's body n is one of sampling_params
        asked = parse_generate({"token_ids": [1], "sampling_params": {}, name: value})
        assert getattr(asked.request_fields(), name) == value
    with pytest.raises(InvalidField) as info:
        parse_body({"prompt": "a", name: beyond(FIELDS[name])}, CompletionBody, UNSUPPORTED).request_fields()
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
    assert getattr(body.request_fields(), name) is getattr(asked.request_fields(), name) is True
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
