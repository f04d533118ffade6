"""The outputs of a request as they arrive, and the task that reads them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Set

import msgspec

from fastdeploy.inter_communicator.messages import Output


class Reader:
    """The bell of the one task that reads some streams: it wakes the task."""

    def __init__(self) -> None:
        self._is_woken = False
        self._loop: asyncio.AbstractEventLoop | None = None  # asked for once: that is a system call
        self._waiter: asyncio.Future[None] | None = None
        self._streams: dict[RequestStream, None] = {}  # an ordered set

    def wake(self, stream: RequestStream | None = None) -> None:
        """Make :meth:`wait` return, with ``stream`` among the streams that it returns."""
        if stream is not None:
            self._streams[stream] = None
        self._is_woken = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> list[RequestStream]:
        """Return the streams that have something to read since the last call. May be empty."""
        if not self._is_woken:
            self._loop = self._loop or asyncio.get_running_loop()
            self._waiter = self._loop.create_future()
            await self._waiter
        self._is_woken = False
        streams, self._streams = list(self._streams), {}
        return streams


class RequestStream:
    """The outputs of one request. The engine client fills the stream and wakes its reader. One task reads the stream
    and closes it in every case (``with stream:``). A close before all n choices have ended cancels the others.

    fingerprint: of the HTTP body of a request with retain_s, which outlives this stream; else "".
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
        self._outputs: dict[int, list[Output]] = {}  # by choice; joined only when they are read, since that copies
        self._error: Exception | None = None
        self.reader = reader or Reader()
        self.in_wake_queue = False

    @property
    def ended(self) -> bool:
        """Whether no more outputs will come: every choice ended or was stopped, or the request failed."""
        return not self._open or self._error is not None

    @property
    def open_choices(self) -> Set[int]:
        """The choices that may still get outputs."""
        return self._open

    def put(self, output: Output) -> None:
        """Keep ``output`` for the reader, without waking it."""
        if output.choice in self._open:
            self._outputs.setdefault(output.choice, []).append(output)
            if output.finish_reason is not None:
                self._end(output.choice)

    def fail(self, error: Exception) -> None:
        """End the stream. The reader gets the outputs that are there, and then ``error``."""
        self._error = error
        self._forget(self.request_id)
        self.wake()

    def wake(self) -> None:
        """Wake the reader."""
        self.reader.wake(self)

    def read(self) -> list[Output]:
        """Return the outputs that are there, those of one choice :func:`joined`. If there are none, raises the error
        of :meth:`fail`."""
        outputs, self._outputs = [output for parts in self._outputs.values() for output in joined(parts)], {}
        if self._error is not None:
            if not outputs:
                raise self._error
            self.wake()
        return outputs

    def stop(self, choice: int) -> None:
        """Cancel a choice in which the reader found a stop string. Later outputs of it are ignored."""
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


def joined(outputs: list[Output]) -> list[Output]:
    """Join consecutive outputs of one choice, in time linear in their length. A final "stop" without a token stays
    apart, since the last token of an output that ends with "stop" is read as the EOS or stop id."""
    if len(outputs) == 1:
        return outputs
    *before, last = outputs
    if not last.token_ids and last.finish_reason == "stop":
        return [_one(before), last]
    return [_one(outputs)]


def _one(outputs: list[Output]) -> Output:
    if len(outputs) == 1:
        return outputs[0]
    return msgspec.structs.replace(
        outputs[-1],
        token_ids=[token for output in outputs for token in output.token_ids],
        logprobs=[logprob for output in outputs for logprob in output.logprobs],
        spans=[span for output in outputs for span in output.spans],
        prompt_logprobs=[logprob for output in outputs for logprob in output.prompt_logprobs],
        cached_tokens=sum(output.cached_tokens for output in outputs),
        num_preempted=sum(output.num_preempted for output in outputs),
        routed=b"".join([output.routed for output in outputs]),
    )
