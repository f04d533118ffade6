"""A generation that goes on when its engine dies: what it has is sent to the next engine with the rest of its budget.

The random number of a token depends on (seed, number of the choice, position) only, so the tokens are those of an
undisturbed run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from fastdeploy.client.choice import ChoiceDelta
from fastdeploy.client.generation import Generation
from fastdeploy.client.request_stream import Reader, RequestStream
from fastdeploy.core.errors import EngineDead, EngineStalled
from fastdeploy.core.outputs import Span
from fastdeploy.core.request_fields import AddRequest, part_id
from fastdeploy.inter_communicator.messages import Output

LOST = (EngineDead, EngineStalled)
MAX_VAIN_LOSSES = 8  # of engines in a row without a token: a request that ends its engine must not end them all
RESTART_S = 600.0  # for which a generation waits for the next engine


def rest_of(request: AddRequest, request_id: str, choice: int, tokens: Sequence[int]) -> AddRequest:
    """Return the request for the rest of one choice. choice: its number in ``request``. tokens: those that it has."""
    sampling, base = request.sampling, len(tokens)
    # The rows of all tokens before the last one came with the tokens.
    first_row = len(request.prompt_token_ids) + base - 1 if base else sampling.routed_experts_start
    return replace(
        request,
        request_id=request_id,
        group=request.group or request.request_id,  # so that an abort finds it
        n=1,
        first_choice=request.first_choice + choice,
        prompt_token_ids=request.prompt_token_ids + list(tokens),
        resumed_tokens=request.resumed_tokens + base,
        retain_s=0.0,  # a result without its beginning is of no use later
        max_queue_s=None if base else request.max_queue_s,  # its first step was in time
        sampling=replace(
            sampling,
            max_tokens=sampling.max_tokens - base,
            min_tokens=max(sampling.min_tokens - base, 0),
            prompt_logprobs=None if base or choice else sampling.prompt_logprobs,
            routed_experts_start=first_row if sampling.routed_experts else 0,
        ),
    )


class LastingGeneration(Generation):
    """A generation that survives the death of its engine. Its requests must have a seed."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._parts: dict[RequestStream, tuple[int, int]] = {}  # choice and first token of the streams of one choice
        self._lost: Exception | None = None
        self._lost_at = 0.0
        self._num_losses = 0
        self._vain_losses = 0
        self._tokens_at_loss = -1

    async def __aenter__(self) -> LastingGeneration:
        try:
            await super().__aenter__()
        except LOST as error:
            self._note_loss(error)
        return self

    async def step(self) -> list[tuple[int, ChoiceDelta]]:
        """See Generation.step. Empty also after the death of an engine, and while there is none."""
        try:
            if self._lost is not None and not await self._resubmitted(self._lost):
                return []
            return await super().step()
        except LOST as error:
            self._note_loss(error)
            return []

    def _note_loss(self, error: Exception) -> None:
        """Take note of the loss, or raise ``error`` if there is no hope."""
        if self._client.closing.is_set():
            raise error
        self._vain_losses = self._vain_losses + 1 if self.completion_tokens == self._tokens_at_loss else 1
        if self._vain_losses >= MAX_VAIN_LOSSES:
            raise error
        self._tokens_at_loss = self.completion_tokens
        if self._lost is None:
            self._lost_at = asyncio.get_running_loop().time()
        self._num_losses += 1
        self._lost = error
        self._close()
        self._streams.clear()
        self._parts.clear()
        self._reader = Reader()

    async def _resubmitted(self, lost: Exception) -> bool:
        """Wait for an engine, and send it what is left. False: woken before (see nudge)."""
        if asyncio.get_running_loop().time() - self._lost_at > RESTART_S or self._client.closing.is_set():
            raise lost
        if not self._client.connected.is_set():
            waits = [asyncio.ensure_future(event) for event in (self._client.connected.wait(), self._reader.wait())]
            try:
                await asyncio.wait(waits, timeout=RESTART_S, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
            if not self._client.connected.is_set():
                return False
        for i, request in enumerate(self._requests):
            await self._resubmit(i, request)
        self._lost = None
        return True

    async def _resubmit(self, i: int, request: AddRequest) -> None:
        choices = self.choices[self.n * i : self.n * (i + 1)]
        if not any(choice.token_ids or choice.finish_reason for choice in choices):
            self._streams[await self._client.submit(request, self._reader)] = i
            return
        for k, choice in enumerate(choices):
            if choice.finish_reason is None:
                name = part_id(request.request_id, f"{k}.{self._num_losses}")
                stream = await self._client.submit(rest_of(request, name, k, choice.token_ids), self._reader)
                self._streams[stream] = i
                self._parts[stream] = k, len(choice.token_ids)

    def _received(self, stream: RequestStream, output: Output) -> Output:
        """See Generation._received."""
        if stream not in self._parts:
            return output
        choice, base = self._parts[stream]
        spans = [_moved(span, base) for span in output.spans]
        return replace(output, choice=choice, spans=spans, cached_tokens=0 if base else output.cached_tokens)

    def _sent_choice(self, stream: RequestStream, choice: int) -> int:
        return 0 if stream in self._parts else choice


def _moved(span: Span, base: int) -> Span:
    return replace(span, start=span.start + base, end=span.end + base)
