"""One HTTP request on its way through the engine: its prompts, its choices, and what came of them so far."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import NamedTuple

from fastdeploy.client.choice import Choice, Delta, TextOptions, joined, pieces
from fastdeploy.client.engine_client import EngineClient
from fastdeploy.client.request_stream import RequestStream
from fastdeploy.client.tokenizer import Tokenizer
from fastdeploy.core.errors import EngineError, NonFiniteLogits
from fastdeploy.core.request_fields import AddRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.http.guards.pace import Pace
from fastdeploy.inter_communicator.messages import Output

TOKENS_AT_ONCE = 128  # of one choice
WORK_PER_TOKEN = 10  # to decode a token, in the units of Pace


class GenerationRequest(NamedTuple):
    """A checked request. One engine request per prompt; ``sampling`` holds one set of parameters per prompt.

    ids: of the prompts, where they are not to be made from the request_id. texts: ``text`` of each, where they differ.
    first_choice, resumed_tokens, max_queue_s, retain_s, fingerprint: see AddRequest. arrival: time.time() at the
    door (0 = when it is sent to the engine); deadline_s counts from it.
    """

    request_id: str
    prompts: list[list[int]]
    sampling: list[SamplingParams]
    text: TextOptions
    n: int = 1
    priority: int = 0
    cache_salt: str = ""
    ids: Sequence[str] = ()
    texts: Sequence[TextOptions] = ()
    first_choice: int = 0
    resumed_tokens: int = 0
    deadline_s: float | None = None
    max_queue_s: float | None = None
    retain_s: float = 0.0
    fingerprint: str = ""
    arrival: float = 0.0


class Generation:
    """The running requests of one HTTP request. Use as ``async with``: leaving it cancels those that still run. pace:
    of all work for this request.

    Choice ``n * i + k`` is the k-th choice of prompt i, as OpenAI numbers them.
    """

    def __init__(self, client: EngineClient, tokenizer: Tokenizer | None, request: GenerationRequest, pace: Pace):
        self.request = request
        self.pace = pace
        texts = request.texts or [request.text] * len(request.prompts)
        pairs = zip(request.prompts, texts, strict=True)
        self.choices = [
            Choice(tokenizer, p, text, request.resumed_tokens) for p, text in pairs for _ in range(request.n)
        ]
        self.created = int(time.time())
        self._cached_tokens = [0] * len(request.prompts)
        self.gone = False
        self._client = client
        self._streams: list[RequestStream] = []
        self._event = asyncio.Event()

    async def __aenter__(self) -> Generation:
        try:
            for i in range(len(self.request.prompts)):
                self._streams.append(await self._client.submit(self._engine_request(i), self._event))
        except BaseException:
            self._close()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._close()

    def _close(self) -> None:
        for stream in self._streams:
            stream.close()

    def _engine_request(self, i: int) -> AddRequest:
        r = self.request
        arrival = r.arrival or time.time()
        own_id = r.ids[i] if r.ids else r.request_id if len(r.prompts) == 1 else f"{r.request_id}-{i}"
        return AddRequest(
            request_id=own_id,
            group="" if own_id == r.request_id else r.request_id,
            prompt_token_ids=r.prompts[i],
            sampling=r.sampling[i],
            n=r.n,
            priority=r.priority,
            cache_salt=r.cache_salt,
            arrival=arrival,
            first_choice=r.first_choice + r.n * i,
            resumed_tokens=r.resumed_tokens,
            deadline=None if r.deadline_s is None else arrival + r.deadline_s,
            max_queue_s=r.max_queue_s,
            retain_s=r.retain_s,
            fingerprint=r.fingerprint,
        )

    @property
    def finished(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.choices)

    @property
    def completion_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices)

    @property
    def cached_tokens(self) -> int:
        return sum(self._cached_tokens)

    def cached_tokens_of(self, prompt: int) -> int:
        return self._cached_tokens[prompt]

    def require_an_answer(self) -> None:
        """Raise NonFiniteLogits if every choice ended with that error: then there is nothing to answer with."""
        if all(choice.finish_reason == "error" for choice in self.choices):
            raise NonFiniteLogits(self.choices[0].message)

    def nudge(self) -> None:
        """Make :meth:`step` return."""
        self._event.set()

    def leave(self) -> None:
        """The HTTP client has gone: :meth:`step` returns and ``gone`` is set."""
        self.gone = True
        self._event.set()

    async def step(self) -> list[tuple[int, Delta]]:
        """Wait for new tokens: what was added to which choice, once per choice. Empty after a nudge.

        Raises what the engine answered (RequestError), EngineDead, or EngineError if the engine failed. A choice whose
        logits were not finite has the finish_reason "error", and the others go on: see :meth:`require_an_answer`.
        """
        await self._event.wait()
        self._event.clear()
        deltas = []
        for i, stream in enumerate(self._streams):
            for output in stream.take() if not deltas else _take_quietly(stream, self._event):
                if delta := await self._feed(i, stream, output):
                    deltas.append((self.request.n * i + output.choice, delta))
        return deltas

    async def _feed(self, i: int, stream: RequestStream, output: Output) -> Delta | None:
        """Give ``output`` to its choice, a slice at a time: a late reader finds the tokens of many steps in it."""
        deltas = []
        for piece in pieces(output, TOKENS_AT_ONCE):
            if delta := self._feed_piece(i, stream, piece):
                deltas.append(delta)
            await self.pace.spend(1 + WORK_PER_TOKEN * len(piece.token_ids))
        return joined(deltas)

    def _feed_piece(self, i: int, stream: RequestStream, output: Output) -> Delta | None:
        choice = self.choices[self.request.n * i + output.choice]
        if choice.finish_reason is not None:  # it met its stop string while this was in flight
            return None
        delta = choice.feed(output)
        if output.cached_tokens and output.choice == 0:  # the prompt is counted once, whatever n is
            self._cached_tokens[i] = output.cached_tokens
        if choice.finish_reason == "error" and choice.stop_reason != NonFiniteLogits.code:
            raise EngineError(choice.message or "the engine failed on this request")
        if choice.finish_reason is not None and output.finish_reason is None:
            stream.stop(output.choice)
        return delta


def _take_quietly(stream: RequestStream, event: asyncio.Event) -> list[Output]:
    """``stream.take()``, but a failure is left for the next step, so that what was read before it is delivered."""
    try:
        return stream.take()
    except Exception:
        event.set()
        return []
