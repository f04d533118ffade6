"""Messages in the text of answers, in the format of each family of models."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdeploy.client.chat_format.formats import REASONING, TOOL_CALLS, ChatFormat, choose
from fastdeploy.client.chat_format.parser import ChatParser, MessageDelta
from fastdeploy.core.config import AUTO, NO_PARSER, REASONING_PARSERS, TOOL_CALL_PARSERS
from support.search import examples

TOOLS = {
    "add": {"properties": {"a": {"type": "integer"}, "b": {"type": "number"}}},
    "write": {
        "properties": {
            "path": {"type": "string"},
            "lines": {"type": "array"},
            "new": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
            "mode": {"enum": ["1", "2"]},
        }
    },
}
DEEPSEEK_V3 = (
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 1}\n```<｜tool▁call▁end｜>\n'
    '<｜tool▁call▁begin｜>function<｜tool▁sep｜>write\n```json\n{"path": "```"}\n```<｜tool▁call▁end｜>'
    "<｜tool▁calls▁end｜>"
)
DEEPSEEK_V31 = (
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
    '<｜tool▁call▁begin｜>write<｜tool▁sep｜>{"path": "```"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)
HERMES = (
    '<tool_call>\n{"name": "add", "arguments": {"a":  1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "write", "arguments": {"path": "<think>"}}\n</tool_call>'
)
QWEN_CODER = (
    "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call><function=write><parameter=path>x\n\ny</parameter><parameter=new>\nTrue\n</parameter></function>"
    "</tool_call>"
)
GLM = (
    "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>\n"
    '<tool_call>write<arg_key>path</arg_key><arg_value>1</arg_value><arg_key>lines</arg_key><arg_value>["l"]</arg_value>'
    "</tool_call>"
)
LLAMA = '{"name": "add", "parameters": {"a": 1}}; {"name": "write", "parameters": {"path": "}"}}'
# The text of two calls in each format, and the arguments of the calls. JSON stays as it was written.
CALLS = [
    ("deepseek_v3", DEEPSEEK_V3, '{"a": 1}', '{"path": "```"}'),
    ("deepseek_v31", DEEPSEEK_V31, '{"a": 1}', '{"path": "```"}'),
    ("ernie45", HERMES, '{"a":  1}', '{"path": "<think>"}'),
    ("glm45", GLM, '{"a": 1}', '{"path": "1", "lines": ["l"]}'),
    ("hermes", HERMES, '{"a":  1}', '{"path": "<think>"}'),
    ("llama3_json", "<|python_tag|>" + LLAMA, '{"a": 1}', '{"path": "}"}'),
    ("llama3_json", LLAMA, '{"a": 1}', '{"path": "}"}'),
    ("qwen3_coder", QWEN_CODER, '{"a": 1}', '{"path": "x\\n\\ny", "new": true}'),
]
SIGNS = {
    "deepseek_v3": "<｜tool▁call▁begin｜>function<｜tool▁sep｜>'\n```json",
    "deepseek_v31": "<｜tool▁call▁begin｜>",
    "ernie45": "<tool_call> <response>",
    "glm45": "<tool_call> <arg_key>",
    "hermes": "<tool_call>",
    "llama3_json": '<|start_header_id|> "parameters"',
    "qwen3_coder": "<tool_call> <function=",
}


def read(parser: ChatParser, parts: list[str], finish: str = "stop") -> MessageDelta:
    """Return the message of a text that comes in parts."""
    deltas = [*map(parser.feed, parts), parser.finish(finish)]
    content, reasoning, calls, errors = zip(*deltas, strict=True)
    return MessageDelta("".join(content), "".join(reasoning), sum(calls, ()), sum(errors, ()))


def parser_of(tool_calls: str, reasoning: str = "qwen3", **options) -> ChatParser:
    return ChatParser(ChatFormat(REASONING.get(reasoning), TOOL_CALLS.get(tool_calls)), TOOLS, **options)


@pytest.mark.parametrize(("name", "text", "first", "second"), CALLS)
def test_reasoning_content_and_calls_of_every_format(name, text, first, second):
    """In one part, and character by character."""
    before = "" if text == LLAMA else "I will.\n\n"
    text = f"<think>\nHm. {{\n</think>\n\n{before}{text}"
    for parts in ([text], list(text)):
        message = read(parser_of(name), parts)
        assert (message.content, message.reasoning, message.errors) == (before.strip(), "Hm. {", ())
        assert message.calls == (("add", first), ("write", second))


@pytest.mark.parametrize("name", TOOL_CALLS)
def test_a_prompt_that_ends_in_reasoning(name):
    """Some models write the first marker all the same."""
    for text in ("because\n</think>\n\nYes.", "<think>\nbecause</think>Yes."):
        assert read(parser_of(name, in_reasoning=True), [text])[:2] == ("Yes.", "because")
    assert read(parser_of(name, in_reasoning=True), ["because\n"], "length")[:2] == ("", "because")


def test_ernies_markers_around_a_response_are_no_content():
    text = "abc\n</think>\n\n<response>\ndef\n\nghi\n</response>\n"
    assert read(parser_of("ernie45", "ernie45", in_reasoning=True), [text])[:2] == ("def\n\nghi", "abc")


@pytest.mark.parametrize(
    "text", [" a \n\n", "\n", "{} a {", "1 < 2 <", "a <think> b </think>", "", "<tool", "</tool_call>"]
)
def test_content_without_reasoning_and_calls_stays_as_it_is(text):
    for name in TOOL_CALLS:
        message = read(parser_of(name, "qwen3"), list(text))
        assert message == (text, "", (), ())


BROKEN = [
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": }}</tool_call>', "JSON"),
    ("hermes", "<tool_call>{'name': 'add'}</tool_call>", "JSON"),
    ("hermes", '<tool_call>{"name": "sub", "arguments": {}}</tool_call>', "no function 'sub'"),
    ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "object"),
    ("hermes", '<tool_call>{"name": "add", "arguments": NaN}</tool_call>', "JSON"),
    ("hermes", '<tool_call>{"name": "add"', "JSON"),
    ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>", "JSON"),
    ("hermes", '<tool_call>{"name": "add", "arguments": ' + "[" * 100_000 + "</tool_call>", "JSON"),
    ("qwen3_coder", "<tool_call>\n<function=add>\n<parameter=a>\n1\n</function>\n</tool_call>", "</parameter>"),
    ("qwen3_coder", "<tool_call>\n<parameter=a>\n1\n</parameter></tool_call>", "<function=NAME>"),
    ("qwen3_coder", "<tool_call>\n<function=add>so</function></tool_call>", "<parameter="),
    ("glm45", "<tool_call>add\n<arg_key>a</arg_key>1</tool_call>", "<arg_value>"),
    ("glm45", "<tool_call>nothing</tool_call>", "no function 'nothing'"),
    ("deepseek_v3", "<｜tool▁call▁begin｜>add<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
    ("deepseek_v31", "<｜tool▁call▁begin｜>add<｜tool▁sep｜>1<｜tool▁call▁end｜>", "object"),
    ("llama3_json", '{"name": "add", "parameters": {', "JSON"),
    ("llama3_json", '<|python_tag|>search.call("x")', "JSON"),
    ("llama3_json", "<|python_tag|>", "call"),
]


@pytest.mark.parametrize(("name", "text", "why"), BROKEN)
def test_a_broken_call_is_content_that_is_flagged(name, text, why):
    message = read(parser_of(name), ["so: "[: 0 if name == "llama3_json" else 4], text])
    assert message.content.removeprefix("so: ") == text and message.calls == ()
    assert len(message.errors) == 1 and why in message.errors[0]


NESTED_CALLS = {
    "hermes": '<tool_call>{"name": "write", "arguments": {"lines": VALUE}}</tool_call>',
    "qwen3_coder": "<tool_call><function=write><parameter=lines>VALUE</parameter></function></tool_call>",
    "llama3_json": '{"name": "write", "parameters": {"lines": VALUE}}',
}


@pytest.mark.parametrize("depth", [100, 200, 900, 940, 960, 2000])
@pytest.mark.parametrize("name", NESTED_CALLS)
def test_the_depth_of_a_call_is_limited_whatever_the_stack_of_the_caller(name, depth):
    text = NESTED_CALLS[name].replace("VALUE", "[" * depth + "]" * depth)

    def deep(levels: int) -> MessageDelta:
        return deep(levels - 1) if levels else read(parser_of(name), [text])

    assert len(read(parser_of(name), [text]).calls) == len(deep(60).calls) == (depth < 128 or name == "qwen3_coder")


def test_a_string_without_an_end_is_looked_at_once():
    text = NESTED_CALLS["hermes"].replace("VALUE", '"' + '\\"' * 200_000)
    assert len(read(parser_of("hermes"), [text]).errors) == 1, "within the time limit of a test"


def test_numbers_of_any_size_are_arguments():
    text = NESTED_CALLS["hermes"].replace("VALUE", "[1e999, -12345678901234567890123]")
    assert len(read(parser_of("hermes"), [text]).calls) == 1


def test_json_that_is_no_call_is_content_without_a_flag():
    assert read(parser_of("llama3_json"), ['{"answer": 3}']) == ('{"answer": 3}', "", (), ())


@pytest.mark.parametrize("finish", ["length", "abort", "error", None])
def test_a_call_that_is_cut_is_content_even_if_it_could_be_read(finish):
    text = '<tool_call>{"name": "add", "arguments": {}}'
    message = read(parser_of("hermes"), [text], finish)
    assert message.content == text and len(message.errors) == 1 and not message.calls


def test_a_stop_may_take_the_place_of_the_end_of_a_call():
    message = read(parser_of("hermes"), ['<tool_call>{"name": "add", "arguments": {}}\n'])
    assert message.calls == (("add", "{}"),) and not message.errors and not message.content


def test_one_call_only():
    """Where the text goes on behind the first call."""
    message = read(parser_of("hermes", one_call=True), [HERMES])
    assert [call.name for call in message.calls] == ["add"] and "parallel_tool_calls" in message.errors[0]
    assert message.content == HERMES[HERMES.rindex("<tool_call>") :]
    assert read(parser_of("llama3_json", one_call=True), [LLAMA]).content == LLAMA


def test_arguments_that_are_text_get_the_type_of_the_schema():
    values = {
        "a": ("1", "1.5", '"1"', "one"), "path": ("1", '"x"', "null", "True"), "new": ("False", "None", "1", "no"),
        "lines": ("[1]", "{}", "[", ""), "mode": ("1",), "unknown": ("1", "x", '"x"', "[1]"),
    }  # fmt: skip
    expected = {
        "a": (1, 1.5, '"1"', "one"), "path": ("1", '"x"', "null", "True"), "new": (False, None, "1", "no"),
        "lines": ([1], "{}", "[", ""), "mode": ("1",), "unknown": (1, "x", "x", [1]),
    }  # fmt: skip
    for key, texts in values.items():
        for text, value in zip(texts, expected[key], strict=True):
            name = "add" if key == "a" else "write"
            call = f"<tool_call>{name}<arg_key>{key}</arg_key><arg_value>{text}</arg_value></tool_call>"
            (made,) = read(parser_of("glm45"), [call]).calls
            assert json.loads(made.arguments) == {key: value}


def test_arguments_that_are_json_in_a_string_are_taken_out():
    text = json.dumps({"name": "add", "arguments": '{"a": 1}'})
    assert read(parser_of("hermes"), [f"<tool_call>{text}</tool_call>"]).calls == (("add", '{"a": 1}'),)


PIECES = st.sampled_from([
    "<think>", "</think>", "<response>", "</response>", "<|python_tag|>", "\n", " ", "text", "{", "<", "<tool_call",
    *(text for _, text, *_ in CALLS), *(text for _, text, _ in BROKEN if len(text) < 1000),
])  # fmt: skip


@examples(300)
@given(st.data())
def test_the_message_does_not_depend_on_how_the_text_is_cut(data):
    name, reasoning = (
        data.draw(st.sampled_from([*TOOL_CALLS])),
        data.draw(st.sampled_from(["qwen3", "ernie45", "none"])),
    )
    text = "".join(data.draw(st.lists(PIECES, max_size=6)))
    text = text[: data.draw(st.integers(0, len(text)))]
    options = {"in_reasoning": data.draw(st.booleans()), "one_call": data.draw(st.booleans())}
    finish = data.draw(st.sampled_from(["stop", "length"]))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=20)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = read(parser_of(name, reasoning, **options), [text], finish)
    assert read(parser_of(name, reasoning, **options), parts, finish) == whole
    assert read(parser_of(name, reasoning, **options), list(text), finish) == whole


@pytest.mark.parametrize("name", TOOL_CALLS)
def test_the_chat_template_tells_the_format_and_a_flag_wins(name):
    reasoning = {"deepseek_v3": "deepseek_r1", "deepseek_v31": "deepseek_r1"}.get(name, name)
    expected = ChatFormat(REASONING.get(reasoning, REASONING["qwen3"]), TOOL_CALLS[name])
    assert choose(SIGNS[name] + "content.split('</think>')") == expected
    assert choose(SIGNS[name]) == ChatFormat(None, TOOL_CALLS[name])
    assert choose("", name, "qwen3") == ChatFormat(REASONING["qwen3"], TOOL_CALLS[name])
    assert choose(SIGNS[name] + "</think>", "none", "none") == choose("{{ messages }}") == ChatFormat()


def test_the_flags_have_the_names_of_all_formats():
    assert {AUTO, NO_PARSER, *REASONING} == set(REASONING_PARSERS)
    assert {AUTO, NO_PARSER, *TOOL_CALLS} == set(TOOL_CALL_PARSERS)
