"""Admission control: checks of new requests."""

from __future__ import annotations

import time

from fastdeploy.core.errors import (
    DuplicateRequest,
    FastDeployError,
    InvalidField,
    QueueFull,
    RequestsRejected,
)
from fastdeploy.core.request import Group, Request, Scope
from fastdeploy.core.request_fields import AddRequest, check_prompt
from fastdeploy.core.runner import ModelInfo
from fastdeploy.core.sampling_params import check_prompt_logprobs
from fastdeploy.core.served_weights import adapter_scope
from fastdeploy.engine.adapters.registry import AdapterRegistry
from fastdeploy.engine.pauses.holds import Admission
from fastdeploy.engine.pauses.pause import PauseState
from fastdeploy.engine.pauses.scopes import ScopeRegistry
from fastdeploy.engine.requests.delivery import Delivery
from fastdeploy.engine.requests.lifecycle import RequestLifecycle
from fastdeploy.engine.requests.retention import RETRY_AFTER_S, Retention, check_retainable
from fastdeploy.scheduler.scheduler import Scheduler


class AdmissionControl:
    """The check of each new request against the pauses, the queue and the model. max_waiting: choices that may wait,
    and choices that the pauses of adapters may hold beside them."""

    def __init__(
        self,
        info: ModelInfo,
        max_waiting: int,
        scheduler: Scheduler,
        delivery: Delivery,
        lifecycle: RequestLifecycle,
        retention: Retention,
        scopes: ScopeRegistry,
        adapters: AdapterRegistry,
    ):
        self._info = info
        self._metrics = lifecycle.metrics
        self._max_waiting = max_waiting
        self._waiting = scheduler.waiting
        self._delivery = delivery
        self._lifecycle = lifecycle
        self._requests = lifecycle.requests
        self._retention = retention
        self._scopes = scopes
        self._adapters = adapters
        self._arrivals = 0
        self._now = 0.0

    def add(self, client: str, add: AddRequest) -> None:
        """Accept a request, or attach ``client`` to the retained request of the same id, or reject the request.
        An exception that is not a FastDeployError is raised again after the client has got it."""
        try:
            if (record := self._retention.find(add)) is not None:
                self._lifecycle.attach(client, record, add.output_interval_s)
                return
            group = self._admit(client, add)
        except Exception as error:
            self._metrics.rejected.labels(getattr(error, "code", FastDeployError.code)).inc()
            self._delivery.reject(client, add.request_id, error)
            if not isinstance(error, FastDeployError):
                raise
            return
        self._lifecycle.accept(group)

    def _admit(self, client: str, add: AddRequest) -> Group:
        """Return a new group for ``add``. Raises ModelNotFound, RequestsRejected, DuplicateRequest,
        QueueFull or InvalidField."""
        own = self._scopes.find(adapter_scope(add.adapter or None))
        for pause in (self._scopes.whole_pause, own):
            if pause is not None and not add.survives_aborts:
                self._check_pause(pause)
        self._check_queue(add, own.scope if own is not None else self._scopes.whole)
        add.sampling.check()  # one sequence that cannot be computed would fail the whole step
        check_retainable(add)
        self._retention.check_room(add)
        self._check_prompt(add)
        model = self._scopes.base
        if add.adapter:
            model = self._adapters.find(add.adapter)  # after the other checks, since it may begin to look the name up
        max_output_tokens = min(add.sampling.max_tokens, self._info.max_model_len - len(add.prompt_token_ids))
        group = Group(client, add, model)
        self._arrivals += 1
        self._now = max(
            self._now, time.time()
        )  # the time never goes back, so requests without a session keep their order
        order = (add.priority, add.session_began or self._now, self._arrivals)
        group.requests = [Request(group, choice, order, max_output_tokens) for choice in range(add.n)]
        return group

    def _check_pause(self, pause: PauseState) -> None:
        if pause.admission is Admission.REJECT:
            message = f"{pause.scope} is pausing or paused and rejects new requests"
            raise RequestsRejected(message, retry_after=RETRY_AFTER_S, state=pause.phase.value)

    def _check_queue(self, add: AddRequest, scope: Scope) -> None:
        if add.retain_s > 0:
            self._lifecycle.take_over(add)
        if self._requests.id_is_in_use(add):
            raise DuplicateRequest(f"request_id {add.group or add.request_id!r} is in use already", param="request_id")
        add.check_fields()
        if self._waiting.num_beside(scope) + add.n > self._max_waiting:
            message = f"at most {self._max_waiting} choices may wait (--max-waiting)"
            raise QueueFull(message, retry_after=RETRY_AFTER_S)

    def _check_prompt(self, add: AddRequest) -> None:
        prompt, vocab_size = add.prompt_token_ids, self._info.vocab_size
        check_prompt(prompt, self._info.max_model_len, vocab_size)
        check_prompt_logprobs(add.sampling.prompt_logprobs, len(prompt))
        add.sampling.check_ids(vocab_size)
        if add.sampling.grammar and not self._info.grammars:
            raise InvalidField("grammar", "this model's folder has no tokenizer.json, or names no EOS id")
        self._check_rows(add)
        if add.resumed_tokens >= len(prompt):
            expected = f"an integer from 0 to {len(prompt) - 1} (one less than the tokens of the prompt)"
            raise InvalidField("resumed_tokens", f"expected {expected}, got {add.resumed_tokens}")

    def _check_rows(self, add: AddRequest) -> None:
        """Raise InvalidField for a request for rows that are not kept, or that begin too late."""
        sampling, most = add.sampling, len(add.prompt_token_ids)
        if sampling.routed_experts and not self._info.routed_experts:
            why = "the server keeps no routing" if self._info.experts else "the model has no experts"
            raise InvalidField("routed_experts", f"{why}; it takes --enable-return-routed-experts")
        if sampling.routed_experts_start > most:
            got = sampling.routed_experts_start
            raise InvalidField("routed_experts_start", f"expected at most the prompt's {most} tokens, got {got}")
