"""Grammars of whole answers: llguidance takes what the model may write, and the parser reads it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer

from fastdeploy.client import grammars
from fastdeploy.client.chat_format.formats import REASONING, TOOL_CALLS, ChatFormat
from fastdeploy.client.chat_format.message_grammar import message_grammar
from fastdeploy.client.chat_format.parser import ChatParser
from support.search import examples
from support.tiny_tokenizer import save_tokenizer

TOOLS = {
    "add": {
        "properties": {"a": {"type": "integer"}, "b": {"$ref": "#/$defs/N"}},
        "required": ["a"],
        "$defs": {"N": {"type": "number"}},
    },
    "write": {
        "type": "object",
        "properties": {"VALUE": {"type": "string"}, "mode": {"type": "string", "enum": ["x", "y"]}},
        "required": ["VALUE", "mode"],
    },
    "ARGUMENTS": {},
}
JSON = ('{"a": 1, "b": 1.5}', '{"VALUE": "\\n<", "mode": "x"}', "{}")
XML = ({"a": "1", "b": "1.5"}, {"VALUE": "\n<", "mode": "x"}, {})

KEYWORDS = st.sampled_from(["type", "enum", "anyOf", "oneOf", "properties", "items", "required", "$defs"])


def answers() -> dict[str, str]:
    """Return an answer in each format that calls every function once, as the format says that it is written."""
    made = {}
    for name, format in TOOL_CALLS.items():
        calls = []
        for function, as_json, pairs in zip(TOOLS, JSON, XML, strict=True):
            parts = [format.argument.replace("KEY", key).replace("VALUE", value) for key, value in pairs.items()]
            if format.argument and "VALUE" in pairs:
                parts[0] = format.argument.replace("VALUE", "\n<").replace("KEY", "VALUE")
            arguments = "".join(parts) if format.argument else as_json
            before, _, after = format.written.partition("ARGUMENTS")
            opens = "" if format.bare else format.opens
            calls.append(opens + before.replace("NAME", function) + arguments + after + format.closes)
        first, last = format.dropped or ("", "")
        made[name] = first + format.between.join(calls) + last
    return made


ANSWERS = answers()


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    """Return ``make(special)``: a tokenizer with these special tokens, for us and for llguidance."""
    path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(path)

    def make(special: tuple[str, ...]) -> tuple[Tokenizer, LLTokenizer]:
        backend = Tokenizer.from_file(str(path / "tokenizer.json"))
        backend.add_special_tokens([AddedToken(text, special=True) for text in special])
        return backend, LLTokenizer(backend.to_str())

    return make


def takes(vocabulary, format: ChatFormat, text: str, special: tuple[str, ...] = (), **options) -> bool:
    """Return whether ``text`` is a whole answer of the grammar."""
    backend, for_grammar = vocabulary(special)
    ids = {marker: backend.token_to_id(marker) for marker in special}
    matcher = LLMatcher(for_grammar, message_grammar(format, TOOLS, ids, **options))
    assert not matcher.get_error()
    tokens = backend.encode(text, add_special_tokens=False).ids
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", TOOL_CALLS)
def test_what_the_grammar_takes_the_parser_reads(vocabulary, name, special):
    format = ChatFormat(REASONING["qwen3"], TOOL_CALLS[name])
    markers = format.markers if special else ()
    for reasoning in ("", "<think>\nso\n</think>\n\n"):
        text = reasoning + ANSWERS[name]
        assert takes(vocabulary, format, text, markers)
        parser = ChatParser(format, TOOLS)
        calls = parser.feed(text).calls + parser.finish("stop").calls
        assert calls == tuple(zip(TOOLS, ('{"a": 1, "b": 1.5}', JSON[1], "{}"), strict=True))


@pytest.mark.parametrize("name", TOOL_CALLS)
def test_the_grammar_takes_nothing_else(vocabulary, name):
    format, answer = ChatFormat(None, TOOL_CALLS[name]), ANSWERS[name]
    wrong = [answer.replace("add", "sub"), answer.replace("x", "z"), "so" + answer, "<think></think>" + answer, ""]
    assert [text for text in wrong if takes(vocabulary, format, text)] == []
    assert not takes(vocabulary, format, answer, one_call=True)


STRINGS = {"$defs": {"S": {"type": "string", "enum": ["x"]}}}
# A schema of an argument, texts that follow it with the values that they are, and a text that does not follow it.
VALUES = [
    ({"anyOf": [{"type": "string", "enum": ["x"]}, {"type": "null"}]}, {'"x"': "x", "null": None}, '"y"'),
    ({"enum": ["x", 1]}, {'"x"': "x", "1": 1}, "2"),
    ({"const": "x"}, {'"x"': "x"}, "x"),
    ({"type": "string", "const": "1"}, {"1": "1"}, "2"),
    ({"anyOf": [{"type": "string", "enum": ["x"]}, {"type": "string", "enum": ["y"]}]}, {"x": "x", "y": "y"}, "z"),
    ({"$ref": "#/$defs/S"}, {'"x"': "x"}, '"y"'),
    ({"type": "string", "minLength": 2, "maxLength": 3}, {"ab": "ab", "a\nb": "a\nb"}, "abcd"),
    ({"type": "array", "items": {"$ref": "#/properties/b"}}, {"[1, 2]": [1, 2]}, '["x"]'),
    (
        {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
        {"null": None, '{"a": null, "more": 2}': {"a": None, "more": 2}},
        '{"b": 1}',
    ),
]


@pytest.mark.parametrize("name", ["glm45", "qwen3_coder"])
@pytest.mark.parametrize(("schema", "right", "wrong"), VALUES, ids=lambda value: str(value)[:30])
def test_arguments_that_are_written_as_texts_follow_their_schema(vocabulary, name, schema, right, wrong):
    format = ChatFormat(None, TOOL_CALLS[name])
    tools = {
        "f": STRINGS | {"properties": {"a": schema, "b": {"type": "integer"}, "no": False}, "required": ["a", "more"]}
    }
    backend, for_grammar = vocabulary(())

    def answer(text: str) -> tuple[str, bool]:
        shape = TOOL_CALLS[name]
        arguments = "".join(
            shape.argument.replace("KEY", k).replace("VALUE", v) for k, v in (("a", text), ("more", "2"))
        )
        call = shape.opens + shape.written.replace("NAME", "f").replace("ARGUMENTS", arguments) + shape.closes
        matcher = LLMatcher(for_grammar, message_grammar(format, tools, {}, one_call=True))
        tokens = backend.encode(call, add_special_tokens=False).ids
        return call, matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    for text, value in right.items():
        call, taken = answer(text)
        assert taken
        [read] = ChatParser(format, tools).feed(call).calls
        assert json.loads(read.arguments) == {"a": value, "more": 2}
    assert not answer(wrong)[1]


@pytest.mark.parametrize(
    ("name", "schema", "place"),
    [
        ("hermes", {"type": "array"}, "type"),
        ("glm45", {"type": ["string", "null"]}, "type"),
        ("glm45", {"$ref": "#/$defs/A", "$defs": {"A": {"type": "object"}}}, r"\$ref"),
        ("qwen3_coder", {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, "anyOf"),
        ("qwen3_coder", {"properties": {"a": {"type": "string", "pattern": "^[0-9]+$"}}}, "pattern.*'a'"),
        ("qwen3_coder", {"properties": {"a": {"type": "string", "minLength": 1.5}}}, "minLength.*'a'"),
        ("glm45", {"properties": {"a": {"type": "string", "maxLength": "3}|.{0,9"}}}, "maxLength.*'a'"),
    ],
)
def test_a_schema_that_a_format_cannot_follow_is_refused(name, schema, place):
    with pytest.raises(ValueError, match=place):
        message_grammar(ChatFormat(None, TOOL_CALLS[name]), {"f": schema}, {})


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.sampled_from(["string", "integer", "object"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYWORDS, inner, max_size=3),
    max_leaves=10,
)


@examples(100)
@given(schema=st.dictionaries(KEYWORDS, JSON_VALUES, max_size=4), value=st.text(max_size=5))
def test_no_schema_of_a_client_is_too_strange(schema, value):
    """The grammar may be one that cannot be compiled. Then the request is refused."""
    tools = {"f": {"properties": {"a": schema}}}
    for name in TOOL_CALLS:
        message_grammar(ChatFormat(None, TOOL_CALLS[name]), tools, {})
    call = f"<tool_call>f<arg_key>a</arg_key><arg_value>{value}</arg_value></tool_call>"
    assert len(ChatParser(ChatFormat(None, TOOL_CALLS["glm45"]), tools).feed(call).calls) == 1


def test_a_prompt_that_ends_in_reasoning(vocabulary):
    format, answer = ChatFormat(REASONING["qwen3"], TOOL_CALLS["hermes"]), ANSWERS["hermes"]
    assert takes(vocabulary, format, f"so\n</think>\n\n{answer}", in_reasoning=True)
    assert not takes(vocabulary, format, answer, in_reasoning=True)


SCHEMA = grammars.json_schema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
CONTENTS = [(SCHEMA, '{"a": 1}'), (grammars.regex("[0-9]{2}"), "12"), (grammars.choice(["yes"]), "yes")]


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(("grammar", "content"), CONTENTS, ids=["schema", "regex", "choice"])
def test_a_content_with_a_grammar_stands_behind_reasoning_or_calls_stand_in_its_place(
    vocabulary, grammar, content, special
):
    format = ChatFormat(REASONING["qwen3"], TOOL_CALLS["hermes"])
    markers = format.markers if special else ()
    for tools in (TOOL_CALLS["hermes"], None):
        format = ChatFormat(REASONING["qwen3"], tools)
        for text in (content, f"<think>\nso\n</think>\n\n{content}"):
            assert takes(vocabulary, format, text, markers, content=grammar)
        assert takes(vocabulary, format, f"so\n</think>\n\n{content}", markers, content=grammar, in_reasoning=True)
        assert not takes(vocabulary, format, content, markers, content=grammar, in_reasoning=True)
        assert not takes(vocabulary, format, f"so{content}", markers, content=grammar)
        assert takes(vocabulary, format, ANSWERS["hermes"], markers, content=grammar) == (tools is not None)
