"""Tools and reasoning in chats, with the unmodified ``openai`` package."""

from __future__ import annotations

import json

import openai
import pytest

from fastdeploy.client.tokenizer import load_tokenizer
from fastdeploy.core.request_fields import AddRequest
from support.fake_engine_server import reply_with
from support.http_calls import events
from support.http_stack import stacks
from support.tiny_tokenizer import save_tokenizer

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a":  1}}\n</tool_call>'
ANSWER = f"<think>\nhm\n</think>\n\nI add.\n{CALL}\n{CALL}"
TEMPLATE = (
    "{{ reasoning_effort }}{{ thinking }}{% for m in messages %}{{ m.content }}[{{ m.reasoning_content }}]"
    "{% for c in m.tool_calls %}{{ c.function.arguments }}{% endfor %}{% endfor %}"
)


@pytest.fixture
def served(make_stack):
    return make_stack(tool_call_parser="hermes", reasoning_parser="qwen3", trust_request_chat_template=True)


@pytest.fixture
def client(served):
    return openai.OpenAI(base_url=served.server.url + "/v1", api_key="none", max_retries=0)


def answer(stack, text: str, finish_reason: str = "stop") -> list[int]:
    """Let the engine sample ``text`` and, for a stop, the end of the sequence."""
    ids = list(text.encode()) + ([261] if finish_reason == "stop" else [])
    stack.script(reply_with(ids, finish_reason, step=3))
    return ids


def prompt_of(stack, tokenizer) -> str:
    return tokenizer.decode(stack.engine.expect(AddRequest).prompt_token_ids, skip_special_tokens=False)


def test_a_whole_reply_has_reasoning_content_and_calls(served, client):
    ids = answer(served, ANSWER)
    fields = {"return_token_ids": True}
    reply = client.chat.completions.create(**CHAT, tools=[ADD], logprobs=True, n=2, extra_body=fields)
    for choice in reply.choices:
        message = choice.message
        assert (message.content, message.reasoning_content) == ("I add.", "hm")
        assert [(c.type, c.function.name, c.function.arguments) for c in message.tool_calls] == [
            ("function", "add", '{"a":  1}')
        ] * 2
        assert choice.finish_reason == "tool_calls" and not hasattr(choice, "tool_call_errors")
        assert choice.token_ids == ids and len(choice.logprobs.content) == len(ids)
    names = {c.id for choice in reply.choices for c in choice.message.tool_calls}
    assert len(names) == 4 and all(name.startswith("call_") for name in names)


def test_the_stream_has_the_message_and_the_ids_of_the_whole_reply(served, client):
    ids = answer(served, ANSWER)
    extra = {"extra_body": {"return_token_ids": True, "request_id": "same"}, "logprobs": True}
    whole = client.chat.completions.create(**CHAT, tools=[ADD], **extra).choices[0]
    options = {"include_usage": True}
    chunks = list(client.chat.completions.create(**CHAT, tools=[ADD], **extra, stream=True, stream_options=options))
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert sum((choice.token_ids for choice in choices), []) == ids
    assert sum(len(choice.logprobs.content) for choice in choices) == len(ids)
    assert choices[0].delta.role == "assistant" and choices[0].delta.content == ""
    assert "".join(getattr(c.delta, "reasoning_content", "") for c in choices) == "hm"
    assert [c.finish_reason for c in choices if c.finish_reason] == ["tool_calls"]
    calls = [call for choice in choices for call in choice.delta.tool_calls or []]
    assert [call.index for call in calls] == [0, 1]
    assert [call.model_dump(exclude={"index"}) for call in calls] == [c.model_dump() for c in whole.message.tool_calls]
    assert chunks[-1].usage.completion_tokens == len(ids)
    with client.chat.completions.stream(**CHAT, tools=[ADD], **extra) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        message = stream.get_final_completion().choices[0].message
    assert [event.arguments for event in done] == ['{"a":  1}'] * 2
    assert (message.content, message.reasoning_content) == ("I add.", "hm")


