"""One sequence in the engine, its state machine, and the table that holds all of them."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator
from enum import StrEnum
from typing import Any

from fastdeploy.core.outputs import Logprob, Span
from fastdeploy.core.request_fields import AddRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.core.scope import Scope
from fastdeploy.core.served_weights import ServedWeights


class RequestState(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    ENDING = "ending"
    FINISHED = "finished"


class RequestEvent(StrEnum):
    ADMIT = "admit"
    RETRACT = "retract"
    END = "end"
    RETIRE = "retire"


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


# An event that is not listed is our own mistake and raises KeyError.
TRANSITIONS: dict[tuple[RequestState, RequestEvent], RequestState] = {
    (RequestState.WAITING, RequestEvent.ADMIT): RequestState.RUNNING,
    (RequestState.WAITING, RequestEvent.END): RequestState.ENDING,
    (RequestState.RUNNING, RequestEvent.RETRACT): RequestState.WAITING,
    (RequestState.RUNNING, RequestEvent.END): RequestState.ENDING,
    (RequestState.ENDING, RequestEvent.RETIRE): RequestState.FINISHED,
}


class Request:
    """One choice of a client's request. Three parts of the engine mutate it, all on the loop's thread: the scheduler
    (state, tokens, ``num_computed``, ``kv_mixed``), the KV cache manager (blocks and what is published of them,
    ``num_computed`` and ``kv_recomputed`` on admission and release) and the lifecycle (``silent``).

    There is no prefill or decode phase: ``num_computed`` (tokens whose KV is in ``blocks``) catches up with
    ``len(token_ids)``, and whenever it is about to reach it the next token is sampled.

    token_ids: prompt and output. While the request waits and has no output, this is the list of its group's prompt
    itself, which must not be changed: a thousand choices of a long prompt wait with one copy of it. ADMIT makes a copy.
    key: the second part keys random numbers. That is the number which the choice had in the reply it was first asked
    for in.
    scope: the scope that it is paused with, and whose weights compute it.
    num_new_prompt_tokens: of the prompt, without what was output of an earlier attempt.
    blocks: grows in place; a new array after its KV was given up.
    order: sorts requests, smaller first: (priority, arrival number). Preemption takes the largest.
    kv_mixed: a commit with kv=keep happened under its KV, so that its blocks belong to no single weight epoch.
    silent: its client wants no final output (it cancelled the request, or is gone).
    first_weight_epoch: of the weights that sampled its first token.
    kv_recomputed: since then its KV was lost and rebuilt under other weights; the spans of later tokens say so.
    published_node: node of the last full block that is published in the prefix index. num_published: how many full
    blocks that makes. tail_published: whether the prompt's partial last block is published too.
    sequence: its number at the runner, while it is in the batch; num_told_tokens, num_told_blocks: of it, the runner
    knows so many tokens and blocks.
    prompt_logprobs: as far as its prompt is computed; they go out with its first token, or with its end before that.
    """

    __slots__ = (
        "arrival", "blocks", "cached_tokens", "choice", "finish_reason", "first_token_at", "first_weight_epoch",
        "group", "key", "kv_mixed", "kv_recomputed", "last_token_at", "max_output_tokens", "message", "num_computed",
        "num_new_prompt_tokens", "num_preempted", "num_prompt_tokens", "num_published", "num_told_blocks",
        "num_told_tokens", "order", "prompt_key", "prompt_logprobs", "published_node", "sampling", "scope",
        "sequence", "silent", "state", "stop_reason", "tail_published", "token_ids",
    )  # fmt: skip

    def __init__(self, group: Group, choice: int, order: tuple[int, int], max_output_tokens: int):
        add = group.add
        self.group = group
        self.scope = group.scope
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
        self.blocks = array("i")
        self.published_node: Any = None
        self.num_published = 0
        self.tail_published = False
        self.kv_mixed = False
        self.kv_recomputed = False
        self.first_weight_epoch: int | None = None
        self.cached_tokens = 0
        self.prompt_logprobs: list[Logprob] = []
        self.sequence: int | None = None
        self.num_told_tokens = 0
        self.num_told_blocks = 0
        self.num_preempted = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.message = ""
        self.silent = False
        self.arrival = add.arrival or time.time()
        self.first_token_at = 0.0
        self.last_token_at = 0.0

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether this choice computes the logprobs of the prompt, for all choices. Nothing of its prompt is then taken
        from the prefix cache."""
        return self.choice == 0 and self.sampling.prompt_logprobs is not None and self.num_output_tokens == 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def live(self) -> bool:
        return self.state is RequestState.WAITING or self.state is RequestState.RUNNING

    def advance(self, event: RequestEvent) -> None:
        """Go to the next state of the table. Raises KeyError for an event that is not in it."""
        self.state = TRANSITIONS[self.state, event]
        prompt = self.group.add.prompt_token_ids
        if event is RequestEvent.ADMIT:
            self.group.scheduled = True
            if self.token_ids is prompt:
                self.token_ids = list(prompt)
        elif event is RequestEvent.RETRACT and self.num_output_tokens == 0:
            self.token_ids = prompt

    def append(self, token_id: int, served: ServedWeights, now: float) -> Span:
        """Add one token that ``served`` has sampled; returns the span that labels it."""
        at = self.num_output_tokens
        self.token_ids.append(token_id)
        if at == 0:
            self.first_weight_epoch = served.weight_epoch
        self.first_token_at = self.first_token_at or now
        self.last_token_at = now
        return Span(served.version, served.weight_epoch, at, at + 1, self.kv_recomputed)

    def __repr__(self) -> str:
        computed = f"{self.num_computed}/{self.num_tokens}"
        return f"<Request {self.key} {self.state.value} {computed} blocks={len(self.blocks)}>"


