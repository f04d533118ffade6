"""The outputs of the offline ``LLM``, made of the choices of a running request."""

from __future__ import annotations

import time
from typing import Any

from fastdeploy.client.choice import Choice, ChoiceDelta
from fastdeploy.client.generation import Generation
from fastdeploy.core.offline_outputs import (
    FAILED,
    OK,
    CompletionOutput,
    Completions,
    LogprobReader,
    RequestMetrics,
    RequestOutput,
)
from fastdeploy.entrypoints.offline.requests import Prepared
from fastdeploy.http.context import ServingContext
from fastdeploy.http.openai.chat_message import ReplyMessages

NO_DELTA = ChoiceDelta(0, "", [], [], [], None)


class OutputView:
    """What a caller sees of one request. ``time.time()`` of the first and the last look at its tokens are noted."""

    def __init__(self, context: ServingContext, prepared: Prepared, generation: Generation):
        self._generation = generation
        self._add = prepared.add
        tokenizer = context.tokenizer
        if prepared.shown is not None:
            self._shown = prepared.shown
        else:
            ids = self._add.prompt_token_ids
            self._shown = ids if tokenizer is None else tokenizer.decode(ids, skip_special_tokens=False)
        text = None if tokenizer is None else tokenizer.token_text
        self._reader = LogprobReader(text, ranked=not self._add.sampling.logprob_token_ids)
        self._messages = None if prepared.chat is None else ReplyMessages(context, generation, prepared.chat)
        self._first_s: float | None = None

    def whole(self) -> RequestOutput:
        """Return the choices, which have ended."""
        return self._output([self._choice(i, choice) for i, choice in enumerate(self._generation.choices)], 0.0)

    def step(self, deltas: list[tuple[int, ChoiceDelta]]) -> RequestOutput:
        """Return what one step has added."""
        if self._first_s is None and any(delta.token_ids for _, delta in deltas):
            self._first_s = self._elapsed()
        added = dict(deltas)
        choices = [self._delta(i, added.get(i, NO_DELTA)) for i in range(self._generation.n)]
        return self._output(choices, self._first_s)

    def _output(self, choices: list[CompletionOutput], first_s: float | None) -> RequestOutput:
        generation, first = self._generation, self._generation.choices[0]
        failed = all(choice.finish_reason == "error" for choice in generation.choices)
        preempted = sum(choice.num_preempted for choice in generation.choices)
        metrics = RequestMetrics(self._add.arrival, self._elapsed(), first_s or None, preempted)
        asked = self._add.sampling.prompt_logprobs is not None
        return RequestOutput(
            request_id=self._add.request_id,
            prompt=self._shown,
            prompt_token_ids=self._add.prompt_token_ids,
            outputs=Completions(choices),
            finished=generation.finished,
            metrics=metrics,
            num_cached_tokens=generation.cached_tokens[0],
            seed=self._add.sampling.seed,
            error_code=FAILED if failed else OK,
            error_msg=first.message if failed else None,
            prompt_entries=first.prompt_logprobs if asked else None,
            reader=self._reader,
        )

    def _elapsed(self) -> float:
        return max(time.time() - self._add.arrival, 1e-9)

    def _choice(self, i: int, choice: Choice) -> CompletionOutput:
        message: dict[str, Any] = {"content": choice.text}
        reason = choice.finish_reason
        if self._messages is not None:
            message, _ = self._messages.whole(i, choice)
            reason = self._messages.finish_reason(i, reason)
        return CompletionOutput(
            i, choice.token_ids, message["content"], reason, choice.stop_reason, choice.spans,
            message.get("reasoning_content"), message.get("tool_calls"), choice.message, 0, choice.num_preempted,
            choice.routed_experts, choice.logprobs, self._reader,
        )  # fmt: skip

    def _delta(self, i: int, delta: ChoiceDelta) -> CompletionOutput:
        choice = self._generation.choices[i]
        message: dict[str, Any] = {"content": delta.text}
        reason = delta.finish_reason
        if self._messages is not None and delta is not NO_DELTA:
            message, _ = self._messages.delta(i, delta)
            reason = self._messages.finish_reason(i, reason)
        ended = reason is not None
        return CompletionOutput(
            i, delta.token_ids, message.get("content", ""), reason, choice.stop_reason if ended else None, delta.spans,
            message.get("reasoning_content"), message.get("tool_calls"), choice.message if ended else "", delta.first,
            choice.num_preempted, choice.routed_experts if ended else None, delta.logprobs, self._reader,
        )  # fmt: skip
