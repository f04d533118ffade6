"""Anthropic's reply to a chat: one message, or its events."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from starlette.responses import Response

from fastdeploy.client.choice import ChoiceDelta
from fastdeploy.http.context import ServingContext
from fastdeploy.http.openai.chat import ChatView
from fastdeploy.http.openai.responses import EventStream, JsonResponse

# "pause_turn" says that the answer was cut, and may be continued.
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "abort": "pause_turn"}


class MessagesReply:
    """The reply in Anthropic's shape. view: the same reply in OpenAI's shape."""

    def __init__(self, context: ServingContext, view: ChatView, streams: bool):
        self._context = context
        self._view = view
        self._streams = streams
        self._blocks = BlockEvents()
        self._started = False

    def response(self) -> Response:
        generation = self._view.generation
        if self._streams:
            return MessageStream(generation, self._events, self._last_events, self._context.config.keepalive_s)
        return JsonResponse(generation, self._body, self._view.choices)

    async def _body(self) -> dict[str, Any]:
        choice = (await self._view.choices())[0]
        return self._message(blocks_of(choice["message"])) | self._end(choice["finish_reason"])

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        generation = self._view.generation
        return {
            "id": generation.request_id,
            "type": "message",
            "role": "assistant",
            "model": self._context.model_name(generation.adapters[0]),
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, int]:
        generation = self._view.generation
        cached = generation.cached_tokens[0]
        return {
            "input_tokens": len(generation.prompts[0]) - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": generation.completion_tokens,
        }

    def _end(self, finish_reason: str) -> dict[str, Any]:
        stop = self._view.generation.choices[0].stop_reason
        sequence = stop if finish_reason == "stop" and isinstance(stop, str) else None
        reason = "stop_sequence" if sequence is not None else STOP_REASONS.get(finish_reason, finish_reason)
        return {"stop_reason": reason, "stop_sequence": sequence}

    async def _events(self, index: int, delta: ChoiceDelta) -> list[dict[str, Any]]:
        events = [] if self._started else [{"type": "message_start", "message": self._message([])}]
        self._started = True
        for chunk in await self._view.events(index, delta):
            (choice,) = chunk["choices"]
            events += self._blocks.of(choice["delta"])
            if (reason := choice["finish_reason"]) is not None:
                events += self._blocks.end()
                events.append({"type": "message_delta", "delta": self._end(reason), "usage": self._usage()})
        return events

    def _last_events(self) -> Iterable[dict[str, Any]]:
        return [{"type": "message_stop"}]


class BlockEvents:
    """The events of content blocks. A block begins where the kind of content changes, and with each tool call."""

    def __init__(self) -> None:
        self._kind = ""
        self._index = -1

    def of(self, delta: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the events of a delta of OpenAI's."""
        events: list[dict[str, Any]] = []
        if text := delta.get("reasoning_content"):
            events += self._begin("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            events.append(self._delta({"type": "thinking_delta", "thinking": text}))
        if text := delta.get("content"):
            events += self._begin("text", {"type": "text", "text": ""})
            events.append(self._delta({"type": "text_delta", "text": text}))
        for call in delta.get("tool_calls") or ():
            function = call.get("function") or {}
            if call.get("id"):
                block = {"type": "tool_use", "id": call["id"], "name": function.get("name"), "input": {}}
                events += self._begin(f"tool {call['id']}", block)
            if arguments := function.get("arguments"):
                events.append(self._delta({"type": "input_json_delta", "partial_json": arguments}))
        return events

    def _begin(self, kind: str, block: dict[str, Any]) -> list[dict[str, Any]]:
        if kind == self._kind:
            return []
        ended = self.end()
        self._kind = kind
        self._index += 1
        return [*ended, {"type": "content_block_start", "index": self._index, "content_block": block}]

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def end(self) -> list[dict[str, Any]]:
        """Return the event that ends the block that is open, if one is."""
        if not self._kind:
            return []
        self._kind = ""
        return [{"type": "content_block_stop", "index": self._index}]


def blocks_of(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the content blocks of a message of OpenAI's."""
    blocks: list[dict[str, Any]] = []
    if reasoning := message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": reasoning, "signature": ""})
    if content := message.get("content"):
        blocks.append({"type": "text", "text": content})
    for call in message.get("tool_calls") or ():
        function = call["function"]
        arguments = msgspec.json.decode(function["arguments"] or "{}")
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments})
    return blocks


class MessageStream(EventStream):
    """A stream whose events have names, as Anthropic's clients read them. Nothing follows the last event."""

    done = b""

    def _event(self, payload: dict) -> bytes:
        if "type" not in payload:
            payload = {"type": "error", **payload}
        return b"event: " + payload["type"].encode() + b"\n" + super()._event(payload)
