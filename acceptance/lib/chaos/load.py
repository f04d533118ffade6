"""A steady load: sessions that never end, each with one request at a time."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable

from acceptance.lib.chaos.ledger import Answer, Ledger
from fastdeploy.client.request_stream import RequestStream
from fastdeploy.core.errors import EngineDead, FastDeployError, NotLeader, RequestsRejected
from fastdeploy.core.request_fields import AddRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.fleet.client import FleetClient

MAX_HISTORY = 600  # tokens, then a session ends and another one begins
RETRY_S = 0.05


class Load:
    """``num`` sessions at once. gateway: returns the gateway of now. scale: of the lengths of answers."""

    def __init__(self, gateway: Callable[[], FleetClient], ledger: Ledger, num: int, seed: int, scale: float = 1.0):
        self._gateway = gateway
        self._ledger = ledger
        self._draw = random.Random(seed)
        self._scale = scale
        self._streams: dict[RequestStream, Answer] = {}
        self._ending = False
        self._num = num
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._sessions(i)) for i in range(self._num)]

    async def end(self) -> None:
        """Return when every request is answered."""
        self._ending = True
        await asyncio.gather(*self._tasks)

    def tokens_so_far(self) -> int:
        """Return the number of tokens that have reached the clients, also those that nobody has read yet."""
        for stream, answer in self._streams.items():
            with contextlib.suppress(FastDeployError):  # its task gets the error too
                self._read(stream, answer)
        return self._ledger.counts["tokens"]

    async def _sessions(self, place: int) -> None:
        number = 0
        while not self._ending:
            await self._session(f"session-{place}-{number}")
            number += 1

    async def _session(self, name: str) -> None:
        history: list[int] = []
        seen, turn = 0, 0
        while len(history) < MAX_HISTORY and not self._ending:
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
        await ledger.ready.wait()
        gateway = self._gateway()
        answer = Answer(name, prompt, max_tokens, max(seen, ledger.committed))
        aborts = ledger.aborts
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
            self._cut(answer, "refused by a pause", aborts < ledger.aborts or ledger.rejecting > 0)
        except (EngineDead, NotLeader) as error:
            self._cut(answer, "cut off with the gateway", gateway is not self._gateway(), str(error))
        was_cut = not answer.finish
        if answer.finish == "abort":
            ledger.counts["ended by a pause"] += 1
            if aborts == ledger.aborts and not ledger.rejecting:
                ledger.problem(f"{name}: ended by abort without a pause")
        answer.check(ledger, may_be_short=was_cut or answer.finish == "abort")
        if was_cut:
            await asyncio.sleep(RETRY_S)
        return answer

    def _read(self, stream: RequestStream, answer: Answer) -> None:
        """Take over what the stream has. Raises its error."""
        for output in stream.read():
            answer.add(output, self._ledger)
            self._ledger.counts["tokens"] += len(output.token_ids)

    def _cut(self, answer: Answer, what: str, may_be: bool, why: str = "") -> None:
        self._ledger.counts[what] += 1
        if not may_be:
            self._ledger.problem(f"{answer.name}: {what}, without a reason {why}")
