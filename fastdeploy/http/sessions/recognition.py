"""Recognition of earlier turns in the messages of a request.

Agents send the whole conversation again with each request. They drop what they do not know (``reasoning_content``,
token ids) and keep what the model said. So two messages count as equal if these are equal: the role, the text, the
names and arguments of tool calls, and the ``tool_call_id`` of a tool's result. White space around the text of an answer
does not count, since some agents strip it.

A conversation has a digest, made of the digest without its last message and of this message. So the digests of all
beginnings of a conversation are a **chain**, which takes time in proportion to the conversation once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

DIGEST_BYTES = 16
# Fields of a request that decide, with the messages, which text the chat template renders.
RENDERED = ("tools", "chat_template", "chat_template_kwargs", "reasoning_effort")
_encode = msgspec.json.Encoder(order="deterministic").encode


def chain_of(body: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """Return the digests of the first message, of the first two, and so on. body: the fields of the request."""
    rendered = {name: body[name] for name in RENDERED if body.get(name)}
    digest, chain = _digest(b"", _encode(rendered)), []
    for message in messages:
        digest = _digest(digest, _encode(canonical(message)))
        chain.append(digest)
    return chain


def chain_with(
    chain: Sequence[bytes], answer: Mapping[str, Any], begun: Mapping[str, Any] | None = None
) -> bytes | None:
    """Return the digest of a conversation with its answer. chain: of the conversation. begun: its last message, if the
    answer continues it; agents send both back as one message. None for a conversation that is nothing but this one."""
    if begun is None:
        return _digest(chain[-1], _encode(canonical(answer)))
    if len(chain) < 2:
        return None
    text = text_of(begun.get("content")) + text_of(answer.get("content"))
    whole = canonical({**begun, "content": text})
    whole[2] += canonical(answer)[2]
    return _digest(chain[-2], _encode(whole))


def canonical(message: Mapping[str, Any]) -> list[Any]:
    """Return what of a message is compared. Values of wrong types are compared as they are: the route refuses them."""
    role = message.get("role")
    text = text_of(message.get("content"))
    if role == "assistant" and isinstance(text, str):
        text = text.strip()
    calls = message.get("tool_calls")
    called = [_call(call) for call in calls] if isinstance(calls, list) else []
    return [role, text, called, message.get("tool_call_id") if role == "tool" else None]


def text_of(content: Any) -> Any:
    """Return a content as one text: "" for none, and its parts joined."""
    if content is None:
        return ""
    if isinstance(content, list) and all(isinstance(part, Mapping) for part in content):
        texts = [part.get("text") for part in content]
        return "".join(texts) if all(isinstance(text, str) for text in texts) else content
    return content


def _call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments or "{}")
        except (msgspec.DecodeError, RecursionError):
            arguments = [arguments]  # no arguments that were parsed are a list
    return [function.get("name"), arguments]


def _digest(*parts: bytes) -> bytes:
    return hashlib.blake2b(b"".join(parts), digest_size=DIGEST_BYTES).digest()
