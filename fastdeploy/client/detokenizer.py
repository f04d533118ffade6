"""Incremental decoding in whole characters, and the search for stop strings in the text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from fastdeploy.client.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
CONTEXT = 6
# A character has at most four bytes. If more tokens than that end in U+FFFD, their bytes are not UTF-8.
MAX_PENDING = 4


class IncrementalDecoder:
    """Text of a growing sequence of ids. The returned texts, joined, are the decoding of all ids.

    A few prompt tokens are context: the text of a token can depend on the token before, and a prompt that continues
    an aborted answer may end inside a character.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_tail: Sequence[int], skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window = list(prompt_tail[-CONTEXT:])
        self._shown_ids = len(self._window)  # of the window, with the text that is returned already
        self._shown = self._decode(self._window)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, self._skip)

    def push(self, token_id: int) -> str:
        """Add one token, and return the text that is certain now."""
        self._window.append(token_id)
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT) and len(self._window) - self._shown_ids <= MAX_PENDING:
            return ""
        return self._advance(text)

    def extend(self, token_ids: Sequence[int]) -> str:
        """Add many tokens at once. The result is that of :meth:`push` for each of them."""
        window = [*self._window, *token_ids]
        text = self._decode(window)
        if text.endswith(REPLACEMENT):  # an incomplete character, or bytes that are not UTF-8
            return "".join(map(self.push, token_ids))
        self._window = window
        return self._advance(text)

    def flush(self) -> str:
        """Return the rest of the text, after the last token."""
        return self._advance(self._decode(self._window))

    def _advance(self, text: str) -> str:
        # An incomplete character at the end is decoded as one U+FFFD. The complete character replaces it.
        shown = self._shown if text.startswith(self._shown) else self._shown.removesuffix(REPLACEMENT)
        new = text[len(shown) :]
        self._window = self._window[max(self._shown_ids - 1, 0) :]
        self._shown_ids = len(self._window)
        self._shown = self._decode(self._window)
        return new


class StopHit(NamedTuple):
    """A stop string in the text. cut: index of its first character."""

    stop: str
    cut: int


class StopSearch:
    """Finds stop strings in a text that grows by :meth:`push`. The time is linear in the length of the text, and does
    not depend on the number of stop strings (Aho and Corasick, 1975)."""

    def __init__(self, stops: Sequence[str]):
        self._automaton = compile_stops(tuple(stops))
        self._state = 0
        self._length = 0

    def push(self, new: str) -> StopHit | None:
        """Add ``new`` to the text. Of the stop strings that end in ``new``, return the one that begins first; of two
        that begin together, the one that the request names first."""
        automaton, state, best = self._automaton, self._state, None
        for end, character in enumerate(new, self._length + 1):
            state = automaton.step(state, character)
            if (order := automaton.found[state]) is not None:
                hit = (end - len(automaton.stops[order]), order)
                best = hit if best is None else min(best, hit)
        self._state = state
        self._length += len(new)
        return None if best is None else StopHit(automaton.stops[best[1]], best[0])

    @property
    def held_back(self) -> int:
        """Length of the longest end of the text that is an incomplete beginning of a stop string."""
        return self._automaton.held[self._state]


class StopAutomaton:
    """A trie of all stop strings. Each state stands for a beginning of a stop string, the text of the state; state 0 is
    the empty text.

    found: the longest stop string at the end of a state's text, as an index of ``stops``, or None. held: length of the
    longest end of a state's text that is an incomplete beginning of a stop string.
    """

    def __init__(self, stops: tuple[str, ...]):
        self.stops = stops
        self._children: list[dict[str, int]] = [{}]
        self._fallback = [0]  # by state: the other state whose text is the longest end of its text
        self.found: list[int | None] = [None]
        self.held = [0]
        for order, stop in enumerate(stops):
            self._add(stop, order)
        self._link()

    def _add(self, stop: str, order: int) -> None:
        state = 0
        for character in stop:
            child = self._children[state].get(character)
            if child is None:
                child = self._children[state][character] = len(self._children)
                self._children.append({})
                self._fallback.append(0)
                self.found.append(None)
                self.held.append(0)
            state = child
        if self.found[state] is None:
            self.found[state] = order

    def _link(self) -> None:
        """Set ``_fallback``, ``found`` and ``held`` of all states, shorter texts first."""
        layer, depth = list(self._children[0].values()), 1
        for child in layer:
            self.held[child] = depth if self._children[child] else 0
        while layer:
            depth += 1
            parents, layer = layer, []
            for parent in parents:
                for character, child in self._children[parent].items():
                    other = self._fallback[child] = self.step(self._fallback[parent], character)
                    if self.found[child] is None:
                        self.found[child] = self.found[other]
                    self.held[child] = depth if self._children[child] else self.held[other]
                    layer.append(child)

    def step(self, state: int, character: str) -> int:
        """Return the state after ``character``."""
        while (child := self._children[state].get(character)) is None:
            if state == 0:
                return 0
            state = self._fallback[state]
        return child


@lru_cache(maxsize=32)
def compile_stops(stops: tuple[str, ...]) -> StopAutomaton:
    """Return the automaton of ``stops``, which all choices with equal stop strings share."""
    return StopAutomaton(stops)
