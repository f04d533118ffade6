"""A record of what the clients of the fleet have seen, which is compared with what they may see."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import dataclass, field

from benchmarks.lib.fleet.runner import checksum, next_token
from fastdeploy.core.outputs import Span
from fastdeploy.inter_communicator.messages import Output

logger = logging.getLogger(__name__)
MAX_PROBLEMS = 20


@dataclass
class Ledger:
    """problems: what must not be. counts: of what happened. committed: epoch of the last commit that was answered.
    aborts: counts the beginnings and ends of pause calls that may end requests. rejecting: pauses now that refuse
    requests. ready: a gateway takes requests. first_version: label of the weights 0."""

    problems: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    committed: int = 0
    aborts: int = 0
    rejecting: int = 0
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    first_version: str = ""
    versions: dict[int, str] = field(default_factory=dict)

    def problem(self, what: str) -> None:
        """Note what must not be."""
        self.counts["problems"] += 1
        logger.error("WRONG: %s", what)
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(what)

    def weights_of(self, span: Span) -> int:
        """Return the number of the weights of a span. Weights of one epoch have one label."""
        if self.versions.setdefault(span.weight_epoch, span.version) != span.version:
            self.problem(f"epoch {span.weight_epoch} is {span.version!r} and {self.versions[span.weight_epoch]!r}")
        return self.number_of(span.version)

    def number_of(self, version: str) -> int:
        """Return the number of the weights with this label."""
        return 0 if version == self.first_version else int(version.removeprefix("w"))


@dataclass
class Answer:
    """The answer to one request. floor: its tokens are not from weights with a lower epoch. tokens, spans: as the
    client got them, one span for each token. finish: reason of the end, "" before the end."""

    name: str
    prompt: list[int]
    max_tokens: int
    floor: int
    tokens: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    finish: str = ""

    def add(self, output: Output, ledger: Ledger) -> None:
        """Take an output over. The spans say where its tokens belong, so a token that is lost or doubled shows."""
        if self.finish:
            ledger.problem(f"{self.name}: an output after the last one")
        for span in output.spans:
            if span.start != len(self.spans):
                ledger.problem(f"{self.name}: tokens from {span.start} on came after {len(self.spans)} tokens")
            self.spans += [span] * (span.end - span.start)
        self.tokens += output.token_ids
        if len(self.spans) != len(self.tokens):
            ledger.problem(f"{self.name}: {len(self.tokens)} tokens, but spans of {len(self.spans)}")
        self.finish = output.finish_reason or ""

    def check(self, ledger: Ledger, may_be_short: bool) -> None:
        """Compare the tokens with those that the weights of their spans give."""
        known, floor = checksum(self.prompt), self.floor
        for i, (token, span) in enumerate(zip(self.tokens, self.spans, strict=False)):
            if span.weight_epoch < floor:
                ledger.problem(f"{self.name}: token {i} of epoch {span.weight_epoch}, but {floor} was seen before")
            floor = max(floor, span.weight_epoch)
            if token != next_token(known, ledger.weights_of(span)):
                ledger.problem(f"{self.name}: token {i} is not that of weights {span.version!r}")
                break
            known = checksum([token], known)
        if len(self.tokens) > self.max_tokens or (len(self.tokens) < self.max_tokens and not may_be_short):
            ledger.problem(f"{self.name}: {len(self.tokens)} tokens of {self.max_tokens}, end {self.finish!r}")
        ledger.counts["tokens compared"] += len(self.tokens)