class Group:
    """The n choices of one client request. ``started``: some choice has produced a token, so that a pause which
    drains (mode wait) runs all of them to their end. ``scheduled``: some choice has had a step, even if it has ended or
    was preempted since. ``client_id``: the id that the client knows, which other groups may share. ``sampling``: always
    has a seed."""

    __slots__ = ("add", "client", "client_id", "prompt_key", "requests", "sampling", "scheduled", "scope", "started")

    def __init__(self, client: str, add: AddRequest, scope: Scope):
        self.client = client
        self.scope = scope
        self.client_id = add.group or add.request_id
        self.add = add
        self.sampling = add.sampling.seeded()
        self.prompt_key = hash((scope.id, add.cache_salt, tuple(add.prompt_token_ids)))
        self.requests: list[Request] = []
        self.scheduled = False
        self.started = False


class RequestTable:
    """The one table of requests, by request id. A group leaves when its last choice is retired."""

    def __init__(self) -> None:
        self._groups: dict[str, Group] = {}
        self._by_client_id: dict[str, list[Group]] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, group: Group) -> None:
        assert group.add.request_id not in self._groups
        self._groups[group.add.request_id] = group
        self._by_client_id.setdefault(group.client_id, []).append(group)

    def get(self, request_id: str) -> list[Request]:
        """The choices still in the engine; empty for an unknown id."""
        group = self._groups.get(request_id)
        return list(group.requests) if group else []

    def id_is_in_use(self, add: AddRequest) -> bool:
        """Whether another request has the id of ``add``, or the id that its client knows it by. Members of a group
        share the latter."""
        also = self._groups if add.group else self._by_client_id
        return add.request_id in self._groups or (add.group or add.request_id) in also

    def known_as(self, client_id: str) -> list[Request]:
        """All that the client means by this id, which may be several requests."""
        return [r for group in self._by_client_id.get(client_id, []) for r in group.requests]

    def remove(self, request: Request) -> None:
        group = request.group
        group.requests.remove(request)
        if not group.requests:
            del self._groups[group.add.request_id]
            same = self._by_client_id[group.client_id]
            same.remove(group)
            if not same:
                del self._by_client_id[group.client_id]

    def of_client(self, client: str) -> list[Request]:
        return [r for g in self._groups.values() if g.client == client for r in g.requests]

    def __iter__(self) -> Iterator[Request]:
        return (r for g in list(self._groups.values()) for r in list(g.requests))