@pytest.mark.parametrize(("text", "finish"), [(CALL[:-14] + "</tool_call>", "stop"), (CALL[:-3], "length")])
def test_a_broken_call_is_content_with_a_flag(served, client, text, finish):
    answer(served, text, finish)
    choice = client.chat.completions.create(**CHAT, tools=[ADD]).choices[0]
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (text, None, finish)
    assert len(choice.tool_call_errors) == 1
    with client.chat.completions.stream(**CHAT, tools=[ADD]) as stream:
        chunks = [event.chunk.choices[0] for event in stream if event.type == "chunk"]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == text
    assert sum((getattr(chunk, "tool_call_errors", []) for chunk in chunks), []) == choice.tool_call_errors


def test_a_stop_string_inside_of_a_call_breaks_it(served, client):
    answer(served, CALL)
    choice = client.chat.completions.create(**CHAT, tools=[ADD], stop='"a"').choices[0]
    assert choice.message.content == CALL[: CALL.index('"a"')] and choice.finish_reason == "stop"
    assert len(choice.tool_call_errors) == 1


def test_without_parallel_calls_the_answer_ends_behind_the_first(served, client):
    ids = answer(served, ANSWER)
    ask = {"tools": [ADD], "parallel_tool_calls": False, "extra_body": {"return_token_ids": True}}
    choice = client.chat.completions.create(**CHAT, **ask).choices[0]
    assert len(choice.message.tool_calls) == 1 and choice.finish_reason == "tool_calls"
    end = ANSWER.index("</tool_call>") + len("</tool_call>")
    assert choice.token_ids == ids[:end] and not hasattr(choice, "tool_call_errors")


def test_calls_that_are_required_are_a_grammar_of_the_request(served):
    other = {"type": "function", "function": {"name": "other"}}
    answer(served, CALL)
    named = {"type": "function", "function": {"name": "add"}}
    for choice, in_grammar in (("auto", []), ("required", ["add", "other"]), (named, ["add"])):
        body = CHAT | {"tools": [ADD, other], "tool_choice": choice}
        assert served.post("/v1/chat/completions", **body).json()["choices"][0]["finish_reason"] == "tool_calls"
        grammar = served.engine.expect(AddRequest).sampling.grammar
        assert [name for name in ("add", "other") if name in grammar] == in_grammar


def test_a_schema_that_no_grammar_can_follow_is_refused_where_calls_are_required(served):
    wrong = {"type": "object", "properties": {"a": {"type": "sum"}}}
    tools = [ADD, {"type": "function", "function": {"name": "f", "parameters": wrong}}]
    reply = served.post("/v1/chat/completions", **CHAT, tools=tools, tool_choice="required")
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "tools.1.function.parameters.properties.a", reply.text
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]
    error = served.post("/v1/chat/completions", **CHAT, tools=tools, tool_choice="required").json()["error"]
    assert error["param"] == "tools.0.function.parameters" and "expected object" in error["message"]
    more = {"response_format": {"type": "json_object"}}
    reply = served.post("/v1/chat/completions", **CHAT, tools=[ADD], tool_choice="required", **more)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "response_format")


def test_a_grammar_of_the_client_is_that_of_the_content(served):
    """The model may reason before it, and call tools in its place."""
    body = CHAT | {"response_format": {"type": "json_object"}}
    answer(served, "<think>hm</think>\n\n{}")
    message = served.post("/v1/chat/completions", **body).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "{}")
    made = [served.engine.expect(AddRequest).sampling.grammar]
    for fields in ({"tools": [ADD]}, {"tools": [ADD], "tool_choice": "none"}):
        reply = served.post("/v1/chat/completions", **body | fields)
        assert reply.status_code == 200, reply.text
        made.append(served.engine.expect(AddRequest).sampling.grammar)
    assert ["<think>" in grammar for grammar in made] == [True] * 3
    assert ["<tool_call>" in grammar for grammar in made] == [False, True, False]


