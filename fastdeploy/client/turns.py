"""The prompt of a later turn, when the token ids of an earlier turn are known: those ids, and the ids of the new text
only. So the tokens that the model sampled stay what they were, and the tokenizer's work grows with the new text."""

from __future__ import annotations

import uuid
from collections.abc import Collection
from typing import Any, AnyStr, NamedTuple

from fastdeploy.client.tokenizer import Tokenizer
from fastdeploy.core.errors import InvalidField

Message = dict[str, Any]
# Fields of an assistant's message that hold its reasoning, by the names that templates read.
REASONING = frozenset({"reasoning_content", "reasoning", "thinking"})


class KnownTurn(NamedTuple):
    """An assistant's turn whose token ids are known.

    num_messages: how many of the conversation's messages the ids stand for; the assistant's message is the last of
    them. token_ids: the prompt of that turn, and the tokens that were sampled."""

    num_messages: int
    token_ids: list[int]


async def extend(
    tokenizer: Tokenizer, messages: list[Message], known: KnownTurn, end_ids: Collection[int], **template: Any
) -> list[int] | None:
    """Return the prompt of ``messages``: ``known.token_ids``, and the ids of the text after that turn.

    The turn's end is in the prompt once: it is added if the turn was cut before it, by a stop string or by its length.
    None if the template gives no text from which the turn's end can be told. Raises InvalidField if it refuses the
    conversation.

    end_ids: the model's EOS tokens. template: the other arguments of Tokenizer.chat_text."""
    rest = await _rest(tokenizer, messages, known.num_messages, end_ids, template)
    if rest is None:
        return None
    ids = await tokenizer.encode(rest.text, add_special_tokens=False)
    return known.token_ids + ids[_num_known(tokenizer, ids, known.token_ids[-1:], end_ids, rest.has_end) :]


class _Rest(NamedTuple):
    """The text after a turn's content. has_end: the template writes an end behind a turn. Otherwise the next message
    begins at once, as with GLM."""

    text: str
    has_end: bool


async def _rest(
    tokenizer: Tokenizer, messages: list[Message], num_messages: int, end_ids: Collection[int], template: dict[str, Any]
) -> _Rest | None:
    """Find the text after the turn in the rendered conversation.

    The turn is rendered with a mark as its content, since its true text may be changed or left out: Qwen3 drops earlier
    reasoning. Where a template does not write the content, as many do beside tool calls, the text is found as the part
    that the conversation up to this turn does not have."""
    whole = await tokenizer.chat_text(messages, **template)
    alone = template | {"add_generation_prompt": False, "continue_final_message": False}
    mark = f"x{uuid.uuid4().hex}"
    turn = {name: value for name, value in messages[num_messages - 1].items() if name not in REASONING}
    marked = [*messages[: num_messages - 1], turn | {"content": mark}, *messages[num_messages:]]
    after = _after(await _taken(tokenizer, marked, template), mark)
    end = _after(await _taken(tokenizer, marked[:num_messages], alone), mark)
    rest = None
    if after is not None and end is not None:
        has_calls = bool(turn.get("tool_calls"))
        rest = _behind_shared(tokenizer, after, end, end_ids) if has_calls else _Rest(after, bool(end.strip()))
    if rest is not None and whole.endswith(rest.text):
        return rest
    written = await _taken(tokenizer, messages[:num_messages], alone)
    return None if written is None else _behind_shared(tokenizer, whole, written, end_ids)


async def _taken(tokenizer: Tokenizer, messages: list[Message], template: dict[str, Any]) -> str | None:
    """Return the text of ``messages``, or None if the template refuses them: some take no text beside tool calls, or
    no conversation that ends with an assistant's turn."""
    try:
        return await tokenizer.chat_text(messages, **template)
    except InvalidField:
        return None


def _after(text: str | None, mark: str) -> str | None:
    return text.partition(mark)[2] if text is not None and text.count(mark) == 1 else None


def _behind_shared(tokenizer: Tokenizer, after: str, turn: str, end_ids: Collection[int]) -> _Rest | None:
    """Return the rest of ``after`` behind the turn. ``turn`` is the same text without the later messages. None if the
    turn is written in another way when messages follow it."""
    shared = common_beginning(after, turn)
    if turn[len(shared) :].strip():
        return None
    written = shared.rstrip()
    for end in map(tokenizer.token_text, sorted(end_ids)):
        if end and written.endswith(end):
            return _Rest(after[len(written) - len(end) :], True)
    return _Rest(after[len(shared) :], False)


def common_beginning(a: AnyStr, b: AnyStr) -> AnyStr:
    """Return what both begin with. They are compared in large pieces: both may be whole conversations."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a.startswith(b[low:middle], low) else (low, middle - 1)
    return a[:low]


def _num_known(tokenizer: Tokenizer, ids: list[int], last: list[int], end_ids: Collection[int], has_end: bool) -> int:
    """Return how many of ``ids`` are the end of the turn that the known ids have already. last: the last known id, as a
    list. Its end may have another id than in the template: gpt-oss samples <|return|>, and <|end|> is written."""
    special = tokenizer.ids_without_text(skip_special_tokens=True)
    for i, token in enumerate(ids):
        if [token] == last or token in special or token in end_ids:
            ended = [token] == last or (has_end and last and last[0] in end_ids)
            return i + 1 if ended else 0
        if tokenizer.token_text(token).strip():
            return 0
    return 0
