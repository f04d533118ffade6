"""The timeline of one stream as its client saw it, and statistics of it. All times are time.perf_counter() seconds."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any


@dataclass(slots=True)
class TokenEvent:
    """A chunk of a stream, with tokens."""

    at: float
    token_ids: list[int]
    text: str = ""
    weight_versions: list[dict[str, Any]] = field(default_factory=list)

    @property
    def last_version(self) -> Any:
        """The version label of the last token; None without labels."""
        return self.weight_versions[-1]["version"] if self.weight_versions else None


@dataclass(slots=True)
class StreamLog:
    """All that arrived for one streamed request.

    finals: (time, finish_reason) of every chunk with a finish reason; a correct stream has exactly one.
    loose_text: text at the end that came without a token (held back for a stop string, or part of a character).
    status: HTTP status, 0 before the head. error: why the stream ended with an error, or None.
    used: the completion tokens that the server reported, which counts them where it sends no token ids; else 0.
    """

    request_id: str
    sent_at: float
    status: int = 0
    tokens: list[TokenEvent] = field(default_factory=list)
    finals: list[tuple[float, str]] = field(default_factory=list)
    loose_text: str = ""
    done_markers: int = 0
    comments: int = 0
    closed_at: float | None = None
    error: str | None = None
    used: int = 0
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def token_ids(self) -> list[int]:
        return [token for event in self.tokens for token in event.token_ids]

    @property
    def num_tokens(self) -> int:
        return sum(len(event.token_ids) for event in self.tokens) or self.used

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.tokens) + self.loose_text

    @property
    def reason(self) -> str | None:
        return self.finals[-1][1] if self.finals else None

    @property
    def ended_once(self) -> bool:
        """Whether the stream is correct: HTTP 200, one finish reason, then only one [DONE], no broken connection."""
        if self.status != 200 or self.error or len(self.finals) != 1 or self.done_markers != 1:
            return False
        return not self.tokens or self.tokens[-1].at <= self.finals[0][0]

    def fault(self, tokens: int) -> str | None:
        """Return what is wrong with a stream that should have ended once, with so many tokens; None if nothing is."""
        if self.ended_once and self.num_tokens == tokens:
            return None
        return f"HTTP {self.status}, {self.num_tokens} of {tokens} tokens: {self.error}"

    def tokens_between(self, start: float, end: float) -> int:
        return sum(len(event.token_ids) for event in self.tokens if start < event.at < end)

    def add_event(self, at: float, payload: bytes) -> None:
        """Add one event of a stream of OpenAI's completions or chats, which arrived at ``at``."""
        if payload == b"[DONE]":
            self.done_markers += 1
            return
        chunk = json.loads(payload)
        if "error" in chunk:
            error = chunk["error"]
            self.error = error.get("message", str(error)) if isinstance(error, dict) else str(error)
            return
        self.used = (chunk.get("usage") or {}).get("completion_tokens", self.used)
        for choice in chunk.get("choices", ()):
            delta = choice.get("delta") or {}
            ids = choice.get("token_ids") or []
            text = choice.get("text") or delta.get("content") or delta.get("reasoning_content") or ""
            if text and not ids and "token_ids" in choice:
                self.loose_text += text
            elif ids or text:
                self.tokens.append(TokenEvent(at, ids, text, choice.get("weight_versions") or []))
            if choice.get("finish_reason") is not None:
                self.finals.append((at, choice["finish_reason"]))


def gaps(log: StreamLog) -> list[float]:
    """Return the seconds between consecutive token chunks of one stream."""
    return [b.at - a.at for a, b in pairwise(log.tokens)]


def median_step(logs: Iterable[StreamLog], start: float, end: float) -> float:
    """Return the seconds between tokens from ``start`` to ``end``: the mean of each stream, median over streams; 0 if
    unknown.

    The median gap of one stream would be wrong: tokens of fast steps arrive in bursts, with most gaps near zero.
    """
    steps = []
    for log in logs:
        inside = [event for event in log.tokens if start <= event.at <= end]
        count = sum(len(event.token_ids) or 1 for event in inside[1:])
        if count:
            steps.append((inside[-1].at - inside[0].at) / count)
    return median(steps) if steps else 0.0


def is_prefix(part: Sequence[int], whole: Sequence[int]) -> bool:
    return list(part) == list(whole[: len(part)])


def uncovered(spans: Iterable[tuple[int, int]], count: int) -> str | None:
    """Return how the spans [start, end) fail to cover ``count`` tokens once and in order; None if they do."""
    at = 0
    for start, end in spans:
        if start != at or end <= start:
            return f"the span [{start}, {end}) follows token {at}"
        at = end
    return None if at == count else f"the spans cover {at} of {count} tokens"