def test_a_grammar_beside_tools_names_the_schema_that_it_cannot_follow(served):
    wrong = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "sum"}}}}}
    for fields, place in (
        ({"tools": [ADD, wrong]}, "tools.1.function.parameters.properties.a"),
        ({"tools": [ADD], "guided_json": {"type": "sum"}, "response_format": None}, "guided_json"),
    ):
        body = CHAT | {"response_format": {"type": "json_object"}} | fields
        reply = served.post("/v1/chat/completions", **body)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, place), reply.text
    answer(served, "so")
    assert served.post("/v1/chat/completions", **CHAT, tools=[wrong]).status_code == 200


def test_tool_choice_none_renders_the_tools_and_leaves_calls_in_the_text(served, client, tokenizer):
    answer(served, CALL)
    choice = client.chat.completions.create(**CHAT, tools=[ADD], tool_choice="none").choices[0]
    assert (choice.message.content, choice.finish_reason) == (CALL, "stop")
    assert prompt_of(served, tokenizer) == "<tools:add><user>a<bot>"
    assert client.chat.completions.create(**CHAT).choices[0].message.content == CALL


def test_reasoning_may_be_left_out_or_left_in_the_content(served, client):
    answer(served, ANSWER)
    create = client.chat.completions.create
    left_out = create(**CHAT, tools=[ADD], extra_body={"include_reasoning": False}).choices[0].message
    assert left_out.content == "I add." and not hasattr(left_out, "reasoning_content")
    left_in = create(**CHAT, tools=[ADD], extra_body={"separate_reasoning": False}).choices[0].message
    assert left_in.content == "<think>\nhm\n</think>\n\nI add." and len(left_in.tool_calls) == 2


def test_a_prompt_that_ends_in_reasoning_begins_the_answer_there(served, client, tokenizer):
    answer(served, "hm\n</think>\n\nYes.")
    opens = "{{ messages[0].content }}<think>\n"
    message = client.chat.completions.create(**CHAT, extra_body={"chat_template": opens}).choices[0].message
    assert (message.content, message.reasoning_content) == ("Yes.", "hm")


def test_a_message_that_is_continued_may_end_in_reasoning(served, client):
    answer(served, " it</think>Yes.")
    for begun, expected in (("<think>so", ("Yes.", "it")), ("<think>so</think>a", ("it</think>Yes.", None))):
        messages = [*CHAT["messages"], {"role": "assistant", "content": begun}]
        fields = {"continue_final_message": True, "add_generation_prompt": False}
        message = client.chat.completions.create(model="tiny", messages=messages, extra_body=fields).choices[0].message
        assert (message.content.strip(), getattr(message, "reasoning_content", None)) == expected


def test_resumed_tokens_are_read_with_the_answer(served, client):
    """The reply has the text of the tokens of an earlier attempt, and so their part of a call."""
    first, rest = CALL[:30], CALL[30:]
    answer(served, rest)
    body = CHAT | {"tokens": [5, *first.encode()], "resumed_tokens": len(first), "tools": [ADD]}
    choice = served.post("/v1/chat/completions/tokens", **body).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls" and len(choice["message"]["tool_calls"]) == 1


