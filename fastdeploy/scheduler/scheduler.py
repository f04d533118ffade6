"""Continuous batching: ``plan`` makes the plan of the next step, ``apply`` takes in its result."""

from __future__ import annotations

import time
from bisect import insort

from fastdeploy.cache_manager.adapter_memory import AdapterMemory
from fastdeploy.cache_manager.kv_cache_manager import KVCacheManager
from fastdeploy.core.errors import NonFiniteLogits, NoTokenAllowed
from fastdeploy.core.events import EventKind, EventLog
from fastdeploy.core.plan import BlockCopy, NoneAllowed, NonFinite, ScheduledChunk, StepPlan, StepResult
from fastdeploy.core.request import (
    FinishReason,
    NewTokens,
    Preemption,
    Request,
    RequestEvent,
    RequestState,
    Scope,
    ServedModel,
)
from fastdeploy.core.runner import ModelInfo
from fastdeploy.core.served_weights import ServedWeights
from fastdeploy.scheduler.chunks import RunnerSequences
from fastdeploy.scheduler.drafts import Drafter, Speculation
from fastdeploy.scheduler.load import LoadBook
from fastdeploy.scheduler.pacer import PromptBudget, StepPacer
from fastdeploy.scheduler.queue import AdapterRoom, Gate, WaitingQueue


