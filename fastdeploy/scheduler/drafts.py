"""Drafts: guesses of the next tokens of a request, which a step verifies together.

The random number of a token is a function of (seed, choice, position), and a row of logits has the same bits in any
batch. So a step that computes the drafts beside the last token draws, row by row, the tokens that later steps would
have drawn. A draft is right if it equals the token drawn at its position. Right or wrong, drafts change no token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from fastdeploy.cache_manager.kv_cache_manager import KVCacheManager
from fastdeploy.core.request import NewTokens, Request


class Drafter(Protocol):
    """The source of drafts. Used by the loop's thread only."""

    def draft(self, requests: Sequence[Request], other_rows: int, most: int) -> Mapping[Request, list[int]]:
        """Return drafts, ids of the vocabulary, for those of ``requests`` that get any. Each request needs one token.
        other_rows: tokens that the step computes for other requests. most: drafts that fit into the step."""
        ...

    def ended(self, request: Request) -> None:
        """Record that a request gets no more tokens."""


class NoDrafts:
    """A drafter that never drafts."""

    def draft(self, requests: Sequence[Request], other_rows: int, most: int) -> Mapping[Request, list[int]]:
        return {}

    def ended(self, request: Request) -> None: ...


class Speculation:
    """The drafts of each plan. max_rows: tokens of a step. num_drafted: drafts that were verified. num_accepted: drafts
    that became tokens."""

    def __init__(self, drafter: Drafter, kv: KVCacheManager, max_rows: int):
        self.drafter = drafter
        self.num_drafted = 0
        self.num_accepted = 0
        self._kv = kv
        self._max_rows = max_rows

    def drafts(self, decodes: list[Request], other_rows: int) -> Mapping[Request, Sequence[int]]:
        """Return drafts for requests that need one token, with KV for them. Drafts take no KV from other requests, and
        none is behind the last token that a request may get. other_rows: see ``Drafter.draft``."""
        found = {}
        for request, drafts in self.drafter.draft(
            decodes, other_rows, self._max_rows - other_rows - len(decodes)
        ).items():
            drafts = drafts[: request.num_prompt_tokens + request.max_output_tokens - request.num_tokens - 1]
            if not self._kv.grow(request, len(drafts)):
                drafts = drafts[: len(request.blocks) * self._kv.block_size - request.num_tokens]
            found[request] = drafts
        return found

    def verified(self, new: NewTokens, drafted: int) -> None:
        """Take in that drafts have become tokens: the runner knows them, and has computed their KV. The KV behind them
        is of no token, and is overwritten."""
        accepted = len(new.token_ids) - 1
        new.request.num_computed += accepted
        new.request.num_sent_tokens += accepted
        self.num_drafted += drafted
        self.num_accepted += accepted

    def ended(self, request: Request) -> None:
        """Record that a request gets no more tokens."""
        self.drafter.ended(request)
