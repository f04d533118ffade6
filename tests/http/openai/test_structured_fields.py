"""Fields that restrict the tokens of an answer: what reaches the engine, and the place that an error names."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from fastdeploy.client import grammars
from fastdeploy.inter_communicator.messages import AddRequest
from support.fake_engine_server import reply_with

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
BAD_SCHEMA = {"type": "object", "properties": {"a": {"items": {"anyOf": [{}, {"uniqueItems": True}]}}}}
BAD_PLACE = "properties.a.items.anyOf.1"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}


def response_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def grammar_of(stack, path: str, **body: Any) -> dict[str, Any]:
    """Return the grammar of the request that reaches the engine."""
    stack.script(reply_with([97]))
    reply = stack.post(path, **body)
    assert reply.status_code == 200, reply.text
    [grammar] = json.loads(stack.engine.expect(AddRequest).sampling.grammar)["grammars"]
    return grammar


def schema_in(grammar: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in grammar["json_schema"].items() if key != "x-guidance"}


@pytest.mark.parametrize(
    "fields",
    [{"response_format": response_format(SCHEMA)}, {"structured_outputs": {"json": SCHEMA}},
     {"structured_outputs": {"json": json.dumps(SCHEMA), "disable_any_whitespace": True}}, {"guided_json": SCHEMA}],
    ids=["response_format", "structured_outputs", "text", "guided_json"],
)  # fmt: skip
def test_every_name_of_a_schema_is_one_grammar(stack, fields):
    for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", CHAT)):
        assert schema_in(grammar_of(stack, path, **body, **fields)) == SCHEMA


def test_dialects_have_the_same_grammars(stack):
    vllm = {"token_ids": [1], "sampling_params": {"structured_outputs": {"json": SCHEMA}}}
    sglang = {"input_ids": [1], "sampling_params": {"json_schema": json.dumps(SCHEMA)}}
    assert schema_in(grammar_of(stack, "/inference/v1/generate", **vllm)) == SCHEMA
    assert schema_in(grammar_of(stack, "/generate", **sglang)) == SCHEMA
    for path, field, body in (
        ("/inference/v1/generate", "token_ids", {"structured_outputs": {"regex": "a/\\d"}}),
        ("/generate", "input_ids", {"regex": "a/\\d"}),
    ):
        assert grammar_of(stack, path, **{field: [1], "sampling_params": body}) == {"lark_grammar": "start: /a\\/\\d/"}
    ebnf = {"input_ids": [1], "sampling_params": {"ebnf": 'root ::= "a" | "b"'}}
    assert 'start: "a"' in grammar_of(stack, "/generate", **ebnf)["lark_grammar"]


def test_a_choice_may_have_any_characters(stack):
    body = {"prompt": "a", "structured_outputs": {"choice": ['a "b"\n', "é/"]}}
    assert grammar_of(stack, "/v1/completions", **body) == {"lark_grammar": 'start: "a \\"b\\"\\n" | "é/"'}


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"response_format": response_format(BAD_SCHEMA)}, f"response_format.json_schema.schema.{BAD_PLACE}"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"structured_outputs": {"json": BAD_SCHEMA}}, f"structured_outputs.json.{BAD_PLACE}"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": {"$ref": "http://localhost/x"}}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": "?"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"xml": "a"}}, "structured_outputs.xml"),
        ({"guided_regex": "a" * 70000}, "guided_regex"),
        ({"guided_grammar": 'root ::= "' + "a" * 70000 + '"'}, "guided_grammar"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"guided_grammar": "start: T0\n" + "".join(f"T{i}: T{i + 1} T{i + 1}\n" for i in range(40)) + 'T40: "a"'},
         "guided_grammar"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x"),
        ({"bad_words": ["a", " "]}, "bad_words.1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_an_error_names_the_place(module_stack, fields, place):
    module_stack.script(reply_with([97]))
    reply = module_stack.post("/v1/completions", prompt="a", **fields)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == place


def test_deeply_nested_schemas_and_long_chains_of_rules_are_answered(module_stack):
    deep: dict[str, Any] = {}
    for _ in range(100):
        deep = {"properties": {"a": deep}}
    chain = {"$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(1500)}, "$ref": "#/$defs/0"}
    chain["$defs"]["1500"] = {"type": "integer"}
    assert module_stack.post("/v1/completions", prompt="a", guided_json=deep).status_code == 400
    module_stack.script(reply_with([97]))
    assert module_stack.post("/v1/completions", prompt="a", guided_json=chain).status_code == 200
    rules = "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(4000)) + 'r4000: "a"'
    assert module_stack.post("/v1/completions", prompt="a", guided_grammar=rules).status_code == 200


@pytest.mark.parametrize(
    ("text", "why"),
    [("a" * 65537, "at most 65536 characters"), ('root ::= "a"\n' * 513, "at most 512 rules in GBNF")],
    ids=["characters", "rules"],
)
def test_a_large_grammar_is_refused_before_it_is_converted(monkeypatch, text, why):
    monkeypatch.setattr("llguidance.gbnf_to_lark.any_to_lark", lambda text: "converted")
    with pytest.raises(ValueError, match=why):
        grammars.lark_or_gbnf(text)


def test_a_grammar_is_built_off_the_event_loop(stack, monkeypatch):
    on_loop: list[bool] = []

    def build(text: str) -> str:
        on_loop.append(asyncio._get_running_loop() is not None)
        return grammars.lark(text)

    monkeypatch.setattr(grammars, "lark_or_gbnf", build)
    stack.script(reply_with([97]))
    assert stack.post("/v1/completions", prompt="a", guided_grammar='start: "a"').status_code == 200
    assert on_loop == [False]


def test_biases_and_bad_words_reach_the_engine_as_ids(stack):
    stack.script(reply_with([97]))
    body = {"prompt": "a", "logit_bias": {"5": -2.5}, "bad_words": ["ab"], "allowed_token_ids": [1, 2]}
    assert stack.post("/v1/completions", **body).status_code == 200
    sampling = stack.engine.expect(AddRequest).sampling
    assert sampling.logit_bias == ((5, -2.5),) and sampling.allowed_token_ids == (1, 2)
    assert set(sampling.bad_words) == {(97, 98), (32, 97, 98)}


def test_ids_that_may_not_be_drawn_and_the_arguments_of_logits_processors_reach_the_engine(stack):
    stack.script(reply_with([97]))
    args = {"logit_bias": {"5": 1.5}}
    body = {"prompt": "a", "bad_words_token_ids": [7, 8, 7], "bad_words": ["a"], "logits_processors_args": args}
    assert stack.post("/v1/completions", **body).status_code == 200
    sampling = stack.engine.expect(AddRequest).sampling
    assert sampling.logit_bias == ((5, 1.5),) and {(7,), (8,), (97,)} < set(sampling.bad_words)
