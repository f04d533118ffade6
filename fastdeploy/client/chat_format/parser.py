"""The message in the text of an answer: reasoning, content and tool calls, found while the text grows."""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache
from typing import NamedTuple

from fastdeploy.client.chat_format.call_syntax import BrokenCall, Call, Tools
from fastdeploy.client.chat_format.formats import ChatFormat

BARE_CALL = re.compile(r'\{\s*"name"')
OPEN_OBJECT = "{"


class MessageDelta(NamedTuple):
    """What a part of the text adds to the message. errors: why text that looks like a tool call is none. Such text is
    content."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    errors: tuple[str, ...] = ()


class ChatParser:
    """The parser of one answer. The deltas of :meth:`feed` and :meth:`finish`, joined, do not depend on how the text
    was cut into parts. A tool call is in one delta, since nothing that was sent can be taken back.

    tools: the functions that may be called, with the schemas of their arguments. in_reasoning: the prompt ends inside
    of reasoning. one_call: a second call is broken.

    White space around reasoning and calls belongs to the format. Content without both stays as it is.
    """

    def __init__(self, format: ChatFormat, tools: Tools, in_reasoning: bool = False, one_call: bool = False):
        self._format = format
        self._tools = tools
        self._one_call = one_call
        self._state = "reasoning" if in_reasoning and format.reasoning is not None else "content"
        self._held = ""  # text that may become a marker
        self._gap: list[str] = []  # white space that may stand before a marker
        self._written = False  # content has begun
        self._reasoning_begun = False
        self._plain = self._state == "content"  # neither reasoning nor a call so far
        self._opener, self._call = "", [""]
        self.num_calls = 0
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[Call] = []
        self._errors: list[str] = []

    def feed(self, text: str) -> MessageDelta:
        """Add text, and return what is certain now."""
        if not self._format.markers:
            return MessageDelta(text)
        self._scan(text)
        return self._delta()

    def finish(self, finish_reason: str | None) -> MessageDelta:
        """Return the rest of the message. A call without its end counts only if the answer ended by "stop", since a
        stop string or token may be the end."""
        rest, self._held = self._held, ""
        self._take(rest)
        if self._state == "call":
            self._end_call("" if finish_reason == "stop" else f"the answer ended with {finish_reason} inside of a call")
        if self._plain:
            self._content += self._gap
        return self._delta()

    def _scan(self, new: str) -> None:
        text, at = self._held + new, 0
        while True:
            markers = markers_of(self._format, self._state)
            found = markers.pattern.search(text, at) if markers.texts else None
            if found is None:
                break
            self._take(text[at : found.start()])
            at = found.end()
            self._mark(found[0])
        cut = len(text) - min(markers.held_back(text), len(text) - at)
        self._held = text[cut:]
        self._take(text[at:cut])

    def _take(self, text: str) -> None:
        """Add text without markers to the part of the message that the parser is in."""
        if self._state == "call":
            self._call.append(text)
            return
        if not text.strip():
            self._gap.append(text)
            return
        text = "".join(self._gap) + text
        body = text.rstrip()
        self._gap = [text[len(body) :]]
        if self._state == "reasoning":
            self._reasoning.append(body if self._reasoning_begun else body.lstrip())
            self._reasoning_begun = True
        else:
            self._content.append(body if self._written or self._plain else body.lstrip())
            self._written = True

    def _mark(self, marker: str) -> None:
        """Go on behind a marker."""
        reasoning, calls = self._format
        if self._state == "call":
            self._end_call("", marker)
        elif reasoning is not None and self._state == "reasoning":
            if marker == reasoning.closes:
                self._state, self._gap = "content", []
            elif self._reasoning_begun:
                self._take(marker)
        elif reasoning is not None and marker == reasoning.opens and not self._written and self._plain:
            self._state, self._gap, self._plain = "reasoning", [], False
        elif calls is not None and marker == calls.opens:
            self._state, self._opener, self._call = "call", marker, []
        elif calls is not None and calls.bare and marker == OPEN_OBJECT and not self._written:
            self._state, self._opener, self._call = "call", "", [marker]
        elif is_dropped(self._format, marker):
            self._plain = False
        else:
            self._take(marker)

    def _end_call(self, broken: str, closer: str = "") -> None:
        """End a call. broken: why it is none. closer: the marker at its end."""
        text = "".join(self._call)
        self._state = "content"
        try:
            if broken:
                raise BrokenCall(broken)
            self._add_calls(text)
            self._gap, self._plain = [], False
        except BrokenCall as error:
            if self._opener or BARE_CALL.match(text):
                self._errors.append(str(error))
            self._take(self._opener + text + closer)

    def _add_calls(self, text: str) -> None:
        assert self._format.tool_calls is not None
        calls = self._format.tool_calls.read(text, self._tools)
        if not calls:
            raise BrokenCall("expected a call")
        if self._one_call and self.num_calls + len(calls) > 1:
            raise BrokenCall("parallel_tool_calls is false, and there is more than one call")
        self._calls += calls
        self.num_calls += len(calls)

    def _delta(self) -> MessageDelta:
        delta = MessageDelta("".join(self._content), "".join(self._reasoning), tuple(self._calls), tuple(self._errors))
        self._content, self._reasoning, self._calls, self._errors = [], [], [], []
        return delta


class Markers(NamedTuple):
    """The markers that count in one state of the parser."""

    texts: tuple[str, ...]
    pattern: re.Pattern[str]

    def held_back(self, text: str) -> int:
        """Return the length of the longest end of ``text`` that may become a marker."""
        longest = max(map(len, self.texts), default=1) - 1
        ends = (text[-size:] for size in range(min(longest, len(text)), 0, -1))
        return next((len(end) for end in ends if any(marker.startswith(end) for marker in self.texts)), 0)


@lru_cache(maxsize=64)
def markers_of(format: ChatFormat, state: str) -> Markers:
    """Return the markers that count in ``state``."""
    reasoning, calls = format
    if state == "call":
        texts = [calls.closes] if calls is not None else []
    elif state == "reasoning":
        texts = [reasoning.closes, reasoning.opens] if reasoning is not None else []
    else:
        texts = [] if reasoning is None else [reasoning.opens, *reasoning.dropped]
        if calls is not None:
            texts += [calls.opens, *calls.dropped, *([OPEN_OBJECT] if calls.bare else [])]
    kept = tuple(text for text in texts if text)
    return Markers(kept, re.compile("|".join(map(re.escape, kept))))


def is_dropped(format: ChatFormat, marker: str) -> bool:
    return any(part is not None and marker in part.dropped for part in format)


def call_id(request_id: str, choice: int, index: int) -> str:
    """Return the id of a tool call. It is the same whenever the same result is read."""
    digest = hashlib.sha256(f"{request_id}/{choice}/{index}".encode()).hexdigest()
    return f"call_{digest[:24]}"
