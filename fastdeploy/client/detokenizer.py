"""Incremental decoding in whole characters, and the search for stop strings in the text."""

from __future__ import annotations

import codecs
import os
from collections.abc import Container, Sequence
from functools import lru_cache
from typing import NamedTuple

from fastdeploy.client.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"


class IncrementalDecoder:
    """The text of a growing sequence of ids. The returned texts, joined, are the decoding of all ids.

    The tokens before are context (``Tokenizer.context``), also those of ``prompt``, which may end inside a character.
    length: how many ids of the prompt count; None = all. kept: special tokens that have their text all the same.

    Text that a later token can change is held back. That is one U+FFFD at the end, which may be an incomplete
    character, and a run of byte tokens (``Tokenizer.byte_tokens``), since one bad byte makes U+FFFD of the whole run.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        skip_special_tokens: bool = True,
        length: int | None = None,
        kept: frozenset[int] = frozenset(),
    ):
        self._tokenizer = tokenizer
        self._num_ids, self._silent = tokenizer.num_ids, tokenizer.ids_without_text(skip_special_tokens, kept)
        self._decode, self._skip = tokenizer.decode, skip_special_tokens and not kept
        self._bytes = tokenizer.byte_tokens
        self._max_window = 2 * tokenizer.context - 1  # a longer window is cut to the context
        self._run: Run | None = None  # of byte tokens, at the end
        self._window = self._context(prompt, len(prompt) if length is None else length)
        for token in self._window[_run_start(self._window, self._bytes) :]:
            self._add_byte(token)
        self._shown = self._whole()  # of the window's text: what is in the prompt, or was returned

    def _context(self, prompt: Sequence[int], length: int) -> list[int]:
        """Return the last ids of the prompt that have text, as many as the context needs. If the first of these is a
        byte token, also the rest of its run and the token before."""
        ids: list[int] = []
        for position in range(length - 1, -1, -1):
            if self._has_text(token := prompt[position]):
                ids.append(token)
                if len(ids) >= self._tokenizer.context and token not in self._bytes:
                    break
        return ids[::-1]

    def _has_text(self, token_id: int) -> bool:
        return token_id not in self._silent and token_id < self._num_ids

    def push(self, token_id: int) -> str:
        """Add one token, and return the text that is certain now."""
        if token_id in self._silent or token_id >= self._num_ids:
            return ""
        self._window.append(token_id)
        if token_id in self._bytes:
            self._add_byte(token_id)
            return ""
        return self._advance()

    def extend(self, token_ids: Sequence[int]) -> str:
        """Add many tokens at once. The result is that of :meth:`push` for each of them."""
        ids = [token for token in token_ids if self._has_text(token)]
        end = _run_start(ids, self._bytes)
        self._window += ids[:end]
        return (self._advance() if end else "") + "".join(map(self.push, ids[end:]))

    def run_end(self, length: int) -> str:
        """Return the last ``length`` characters of the run of byte tokens at the end, if they are valid so far."""
        return "".join(self._run.characters[-length:]) if self._run is not None else ""

    def rest(self) -> str:
        """Return the text that is held back, as it is if no token follows."""
        return _behind(self._shown, self._whole())

    def _add_byte(self, token_id: int) -> None:
        if self._run is None:
            self._run = Run()
        self._run.add(self._bytes[token_id])

    def _advance(self) -> str:
        """Return the new text behind a token that is no byte."""
        self._run = None
        text, shown = self._decode(self._window, self._skip).removesuffix(REPLACEMENT), self._shown
        if text.startswith(shown):
            new, self._shown = text[len(shown) :], text
        elif shown.startswith(text):  # the prompt ends inside a character, and so does the output
            return ""
        else:
            new, self._shown = _behind(shown, text), text
        if len(self._window) > self._max_window:
            self._window = self._window[-self._tokenizer.context :]
            whole = self._tokenizer.token_text(self._window[0]) if len(self._window) == 1 else self._whole()
            self._shown = whole.removesuffix(REPLACEMENT)
        return new

    def _whole(self) -> str:
        return self._decode(self._window, self._skip)


class Run:
    """Byte tokens in a row. characters: those that are complete; none if a byte is bad."""

    def __init__(self) -> None:
        self.characters: list[str] = []
        self._decoder: codecs.IncrementalDecoder | None = codecs.getincrementaldecoder("utf-8")()

    def add(self, byte: int) -> None:
        if self._decoder is not None:
            try:
                self.characters += self._decoder.decode(bytes((byte,)))
            except UnicodeDecodeError:
                self.characters, self._decoder = [], None


def _run_start(ids: Sequence[int], byte_tokens: Container[int]) -> int:
    """Return the index of the first of the byte tokens at the end."""
    return next((i for i in range(len(ids), 0, -1) if ids[i - 1] not in byte_tokens), 0)


def _behind(shown: str, text: str) -> str:
    """Return the part of ``text`` that is not shown. Where the prompt, which is shown, ends inside a character, the
    whole character counts as not shown."""
    return text[len(os.path.commonprefix((shown, text))) :]


class StopHit(NamedTuple):
    """A stop string in the text. cut: index of its first character."""

    stop: str
    cut: int


class StopSearch:
    """A search for stop strings in a text that grows by :meth:`push`. The time is linear in the length of the text, and
    does not depend on the number of stop strings (Aho and Corasick, 1975)."""

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
