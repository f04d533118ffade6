"""The HTTP answer of a generation: server-sent events, or one JSON body. A disconnect cancels the generation."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from fastdeploy.client.choice import ChoiceDelta
from fastdeploy.client.generation import Generation
from fastdeploy.http.errors import error_body, error_response, json_response
from fastdeploy.http.guards.connection_limits import SEND_PART, client_left

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
ESCAPES = [(chr(code).encode(), b"\\u%04x" % code) for code in (0x85, 0x2028, 0x2029)]  # JSON escapes the others


class GenerationResponse(Response):
    """The response that runs ``generation`` and sends its answer. Subclasses have the form of the answer."""

    def __init__(self, generation: Generation):
        self.generation = generation
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watch = asyncio.create_task(_watch(scope, receive, self.generation))
        try:
            # In a task of its own: a wait below all middleware would pass each of them at every token.
            await asyncio.create_task(self._answer(scope, receive, send))
        finally:
            watch.cancel()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError


class JsonResponse(GenerationResponse):
    """One JSON body, made by ``body``. ``partial`` makes the unfinished choices for an error reply, so that no token is
    lost when the engine dies."""

    def __init__(
        self, generation: Generation, body: Callable[[], Awaitable[Any]], partial: Callable[[], Awaitable[list[dict]]]
    ):
        super().__init__(generation)
        self._body, self._partial = body, partial

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        generation = self.generation
        try:
            async with generation:
                while not (generation.finished or generation.gone):
                    await generation.step()
            generation.require_an_answer()
        except Exception as error:
            kept = generation.completion_tokens and not generation.gone
            extra = {"choices": await self._partial()} if kept else {}
            await error_response(error, **extra)(scope, receive, send)
            return
        await json_response(await self._body())(scope, receive, send)


class EventStream(GenerationResponse):
    """One event per choice and step, a comment after ``keepalive_s`` seconds without events, and [DONE] at the end. A
    stream that fails ends with an error event instead of [DONE].

    ``render`` makes the payloads of one delta. ``last`` makes the payloads after the last token."""

    done = DONE

    def __init__(
        self,
        generation: Generation,
        render: Callable[[int, ChoiceDelta], Awaitable[Iterable[dict]]],
        last: Callable[[], Iterable[dict]],
        keepalive_s: float,
    ):
        super().__init__(generation)
        self._render, self._last = render, last
        self._keepalive_s = keepalive_s
        self._encoder = msgspec.json.Encoder()
        self._started = False
        self._sent_at = 0.0

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        generation, loop = self.generation, asyncio.get_running_loop()
        self._now, self._send_part = loop.time, scope.get("extensions", {}).get(SEND_PART, send)
        self._sent_at = self._now()
        self._timer = loop.call_later(self._keepalive_s, self._check_idle)
        try:
            async with generation:
                while not (generation.finished or generation.gone):
                    await self._step(send)
            generation.require_an_answer()
            await self._send(send, b"".join(map(self._event, self._last())) + self.done, more=False)
        except Exception as error:
            if self._started:
                await self._send(send, self._event(error_body(error)), more=False)
            else:
                await error_response(error)(scope, receive, send)
        finally:
            self._timer.cancel()

    async def _step(self, send: Send) -> None:
        deltas = await self.generation.step()
        if deltas:
            payloads = [payload for index, delta in deltas for payload in await self._render(index, delta)]
            await self._send(send, b"".join(map(self._event, payloads)))
        elif self._now() - self._sent_at >= self._keepalive_s:
            await self._send(send, KEEP_ALIVE)

    def _event(self, payload: dict) -> bytes:
        return b"data: " + one_line(self._encoder.encode(payload)) + b"\n\n"

    async def _send(self, send: Send, body: bytes, more: bool = True) -> None:
        if not self._started:
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            self._started = True
        await (self._send_part if more else send)({"type": "http.response.body", "body": body, "more_body": more})
        self._sent_at = self._now()

    def _check_idle(self) -> None:
        """Wake the stream if it sent nothing for ``keepalive_s``. In any case, set the timer again."""
        loop = asyncio.get_running_loop()
        left = self._sent_at + self._keepalive_s - self._now()
        if left <= 0:
            self.generation.nudge()
        self._timer = loop.call_later(left if left > 0 else self._keepalive_s, self._check_idle)


def one_line(encoded: bytes) -> bytes:
    """Escape the characters of a JSON text that end a line for some readers of streams, as str.splitlines."""
    # The first bytes of these characters are looked for first: to search for one byte is fast.
    if not encoded.isascii() and (b"\xe2" in encoded or b"\xc2" in encoded):
        for character, escape in ESCAPES:
            encoded = encoded.replace(character, escape)
    return encoded


async def _watch(scope: Scope, receive: Receive, generation: Generation) -> None:
    await client_left(scope, receive)
    generation.leave()
