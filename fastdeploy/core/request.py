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
from fastdeploy.core.served_weights import ServedWeights


class State(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    ENDING = "ending"
    FINISHED = "finished"


class Event(StrEnum):
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
TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.WAITING, Event.ADMIT): State.RUNNING,
    (State.WAITING, Event.END): State.ENDING,
    (State.RUNNING, Event.RETRACT): State.WAITING,
    (State.RUNNING, Event.END): State.ENDING,
    (State.ENDING, Event.RETIRE): State.FINISHED,
}


class Request:
    """One choice of a client's request. Only the scheduler (and, for ``kv_mixed``, a weight commit) mutates it.

    There is no prefill or decode phase: ``num_computed`` (tokens whose KV is in ``blocks``) catches up with
    ``len(token_ids)``, and whenever it is about to reach it the next token is sampled.

    token_ids: prompt and output. While the request waits and has no output, this is the list of its group's prompt
    itself, which must not be changed: a thousand choices of a long prompt wait with one copy of it. ADMIT makes a copy.
    key: the second part keys random numbers. That is the number which the choice had in the reply it was first asked
    for in.
    num_new_prompt_tokens: of the prompt, without what was output of an earlier attempt.
    blocks: grows in place; a new array after its KV was given up.
    order: sorts requests, smaller first: (priority, arrival number). Preemption takes the largest.
    kv_mixed: a commit with kv=keep happened under its KV, so that its blocks belong to no single epoch.
    silent: its client wants no final output (it cancelled the request, or is gone).
    first_epoch: of the weights that sampled its first token.
    kv_recomputed: since then its KV was lost and rebuilt under other weights; the spans of later tokens say so.
    sequence: its number at the runner, while it is in the batch; num_told_tokens, num_told_blocks: of it, the runner
    knows so many tokens and blocks.
    prompt_logprobs: as far as its prompt is computed; they go out with its first token, or with its end before that.
    """

    __slots__ = (
        "arrival", "blocks", "cached_tokens", "choice", "cursor", "finish_reason", "first_token_at",
        "first_weight_epoch", "group", "key", "kv_mixed", "kv_recomputed", "last_token_at", "max_output_tokens",
        "message", "num_computed", "num_new_prompt_tokens", "num_preempted", "num_prompt_tokens", "num_published",
        "num_told_blocks", "num_told_tokens", "order", "prompt_key", "prompt_logprobs", "sampling", "sequence",
        "silent", "state", "stop_reason", "tail_published", "token_ids",
    )  # fmt: skip

    def __init__(self, group: Group, choice: int, order: tuple[int, int], max_output_tokens: int):
        add = group.add
        self.group = group
        self.choice = choice
        self.order = order
        self.sampling: SamplingParams = group.sampling
        self.token_ids: list[int] = add.prompt_token_ids
        self.num_prompt_tokens = len(add.prompt_token_ids)
        self.max_output_tokens = max_output_tokens
        self.num_new_prompt_tokens = self.num_prompt_tokens - add.resumed_tokens
        self.key = (add.request_id, add.first_choice + choice)
        self.prompt_key = group.prompt_key
        self.state = State.WAITING
        self.num_computed = 0
        self.blocks = array("i")
        self.cursor: Any = None  # owned by KVCacheManager: the node of the last full block that is published,
        self.num_published = 0  # how many full blocks that makes, and whether the prompt's partial one is too
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
        """Its whole prompt is computed, and nothing of it taken from the prefix cache. One choice does it for all."""
        return self.choice == 0 and self.sampling.prompt_logprobs is not None and self.num_output_tokens == 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def live(self) -> bool:
        return self.state is State.WAITING or self.state is State.RUNNING

    def advance(self, event: Event) -> None:
        """Go to the next state of the table. Raises KeyError for an event that is not in it."""
        self.state = TRANSITIONS[self.state, event]
        prompt = self.group.add.prompt_token_ids
        if event is Event.ADMIT:
            self.group.scheduled = True
            if self.token_ids is prompt:
                self.token_ids = list(prompt)
        elif event is Event.RETRACT and self.num_output_tokens == 0:
            self.token_ids = prompt

    def append(self, token_id: int, served: ServedWeights, now: float) -> Span:
        """Add one sampled token; returns the span that labels it."""
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

    __slots__ = ("add", "client", "client_id", "prompt_key", "requests", "sampling", "scheduled", "started")

    def __init__(self, client: str, add: AddRequest):
        self.client = client
        self.client_id = add.group or add.request_id
        self.add = add
        self.sampling = add.sampling.seeded()
        self.prompt_key = hash((add.cache_salt, tuple(add.prompt_token_ids)))
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

    def is_taken(self, add: AddRequest) -> bool:
        """Its id, or the one that its client knows it by, is another's; members of a group share the latter."""
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