class Scheduler:
    """The scheduler, which moves requests through their states. The time per step depends on the number of running
    requests only, not on the number of waiting or frozen requests or of scopes.

    gate: of the whole engine. While it is closed, requests stay where they are. running: sorted by order. frozen:
    requests whose own scope was closed while they ran. A frozen request takes no place in the batch, and keeps its KV
    until another request needs the room. in_flight: the request of each chunk of the plan that runs. drafter: guesses
    tokens, which change the speed only. events: gets all events of requests.
    """

    def __init__(
        self,
        info: ModelInfo,
        max_num_seqs: int,
        pacer: StepPacer,
        kv: KVCacheManager,
        adapters: AdapterMemory,
        drafter: Drafter,
        events: EventLog,
    ):
        self.info = info
        self.max_num_seqs = max_num_seqs
        self.pacer = pacer
        self.kv = kv
        self.adapters = adapters
        self.speculation = Speculation(drafter, kv, pacer.max_tokens)
        self.gate = Gate.OPEN
        self.waiting = WaitingQueue()
        self.adapter_room = AdapterRoom(adapters, self.waiting)
        self.running: list[Request] = []
        self.frozen: list[Request] = []
        self._prefilling: dict[int, Request] = {}  # prompt_key -> the request that computes this prompt now
        self.ended: list[Request] = []  # in state ENDING; the final output is not collected yet
        self._step_id = 0
        self.in_flight: list[Request] = []
        self.load = LoadBook()
        self._events = events
        self._sequences = RunnerSequences(info)
        self.num_preemptions = 0
        self.num_recomputed = 0  # tokens computed again, since their KV was lost
        self.num_non_finite = 0  # sequences that ended because their logits were not finite

    # ------------------------------------------------------------------ requests in and out

    def add(self, request: Request) -> None:
        request.model.requests[request] = None
        self.waiting.push(request)
        self.load.add(request)
        if self._events.watched:
            whose = {"scope": request.scope.id, "request_id": request.group.client_id}
            whose["session"] = request.group.add.session
            sizes = {"prompt_tokens": request.num_prompt_tokens, "max_tokens": request.max_output_tokens}
            self._events.add(EventKind.QUEUED, request.name, **whose, **sizes)

    def end(
        self, request: Request, reason: FinishReason, message: str = "", stop_reason: int | str | None = None
    ) -> None:
        """Compute nothing more for ``request``. ``retire`` follows once its final output is handed over."""
        if request.state is RequestState.RUNNING:
            # Here and not in retire(): new weights may be committed in between, and the KV is not theirs.
            self.kv.publish(request, ended=True)
            self._leave_batch(request)
            if request.scope.above is not None:
                self.adapters.leave(request.model)
        else:
            self.waiting.remove(request)
        self.speculation.ended(request)
        self.load.end(request)
        request.advance(RequestEvent.END)
        request.finish_reason, request.message, request.stop_reason = reason, message, stop_reason
        self.ended.append(request)

    def retire(self, request: Request) -> None:
        """Release the KV of a request whose final output has been handed over."""
        request.advance(RequestEvent.RETIRE)
        del request.model.requests[request]
        self.kv.release(request)
        if self._events.watched:
            fields = {"output_tokens": request.num_output_tokens, "spans": request.labels()}
            self._events.add(EventKind.FINAL, request.name, reason=request.finish_reason, **fields)

    def retract(self, request: Request, why: Preemption) -> None:
        """Put a request back into the queue and release its KV, which is recomputed at the next admission."""
        if self._events.watched:
            self._events.add(EventKind.PREEMPTED, request.name, why=why, computed=request.num_computed)
        self._leave_batch(request)
        if request.scope.above is not None:
            self.adapters.leave(request.model)
        if request.num_output_tokens == 0:
            request.prompt_logprobs = []  # the prompt is computed again
        request.computed_before = max(request.computed_before, request.num_computed)
        request.advance(RequestEvent.RETRACT)
        self.kv.release(request)
        self.waiting.push(request)

    def adapter_failed(self, model: ServedModel, message: str) -> None:
        """End the requests that wait for an adapter which could not be read."""
        self.adapters.forget(model)
        for request in self.waiting.take_back(model):
            self.end(request, FinishReason.ERROR, message)

    def _leave_batch(self, request: Request) -> None:
        (self.running if request in self.running else self.frozen).remove(request)
        self._sequences.forget(request)
        if self._prefilling.get(request.prompt_key) is request:
            del self._prefilling[request.prompt_key]

    # ------------------------------------------------------------------ one step

    @property
    def has_work(self) -> bool:
        """Whether ``plan`` may have something to compute."""
        if self.gate is Gate.CLOSED:
            return False
        started_only = self.gate is Gate.STARTED_ONLY
        if self.running or self.waiting.head(started_only, with_adapters=False) is not None:
            return True
        request = self.waiting.head(started_only)
        return request is not None and self.adapter_room.victims_for(request, bool(self.frozen)) is not None

    def plan(self) -> StepPlan | None:
        """Plan a step within the pacer's budget: first decodes, then begun prompts, then new requests. The chunks of
        the plan are grouped by adapter, those of the base model first."""
        if not self.has_work:
            return None
        prefills: dict[Request, ScheduledChunk] = {}
        copies: list[BlockCopy] = []
        decodes = self._plan_decodes()
        budget = self.pacer.budget(decodes)
        self._plan_prefills(prefills, budget)
        self._plan_admissions(prefills, copies, budget)
        drafts = self.speculation.drafts(decodes, sum([chunk.count for chunk in prefills.values()]))
        chunks = {r: self._sequences.chunk(r, 1, drafts.get(r, ())) for r in decodes} | prefills
        if not chunks:
            return None
        if self.adapters.num_users:
            chunks = dict(sorted(chunks.items(), key=lambda item: item[1].served.adapter))
        self._step_id += 1
        self.in_flight = list(chunks)
        return StepPlan(self._step_id, list(chunks.values()), copies)

    def _plan_decodes(self) -> list[Request]:
        """Return the running requests that need one token, with KV for that token."""
        decodes: dict[Request, None] = {}
        for request in self.running[:]:
            if len(request.token_ids) - request.num_computed != 1 or request.state is not RequestState.RUNNING:
                continue
            while not self.kv.grow(request):
                victim = self._preempt(self.frozen or self.running)
                decodes.pop(victim, None)
                if victim is request:
                    break
            else:
                decodes[request] = None
        return list(decodes)

    def _plan_prefills(self, chunks: dict[Request, ScheduledChunk], budget: PromptBudget) -> None:
        for request in self.running:
            if len(request.token_ids) - request.num_computed > 1:
                if not budget.admits(request):
                    break
                chunks[request] = self._sequences.chunk(request, budget.take(request))

    def _plan_admissions(
        self, chunks: dict[Request, ScheduledChunk], copies: list[BlockCopy], budget: PromptBudget
    ) -> None:
        started_only, with_adapters = self.gate is Gate.STARTED_ONLY, True
        while len(self.running) < self.max_num_seqs:
            request = self.waiting.head(started_only, with_adapters)
            if request is None or self._prompt_is_being_computed(request) or not budget.admits(request):
                return
            needs_adapter = request.scope.above is not None
            if needs_adapter and not self.adapters.has(request.model):
                # Without room for the adapter, no younger request that needs one is admitted: it would take the room.
                with_adapters = self._wait_for_adapter(request)
                continue
            while (grant := self.kv.admit(request)) is None:
                if not self.frozen:
                    return
                self._preempt(self.frozen)
            self.waiting.remove(request)
            request.advance(RequestEvent.ADMIT)
            self._join_batch(request)
            if needs_adapter:
                self.adapters.use(request.model)
            if request.num_output_tokens == 0:
                request.cached_tokens = grant.hit_tokens
                if self.kv.enable_prefix_caching and request.num_tokens - request.num_computed > 1:
                    self._prefilling.setdefault(request.prompt_key, request)
            if grant.copy is not None:
                copies.append(grant.copy)
            if self._events.watched:
                fields = {"cached_tokens": grant.hit_tokens, "computed_before": request.num_output_tokens}
                self._events.add(EventKind.ADMITTED, request.name, **fields)
            chunks[request] = self._sequences.chunk(request, budget.take(request))

    def _wait_for_adapter(self, request: Request) -> bool:
        """Set a request aside until its adapter is read. False, with nothing changed, if the adapter has no room."""
        victims = self.adapter_room.victims_for(request, bool(self.frozen))
        if victims is None:
            return False
        for frozen in [r for r in self.frozen if r.model in victims]:
            self._preempt([frozen])
        self.adapter_room.read_for(request, victims)
        return True

    def _prompt_is_being_computed(self, request: Request) -> bool:
        """Whether another request computes the same prompt now. ``request`` then waits, and gets a prefix hit."""
        first = self._prefilling.get(request.prompt_key)
        if first is None or request.num_output_tokens or request.wants_prompt_logprobs:
            return False
        n = first.num_prompt_tokens
        return n == request.num_prompt_tokens and first.token_ids[:n] == request.token_ids

    def _preempt(self, candidates: list[Request]) -> Request:
        """Retract the last candidate in order, and return it. A request with ``kv_mixed``, whose KV cannot be rebuilt,
        is taken only if all candidates have it."""
        victim = max(candidates, key=lambda r: (not r.kv_mixed, r.order, r.choice))
        victim.num_preempted += 1
        self.num_preemptions += 1
        self.retract(victim, Preemption.MEMORY)
        return victim

    def abandon(self) -> None:
        """Record that the step was given up, after its copies. No request has changed, and no block that the step
        wrote to can be found by others. The next plan computes the same again."""
        self.in_flight = []
        self.kv.release_copied()

    def apply(self, plan: StepPlan, result: StepResult) -> list[NewTokens]:
        """Take in the result of a step, and return its tokens. Requests that end by a token, or with an error because
        their logits are not finite, are in ``ended``."""
        self.kv.release_copied()
        now = time.time()
        tokens: list[NewTokens] = []
        in_flight, self.in_flight = self.in_flight, []
        for i, (request, chunk, sampled) in enumerate(zip(in_flight, plan.chunks, result.sampled, strict=True)):
            count = chunk.num_known
            if request.num_computed < request.computed_before:
                self.num_recomputed += min(count, request.computed_before - request.num_computed)
            request.num_computed += count
            of_prompt = result.prompt_logprobs[i] if chunk.prompt_logprobs else None
            if isinstance(of_prompt, NonFinite):
                self._end_non_finite(request, of_prompt, chunk)
                continue
            if isinstance(sampled, NonFinite):
                self._end_non_finite(request, sampled, chunk)
                continue
            if isinstance(sampled, NoneAllowed):
                self.end(request, FinishReason.ERROR, sampled.why, NoTokenAllowed.code)
                continue
            if of_prompt is not None:
                request.prompt_logprobs += of_prompt
            if sampled is None:
                self.kv.publish(request)
                continue
            if self._prefilling and self._prefilling.get(request.prompt_key) is request:
                del self._prefilling[request.prompt_key]
            new = request.append(sampled.token_ids, sampled.logprobs, chunk.served, self.eos_token_ids, now)
            if chunk.routed_from >= 0:
                self._keep_rows(request, chunk.routed_from, result.routed.get(i, b""))
            tokens.append(new)
            if chunk.drafted:
                self.speculation.verified(new, chunk.drafted)
            self.kv.publish(request)
            if not request.group.started:
                self._group_started(request)
            if new.ending is not None:
                self.end(request, new.ending.reason, stop_reason=new.ending.stop_reason)
        if not result.prompt_logprobs:  # these cost more than other rows
            self.pacer.observe(plan.chunks, result.elapsed_s)
        return tokens

    def _keep_rows(self, request: Request, first: int, routed: bytes) -> None:
        """Keep the rows of the tokens before the last one for the client. routed: the rows from position ``first`` on,
        also those of tokens behind the one that ended the request."""
        assert self.info.experts is not None
        wanted = (request.num_tokens - 1 - first) * self.info.experts.row_bytes
        assert wanted <= len(routed), "the runner did not return all rows"
        request.routed += routed[:wanted]

    def _end_non_finite(self, request: Request, row: NonFinite, chunk: ScheduledChunk) -> None:
        """End this choice with an error. The other choices of the request go on."""
        self.num_non_finite += 1
        where = f"the token at position {row.position} under weights {chunk.served.version!r}"
        message = f"the logits for {where} are not finite (NaN, +inf, or -inf for every token)"
        self.end(request, FinishReason.ERROR, message, NonFiniteLogits.code)

    def _group_started(self, request: Request) -> None:
        self.load.started(request.group)
        waiting = [r for r in request.group.requests if r in self.waiting]
        request.group.started = True
        for sibling in waiting:
            self.waiting.promote(sibling)

    # ------------------------------------------------------------------ pause and weights

    def set_gate(self, scope: Scope, gate: Gate) -> None:
        """Schedule only those requests of ``scope`` that ``gate`` admits, from the next plan on."""
        if scope.above is None:
            self.gate = gate
        elif gate is not self.waiting.gate_of(scope):
            self.waiting.set_gate(scope, gate)
            if gate is Gate.CLOSED:
                self._freeze(scope)
            else:
                self._unfreeze(scope)
        for request in [r for r in self.running if not r.group.started]:
            if Gate.STARTED_ONLY in (self.gate, self.waiting.gate_of(request.scope)):
                self.retract(request, Preemption.PAUSE)  # a drain waits for begun answers, not for half a prompt

    def _freeze(self, scope: Scope) -> None:
        for request in [r for r in self.running if r.scope is scope]:
            self._leave_batch(request)
            self.frozen.append(request)
            if self._events.watched:
                self._events.add(EventKind.FROZEN, request.name)

    def _unfreeze(self, scope: Scope) -> None:
        for request in [r for r in self.frozen if r.scope is scope]:
            self.frozen.remove(request)
            self._join_batch(request)
            if self._events.watched:
                self._events.add(EventKind.THAWED, request.name)
        while len(self.running) > self.max_num_seqs:
            self._preempt(self.running)

    def _join_batch(self, request: Request) -> None:
        insort(self.running, request, key=lambda r: (r.order, r.choice))

    def drained(self, scope: Scope) -> bool:
        """Whether no started request of ``scope`` that its own gate admits is left to run."""
        running = any(r.group.started and scope.covers(r.scope) for r in self.running)
        return not running and not self.waiting.started_of(scope)

    def count(self, scope: Scope) -> tuple[int, int]:
        """Return the number of unfinished requests of ``scope`` whose group has produced a token, and of the others."""
        batch = [r.group.started for r in (*self.running, *self.frozen) if scope.covers(r.scope)]
        started, waiting = self.waiting.count(scope)
        return started + sum(batch), waiting - started + len(batch) - sum(batch)

    def drop_kv(self, scope: Scope) -> None:
        """Release all KV of ``scope``. Running requests are recomputed when they are scheduled again. No later request
        gets a prefix hit in the released KV."""
        models = {scope.model}
        for request in [r for r in (*self.running, *self.frozen) if scope.covers(r.scope)]:
            models.add(request.model)
            self.retract(request, Preemption.CLEARED)
        # A model that is being looked up has no adapter yet: its namespace would be that of the base model.
        namespaces = {model.served.kv_namespace for model in models if model.served.adapter}
        self.kv.forget_prefixes(None if scope.above is None else namespaces)

    def weights_changed(self, model: ServedModel, before: ServedWeights, recompute: bool) -> None:
        """Record that ``model`` is no longer computed by the weights ``before``; for the base model, that no model
        is computed by the weights that computed it. No request gets a prefix hit in KV of other weights. Begun requests
        keep their own KV and share it no more; with ``recompute`` they lose it."""
        base = model.scope.above is None
        for request in [r for r in (*self.running, *self.frozen) if base or r.model is model]:
            self._prefilling.pop(request.prompt_key, None)
            if recompute or request.wants_prompt_logprobs:  # prompt logprobs would mix two weights
                self.retract(request, Preemption.RECOMPUTE)
            else:
                request.kv_mixed = bool(request.num_computed) or request.kv_mixed
        self.kv.forget_prefixes(None if base else {before.kv_namespace})

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Any of these ids ends a request, unless ignore_eos is set."""
        return self._sequences.eos_token_ids

    def set_eos(self, token_ids: tuple[int, ...]) -> None:
        """End requests at these ids from the next token on. Each request in the batch that must not draw an EOS id
        yet (min_tokens, a grammar) is sent to the runner anew."""
        self._sequences.eos_token_ids = token_ids
        for request in (*self.running, *self.frozen):
            if request.sampling.grammar or request.num_output_tokens < request.sampling.min_tokens:
                self._sequences.forget(request)

    def check_integrity(self) -> None:
        """Assert that the state is consistent. See ``RequestLifecycle.check_integrity`` for when this runs."""
        assert self.running == sorted(self.running, key=lambda r: (r.order, r.choice))
        assert len(self.running) <= self.max_num_seqs
        assert all(self.waiting.gate_of(r.scope) is not Gate.CLOSED for r in self.running)
        assert all(self.waiting.gate_of(r.scope) is Gate.CLOSED for r in self.frozen)
        for request in (*self.running, *self.frozen):
            assert request.state is RequestState.RUNNING and request not in self.waiting, request
            assert 0 <= request.num_computed < request.num_tokens, request
        self._sequences.check_integrity([*self.running, *self.frozen])
        for request in self._prefilling.values():
            assert request in self.running, request
        assert all(r.state is RequestState.ENDING for r in self.ended)
        self.waiting.check_integrity()
        self.adapters.check_integrity([*self.running, *self.frozen])
        self.kv.check_integrity([*self.running, *self.frozen, *self.ended])
