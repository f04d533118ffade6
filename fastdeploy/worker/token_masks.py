"""Masks of the tokens that may be drawn, for sequences with a grammar, allowed_token_ids, bad_words or a limit of
reasoning.

The state of a grammar is a function of the grammar and of the sequence's output. So a sequence that comes back after a
preemption, a sleep or at another engine needs nothing but its tokens: a new matcher reads them again. The masks of a
step are made on a thread of their own while the layers compute.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fastdeploy.core.grammar import PARSER_LIMITS, compiling_thread
from fastdeploy.core.plan import NewSequence, NoneAllowed, NonFinite, Sampled, ScheduledChunk
from fastdeploy.model_executor.ops.vocabulary import TokenMasks
from fastdeploy.worker.reasoning_budget import ReasoningBudget
from fastdeploy.worker.sequences import Sequences

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

COMPILED = 64  # grammars that are kept compiled


class _State:
    """The masks of one sequence. matcher: has read ``num_read`` tokens of the output. ended: the grammar has ended with
    an EOS that the request ignores. why: set if the sequence can get no more tokens. allowed, banned: ids as bits.
    budget: of reasoning; made when all tokens of the prompt are known."""

    def __init__(self, new: NewSequence, words: int, compiled: Future[LLMatcher] | None):
        self.new = new
        self.compiled = compiled
        self.matcher: LLMatcher | None = None
        self.num_read = 0
        self.ended = False
        self.why = ""
        self.longest_bad_word = max(map(len, new.sampling.bad_words), default=0)
        ids = new.sampling.allowed_token_ids
        self.allowed = None if ids is None else _bits(ids, words)
        self.ends, self.banned = _bits(new.ends, words), _bits(new.banned, words)
        self.budget: ReasoningBudget | None = None

    def count_reasoning(self, known: np.ndarray) -> None:
        """Read the tokens of the sequence that are known now."""
        if self.new.sampling.reasoning_max_tokens is None:
            return
        start = self.new.num_prompt_tokens
        self.budget = self.budget or ReasoningBudget(self.new.sampling, known[:start].tolist())
        self.budget.read(known[start + self.budget.num_read :].tolist())

    def read(self, output: Sequence[int], end_id: int) -> None:
        """Read the next tokens of the output. end_id: see ``GrammarCompiler``."""
        if self.matcher is None:
            assert self.compiled is not None
            try:
                self.matcher = self.compiled.result().deep_copy()
            except Exception as error:  # of a tokenizer that llguidance cannot read
                self.why = f"this model's tokenizer cannot be used for grammars: {error}"
                return
        for token in output:
            self.ended = self.ended or token in self.new.ends
            if not self.why and not self.matcher.consume_token(end_id if self.ended else token):
                what = f"token {token} at position {self.num_read} of the output does not follow the grammar"
                self.why = f"{what}: {_error_of(self.matcher)}"
            self.num_read += 1
        if not self.why and self.matcher.is_error():
            self.why = f"the grammar cannot be followed: {_error_of(self.matcher)}"


class _Row(NamedTuple):
    """The rows of one sequence in a step: the first one, and one behind each draft. number: of the sequence among
    those that sample. position: of the token that the first one draws. unread: output tokens that the matcher has not
    read. output: the last tokens of the output before the first row, if there are bad words."""

    state: _State
    number: int
    first: int
    position: int
    unread: list[int]
    drafts: list[int]
    output: list[int]

    def restrict(self, mask: np.ndarray, k: int) -> None:
        """Take from the mask behind ``k`` drafts the ids that are not in allowed_token_ids, and the last ids of bad
        words; all but the next one of reasoning_end, where reasoning must end; and, before min_tokens, those that end
        the request, if others are left."""
        state = self.state
        if state.allowed is not None:
            mask &= state.allowed
        if state.budget is not None and (forced := state.budget.forced(self.drafts[:k])) is not None:
            mask[: forced // 32] = mask[forced // 32 + 1 :] = 0
            mask[forced // 32] &= np.uint32(1 << forced % 32)
        output = (*self.output, *self.drafts[:k])
        for word in state.new.sampling.bad_words:
            before, last = word[:-1], word[-1]
            if output[len(output) - len(before) :] == before:
                mask[last // 32] &= ~np.uint32(1 << last % 32)
        if self.position + k < state.new.banned_before:
            others = mask & ~state.banned
            if others.any():
                mask[:] = others


class GrammarCompiler:
    """The compiled grammars of a runner. end_id: the model's own EOS id, which stands for every end in a matcher.
    Everything is made when it is needed first, on a thread."""

    def __init__(self, tokenizer_file: Path, vocab_size: int, end_id: int):
        self._file, self._vocab_size, self.end_id = tokenizer_file, vocab_size, end_id
        self._thread: ThreadPoolExecutor | None = None
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()

    def compiled(self, grammar: str) -> Future[LLMatcher]:
        """Return the matcher of a grammar, to be copied. It is in an error state if the grammar cannot be compiled."""
        if grammar not in self._compiled:
            self._thread = self._thread or compiling_thread("grammars")
            self._compiled[grammar] = self._thread.submit(self._compile, grammar)
        self._compiled.move_to_end(grammar)
        while len(self._compiled) > COMPILED:
            self._compiled.popitem(last=False)
        return self._compiled[grammar]

    def _compile(self, grammar: str) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        self._tokenizer = self._tokenizer or self._load()
        return LLMatcher(self._tokenizer, grammar, log_level=0, limits=LLParserLimits(**PARSER_LIMITS))

    def _load(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        text = self._file.read_text(encoding="utf-8")
        try:
            return LLTokenizer(text, n_vocab=self._vocab_size, eos_token=self.end_id)
        except ValueError:  # it has more tokens than the model has logits
            return LLTokenizer(text, eos_token=self.end_id)


class TokenMaskMaker:
    """The masks of a runner's sequences. model_path: has the tokenizer.json that grammars need."""

    def __init__(self, model_path: str, vocab_size: int, eos_token_ids: Sequence[int]):
        file = Path(model_path) / "tokenizer.json"
        self._words = -(-vocab_size // 32)
        self._last = np.uint32(0xFFFFFFFF >> (self._words * 32 - vocab_size))  # the ids in the last word of a mask
        self._grammars = GrammarCompiler(file, vocab_size, eos_token_ids[0]) if eos_token_ids else None
        self.has_grammars = self._grammars is not None and file.is_file()
        self._states: dict[int, _State] = {}
        self._thread: ThreadPoolExecutor | None = None
        self._executor: LLExecutor | None = None

    def begin(self, chunks: list[ScheduledChunk], sampling: np.ndarray, known: Sequences) -> PendingMasks | None:
        """Begin to make the masks of a step; None if no row needs one. sampling: indices of the chunks that sample, in
        the order of their rows. known: has the tokens of the step."""
        for chunk in chunks:
            if chunk.new is not None:
                self._set(chunk.sequence, chunk.new)
        if not self._states:
            return None
        rows, first = [], 0
        for index, i in enumerate(sampling.tolist()):
            chunk = chunks[i]
            if (state := self._states.get(chunk.sequence)) is not None:
                end = chunk.start + chunk.num_known
                tokens = known.tokens[chunk.sequence]
                state.count_reasoning(tokens[:end])
                unread = tokens[state.new.num_prompt_tokens + state.num_read : end].tolist()
                drafts = tokens[end : end + chunk.drafted].tolist()
                output = tokens[max(end - state.longest_bad_word, state.new.num_prompt_tokens) : end].tolist()
                rows.append(_Row(state, index, first, end, unread, drafts, output))
            first += 1 + chunk.drafted
        if not rows:
            return None
        self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="masks")
        return PendingMasks(rows, self._thread.submit(self._make, rows))

    def _set(self, number: int, new: NewSequence) -> None:
        self._states.pop(number, None)
        sampling = new.sampling
        if sampling.is_masked:
            assert self._grammars is not None or not sampling.grammar, "a grammar for a model without a tokenizer"
            compiled = self._grammars.compiled(sampling.grammar) if self._grammars and sampling.grammar else None
            self._states[number] = _State(new, self._words, compiled)

    def _make(self, rows: list[_Row]) -> TokenMasks:
        """Make the masks of a step."""
        counts = [1 + len(row.drafts) for row in rows]
        bits = np.full((sum(counts), self._words), 0xFFFFFFFF, np.uint32)
        at = _firsts(rows)
        self._follow_grammars(rows, at, bits)
        bits[:, -1] &= self._last  # bits that are no ids would pass for allowed ones
        for row, first in zip(rows, at, strict=True):
            for k in range(1 + len(row.drafts)):
                row.restrict(bits[first + k], k)
        of_rows = [np.arange(row.first, row.first + count) for row, count in zip(rows, counts, strict=True)]
        return TokenMasks(np.concatenate(of_rows), bits)

    def _follow_grammars(self, rows: list[_Row], at: list[int], bits: np.ndarray) -> None:
        """Write the masks of the grammars. at: the first mask of each row."""
        with_grammar = [(row, first) for row, first in zip(rows, at, strict=True) if row.state.compiled is not None]
        if not with_grammar:
            return
        assert self._grammars is not None
        plain: list[tuple[LLMatcher, int]] = []
        drafted: list[tuple[LLMatcher, int, list[int]]] = []
        for row, first in with_grammar:
            row.state.read(row.unread, self._grammars.end_id)
            if row.state.why or row.state.matcher is None:
                continue
            if drafts := _before_end(row):
                drafted.append((row.state.matcher, first, drafts))
            else:
                plain.append((row.state.matcher, first))
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(max((os.cpu_count() or 1) // 4, 1))
        sizes = bits.ctypes.data, bits.shape[1] * 4, len(bits)
        if plain:
            self._executor.unsafe_compute_mask_ptr(plain, *sizes)
        if drafted:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, *sizes)
        _set_ends(with_grammar, bits, self._grammars.end_id)


def _set_ends(rows: list[tuple[_Row, int]], bits: np.ndarray, end_id: int) -> None:
    """Allow the ids that end a sequence where its matcher allows its own end, ``end_id``, and nowhere else. Behind an
    end that is ignored there is nothing but ends. rows: with the first mask of each."""
    of_ends: dict[tuple[int, ...], list[int]] = {}
    for row, first in rows:
        of_ends.setdefault(row.state.new.ends, []).extend(range(first, first + 1 + len(row.drafts)))
    for ends, masks in of_ends.items():
        may_end = (bits[masks, end_id // 32] >> np.uint32(end_id % 32)) & np.uint32(1)
        for token in {end_id, *ends}:
            bit = np.uint32(1 << token % 32)
            allowed = may_end * bit if token in ends else np.uint32(0)
            bits[masks, token // 32] = (bits[masks, token // 32] & ~bit) | allowed
    for row, first in rows:
        state, end = row.state, first + 1 + len(row.drafts)
        bits[first + 1 + len(_before_end(row)) : end] = state.ends
        if not state.why and state.matcher is not None and state.matcher.is_error():  # a limit was reached
            state.why = f"the grammar cannot be followed: {_error_of(state.matcher)}"
        if state.why:
            bits[first:end] = 0


class PendingMasks:
    """The masks of a step while they are made."""

    def __init__(self, rows: list[_Row], masks: Future[TokenMasks]):
        self._rows, self._masks = rows, masks

    def result(self) -> TokenMasks:
        """Wait for the masks."""
        return self._masks.result()

    def explained(self, drawn: list[Sampled | NonFinite]) -> list[Sampled | NonFinite | NoneAllowed]:
        """Return what was drawn for each sequence, with the reason for each row whose mask allows no id."""
        masks, result = self.result(), list[Sampled | NonFinite | NoneAllowed](drawn)
        for row, first in zip(self._rows, _firsts(self._rows), strict=True):
            one = drawn[row.number]
            if isinstance(one, NonFinite) and not masks.bits[first].any():
                why = row.state.why or "the grammar, allowed_token_ids, bad_words and reasoning_end leave no token"
                result[row.number] = NoneAllowed(one.position, why)
        return result


def _firsts(rows: list[_Row]) -> list[int]:
    """Return the first mask of each of the rows."""
    counts = [1 + len(row.drafts) for row in rows]
    return np.cumsum([0, *counts])[:-1].tolist()


def _before_end(row: _Row) -> list[int]:
    """Return the drafts before the first one that ends the sequence."""
    ends = row.state.new.ends
    return next((row.drafts[:k] for k, token in enumerate(row.drafts) if token in ends), row.drafts)


def _error_of(matcher: LLMatcher) -> str:
    return matcher.get_error().removesuffix("<non-verbose/>").strip()


def _bits(ids: Sequence[int], words: int) -> np.ndarray:
    """Return the bits of these ids, uint32 [words]."""
    flags = np.zeros(words * 32, bool)
    flags[list(ids)] = True
    return np.packbits(flags, bitorder="little").view(np.uint32)
