"""Which messages of a request count as those of an earlier turn."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdeploy.http.sessions.recognition import canonical, chain_of, chain_with

texts = st.text(max_size=8)
arguments = st.dictionaries(texts, st.integers() | texts, max_size=3)
calls = st.builds(
    lambda i, name, values: {"id": i, "type": "function", "function": {"name": name, "arguments": json.dumps(values)}},
    texts,
    texts,
    arguments,
)
messages = st.one_of(
    st.builds(lambda text: {"role": "user", "content": text}, texts),
    st.builds(
        lambda text, called: {"role": "assistant", "content": text, "tool_calls": called},
        texts,
        st.lists(calls, max_size=2),
    ),
    st.builds(lambda text, i: {"role": "tool", "content": text, "tool_call_id": i}, texts, texts),
)
conversations = st.lists(messages, min_size=1, max_size=6)


def as_agents_send_it(message: dict[str, Any], style: int) -> dict[str, Any]:
    """Return a message as an agent may send it back: with other forms of the same content, and fields of its own."""
    sent = {**message, "reasoning_content": "hm", "refusal": None, "annotations": [], "name": None}
    if style == 1:
        sent["content"] = [{"type": "text", "text": message["content"]}]
    if style == 2 and message["content"] == "":
        sent["content"] = None
    if message["role"] == "assistant" and style:
        called = message["tool_calls"] or None
        sent["tool_calls"] = called and [
            {"function": {**c["function"], "arguments": json.loads(c["function"]["arguments"])}, "index": 0}
            for c in called
        ]
        sent["content"] = f" {sent['content']}\n" if isinstance(sent["content"], str) else sent["content"]
    return sent


@given(conversations, st.lists(st.integers(0, 2), min_size=6, max_size=6))
def test_what_agents_drop_or_write_in_another_form_does_not_count(conversation, styles):
    sent = [as_agents_send_it(message, style) for message, style in zip(conversation, styles, strict=False)]
    assert chain_of({}, sent) == chain_of({}, conversation)


@given(conversations, conversations)
def test_two_chains_are_equal_up_to_the_first_message_that_differs(a, b):
    same = 0
    while same < min(len(a), len(b)) and canonical(a[same]) == canonical(b[same]):
        same += 1
    ours, theirs = chain_of({}, a), chain_of({}, b)
    assert ours[:same] == theirs[:same]
    assert not set(ours[same:]) & set(theirs[same:])


@given(conversations, messages)
def test_the_digest_with_an_answer_is_that_of_the_conversation_that_follows(conversation, answer):
    assert chain_with(chain_of({}, conversation), answer) == chain_of({}, [*conversation, answer])[-1]


@pytest.mark.parametrize(
    "fields", [{"tools": [{"function": {"name": "f"}}]}, {"chat_template_kwargs": {"a": 1}}, {"chat_template": "x"}]
)
def test_a_conversation_that_is_rendered_in_another_way_is_another_one(fields):
    conversation = [{"role": "user", "content": "a"}]
    assert chain_of(fields, conversation) != chain_of({}, conversation)
    assert chain_of({"temperature": 1.0, "tools": []}, conversation) == chain_of({}, conversation)


@pytest.mark.parametrize(
    "message",
    [
        {"role": 1, "content": 2},
        {"role": "user", "content": [1, {"text": 2}]},
        {"role": "assistant", "tool_calls": [1, {"function": 2}, {"function": {"arguments": "{"}}]},
        {"role": "assistant", "tool_calls": [{"function": {"arguments": "[" * 5000}}]},
        {},
    ],
)
def test_messages_of_wrong_types_have_a_digest_too(message):
    assert len(chain_of({}, [message])) == 1
