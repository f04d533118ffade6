"""A steady load: sessions that never end, each with one request at a time; and the tokens that an answer may have."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from acceptance.lib.ledger import Ledger
from benchmarks.lib.fleet.runner import checksum, next_token
from fastdeploy.bench.workload import Clients
from fastdeploy.client.request_stream import RequestStream
from fastdeploy.core.errors import EngineDead, FastDeployError, NotLeader, RequestsRejected
from fastdeploy.core.outputs import Span
from fastdeploy.core.request_fields import AddRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.fleet.client import FleetClient
from fastdeploy.inter_communicator.messages import Output

MAX_HISTORY = 600  # tokens, then a session ends and another one begins
RETRY_S = 0.05


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


class Load:
    """``num`` sessions at once, while ``clients`` go on. gateway: returns the gateway of now. scale: of the lengths of
    answers. first_version: label of the weights 0. committed: epoch of the last commit that was answered. aborts:
    counts the beginnings and ends of pause calls that may end requests. rejecting: pauses now that refuse requests.
    ready: a gateway takes requests."""

    def __init__(self, gateway: Callable[[], FleetClient], ledger: Ledger, num: int, seed: int, scale: float = 1.0):
        self.committed = self.aborts = self.rejecting = 0
        self.first_version = ""
        self.ready = asyncio.Event()
        self.clients = Clients(num, self._session)
        self._gateway, self._ledger = gateway, ledger
        self._draw = random.Random(seed)
        self._scale = scale
        self._streams: dict[RequestStream, Answer] = {}

    def tokens_so_far(self) -> int:
        """Return the number of tokens that have reached the clients, also those that nobody has read yet."""
        for stream, answer in self._streams.items():
            with contextlib.suppress(FastDeployError):  # its task gets the error too
                self._read(stream, answer)
        return self._ledger.counts["tokens"]

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
        """Return the answer, or as much of it as its gateway could give."""
        ledger = self._ledger
        await self.ready.wait()
        gateway = self._gateway()
        answer = Answer(name, prompt, max_tokens, max(seen, self.committed))
        aborts = self.aborts
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        request = AddRequest(f"{name}-{id(gateway)}", prompt, sampling, session=session)
        ledger.counts["requests"] += 1
        try:
            with await gateway.submit(request) as stream:
                self._streams[stream] = answer
                try:
                    while not answer.finish:
                        await stream.reader.wait()
                        self._read(stream, answer)
                finally:
                    del self._streams[stream]
        except RequestsRejected:
            self._cut(answer, "refused by a pause", aborts < self.aborts or self.rejecting > 0)
        except (EngineDead, NotLeader) as error:
            self._cut(answer, "cut off with the gateway", gateway is not self._gateway(), str(error))
        was_cut = not answer.finish
        if answer.finish == "abort":
            ledger.counts["ended by a pause"] += 1
            if aborts == self.aborts and not self.rejecting:
                ledger.problem(f"{name}: ended by abort without a pause")
        answer.check(ledger, self.first_version, may_be_short=was_cut or answer.finish == "abort")
        if was_cut:
            await asyncio.sleep(RETRY_S)
        return answer

    def _read(self, stream: RequestStream, answer: Answer) -> None:
        """Add what the stream has to the answer. Raises the stream's error."""
        for output in stream.read():
            answer.add(output, self._ledger)
            self._ledger.counts["tokens"] += len(output.token_ids)

    def _cut(self, answer: Answer, what: str, may_be: bool, why: str = "") -> None:
        self._ledger.counts[what] += 1
        if not may_be:
            self._ledger.problem(f"{answer.name}: {what}, without a reason {why}")
