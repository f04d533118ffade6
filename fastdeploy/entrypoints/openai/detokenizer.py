"""Incremental decoding that never shows half a character, and the search for stop strings in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fastdeploy.entrypoints.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
CONTEXT = 6
# A character has at most four bytes: more tokens than that ending in U+FFFD are bytes that are no UTF-8.
MAX_PENDING = 4


class IncrementalDecoder:
    """Text of a growing id sequence: the concatenation of what is returned is the decoding of all ids.

    A few prompt tokens are context, since the text of a token can depend on the one before it, and since a prompt that
    continues an aborted answer may end inside a character.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_tail: Sequence[int], skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window = list(prompt_tail[-CONTEXT:])
        self._shown_ids = len(self._window)
        self._shown = self._decode(self._window)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, self._skip)

    def push(self, token_id: int) -> str:
        """Add one token; return the text that is certain now."""
        self._window.append(token_id)
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT) and len(self._window) - self._shown_ids <= MAX_PENDING:
            return ""
        return self._advance(text)

    def extend(self, token_ids: Sequence[int]) -> str:
        """Add many at once, as :meth:`push` would one by one."""
        window = [*self._window, *token_ids]
        text = self._decode(window)
        if text.endswith(REPLACEMENT):  # inside a character, or bytes that are none
            return "".join(map(self.push, token_ids))
        self._window = window
        return self._advance(text)

    def flush(self) -> str:
        """No more tokens: return what was held back."""
        return self._advance(self._decode(self._window))

    def _advance(self, text: str) -> str:
        # An incomplete character at the end reads as one U+FFFD, which gives way to the character.
        shown = self._shown if text.startswith(self._shown) else self._shown.removesuffix(REPLACEMENT)
        new = text[len(shown) :]
        self._window = self._window[max(self._shown_ids - 1, 0) :]
        self._shown_ids = len(self._window)
        self._shown = self._decode(self._window)
        return new


class StopHit(NamedTuple):
    """``stop`` completed in the text; ``cut`` is where it begins."""

    stop: str
    cut: int


class StopSearch:
    """Finds the first stop string in a growing text and tells how much of the text may be shown already."""

    def __init__(self, stops: Sequence[str]):
        self._stops = stops
        self._longest = max((len(s) for s in stops), default=0)

    def find(self, text: str, new: int) -> StopHit | None:
        """The earliest stop in ``text`` that ends in its last ``new`` characters."""
        old = len(text) - new
        hits = [StopHit(s, at) for s in self._stops if (at := text.find(s, max(old - len(s) + 1, 0))) >= 0]
        return min(hits, key=lambda hit: hit.cut, default=None)

    def held_back(self, text: str) -> int:
        """Length of the longest end of ``text`` that could be the beginning of a stop string."""
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[-size:]
            if any(stop.startswith(tail) for stop in self._stops):
                return size
        return 0
