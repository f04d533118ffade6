"""The messages of a chat's reply: text of choices to content, reasoning and tool calls, whole or as deltas."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fastdeploy.client.chat_format.call_syntax import Call
from fastdeploy.client.chat_format.parser import ChatParser, MessageDelta, call_id
from fastdeploy.client.choice import Choice, ChoiceDelta
from fastdeploy.client.generation import Generation
from fastdeploy.http.context import ServingContext
from fastdeploy.http.openai.chat_tools import answer_format, in_reasoning
from fastdeploy.http.openai.protocol import ChatBody


class ReplyMessages:
    """The messages of one generation, one for each choice. ``content`` is a string in all of them."""

    def __init__(self, context: ServingContext, generation: Generation, body: ChatBody):
        self._answer = answer_format(context, body)
        self._shows_reasoning = body.include_reasoning is not False
        prompt = generation.prompts[0]
        self._starts_in_reasoning = in_reasoning(context, self._answer.format, body, prompt)
        self._ids = f"{generation.request_id}/{len(prompt) - body.request_fields.resumed_tokens}"
        self._parsers: dict[int, ChatParser] = {}

    def whole(self, index: int, choice: Choice) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the message of a choice, and further fields of the choice."""
        parser = self._parsers[index] = self._parser()
        added = joined([parser.feed(choice.text), parser.finish(choice.finish_reason)])
        message = {"role": "assistant", "content": added.content, **self._extra(index, added, first_call=0)}
        return message, {} if not added.errors else {"tool_call_errors": added.errors}

    def delta(self, index: int, delta: ChoiceDelta) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what ``delta`` adds to the message of a choice, and further fields of the choice."""
        first = index not in self._parsers
        if first:
            self._parsers[index] = self._parser()
        parser = self._parsers[index]
        num_calls = parser.num_calls
        added = parser.feed(delta.text)
        if delta.finish_reason is not None:
            added = joined([added, parser.finish(delta.finish_reason)])
        shown: dict[str, Any] = {"role": "assistant"} if first else {}
        extra = self._extra(index, added, num_calls, streams=True)
        if first or added.content or not extra:
            shown["content"] = added.content
        return shown | extra, {} if not added.errors else {"tool_call_errors": added.errors}

    def finish_reason(self, index: int, finish_reason: str | None) -> str | None:
        """Return "tool_calls" in place of "stop" for a choice with tool calls."""
        return "tool_calls" if finish_reason == "stop" and self._parsers[index].num_calls else finish_reason

    def _parser(self) -> ChatParser:
        answer = self._answer
        return ChatParser(answer.format, answer.tools, self._starts_in_reasoning, answer.one_call)

    def _extra(self, index: int, added: MessageDelta, first_call: int, streams: bool = False) -> dict[str, Any]:
        """Return the fields of a message that only some messages have."""
        fields: dict[str, Any] = {}
        if added.reasoning and self._shows_reasoning:
            fields["reasoning_content"] = added.reasoning
        if added.calls:
            calls = enumerate(added.calls, first_call)
            fields["tool_calls"] = [self._call(index, number, call, streams) for number, call in calls]
        return fields

    def _call(self, index: int, number: int, call: Call, streams: bool) -> dict[str, Any]:
        shown = {"id": call_id(self._ids, index, number), "type": "function", "function": call._asdict()}
        return {"index": number, **shown} if streams else shown


def joined(deltas: Iterable[MessageDelta]) -> MessageDelta:
    """Join consecutive deltas of one message."""
    content, reasoning, calls, errors = zip(*deltas, strict=True)
    return MessageDelta("".join(content), "".join(reasoning), sum(calls, ()), sum(errors, ()))
