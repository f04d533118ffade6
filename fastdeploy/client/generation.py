"""The running requests of one caller, and their choices so far."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from fastdeploy.client.choice import Choice, ChoiceDelta, TextOptions, joined, pieces
from fastdeploy.client.pace import Pace
from fastdeploy.client.request_stream import Reader, RequestStream
from fastdeploy.client.routed_rows import RoutedRows
from fastdeploy.client.serving_client import ServingClient
from fastdeploy.client.tokenizer import Tokenizer
from fastdeploy.core.errors import EngineError, FastDeployError, InvalidField, NonFiniteLogits, NoTokenAllowed
from fastdeploy.core.experts import experts_of
from fastdeploy.core.outputs import Logprob
from fastdeploy.core.request_fields import AddRequest
from fastdeploy.inter_communicator.messages import Output

# Errors that end one choice, by their stop_reason. The other choices go on.
OF_ONE_CHOICE: dict[int | str | None, type[FastDeployError]] = {
    error.code: error for error in (NonFiniteLogits, NoTokenAllowed)
}
TOKENS_AT_ONCE = 128  # of one choice
# Bytes of the sampling masks of one request: 100 to 1,000 per token with a usual top_p, up to a vocabulary without.
MAX_MASK_BYTES = 64 << 20
# Of the rows of routed experts, likewise. 32,768 tokens of 48 layers and 8 experts have 12 MiB in each choice.
MAX_ROUTED_BYTES = 512 << 20
# Between the outputs of a request that nobody reads before its end. What an engine has not sent when it dies must be
# computed again, so the work of at most this time is lost.
OUTPUT_INTERVAL_S = 1.0
WORK_PER_TOKEN = 10  # to decode a token, in the units of Pace


class GenerationRequest(NamedTuple):
    """Checked engine requests, one per prompt and all with the same n, and the options of decoding for each. streams:
    False = nobody sees a token before the end. Then the engine sends tokens at an interval, unless stop strings must be
    found in them."""

    requests: Sequence[AddRequest]
    texts: Sequence[TextOptions]
    streams: bool


class Generation:
    """The running engine requests of one caller. The end of ``async with`` cancels the unfinished requests.

    Choice ``n * i + k`` is the k-th choice of prompt i, as OpenAI numbers them. cached_tokens: one per prompt. pace:
    counts the work for this caller. adapters: names, one per prompt; "" = the base model. tokens_per_delta: a delta has
    at most so many tokens; None = those that came together.
    """

    def __init__(
        self,
        client: ServingClient,
        tokenizer: Tokenizer | None,
        request: GenerationRequest,
        pace: Pace,
        tokens_per_delta: int | None = None,
    ):
        self.pace = pace
        self._client = client
        self._tokens_per_delta = tokens_per_delta
        self.n = request.requests[0].n
        self.request_id = request.requests[0].group or request.requests[0].request_id
        self.prompts = [add.prompt_token_ids for add in request.requests]
        self.adapters = [add.adapter for add in request.requests]
        self.choices = [
            Choice(tokenizer, add.prompt_token_ids, text, add.resumed_tokens, self._rows(add))
            for add, text in zip(request.requests, request.texts, strict=True)
            for _ in range(self.n)
        ]
        self.created = int(time.time())
        self.gone = False
        in_time = request.streams or any(text.stops for text in request.texts)
        interval_s = 0.0 if in_time else OUTPUT_INTERVAL_S
        self._requests = [replace(add, output_interval_s=interval_s) for add in request.requests]
        self.cached_tokens = [0] * len(self.prompts)
        self._streams: dict[RequestStream, int] = {}  # with the number of the prompt
        self._mask_bytes = self._routed_bytes = 0
        self._num_open = len(self.choices)
        self._reader = Reader()

    def _rows(self, add: AddRequest) -> RoutedRows | None:
        if not add.sampling.routed_experts:
            return None
        info = experts_of(self._client.model_info)
        if info is None:  # the engine refuses the request
            return None
        return RoutedRows(info, len(add.prompt_token_ids), add.sampling.routed_experts_start)

    async def __aenter__(self) -> Generation:
        try:
            for i, add in enumerate(self._requests):
                self._streams[await self._client.submit(add, self._reader)] = i
        except BaseException:
            self._close()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._close()

    def _close(self) -> None:
        for stream in self._streams:
            stream.close()

    @property
    def finished(self) -> bool:
        return not self._num_open

    @property
    def completion_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices)

    def require_an_answer(self) -> None:
        """Raise InvalidField if the client left before the end, and the error of the first choice if every choice ended
        with one."""
        if self.gone and not self.finished:
            why = "the client closed the sending side of the connection before the answer, and so counts as gone"
            raise InvalidField("request", why)
        if all(choice.finish_reason == "error" for choice in self.choices):
            raise choice_error(self.choices[0])

    def nudge(self) -> None:
        """Make :meth:`step` return."""
        self._reader.wake()

    def leave(self) -> None:
        """Set ``gone`` and make :meth:`step` return, since the HTTP client has disconnected."""
        self.gone = True
        self._reader.wake()

    async def step(self) -> list[tuple[int, ChoiceDelta]]:
        """Wait for new tokens. Return the number of each choice that has grown, with what was added. Empty after a
        nudge.

        Raises InvalidField for masks that are too large, the engine's refusal (RequestError), EngineDead, or
        EngineError if the engine failed. A choice that ended with an error of OF_ONE_CHOICE has the finish_reason
        "error", and the others go on: see :meth:`require_an_answer`.
        """
        deltas: list[tuple[int, ChoiceDelta]] = []
        for stream in sorted(await self._reader.wait(), key=self._streams.__getitem__):
            i = self._streams[stream]
            for output in stream.read() if not deltas else _read_quietly(stream):
                output = self._received(stream, output)
                number = self.n * i + output.choice
                deltas += [(number, delta) for delta in await self._feed(i, stream, output)]
        return deltas

    async def _feed(self, i: int, stream: RequestStream, output: Output) -> list[ChoiceDelta]:
        """Give ``output`` to its choice in pieces, since an output may have the tokens of many steps."""
        deltas: list[ChoiceDelta] = []
        for piece in pieces(output, self._tokens_per_delta or TOKENS_AT_ONCE):
            if delta := self._feed_piece(i, stream, piece):
                deltas.append(delta)
            if not self.pace.allows(1 + WORK_PER_TOKEN * len(piece.token_ids)):
                await self.pace.wait()
        whole = joined(deltas)
        return deltas if self._tokens_per_delta or whole is None else [whole]

    def _feed_piece(self, i: int, stream: RequestStream, output: Output) -> ChoiceDelta | None:
        choice = self.choices[self.n * i + output.choice]
        if choice.finish_reason is not None:  # a stop string ended the choice while the output was in flight
            return None
        delta = choice.feed(output)
        if delta.logprobs and delta.logprobs[0].mask_ids:
            self._count_masks(delta.logprobs)
        self._routed_bytes += len(output.routed)
        if self._routed_bytes > MAX_ROUTED_BYTES:
            limit = f"more than {MAX_ROUTED_BYTES >> 20} MiB of rows in one request"
            raise InvalidField("routed_experts", f"{limit}: ask for fewer choices, rows from a later position, or none")
        if output.cached_tokens and output.choice == 0:  # a prompt counts once, whatever n is
            self.cached_tokens[i] = output.cached_tokens
        self._num_open -= choice.finish_reason is not None
        if choice.finish_reason == "error" and choice.stop_reason not in OF_ONE_CHOICE:
            raise EngineError(choice.message or "the engine failed on this request")
        if choice.finish_reason is not None and output.finish_reason is None:
            stream.stop(self._sent_choice(stream, output.choice))
        return delta

    def _count_masks(self, entries: Sequence[Logprob]) -> None:
        """Raise InvalidField once the masks of this request are too large."""
        self._mask_bytes += sum(len(entry.mask_ids) + len(entry.mask_logprobs) for entry in entries)
        if self._mask_bytes > MAX_MASK_BYTES:
            limit = f"more than {MAX_MASK_BYTES >> 20} MiB of sampling masks in one request"
            raise InvalidField("return_sampling_mask", f"{limit}: lower top_k, top_p or max_tokens")

    def _received(self, stream: RequestStream, output: Output) -> Output:
        """Return ``output`` with the number of its choice and the positions that its choice has for this caller."""
        return output

    def _sent_choice(self, stream: RequestStream, choice: int) -> int:
        """Return the number that a choice has in the request of ``stream``."""
        return choice


def choice_error(choice: Choice) -> FastDeployError:
    """Return the error that a choice with finish_reason "error" ended with."""
    return OF_ONE_CHOICE.get(choice.stop_reason, EngineError)(choice.message)


def _read_quietly(stream: RequestStream) -> list[Output]:
    """Return ``stream.read()``. A failure is left for the next step, so that earlier deltas are delivered first."""
    try:
        return stream.read()
    except Exception:
        stream.reader.wake(stream)
        return []
