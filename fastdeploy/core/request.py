"""The models that requests name, with the scopes that they are paused with; and one sequence in the engine, with its
state machine. The table of all sequences is in request_table.py."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec

from fastdeploy.core.outputs import Logprob, Span
from fastdeploy.core.request_fields import AddRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.core.served_weights import ADAPTER_PREFIX, ServedWeights


class RequestState(StrEnum):
    """The states of a request, see TRANSITIONS."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDING = "ending"
    FINISHED = "finished"


class RequestEvent(StrEnum):
    ADMIT = "admit"
    RETRACT = "retract"
    END = "end"
    RETIRE = "retire"


class Preemption(StrEnum):
    """Reasons why the KV of a running request is given up."""

    MEMORY = "memory"  # other requests need the room
    PAUSE = "pause"  # a pause that drains does not wait for a prompt
    CLEARED = "cleared"  # the KV cache was cleared
    RECOMPUTE = "recompute"  # new weights compute the KV again


class FinishReason(StrEnum):
    """The reasons why a choice ends."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


TRANSITIONS: dict[tuple[RequestState, RequestEvent], RequestState] = {
    (RequestState.WAITING, RequestEvent.ADMIT): RequestState.RUNNING,
    (RequestState.WAITING, RequestEvent.END): RequestState.ENDING,
    (RequestState.RUNNING, RequestEvent.RETRACT): RequestState.WAITING,
    (RequestState.RUNNING, RequestEvent.END): RequestState.ENDING,
    (RequestState.ENDING, RequestEvent.RETIRE): RequestState.FINISHED,
}


@dataclass
class Totals:
    """Choices that have ended since the engine started, and the output tokens of the aborted choices."""

    aborted: int = 0
    finished: int = 0
    aborted_tokens: int = 0


class ServedModel:
    """A model that requests can name: the base model, or an adapter over it.

    scope: the scope that its requests are paused with. served: the weights that compute its requests from the next
    step on; only the engine's loop replaces the value, between two steps. requests: all choices in the engine that name
    the model, in order of arrival. nbytes: of an adapter, packed in memory; None until the adapter has been read."""

    __slots__ = ("nbytes", "requests", "scope", "served")

    def __init__(self, scope: Scope, served: ServedWeights):
        self.scope = scope
        self.served = served
        self.requests: dict[Request, None] = {}
        self.nbytes: int | None = None


class Scope:
    """Requests that are paused together: of the whole engine, or of one adapter name.

    above: the scope of the whole engine, or None for that scope itself. boot_id: of the engine; weight_epoch
    restarts with it. totals: of the requests that the scope covers. model: the model whose label the reports
    of the scope show. num_models: models of an adapter's scope that are known or have requests."""

    __slots__ = ("above", "boot_id", "id", "model", "num_models", "totals")

    model: ServedModel

    def __init__(self, scope_id: str, boot_id: str = "", above: Scope | None = None):
        self.id = scope_id
        self.boot_id = boot_id
        self.above = above
        self.totals = Totals()
        self.num_models = 0
        self.model = ServedModel(self, ServedWeights()) if above is None else above.model

    @property
    def lora_name(self) -> str | None:
        """The adapter name of the scope; None for the whole engine."""
        return None if self.above is None else self.id.removeprefix(ADAPTER_PREFIX)

    def covers(self, other: Scope) -> bool:
        """Whether a pause of this scope concerns the requests of ``other``."""
        return other is self or other.above is self

    def __str__(self) -> str:
        return "the engine" if self.above is None else f"adapter {self.lora_name!r}"

    def weights_label(self) -> dict[str, Any]:
        """Return the label of the weights that serve, for reports. That of an adapter's scope has its name."""
        served = self.model.served
        label = {"version": served.version, "weight_epoch": served.weight_epoch, "boot_id": self.boot_id}
        if self.lora_name is not None:
            label["lora_name"] = self.lora_name
        if served.adapter:
            label["adapter_epoch"] = served.adapter_epoch
        if served.quantization:
            label["quantization"] = served.quantization
        return label


