"""The outputs of one request as they arrive, and the task that reads them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fastdeploy.inter_communicator.messages import Output


class Reader:
    """The one task that reads some streams. It sleeps until one of them has something for it. for_tokens: false if it
    is to be woken by the end of a choice only, and not by tokens."""

    def __init__(self, for_tokens: bool = True) -> None:
        self.for_tokens = for_tokens
        self._event = asyncio.Event()
        self._streams: dict[RequestStream, None] = {}  # a set in order of arrival

    def wake(self, stream: RequestStream | None = None) -> None:
        """Make :meth:`wait` return, with ``stream`` among the streams that it returns."""
        if stream is not None:
            self._streams[stream] = None
        self._event.set()

    async def wait(self) -> list[RequestStream]:
        """The streams that have something to take since the last call. May be empty."""
        await self._event.wait()
        self._event.clear()
        streams, self._streams = list(self._streams), {}
        return streams


class RequestStream:
    """Filled by the engine client, read by one task, which closes it in every case (``with stream:``).

    A stream that is closed before all n choices have ended cancels them at the engine. ``reader`` is woken by whoever
    put something in, in the order that EngineClient keeps. fingerprint: of the body, where the request has retain_s and
    outlives this stream; else "".
    """

    def __init__(
        self,
        request_id: str,
        n: int,
        cancel: Callable[[str, int | None, str], None],
        forget: Callable[[str], None],
        reader: Reader | None = None,
        fingerprint: str = "",
    ):
        self.request_id = request_id
        self.fingerprint = fingerprint
        self._open = set(range(n))
        self._n = n
        self._cancel = cancel
        self._forget = forget
        self._outputs: dict[int, list[Output]] = {}  # by choice; joined when they are taken, since joining copies
        self._error: Exception | None = None
        self.reader = reader or Reader()
        self.in_wake_queue = False

    @property
    def ended(self) -> bool:
        """No further output will come: every choice ended or was stopped, or the request failed."""
        return not self._open or self._error is not None

    def put(self, output: Output) -> None:
        """Keep ``output`` for the reader, which is not woken yet. A late reader finds all outputs of a choice joined to
        one."""
        if output.choice in self._open:
            self._outputs.setdefault(output.choice, []).append(output)
            if output.finish_reason is not None:
                self._end(output.choice)

    def fail(self, error: Exception) -> None:
        """No more outputs: the reader gets what is there, and then ``error``."""
        self._error = error
        self._forget(self.request_id)
        self.reader.wake(self)

    def take(self) -> list[Output]:
        """All outputs that are there, one of each choice; once they are taken, raises what :meth:`fail` was given."""
        outputs, self._outputs = [joined(outputs) for outputs in self._outputs.values()], {}
        if self._error is not None:
            if not outputs:
                raise self._error
            self.reader.wake(self)
        return outputs

    def stop(self, choice: int) -> None:
        """The reader found a stop string: this choice needs no more tokens, and its later outputs are ignored."""
        if choice in self._open and self._error is None:
            self._cancel(self.request_id, choice, "stop")
            self._end(choice)

    def _end(self, choice: int) -> None:
        self._open.discard(choice)
        if not self._open:
            self._forget(self.request_id)

    def close(self) -> None:
        if not self.ended:
            none_ended = len(self._open) == self._n
            for choice in [None] if none_ended else sorted(self._open):
                self._cancel(self.request_id, choice, "abort")
            self._open.clear()
            self._forget(self.request_id)

    def __enter__(self) -> RequestStream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def joined(outputs: list[Output]) -> Output:
    """Join consecutive outputs of one choice to one output. Takes time linear in their length."""
    if len(outputs) == 1:
        return outputs[0]
    last = outputs[-1]
    return Output(
        request_id=last.request_id,
        choice=last.choice,
        token_ids=[token for output in outputs for token in output.token_ids],
        logprobs=[logprob for output in outputs for logprob in output.logprobs],
        spans=[span for output in outputs for span in output.spans],
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        prompt_logprobs=[logprob for output in outputs for logprob in output.prompt_logprobs],
        cached_tokens=sum(output.cached_tokens for output in outputs),
        num_preempted=sum(output.num_preempted for output in outputs),
        message=last.message,
    )