def test_markers_that_are_special_tokens_are_found_and_other_special_tokens_have_no_text(tmp_path):
    save_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer.json").read_text())
    special = config["added_tokens"][-1]
    config["added_tokens"].append(special | {"id": special["id"] + 1, "content": "<tool_call>"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(config))
    with stacks(str(tmp_path), load_tokenizer(str(tmp_path))) as make:
        stack = make(tool_call_parser="hermes")
        ids = [262, *b"so", special["id"] + 1, *CALL.removeprefix("<tool_call>").encode(), 261]
        stack.script(reply_with(ids, "stop"))
        body = CHAT | {"tools": [ADD], "return_token_ids": True}
        choice = stack.post("/v1/chat/completions", **body).json()["choices"][0]
        assert choice["message"]["content"] == "so" and choice["token_ids"] == ids
        assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["add"]
        plain = stack.post("/v1/chat/completions", **CHAT).json()["choices"][0]["message"]["content"]
        assert plain == "so" + CALL.removeprefix("<tool_call>")


def test_messages_of_earlier_turns_and_reasoning_effort_reach_the_template(served, make_stack, client, tokenizer):
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a":  1}'}}
    turn = {"role": "assistant", "content": None, "reasoning": "r", "tool_calls": [call]}
    body = {"messages": [turn], "chat_template": TEMPLATE, "reasoning_effort": "none"}
    ids = served.post("/v1/chat/completions/render", **body).json()["token_ids"]
    assert tokenizer.decode(ids) == "noneFalse[r]{'a': 1}"
    body |= {"chat_template_kwargs": {"thinking": "x"}, "reasoning_effort": "high"}
    ids = served.post("/v1/chat/completions/render", **body).json()["token_ids"]
    assert tokenizer.decode(ids) == "highx[r]{'a': 1}"


def test_instructions_of_the_developer_are_those_of_the_system(served, tokenizer):
    body = {"messages": [{"role": "developer", "content": "so"}], "chat_template": "{{ messages[0].role }}"}
    assert tokenizer.decode(served.post("/v1/chat/completions/render", **body).json()["token_ids"]) == "system"


def test_templates_of_deepseek_get_arguments_as_text(make_stack, tokenizer):
    stack = make_stack(tool_call_parser="deepseek_v3", trust_request_chat_template=True)
    calls = [{"function": {"name": "add", "arguments": a}} for a in ('{"a":  1}', {"a": 1}, None)]
    body = {"messages": [{"role": "assistant", "content": "", "tool_calls": calls}], "chat_template": TEMPLATE}
    ids = stack.post("/v1/chat/completions/render", **body).json()["token_ids"]
    assert tokenizer.decode(ids) == '[]{"a":  1}{"a":1}{}'


REFUSED = [
    ({"tools": [{"type": "function"}]}, "tools.0"), ({"tools": [ADD, {"type": "web_search"}]}, "tools.1"),
    ({"tools": ["add"]}, "tools.0"), ({"tools": [{"function": {"name": 1}}]}, "tools.0.function.name"),
    ({"tools": [{"function": {"name": ""}}]}, "tools.0.function.name"), ({"tools": [ADD] * 1025}, "tools"),
    ({"tools": [ADD, ADD]}, "tools.1.function.name"), ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [{"function": {"name": "f", "parameters": []}}]}, "tools.0.function.parameters"),
    ({"tools": [ADD], "tool_choice": "any"}, "tool_choice"), ({"tools": [ADD], "tool_choice": []}, "tool_choice"),
    ({"tools": [ADD], "tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice.function.name"),
    ({"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": [1]}}}, "tool_choice.function.name"),
    ({"reasoning_effort": "some"}, "reasoning_effort"), ({"functions": [ADD]}, "functions"),
    ({"function_call": "auto"}, "function_call"), ({"parallel_tool_calls": "x"}, "parallel_tool_calls"),
]  # fmt: skip


@pytest.fixture(scope="module")
def module_served(make_module_stack):
    return make_module_stack(tool_call_parser="hermes")


@pytest.mark.parametrize(("fields", "field"), REFUSED)
def test_a_wrong_field_is_refused_by_name(module_served, fields, field):
    reply = module_served.post("/v1/chat/completions", **CHAT | fields)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, field), reply.text


def test_a_model_without_a_format_of_calls_refuses_tools(stack):
    reply = stack.post("/v1/chat/completions", **CHAT, tools=[ADD])
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "tools")
    assert "--tool-call-parser" in reply.json()["error"]["message"]


def test_a_chat_with_tokens_parses_calls_too(served):
    answer(served, CALL)
    body = CHAT | {"tokens": [5, 6], "tools": [ADD], "stream": True}
    *payloads, _ = events(served.post("/v1/chat/completions/tokens", **body))
    calls = [call for payload in payloads for call in payload["choices"][0]["delta"].get("tool_calls", [])]
    assert [call["function"]["name"] for call in calls] == ["add"]
