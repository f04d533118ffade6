"""The answer to one request of a fleet, as its client got it, and the tokens that it may have."""

from __future__ import annotations

from dataclasses import dataclass, field

from acceptance.lib.ledger import Ledger
from benchmarks.lib.fleet.runner import checksum, next_token
from fastdeploy.core.outputs import Span
from fastdeploy.inter_communicator.messages import Output


def number_of(version: str, first_version: str) -> int:
    """Return the number of the weights with this label. The first ones are 0."""
    return 0 if version == first_version else int(version.removeprefix("w"))


@dataclass
class Answer:
    """floor: its tokens are not from weights with a lower epoch. tokens, spans: as the client got them. finish: reason
    of the end, "" before the end."""

    name: str
    prompt: list[int]
    max_tokens: int
    floor: int
    tokens: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    finish: str = ""

    def add(self, output: Output, ledger: Ledger) -> None:
        """Add an output."""
        if self.finish:
            ledger.problem(f"{self.name}: an output after the last one")
        self.spans += output.spans
        self.tokens += output.token_ids
        self.finish = output.finish_reason or ""

    def check(self, ledger: Ledger, first_version: str, may_be_short: bool) -> None:
        """Compare the tokens with those that the weights of their spans give. The spans say where its tokens belong, so
        a token that is lost or doubled shows."""
        ledger.check_coverage(self.name, self.spans, len(self.tokens))
        ledger.check_labels(self.name, self.spans)
        if below := [span.weight_epoch for span in self.spans if span.weight_epoch < self.floor]:
            ledger.problem(f"{self.name}: a token of epoch {below[0]}, but {self.floor} was seen before")
        known, of_token = checksum(self.prompt), [span for span in self.spans for _ in range(span.start, span.end)]
        for i, (token, span) in enumerate(zip(self.tokens, of_token, strict=False)):
            if token != next_token(known, number_of(span.version, first_version)):
                ledger.problem(f"{self.name}: token {i} is not that of weights {span.version!r}")
                break
            known = checksum([token], known)
        if len(self.tokens) > self.max_tokens or (len(self.tokens) < self.max_tokens and not may_be_short):
            ledger.problem(f"{self.name}: {len(self.tokens)} tokens of {self.max_tokens}, end {self.finish!r}")
        ledger.counts["tokens compared"] += len(self.tokens)