class Ending(NamedTuple):
    """The end of a request by one of its tokens. num_tokens: of the request, with this one."""

    num_tokens: int
    reason: FinishReason
    stop_reason: int | None = None


class Sampler(NamedTuple):
    """The weights that sampled the output tokens from index ``start`` on, and whether they went on over KV that other
    weights have begun (Span.recomputed)."""

    start: int
    served: ServedWeights
    recomputed: bool


class Request:
    """One choice of a client's request. Three parts of the engine mutate it, all on the loop's thread: the scheduler
    (state, tokens, ``num_computed``, ``kv_mixed``), the KV cache manager (blocks and their publication; on admission
    and release also ``num_computed``, ``kv_recomputed`` and ``kv_mixed``) and the lifecycle (``silent``).

    There is no prefill or decode phase. Steps bring ``num_computed`` (tokens whose KV is in ``blocks``) up to
    ``len(token_ids)``. The step that gets there samples the next token.

    token_ids: prompt and output. While the request waits and has no output, this is the prompt's list itself, which all
    choices share and nobody may change. ADMIT makes a copy.
    key: (request id, number of the choice). Random numbers depend on the number; a resubmitted choice keeps it.
    model: the model that computes the request. scope: the scope that the request is paused with.
    num_new_prompt_tokens: tokens of the prompt without the output of an earlier attempt.
    computed_before: tokens that were computed before their KV was lost, here or in an earlier, aborted attempt. Where
    they are computed again, they count as recomputed.
    blocks: ids of KV blocks. Grows in place; a new array after the KV was given up.
    order: (priority, time at which it or its session came, arrival number), smaller first.
    Preemption takes the largest.
    kv_mixed: a commit with kv=keep happened since the KV was begun, so the blocks belong to no single weight_epoch.
    admitted_at, first_token_at, last_token_at: time.time() of the first admission to the batch and of tokens; 0.0 =
    not yet.
    silent: the client wants no final output (it cancelled the request, or is gone).
    sampled_by: what sampled the output tokens, in their order.
    num_delivered: output tokens that were delivered, see engine/requests/delivery.py. logprobs, routed: what was asked
    for of the others, as in messages.Output. next_output_at: time on the loop's clock before which no further token is
    delivered.
    first_kv_namespace: of the weights that sampled the first token.
    kv_recomputed: the KV was lost since the first token and rebuilt under other weights; see ``Span.recomputed``.
    published_node: node of the last full block that is published in the prefix index. num_published: number of
    published full blocks. tail_published: whether the prompt's partial last block is published too.
    sequence: the request's number at the runner, while it is in the batch. num_sent_tokens, num_sent_blocks: tokens and
    blocks that the runner knows.
    prompt_logprobs: of the part of the prompt that is computed. Sent with the first token, or with an earlier end.
    """

    __slots__ = (
        "admitted_at", "arrival", "blocks", "cached_tokens", "choice", "computed_before", "finish_reason",
        "first_kv_namespace", "first_token_at", "group", "key", "kv_mixed", "kv_recomputed", "last_token_at",
        "logprobs", "max_output_tokens", "message", "model", "next_output_at", "num_computed", "num_delivered",
        "num_new_prompt_tokens", "num_preempted", "num_prompt_tokens", "num_published", "num_sent_blocks",
        "num_sent_tokens", "order", "prompt_key", "prompt_logprobs", "published_node", "routed", "sampled_by",
        "sampling", "scope", "sequence", "silent", "state", "stop_reason", "tail_published", "token_ids",
    )  # fmt: skip

    def __init__(self, group: Group, choice: int, order: tuple[float, ...], max_output_tokens: int):
        add = group.add
        self.group = group
        self.model = group.model
        self.scope = group.model.scope
        self.choice = choice
        self.order = order
        self.sampling: SamplingParams = group.sampling
        self.token_ids: list[int] = add.prompt_token_ids
        self.num_prompt_tokens = len(add.prompt_token_ids)
        self.max_output_tokens = max_output_tokens
        self.num_new_prompt_tokens = self.num_prompt_tokens - add.resumed_tokens
        self.key = (add.request_id, add.first_choice + choice)
        self.prompt_key = group.prompt_key
        self.state = RequestState.WAITING
        self.num_computed = 0
        self.computed_before = self.num_prompt_tokens - 1 if add.resumed_tokens else 0  # the last one was sampled only
        self.blocks = array("i")
        self.published_node: Any = None
        self.num_published = 0
        self.tail_published = False
        self.kv_mixed = False
        self.kv_recomputed = False
        self.sampled_by: list[Sampler] = []
        self.num_delivered = 0
        self.logprobs: list[Logprob] = []
        self.routed = b""
        self.next_output_at = 0.0
        self.first_kv_namespace: tuple[int, int] | None = None
        self.cached_tokens = 0
        self.prompt_logprobs: list[Logprob] = []
        self.sequence: int | None = None
        self.num_sent_tokens = 0
        self.num_sent_blocks = 0
        self.num_preempted = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.message = ""
        self.silent = False
        self.arrival = add.arrival or time.time()
        self.admitted_at = 0.0
        self.first_token_at = 0.0
        self.last_token_at = 0.0

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether this choice computes the logprobs of the prompt, for all choices. It then takes no prefix hit."""
        return self.choice == 0 and self.sampling.prompt_logprobs is not None and self.num_output_tokens == 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def unsent_row(self) -> int:
        """Position of the first token whose row the client wants and does not have, or -1 if it wants none. The rows of
        all tokens before the newest one are sent together with the newest one."""
        if not self.sampling.routed_experts:
            return -1
        return self.num_tokens - 1 if self.num_output_tokens else self.sampling.routed_experts_start

    @property
    def version_lag(self) -> int:
        """By how many numbers the weights that sampled the first token are behind those that serve now: of the base
        weights and, for a request of an adapter, of the adapter's loads. 0 without a token."""
        if not self.sampled_by:
            return 0
        oldest, now = self.sampled_by[0].served, self.model.served
        return now.weight_epoch - oldest.weight_epoch + now.adapter_epoch - oldest.adapter_epoch

    @property
    def live(self) -> bool:
        """Whether the request may still get tokens."""
        return self.state is RequestState.WAITING or self.state is RequestState.RUNNING

    def advance(self, event: RequestEvent) -> None:
        """Go to the next state. Raises KeyError for an event that TRANSITIONS does not have: our own mistake."""
        self.state = TRANSITIONS[self.state, event]
        prompt = self.group.add.prompt_token_ids
        if event is RequestEvent.ADMIT:
            self.group.scheduled = True
            self.admitted_at = self.admitted_at or time.time()
            if self.token_ids is prompt:
                self.token_ids = list(prompt)
        elif event is RequestEvent.RETRACT and self.num_output_tokens == 0:
            self.token_ids = prompt

    def append(
        self,
        token_ids: list[int],
        logprobs: Sequence[Logprob],
        served: ServedWeights,
        eos_token_ids: tuple[int, ...],
        now: float,
    ) -> NewTokens:
        """Add the tokens that ``served`` has sampled in one step, up to the first one that ends the request."""
        at = self.num_output_tokens
        ending = self._ending(token_ids, eos_token_ids)
        if ending is not None and len(token_ids) > 1:
            kept = ending.num_tokens - len(self.token_ids)
            token_ids, logprobs = token_ids[:kept], logprobs[:kept]
        self.token_ids += token_ids
        self.logprobs += logprobs
        last = self.sampled_by[-1] if self.sampled_by else None
        if last is None or last.served is not served or last.recomputed is not self.kv_recomputed:
            self.sampled_by.append(Sampler(at, served, self.kv_recomputed))
        if at == 0:
            self.first_kv_namespace = served.kv_namespace
        gap_s = now - (self.last_token_at or self.arrival)
        self.first_token_at = self.first_token_at or now
        self.last_token_at = now
        return NewTokens(self, token_ids, served, at == 0, gap_s, ending)

    def _ending(self, token_ids: list[int], eos_token_ids: tuple[int, ...]) -> Ending | None:
        """Return how the first of these new tokens that ends the request ends it, or None if the request goes on."""
        sampling, num_tokens = self.sampling, len(self.token_ids)
        limit = self.num_prompt_tokens + self.max_output_tokens
        for token in token_ids:
            num_tokens += 1
            if token in sampling.stop_token_ids:
                return Ending(num_tokens, FinishReason.STOP, token)
            if token in eos_token_ids and not sampling.ignore_eos:
                return Ending(num_tokens, FinishReason.STOP)
            if num_tokens >= limit:
                return Ending(num_tokens, FinishReason.LENGTH)
        return None

    @property
    def name(self) -> str:
        """The name of this choice in events: "request id/choice"."""
        return f"{self.key[0]}/{self.key[1]}"

    def spans(self, start: int = 0) -> list[Span]:
        """Return the labels of the output tokens from index ``start`` on."""
        spans: list[Span] = []
        end = self.num_output_tokens
        for sampler in reversed(self.sampled_by):
            if end <= start:
                break
            served, at = sampler.served, max(sampler.start, start)
            label = served.adapter_name, served.adapter_epoch, served.quantization
            spans.append(Span(served.version, served.weight_epoch, at, end, sampler.recomputed, *label))
            end = at
        spans.reverse()
        return spans

    def labels(self) -> list[tuple[str, int, int, int, int]]:
        """Return (version, weight_epoch, adapter_epoch, start, end) of the output tokens, for events."""
        return [(s.version, s.weight_epoch, s.adapter_epoch, s.start, s.end) for s in self.spans()]

    def __repr__(self) -> str:
        computed = f"{self.num_computed}/{self.num_tokens}"
        return f"<Request {self.key} {self.state.value} {computed} blocks={len(self.blocks)}>"


