"""The outputs of one request, as they come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fastdeploy.inter_communicator.messages import Output


class RequestStream:
    """Filled by the engine client, read by one handler, which closes it in every case (``with stream:``).

    A stream that is closed before all n choices have ended cancels them at the engine. ``event`` is set by whoever put
    something in, once it is the reader's turn; several streams may share one. fingerprint: of the body, where the
    request has retain_s and outlives this stream; else "".
    """

    def __init__(
        self,
        request_id: str,
        n: int,
        cancel: Callable[[str, int | None, str], None],
        forget: Callable[[str], None],
        event: asyncio.Event | None = None,
        fingerprint: str = "",
    ):
        self.request_id = request_id
        self.fingerprint = fingerprint
        self._open = set(range(n))
        self._whole = n
        self._cancel = cancel
        self._forget = forget
        self._outputs: dict[int, list[Output]] = {}  # by choice; joined when they are taken, since joining copies
        self._error: Exception | None = None
        self.event = event or asyncio.Event()
        self.in_line = False  # to be woken, by whoever put something in

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
        self.event.set()

    def take(self) -> list[Output]:
        """All outputs that are there, one of each choice; once they are taken, raises what :meth:`fail` was given."""
        outputs, self._outputs = [joined(outputs) for outputs in self._outputs.values()], {}
        if self._error is not None:
            if not outputs:
                raise self._error
            self.event.set()
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
            whole = len(self._open) == self._whole
            for choice in [None] if whole else sorted(self._open):
                self._cancel(self.request_id, choice, "abort")
            self._open.clear()
            self._forget(self.request_id)

    def __enter__(self) -> RequestStream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def joined(outputs: list[Output]) -> Output:
    """All that ``outputs`` of one choice say, as one output. Time is linear in their length."""
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
