"""Continuous batching: ``plan()`` says what the next step computes, ``apply()`` takes in what it produced."""

from __future__ import annotations

import time
from bisect import insort
from enum import Enum

import msgspec

from fastdeploy.cache_manager.kv_cache_manager import KVCacheManager
from fastdeploy.core.errors import NonFiniteLogits
from fastdeploy.core.outputs import Logprob, Span
from fastdeploy.core.plan import BlockCopy, NewSequence, NonFinite, ScheduledChunk, StepPlan, StepResult
from fastdeploy.core.request import Event, FinishReason, Request, State
from fastdeploy.core.runner import ModelInfo
from fastdeploy.core.served_weights import ServedWeights
from fastdeploy.scheduler.pacer import StepPacer
from fastdeploy.scheduler.queue import WaitingQueue


class Gate(Enum):
    """Who may be scheduled; set by the pause state."""

    OPEN = "open"
    STARTED_ONLY = "started_only"
    CLOSED = "closed"


class NewToken(msgspec.Struct, frozen=True):
    """One token of one request. gap_s: since the token before it, or since arrival for the first."""

    request: Request
    token_id: int
    logprob: Logprob | None
    span: Span
    first: bool
    gap_s: float


class Scheduler:
    """The only place that mutates requests. No Paddle, no sockets, no clock but for timestamps.

    Time per step depends on the number of running requests, never on how many wait.
    """

    def __init__(self, info: ModelInfo, max_num_seqs: int, pacer: StepPacer, kv: KVCacheManager):
        self.info = info
        self.max_num_seqs = max_num_seqs
        self.pacer = pacer
        self.kv = kv
        self.waiting = WaitingQueue()
        self.running: list[Request] = []  # sorted by order
        self._prefilling: dict[int, Request] = {}  # prompt_key -> the request that computes this prompt right now
        self.ended: list[Request] = []  # ENDING: final output not collected yet
        self._step_id = 0
        self._in_flight: list[Request] = []  # aligned with the chunks of the plan that runs
        self._free_sequences: list[int] = []  # numbers that the runner knows, and no request has
        self._num_sequences = 0
        self.num_preemptions = 0
        self.num_non_finite = 0  # sequences that ended since the model gave no finite logits

    # ------------------------------------------------------------------ requests in and out

    def add(self, request: Request) -> None:
        self.waiting.push(request)

    def end(
        self, request: Request, reason: FinishReason, message: str = "", stop_reason: int | str | None = None
    ) -> None:
        """From now on the request computes nothing; ``retire`` follows once its final output is handed over."""
        if request.state is State.RUNNING:
            self._leave_batch(request)
        else:
            self.waiting.remove(request)
        request.advance(Event.END)
        request.finish_reason, request.message, request.stop_reason = reason, message, stop_reason
        self.ended.append(request)

    def retire(self, request: Request) -> None:
        """The final output has been handed over."""
        request.advance(Event.RETIRE)
        self.kv.release(request)

    def retract(self, request: Request) -> None:
        """Back to the queue; its KV is given up and recomputed when its turn comes."""
        self._leave_batch(request)
        if request.num_output_tokens == 0:
            request.prompt_logprobs = []  # its prompt is computed again
        request.advance(Event.RETRACT)
        self.kv.release(request)
        self.waiting.push(request)

    def _leave_batch(self, request: Request) -> None:
        self.running.remove(request)
        if request.sequence is not None:
            self._free_sequences.append(request.sequence)
            request.sequence = None
        if self._prefilling.get(request.prompt_key) is request:
            del self._prefilling[request.prompt_key]

    # ------------------------------------------------------------------ one step

    def has_work(self, gate: Gate) -> bool:
        """Whether ``plan`` may have something to compute."""
        if gate is Gate.CLOSED:
            return False
        return bool(self.running or self.waiting.num_started or (gate is Gate.OPEN and len(self.waiting)))

    def plan(self, gate: Gate, served: ServedWeights) -> StepPlan | None:
        """Decodes first, then prompts under way, then newcomers, within the pacer's budget."""
        if not self.has_work(gate):
            return None
        chunks: dict[Request, ScheduledChunk] = {}
        copies: list[BlockCopy] = []
        self._plan_decodes(chunks, served)
        budget = self._plan_prefills(chunks, self.pacer.budget(len(chunks)), served)
        self._plan_admissions(chunks, copies, budget, gate, served)
        if not chunks:
            return None
        self._step_id += 1
        self._in_flight = list(chunks)
        return StepPlan(self._step_id, list(chunks.values()), copies)

    def _plan_decodes(self, chunks: dict[Request, ScheduledChunk], served: ServedWeights) -> None:
        for request in self.running[:]:
            if len(request.token_ids) - request.num_computed != 1 or request.state is not State.RUNNING:
                continue
            while not self.kv.grow(request):
                victim = self._preempt()
                chunks.pop(victim, None)
                if victim is request:
                    break
            else:
                chunks[request] = self._chunk(request, 1, served)

    def _plan_prefills(self, chunks: dict[Request, ScheduledChunk], budget: int, served: ServedWeights) -> int:
        for request in self.running:
            missing = len(request.token_ids) - request.num_computed
            if missing > 1 and request not in chunks:
                if budget <= 0:
                    break
                chunks[request] = self._chunk(request, min(missing, budget), served)
                budget -= chunks[request].count
        return budget

    def _plan_admissions(
        self,
        chunks: dict[Request, ScheduledChunk],
        copies: list[BlockCopy],
        budget: int,
        gate: Gate,
        served: ServedWeights,
    ) -> None:
        while budget > 0 and len(self.running) < self.max_num_seqs:
            request = self.waiting.head(started_only=gate is Gate.STARTED_ONLY)
            if request is None or self._prompt_is_being_computed(request):
                return
            admission = self.kv.admit(request)
            if admission is None:
                return
            self.waiting.remove(request)
            request.advance(Event.ADMIT)
            insort(self.running, request, key=lambda r: (r.order, r.choice))
            if request.num_output_tokens == 0:
                request.cached_tokens = admission.hit_tokens
                if self.kv.enable_prefix_caching and request.num_tokens - request.num_computed > 1:
                    self._prefilling.setdefault(request.prompt_key, request)
            if admission.copy is not None:
                copies.append(admission.copy)
            chunks[request] = self._chunk(request, min(request.num_tokens - request.num_computed, budget), served)
            budget -= chunks[request].count

    def _prompt_is_being_computed(self, request: Request) -> bool:
        """A group, or the same prompt sent many times, is prefilled once: the others wait for the first, and hit."""
        first = self._prefilling.get(request.prompt_key)
        if first is None or request.num_output_tokens or request.wants_prompt_logprobs:
            return False
        n = first.num_prompt_tokens
        return n == request.num_prompt_tokens and first.token_ids[:n] == request.token_ids

    def _chunk(self, request: Request, count: int, served: ServedWeights) -> ScheduledChunk:
        """The next ``count`` tokens of the request, and all that the runner has not been told of it. The plan must
        reach the runner, even if the step is given up: nothing is told twice."""
        start, token_ids, blocks = request.num_computed, request.token_ids, request.blocks
        number, new = request.sequence, None
        if number is None:
            number, new = self._number(request), self._new_sequence(request)
        untold = token_ids[request.num_told_tokens :]
        request.num_told_tokens = len(token_ids)
        new_blocks: list[int] = []
        if len(blocks) > request.num_told_blocks:
            new_blocks = blocks[request.num_told_blocks :].tolist()
            request.num_told_blocks = len(blocks)
        return ScheduledChunk(
            number,
            start,
            count,
            start + count == len(token_ids),
            served,
            untold,
            new_blocks,
            new,
            0 if request.sampling.prompt_logprobs is None else self._prompt_logprobs_of(request, count),
        )

    def _number(self, request: Request) -> int:
        """Give the request a number at the runner, which knows nothing of it yet."""
        if not self._free_sequences:
            self._free_sequences.append(self._num_sequences)
            self._num_sequences += 1
        request.sequence = number = self._free_sequences.pop()
        request.num_told_tokens = request.num_told_blocks = 0
        return number

    def _new_sequence(self, request: Request) -> NewSequence:
        sampling = request.sampling
        banned: tuple[int, ...] = ()
        if sampling.min_tokens:
            known = self.info.eos_token_ids + sampling.stop_token_ids
            banned = tuple(token for token in known if token < self.info.vocab_size)
        banned_before = request.num_prompt_tokens + sampling.min_tokens if banned else 0
        return NewSequence(request.key, sampling, request.num_new_prompt_tokens, banned, banned_before)

    def _prompt_logprobs_of(self, request: Request, count: int) -> int:
        """How many of the next ``count`` tokens have a prompt token behind them that it wants the logprob of."""
        left = request.num_prompt_tokens - 1 - request.num_computed
        return min(count, max(left, 0)) if request.wants_prompt_logprobs else 0

    def _preempt(self) -> Request:
        """Recompute the last in order later; one whose KV spans epochs, and cannot be rebuilt, only if all do."""
        victim = max(self.running, key=lambda r: (not r.kv_mixed, r.order, r.choice))
        victim.num_preempted += 1
        self.num_preemptions += 1
        self.retract(victim)
        return victim

    def abandon(self) -> None:
        """Take note that the step was given up, after its copies. No request has moved on by it, and no block that it
        wrote to can be found by others. The next plan computes the same again."""
        self._in_flight = []
        self.kv.step_done()

    def apply(self, plan: StepPlan, result: StepResult) -> list[NewToken]:
        """Take in one step. Returns its tokens. The requests that ended are in ``ended``: by their token, or with an
        error since their logits were not finite."""
        self.kv.step_done()
        now = time.time()
        tokens: list[NewToken] = []
        prefill_tokens = 0
        in_flight, self._in_flight = self._in_flight, []
        for i, (request, chunk, sampled) in enumerate(zip(in_flight, plan.chunks, result.sampled, strict=True)):
            count = chunk.count
            request.num_computed += count
            prefill_tokens += count if count > 1 else 0
            self.kv.publish(request)
            of_prompt = result.prompt_logprobs[i] if chunk.prompt_logprobs else []
            if isinstance(of_prompt, NonFinite):
                self._end_non_finite(request, of_prompt.position, chunk.served.version)
                continue
            if isinstance(sampled, NonFinite):
                self._end_non_finite(request, sampled.position, chunk.served.version)
                continue
            request.prompt_logprobs += of_prompt
            if sampled is None:
                continue
            if self._prefilling.get(request.prompt_key) is request:
                del self._prefilling[request.prompt_key]
            gap_s = now - (request.last_token_at or request.arrival)
            token_id = sampled.token_id
            span = request.append(token_id, chunk.served, now)
            tokens.append(NewToken(request, token_id, sampled.logprob, span, span.start == 0, gap_s))
            if not request.group.started:
                self._group_started(request)
            self._end_if_done(request, token_id, span.end)
        self.pacer.observe(prefill_tokens, result.elapsed_s)
        return tokens

    def _end_non_finite(self, request: Request, position: int, version: str) -> None:
        """Only this choice ends; its siblings go on."""
        self.num_non_finite += 1
        message = (
            f"the logits for the token at position {position} are not finite (NaN, +inf, or -inf for every token) "
            f"under weights {version!r}"
        )
        self.end(request, FinishReason.ERROR, message, NonFiniteLogits.code)

    def _group_started(self, request: Request) -> None:
        waiting = [r for r in request.group.requests if r in self.waiting]
        request.group.started = True
        for sibling in waiting:
            self.waiting.promote(sibling)

    def _end_if_done(self, request: Request, token: int, num_output_tokens: int) -> None:
        sampling = request.sampling
        if token in sampling.stop_token_ids:
            self.end(request, FinishReason.STOP, stop_reason=token)
        elif token in self.info.eos_token_ids and not sampling.ignore_eos:
            self.end(request, FinishReason.STOP)
        elif num_output_tokens >= request.max_output_tokens:
            self.end(request, FinishReason.LENGTH)

    # ------------------------------------------------------------------ pause and weights

    @property
    def drained(self) -> bool:
        """Nothing that has produced a token is left to run."""
        return not any(r.group.started for r in self.running) and self.waiting.num_started == 0

    def retract_unstarted(self) -> None:
        """Half-prefilled requests go back to the queue: a drain waits for answers under way, not for new ones."""
        for request in [r for r in self.running if not r.group.started]:
            self.retract(request)

    def drop_kv(self) -> None:
        """Give all KV back: what runs is recomputed when it is scheduled again, and nothing matches what was."""
        for request in self.running[:]:
            self.retract(request)
        self.kv.forget_prefixes()

    def start_epoch(self, weight_epoch: int, recompute: bool) -> None:
        """The weights have just changed. No request matches KV of another epoch; those under way keep their own
        (and share it with nobody from now on), or drop it and are recomputed."""
        if recompute:
            self.drop_kv()
        for request in [r for r in self.running if r.wants_prompt_logprobs]:
            self.retract(request)  # what was computed of its prompt would be of other weights than the rest
        for request in self.running:
            request.kv_mixed = bool(request.num_computed) or request.kv_mixed
        self._prefilling.clear()
        self.kv.forget_prefixes()
        self.kv.weight_epoch = weight_epoch

    def check_integrity(self) -> None:
        """Run by tests after every step, and by the engine when idle."""
        assert self.running == sorted(self.running, key=lambda r: (r.order, r.choice))
        assert len(self.running) <= self.max_num_seqs
        for request in self.running:
            assert request.state is State.RUNNING and request not in self.waiting, request
            assert 0 <= request.num_computed < request.num_tokens, request
        numbers = [r.sequence for r in self.running if r.sequence is not None] + self._free_sequences
        assert sorted(numbers) == list(range(self._num_sequences)), "a number of the runner is lost, or given twice"
        for request in self._prefilling.values():
            assert request in self.running, request
        assert all(r.state is State.ENDING for r in self.ended)
        self.waiting.check_integrity()
        self.kv.check_integrity([*self.running, *self.ended])
