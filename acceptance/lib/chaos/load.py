"""A steady load: sessions that never end, each with one request at a time; and the tokens that an answer may have."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from acceptance.lib.ledger import Ledger
from benchmarks.lib.fleet.runner import checksum, next_token
from fastdeploy.bench.client import Client, Stream, WireError
from fastdeploy.bench.workload import Clients, completion
from fastdeploy.core.errors import RequestsRejected
from fastdeploy.core.outputs import Span

logger = logging.getLogger(__name__)
MAX_HISTORY = 600  # tokens, then a session ends and another one begins
RETRY_S = 0.05
RETAIN_S = 60.0
END_S = 180.0  # for a request, on a busy machine
STREAMED, ASKED_AGAIN = 0.75, 0.1  # parts of the requests
COMPUTED_AGAIN, MAX_COMPUTED_AGAIN = "of these: computed again, though kept", 0.01  # part of the answers that go on


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


Keepers = dict[str, int]


class Gateways(Protocol):
    """The gateways of a fleet, and what is done to them. client: of all of them, at one port."""

    client: Client

    def cut_since(self, since: float) -> bool:
        """Return whether a gateway was killed or ended since time.monotonic() was ``since``."""

    def stalled_since(self, since: float) -> bool:
        """Return whether a gateway was stopped or slowed since then. The engines may have dropped it, and what it had
        there goes on elsewhere."""


@dataclass(frozen=True)
class End:
    """The end of a reply. status: 0 = none came. why, code: of its error. sent: whether a gateway may have had the
    request."""

    status: int
    why: str = ""
    code: str = ""
    sent: bool = True


@dataclass(frozen=True)
class Cut:
    """A beginning of an answer, or all of it. keepers: the engines that had all of its tokens then, see Load."""

    answer: Answer
    keepers: Keepers


class Load:
    """``num`` sessions at once, while ``clients`` go on. scale: of the lengths of answers. first_version: label of the
    weights 0. committed: epoch of the last commit that was answered. aborts: counts the beginnings and ends of pause
    calls that may end requests. rejecting: pauses now that refuse requests.

    Most requests are streams. A request whose gateway dies is sent again with its id, and read from its beginning: at
    another gateway it has the tokens that it had, unless its engine was lost and other weights serve. So it is if the
    answer was complete.

    keepers(name): returns the engines that have all tokens of the request ``name``, each with a number that changes
    when it is harmed. lives: these numbers of now."""

    def __init__(
        self,
        gateways: Gateways,
        ledger: Ledger,
        num: int,
        seed: int,
        scale: float,
        keepers: Callable[[str], Awaitable[Keepers]],
        lives: Mapping[str, int],
    ):
        self.committed = self.aborts = self.rejecting = 0
        self.first_version = ""
        self.clients = Clients(num, self._session)
        self.ledger = ledger
        self._gateways, self._keepers, self._lives = gateways, keepers, lives
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
            request = f"{name}-{turn}"
            asked = self._ask(name, request, prompt, max(int(length * self._scale), 1), seen)
            try:
                answer = await asyncio.wait_for(asked, END_S)
            except TimeoutError:
                self.ledger.problem(f"{request}: no end within {END_S:g} s")
                return
            seen = max([seen, *(span.weight_epoch for span in answer.spans)])
            history = prompt + answer.tokens
            turn += 1
            await asyncio.sleep(self._draw.uniform(0.0, 0.2))

    async def _ask(self, session: str, name: str, prompt: list[int], max_tokens: int, seen: int) -> Answer:
        """Return the answer, from as many gateways as it takes."""
        ledger, draw, aborts, rejected = self.ledger, self._draw, self.aborts, self.rejecting > 0
        body = completion("fake", prompt, max_tokens, name) | {"session": session, "retain_s": RETAIN_S}
        body["stream"] = draw.random() < STREAMED
        ledger.counts["requests"] += 1
        floor = max(seen, self.committed)
        again = draw.random() < ASKED_AGAIN  # as if the complete answer had been lost on its way
        cuts, first = list[Cut](), time.monotonic()
        while True:
            answer, began = Answer(name, prompt, max_tokens, floor), time.monotonic()
            end = await self._read(body, answer)
            logger.info("%s: %d tokens, HTTP %d %s %s", name, len(answer.tokens), end.status, answer.finish, end.why)
            may_be_ended = rejected or aborts < self.aborts or self.rejecting > 0
            if answer.finish and not (again and answer.finish == "length"):
                break
            if end.code == RequestsRejected.code:
                ledger.counts["refused by a pause"] += 1
                break
            if end.status not in (0, 200, 503):
                ledger.problem(f"{name}: HTTP {end.status}: {end.why}")
                return answer
            if answer.finish:
                again = False
            elif end.status == 200 or (end.status == 0 and end.sent):
                ledger.counts["cut off"] += 1
                if not self._gateways.cut_since(began):
                    ledger.problem(f"{name}: cut off after {len(answer.tokens)} tokens, by no dead gateway: {end.why}")
            if answer.tokens:
                answer.check(ledger, self.first_version, may_be_short=not answer.finish)
                cuts.append(Cut(answer, await self._keepers(name)))
            else:
                ledger.counts["sent again without a token"] += 1
            await asyncio.sleep(RETRY_S)
        if answer.finish == "abort":
            ledger.counts["ended by a pause"] += 1
        if answer.finish in ("", "abort") and not may_be_ended:
            ledger.problem(f"{name}: ended by a pause, without one: {answer.finish} {end.why}")
        answer.check(ledger, self.first_version, may_be_short=answer.finish in ("", "abort"))
        for cut in cuts if answer.finish else ():
            self.compare(cut, answer, first)
        return answer

    def compare(self, cut: Cut, answer: Answer, first: float) -> None:
        """Compare an answer with its beginning, which another gateway had sent. The answer goes on from there, if an
        engine that had it then is unharmed. An engine that tells so later than after ``fence_after_s`` is not waited
        for: then the answer is computed again, and a pause may end it sooner. first: time.monotonic() when the request
        was sent."""
        counts, before = self.ledger.counts, cut.answer
        counts["asked again when complete" if before.finish else "taken up at another gateway"] += 1
        if answer.tokens[: len(before.tokens)] == before.tokens:
            counts["of these: with the same tokens"] += 1
            return
        kept = [name for name, number in cut.keepers.items() if number == self._lives.get(name, 0)]
        if not kept or self._gateways.stalled_since(first):
            return
        if answer.finish == "abort" and before.tokens[: len(answer.tokens)] == answer.tokens:
            counts[COMPUTED_AGAIN] += 1
        else:
            self.ledger.problem(f"{answer.name}: other tokens at another gateway, though {kept} had the first ones")

    def check_end(self) -> None:
        """Few of the tokens that an engine had were computed again."""
        counts = self.ledger.counts
        compared = counts["asked again when complete"] + counts["taken up at another gateway"]
        if counts[COMPUTED_AGAIN] > 1 + MAX_COMPUTED_AGAIN * compared:
            self.ledger.problem(f"{counts[COMPUTED_AGAIN]} of {compared} answers were computed again, though kept")

    async def _read(self, body: dict[str, Any], answer: Answer) -> End:
        """Read one answer, as far as it comes."""
        return await (self._read_stream if body["stream"] else self._read_whole)(body, answer)

    async def _read_whole(self, body: dict[str, Any], answer: Answer) -> End:
        try:
            reply = await self._gateways.client.call("POST", "/v1/completions", body, END_S)
        except OSError as error:
            return End(0, str(error), sent=False)
        except WireError as error:
            return End(0, str(error))
        if reply.status != 200:
            return End(reply.status, str(reply.body), code_of(reply.body))
        (choice,) = reply.body["choices"]
        answer.add(choice["token_ids"], [span_of(span) for span in choice["weight_versions"]])
        answer.finish = choice["finish_reason"]
        self.ledger.counts["tokens"] += len(answer.tokens)
        return End(reply.status)

    async def _read_stream(self, body: dict[str, Any], answer: Answer) -> End:
        try:
            stream = await self._gateways.client.stream("/v1/completions", body)
        except OSError as error:
            return End(0, str(error), sent=False)
        self._streams.add(stream)
        try:
            log = await stream.wait_closed()
        finally:
            stream.cancel()
            self._streams.discard(stream)
        self.ledger.counts["tokens"] += log.num_tokens
        ends = len(log.finals)
        for event in log.tokens:
            answer.add(event.token_ids, [span_of(span) for span in event.weight_versions])
        if ends:
            answer.finish = log.finals[0][1]
        if ends > 1 or (ends and log.tokens and log.tokens[-1].at > log.finals[0][0]):
            self.ledger.problem(f"{answer.name}: an output after the last one")
        return End(log.status, log.error or "", code_in(log.error))


def tokens_of(streams: Sequence[Stream]) -> int:
    """Return how many tokens have reached the clients, also those that nobody has read yet."""
    return sum(stream.log.num_tokens for stream in streams)


def span_of(fields: dict[str, Any]) -> Span:
    """Return a span of a reply."""
    return Span(fields["version"], fields["weight_epoch"], fields["start"], fields["end"])


def code_of(body: Any) -> str:
    """Return the code in the body of an error; "" for any other body."""
    error = body.get("error") if isinstance(body, dict) else None
    return str(error.get("code", "")) if isinstance(error, dict) else ""


def code_in(text: str | None) -> str:
    """Return the code in the JSON text of an error; "" for any other text."""
    try:
        return code_of(json.loads(text or ""))
    except ValueError:
        return ""
