"""How many prompt tokens a step computes beside the running sequences, so that it does not take too long."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fastdeploy.core.plan import ScheduledChunk
from fastdeploy.core.request import Request
from fastdeploy.core.roofline import StepRoofline
from fastdeploy.core.runner import Runner
from fastdeploy.scheduler.step_cost import StepCost, chunk_keys, decoded_tokens, step_work
from fastdeploy.scheduler.warm_up import warm_up

STRETCH = 1.4  # times the step of the running sequences alone. 1.5 is promised; a cost is known within some percent
LONGEST_STEP_S = 0.25  # of a step with prompts that are not paced: new requests wait for the step in flight
LARGE_STEPS = 8  # times a step of one row, if that is longer: a small part of such a step is spent reading weights,
LARGE_STEP_S = 2.0  # but at most this: a fleet gives up an engine that does not answer for --fence-after-s (5 s)
BURST_S = 0.25  # requests that arrive within this time of each other came together
FIRST_GUESS = 64  # prompt tokens of a step, before anything has been measured
LEAST = 4  # tokens of the oldest prompt in every step, so that it makes progress at any cost
PROBE_STEPS = 12  # after so many steps with prompts, the running sequences compute one alone: STRETCH refers to it
SURPRISE = 0.2  # so they do after a step that took by so much less or more than expected: the machine has changed


class DecodeSteps:
    """The steps since the start that computed one token of each sequence, without prompts and drafts. seconds: of all
    of them. least_s: the least time of all of them on this machine. Both stay 0.0 while ``roofline`` is None: the
    machine was not measured, or cannot be."""

    def __init__(self) -> None:
        self.seconds = self.least_s = 0.0
        self.roofline: StepRoofline | None = None

    def observe(self, elapsed_s: float, sequences: int, tokens: float) -> None:
        """Add a step. tokens: whose KV it read."""
        if self.roofline is not None:
            self.seconds += elapsed_s
            self.least_s += self.roofline.least_s(sequences, tokens)


class StepPacer:
    """Sizes the chunks of prompts by the learned ``cost`` of a step.

    A prompt is **paced** if it arrives while a request runs. A step with it may take STRETCH times as long as the step
    of the running sequences alone, so that their clients hardly notice. Other prompts came together with all that runs,
    or have waited for longer than anything has run. To pace them would only keep the batch small, so a step with them
    may take LONGEST_STEP_S, or LARGE_STEPS times a step of one row where the weights are large. So may a step that
    computes the KV of a begun request again: its client waits, too.

    max_tokens: of a step. max_step_s: what a step with any prompt may take instead, if that is longer than STRETCH
    times the step of the running sequences; None = by these rules.

    Results do not depend on chunk sizes (the ops guarantee it), so outputs stay reproducible.
    """

    def __init__(self, max_tokens: int, max_step_s: float | None = None):
        self.cost = StepCost()
        self.decode_steps = DecodeSteps()
        self.max_tokens = max_tokens
        self._max_step_s = max_step_s
        self._budget: PromptBudget | None = None  # of the last step
        self._steps_with_prompts = 0  # since a step without
        self._surprised = False  # by the last step

    def warm_up(self, runner: Runner, max_num_seqs: int) -> None:
        """See ``warm_up``. Measures the machine, too, for ``decode_steps``."""
        warm_up(runner, self.cost, max_num_seqs, self.max_tokens)
        self.decode_steps.roofline = runner.measure_roofline()

    def budget(self, decodes: Sequence[Request]) -> PromptBudget:
        """Return the room for prompts in a step that computes one token of each of ``decodes``."""
        taken = self._budget is not None and self._budget.taken
        self._steps_with_prompts = self._steps_with_prompts + 1 if taken else 0
        due = self._steps_with_prompts >= PROBE_STEPS or (taken and self._surprised)
        probe = self._max_step_s is None and due
        self._budget = PromptBudget(self.cost, decodes, self.max_tokens, self._max_step_s, probe)
        return self._budget

    def observe(self, chunks: Sequence[ScheduledChunk], elapsed_s: float) -> None:
        """Learn from a step."""
        if elapsed_s > 0:
            rows, sampled, keys = step_work(chunks)
            expected_s = self.cost.cost(rows, sampled, keys)
            self._surprised = abs(elapsed_s - expected_s) > SURPRISE * expected_s
            self.cost.observe(elapsed_s, rows, sampled, keys)
            if rows == sampled == len(chunks):
                self.decode_steps.observe(elapsed_s, rows, decoded_tokens(rows, keys))


class PromptBudget:
    """The room for prompts in one step. Ask for the oldest prompt first: ``admits``, then ``take``.

    probe: paced prompts have to wait for the next step. taken: the step has tokens of a prompt."""

    def __init__(
        self,
        cost: StepCost,
        decodes: Sequence[Request],
        max_tokens: int,
        max_step_s: float | None,
        probe: bool,
    ):
        self._cost, self._decodes, self._max_tokens = cost, decodes, max_tokens
        self._max_step_s, self._probe = max_step_s, probe
        self.taken = False
        self._rows, self._sampled, self._keys = 0, 0, 0.0
        self._stretched_s: float | None = None  # None: no prompt has asked, and the decodes are not counted yet
        self._longest_s = 0.0  # with prompts that are not paced, and with any if max_step_s is given
        self._settled_at = math.inf  # prompts that arrive from this time on are paced

    def admits(self, request: Request) -> bool:
        """Return whether the step has room for a token of the prompt of ``request``."""
        limit_s = self._limit_s(request)
        if self._rows >= self._max_tokens or (self._probe and self._paces(request)):
            return False
        return not self.taken or self._cost.cost(self._rows + 1, self._sampled, self._keys) <= limit_s

    def take(self, request: Request) -> int:
        """Return how many tokens of ``request`` the step computes, at least 1. Only after ``admits``."""
        limit_s, start = self._limit_s(request), request.num_computed
        most = min(request.num_tokens - start, self._max_tokens - self._rows)
        if not self._cost.known:
            most = min(most, FIRST_GUESS)
        count = self._cost.most(limit_s, self._rows, self._sampled, self._keys, start, most)
        count = max(count, min(most, 1 if self.taken else LEAST))
        self._rows += count
        self._keys += chunk_keys(start, count)
        self.taken = True
        return count

    def _limit_s(self, request: Request) -> float:
        """Return the seconds that the step may take with tokens of ``request``."""
        if self._stretched_s is None:
            self._rows = self._sampled = len(self._decodes)
            self._keys = chunk_keys(sum([r.num_tokens for r in self._decodes]), 1)
            settled = [max(r.first_token_at, r.arrival + BURST_S) for r in self._decodes if r.first_token_at]
            self._settled_at = min(settled, default=math.inf)
            self._stretched_s = STRETCH * self._cost.cost(max(self._rows, 1), self._sampled, self._keys)
            longest_s = self._max_step_s
            if longest_s is None:
                longest_s = max(LONGEST_STEP_S, min(LARGE_STEPS * self._cost.cost(1, 1), LARGE_STEP_S))
            self._longest_s = max(longest_s, self._stretched_s)
        return self._stretched_s if self._max_step_s is None and self._paces(request) else self._longest_s

    def _paces(self, request: Request) -> bool:
        return self._settled_at <= request.arrival and not request.num_output_tokens