class NewTokens(msgspec.Struct, frozen=True):
    """The tokens that one step has made for one request. served: the weights that sampled them. first: the request had
    none before. gap_s: seconds since the tokens before, or since arrival for the first ones. ending: None = the request
    goes on."""

    request: Request
    token_ids: list[int]
    served: ServedWeights
    first: bool
    gap_s: float
    ending: Ending | None


class Group:
    """The n choices of one client request.

    started: some choice has produced a token. A pause with mode wait then runs all choices to their end.
    scheduled: some choice has had a step, even if it has ended or was preempted since.
    client_id: the id that the client knows, which other groups may share.
    sampling: always has a seed.
    output_interval_s: of the client that is attached now, see AddRequest.
    sender: the client that sent the request; ``client`` is another one if that has attached to it since.
    prefill: prompt tokens to compute before the first token; see LoadBook.
    """

    __slots__ = (
        "add",
        "client",
        "client_id",
        "model",
        "output_interval_s",
        "prefill",
        "prompt_key",
        "requests",
        "sampling",
        "scheduled",
        "sender",
        "started",
    )

    def __init__(self, client: str, add: AddRequest, model: ServedModel):
        self.client = self.sender = client
        self.model = model
        self.client_id = add.group or add.request_id
        self.add = add
        self.sampling = add.sampling.seeded()
        self.output_interval_s = add.output_interval_s
        self.prompt_key = hash((model, add.cache_salt, tuple(add.prompt_token_ids)))
        self.requests: list[Request] = []
        self.prefill = 0
        self.scheduled = False
        self.started = False
