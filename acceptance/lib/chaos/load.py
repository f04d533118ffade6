"""A steady load: sessions that never end, each with one request at a time; and the tokens that an answer may have."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from acceptance.lib.ledger import Ledger
from benchmarks.lib.fleet.runner import checksum, next_token
from fastdeploy.bench.client import Client, Stream
from fastdeploy.bench.timeline import StreamLog
from fastdeploy.bench.workload import Clients, completion
from fastdeploy.core.errors import RequestsRejected
from fastdeploy.core.outputs import Span

MAX_HISTORY = 600  # tokens, then a session ends and another one begins
RETRY_S = 0.05
RETAIN_S = 60.0


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

    def add(self, token_ids: list[int], spans: list[Span]) -> None:
        """Add the tokens of an event."""
        self.spans += spans
        self.tokens += token_ids

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


class Load:
    """``num`` sessions at once, while ``clients`` go on. client: of all gateways. scale: of the lengths of answers.
    first_version: label of the weights 0. committed: epoch of the last commit that was answered. aborts: counts the
    beginnings and ends of pause calls that may end requests. rejecting: pauses now that refuse requests.

    A request whose gateway dies is sent again with its id, and read from its beginning: at another gateway it has the
    tokens that it had, as the spans of each token say."""

    def __init__(self, client: Client, ledger: Ledger, num: int, seed: int, scale: float = 1.0):
        self.committed = self.aborts = self.rejecting = 0
        self.first_version = ""
        self.clients = Clients(num, self._session)
        self._client, self._ledger = client, ledger
        self._draw = random.Random(seed)
        self._scale = scale
        self._streams: set[Stream] = set()

    def open_streams(self) -> list[Stream]:
        """Return the streams that are open now."""
        return list(self._streams)

    async def _session(self, client: int) -> None:
        name, history = f"session-{client}-{self._draw.randrange(1 << 30)}", list[int]()
        seen, turn = 0, 0
        while len(history) < MAX_HISTORY and not self.clients.resting:
            prompt = history + [self._draw.randint(1, 999) for _ in range(self._draw.randint(4, 40))]
            # One in ten is long: it sees several pauses and updates.
            length = self._draw.randint(100, 250) if self._draw.random() < 0.1 else self._draw.randint(2, 40)
            answer = await self._ask(name, f"{name}-{turn}", prompt, max(int(length * self._scale), 1), seen)
            seen = max([seen, *(span.weight_epoch for span in answer.spans)])
            history = prompt + answer.tokens
            turn += 1
            await asyncio.sleep(self._draw.uniform(0.0, 0.2))

    async def _ask(self, session: str, name: str, prompt: list[int], max_tokens: int, seen: int) -> Answer:
        """Return the answer, from as many gateways as it takes."""
        ledger, aborts, rejected = self._ledger, self.aborts, self.rejecting > 0
        body = completion("fake", prompt, max_tokens, name) | {"session": session, "retain_s": RETAIN_S}
        ledger.counts["requests"] += 1
        floor = max(seen, self.committed)
        while True:
            answer = Answer(name, prompt, max_tokens, floor)
            log = await self._read(body, answer)
            may_be_ended = rejected or aborts < self.aborts or self.rejecting > 0
            if log.status == 200 and not answer.finish:
                answer.check(ledger, self.first_version, may_be_short=True)
                ledger.counts["taken up at another gateway"] += 1
            elif log.status == 200 or code_in(log) == RequestsRejected.code:
                break
            elif log.status not in (0, 503):
                ledger.problem(f"{name}: HTTP {log.status}: {log.error}")
                break
            else:
                ledger.counts["sent again"] += 1
            await asyncio.sleep(RETRY_S)
        if answer.finish in ("", "abort"):
            ledger.counts["ended by a pause"] += 1
            if not may_be_ended:
                ledger.problem(f"{name}: ended by a pause, without one")
        answer.check(ledger, self.first_version, may_be_short=answer.finish in ("", "abort"))
        return answer

    async def _read(self, body: dict[str, Any], answer: Answer) -> StreamLog:
        """Read one answer of a gateway to its end. Status 0: no gateway has answered."""
        try:
            stream = await self._client.stream("/v1/completions", body)
        except OSError as error:
            return StreamLog("", 0.0, error=str(error))
        self._streams.add(stream)
        try:
            log = await stream.wait_closed()
        finally:
            stream.cancel()
            self._streams.discard(stream)
        self._ledger.counts["tokens"] += log.num_tokens
        ends = len(log.finals)
        for event in log.tokens:
            answer.add(event.token_ids, [span_of(span) for span in event.weight_versions])
        if ends:
            answer.finish = log.finals[0][1]
        if ends > 1 or (ends and log.tokens and log.tokens[-1].at > log.finals[0][0]):
            self._ledger.problem(f"{answer.name}: an output after the last one")
        return log


def tokens_of(streams: Sequence[Stream]) -> int:
    """Return how many tokens have reached the clients, also those that nobody has read yet."""
    return sum(stream.log.num_tokens for stream in streams)


def span_of(fields: dict[str, Any]) -> Span:
    """Return a span of a reply."""
    return Span(fields["version"], fields["weight_epoch"], fields["start"], fields["end"])


def code_in(log: StreamLog) -> str:
    """Return the code of the error that a gateway answered with."""
    try:
        return str(json.loads(log.error or "")["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return ""
