"""Runs without speculation, of requests that another engine served: each alone, with the same commits and losses of KV
at the same tokens."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from fastdeploy.core.outputs import Logprob, Span, merge_spans
from fastdeploy.core.request import Preemption, Request, RequestState
from fastdeploy.core.request_fields import AddRequest
from fastdeploy.core.weight_source import FolderSource
from fastdeploy.worker.model_runner import ModelRunner
from support.fake_runner import nothing
from support.harness import Harness

BLOCKS = 8  # of 16 tokens, so that requests lose their KV to others
LONGEST = 96


class SteppedRunner(ModelRunner):
    """A real runner for a ``Harness``. in_step: called once, behind the first layer of the next step."""

    def __init__(self, folder: Path, num_blocks: int = BLOCKS, routed_experts: bool = False):
        super().__init__(
            str(folder), num_blocks=num_blocks, max_model_len=LONGEST, standby_weights="off",
            enable_return_routed_experts=routed_experts,
        )  # fmt: skip
        self.may_stage = threading.Event()
        self.may_stage.set()
        self.in_step: Callable[[], object] = nothing

    def execute(self, plan, between_layers=None):
        action, self.in_step = self.in_step, nothing
        calls = itertools.count()

        def between() -> bool:
            if next(calls) == 1:
                action()
            return between_layers is not None and between_layers()

        return super().execute(plan, between)


class Happened(NamedTuple):
    """What happened to a request when it had ``num_tokens``, the KV of ``num_computed`` of them. commit: the folder of
    new weights, their version and kv; None = the request lost its KV."""

    num_computed: int
    num_tokens: int
    commit: tuple[Path, str | None, str] | None = None


class Outcome(NamedTuple):
    """All that a client gets of a choice, but its text."""

    tokens: list[int]
    logprobs: list[Logprob]
    prompt_logprobs: list[Logprob]
    spans: list[Span]
    reason: str | None
    stop_reason: int | str | None
    rows: bytes


class Recorder:
    """Records what happens to the requests of a harness. folder: of the weights that the next commit brings."""

    def __init__(self, h: Harness):
        self._h, self._commits = h, list[Happened]()
        self.folder: Path | None = None
        self.histories: dict[tuple[str, int], list[Happened]] = {}
        scheduler, switch = h.engine.scheduler, h.engine._switch
        self._add, self._retract, self._commit = scheduler.add, scheduler.retract, switch.commit
        scheduler.add, scheduler.retract, switch.commit = self.add, self.retract, self.commit

    def add(self, request: Request) -> None:
        begin = request.num_prompt_tokens
        self.histories[request.key] = [one._replace(num_tokens=begin) for one in self._commits]
        self._add(request)

    def retract(self, request: Request, why: Preemption) -> None:
        self.histories[request.key].append(Happened(request.num_computed, request.num_tokens))
        self._retract(request, why)

    def commit(self, staged, version, kv, *rest):
        assert self.folder is not None
        what = (self.folder, version, kv)
        self._commits.append(Happened(0, 0, what))
        for request in self._h.engine.lifecycle.requests:
            if request.live:
                self.histories[request.key].append(Happened(request.num_computed, request.num_tokens, what))
        return self._commit(staged, version, kv, *rest)


def outcome(h: Harness, request_id: str, choice: int) -> Outcome:
    stream, spans = h.stream(request_id, choice), list[Span]()
    merge_spans(spans, stream.spans)
    outputs = [one for sent in h.sent(msgspec.Struct) if hasattr(sent, "outputs") for one in sent.outputs]
    of_prompt = [
        lp for one in outputs if (one.request_id, one.choice) == (request_id, choice) for lp in one.prompt_logprobs
    ]
    stop_reason = stream.finals[0].stop_reason if stream.finals else None
    return Outcome(stream.tokens, stream.logprobs, of_prompt, spans, stream.reason, stop_reason, stream.routed)


def replay(h: Harness, add: AddRequest, choice: int, history: list[Happened], num_tokens: int) -> Outcome:
    """Run one choice of ``add`` alone, in an engine that has no other request, until it ends or has ``num_tokens`` of
    output. Returns its outcome."""
    sampling = add.sampling if choice == 0 else msgspec.structs.replace(add.sampling, prompt_logprobs=None)
    h.engine._handle("a", msgspec.structs.replace(add, n=1, first_choice=add.first_choice + choice, sampling=sampling))
    [request] = h.engine.lifecycle.requests
    left = list(history)
    limit = h.engine.scheduler.pacer.budget

    def budget(decodes):
        """Stop a prompt where the next event found it."""
        given = limit(decodes)
        take = given.take

        def up_to_the_next_event(of: Request) -> int:
            count = take(of)
            if left and left[0].num_tokens == of.num_tokens:
                count = min(count, left[0].num_computed - of.num_computed)
            return count

        given.take = up_to_the_next_event
        return given

    h.engine.scheduler.pacer.budget = budget
    while request.live and request.num_output_tokens < num_tokens:
        while left and (left[0].num_computed, left[0].num_tokens) == (request.num_computed, request.num_tokens):
            _let_happen(h, request, left.pop(0))
        h.run_rounds()
    return outcome(h, add.request_id, 0)


def _let_happen(h: Harness, request: Request, what: Happened) -> None:
    if what.commit is not None:
        folder, version, kv = what.commit
        staging = h.runner.begin_update(partial=False)
        staging.add(FolderSource(str(folder)), {})
        h.engine._switch.commit(staging.finish(), version, kv)
    elif request.state is RequestState.RUNNING:
        h.engine.scheduler.retract(request, Preemption.MEMORY)
