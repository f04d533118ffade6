"""Offline use: the engine in a thread of this process, and a blocking ``generate``."""

from __future__ import annotations

import itertools
import queue
import threading
import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple

from fastdeploy.client.choice import Choice, TextOptions
from fastdeploy.client.tokenizer import load_tokenizer
from fastdeploy.core import errors
from fastdeploy.core.config import EngineConfig
from fastdeploy.core.request_fields import AddRequest
from fastdeploy.core.sampling_params import MAX_INT32, SamplingParams
from fastdeploy.core.weight_source import FolderSource
from fastdeploy.inter_communicator import messages as m
from fastdeploy.inter_communicator.inproc_transport import InprocTransport


class RequestOutput(NamedTuple):
    """One prompt and its n choices; each has text, token_ids, logprobs, spans, finish_reason and stop_reason, the first
    also prompt_logprobs."""

    request_id: str
    prompt_token_ids: list[int]
    choices: list[Choice]


class LLM:
    """``LLM(model).generate(prompts, SamplingParams(...))``. ``close()`` it, or use it as a context manager.

    model None is the embedded one. settings: fields of EngineConfig. runner: in place of a model that is loaded.
    Thread-safe: another thread may pause, abort or update weights while ``generate`` runs.
    """

    def __init__(self, model: str | None = None, *, runner: Any = None, **settings: Any):
        from fastdeploy.embedded import MODEL_DIR
        from fastdeploy.engine.common_engine import CommonEngine
        from fastdeploy.entrypoints.loading import load_runner

        config = EngineConfig(model=model or str(MODEL_DIR), **({"model_roots": ("/",)} | settings)).check()
        self.tokenizer = load_tokenizer(config.model)
        self._runner = runner if runner is not None else load_runner(config)
        self._transport = InprocTransport()
        self._inboxes: dict[str, queue.SimpleQueue[m.Output | Exception]] = {}
        self._calls: dict[int, queue.SimpleQueue[m.Reply | Exception]] = {}
        self._call_ids = itertools.count(1)
        self._dead: Exception | None = None
        self._client = self._transport.connect("offline", self._receive)
        self._engine = CommonEngine(config, self._runner, self._transport, uuid.uuid4().hex)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        self._client.send(m.Hello(pid=0))

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        n: int = 1,
        stop: str | Sequence[str] = (),
        resumed_tokens: int | Sequence[int] = 0,
        first_choice: int | Sequence[int] = 0,
    ) -> list[RequestOutput]:
        """Generate for all prompts (texts, or token ids) and return in their order. ``sampling``: one for all, or one
        per prompt; without a seed every prompt gets a new one. resumed_tokens: one for all, or one per prompt.
        first_choice: number of the first choice of all, from which the others count on, or that of each prompt's own.
        See messages.AddRequest for both. A choice whose logits were not finite has the tokens until then, finish_reason
        "error" and a ``message``; the others are whole. Raises RequestError for a prompt that is refused, and
        EngineError if the engine fails."""
        requests = self._requests(prompts, sampling, n, resumed_tokens, first_choice)
        for request in requests:
            self._inboxes[request.request_id] = queue.SimpleQueue()
            self._client.send(request)
        try:
            return [self._collect(request, (stop,) if isinstance(stop, str) else tuple(stop)) for request in requests]
        finally:
            for request in requests:
                if self._inboxes.pop(request.request_id, None) is not None:
                    self._client.send(m.CancelRequest(request_id=request.request_id))

    def pause(self, mode: str = "abort", **args: Any) -> dict[str, Any]:
        """See messages.PauseArgs; returns the report once the engine is quiesced."""
        return self.call(m.PauseArgs(mode=mode, **args))

    def resume(self, hold_id: str | None = None) -> dict[str, Any]:
        return self.call(m.ResumeArgs(hold_id=hold_id))

    def is_paused(self) -> dict[str, Any]:
        return self.call(m.PauseStatusArgs())

    def update_weights(
        self, model_path: str | None = None, version: str | None = None, kv: str = "keep", **args: Any
    ) -> dict[str, Any]:
        """New weights from a Hugging Face folder; raises WeightUpdateRefused, the old ones serving on. Without a folder
        only the label changes. args: see messages.UpdateWeightsArgs."""
        if model_path is not None:
            return self.call(m.UpdateWeightsArgs(FolderSource(model_path), version, kv=kv, **args))
        if version is None:
            raise errors.InvalidField("model_path", "expected a folder, or a version to relabel what serves")
        return self.call(m.SetVersionArgs(version))

    def weights(self, checksums: bool = False) -> dict[str, Any]:
        """See messages.WeightInfoArgs."""
        return self.call(m.WeightInfoArgs(checksums=checksums))

    def sleep(self, *tags: str, **args: Any) -> dict[str, Any]:
        """Give the memory of "weight" and "kv_cache" (no tag: both) back to the system; see messages.SleepArgs."""
        return self.call(m.SleepArgs(tags, **args))

    def wake_up(self, *tags: str) -> dict[str, Any]:
        """Take memory again, of all that sleeps if no tag is named."""
        return self.call(m.WakeArgs(tags))

    def reset(self, version: str | None = None) -> dict[str, Any]:
        """Start over: see messages.ResetArgs."""
        return self.call(m.ResetArgs(version=version))

    def call(self, args: m.Args) -> dict[str, Any]:
        """Any control call; raises what the engine answered."""
        call_id = next(self._call_ids)
        inbox = self._calls[call_id] = queue.SimpleQueue()
        self._client.send(m.Call(call_id=call_id, args=args))
        if self._dead is not None:
            inbox.put(self._dead)
        answer = inbox.get()
        self._calls.pop(call_id, None)
        if isinstance(answer, Exception):
            raise answer
        if answer.failure is not None:
            failure = answer.failure
            raise errors.from_wire(failure.code, failure.message, {**failure.detail, "report": answer.result})
        return answer.result

    def close(self) -> None:
        """Stop the engine; what is open ends with reason "abort"."""
        self._engine.stop()
        self._thread.join()
        self._transport.close()
        self._runner.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ------------------------------------------------------------------ inside

    def _requests(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        n: int,
        resumed_tokens: int | Sequence[int],
        first_choice: int | Sequence[int],
    ) -> list[AddRequest]:
        """One checked request per prompt; see :meth:`generate`."""
        if not isinstance(prompts, Sequence):
            raise errors.InvalidField("prompts", "expected a text, or a sequence of texts or token ids")
        if type(n) is not int or n < 1:
            raise errors.InvalidField("n", f"expected an integer >= 1, got {n!r}")
        prompts = [prompts] if isinstance(prompts, str) else prompts
        each = sampling if isinstance(sampling, Sequence) else [sampling or SamplingParams()] * len(prompts)
        resumed = [resumed_tokens] * len(prompts) if isinstance(resumed_tokens, int) else resumed_tokens
        numbers = first_choice
        if isinstance(numbers, int):
            numbers = range(numbers, numbers + n * len(prompts), n)
        for field, values in (("sampling", each), ("resumed_tokens", resumed), ("first_choice", numbers)):
            if len(values) != len(prompts):
                raise errors.InvalidField(field, f"{len(values)} of them for {len(prompts)} prompts")
        return [
            self._request(prompt, params.check(), n, done, number)
            for prompt, params, done, number in zip(prompts, each, resumed, numbers, strict=True)
        ]

    def _request(
        self, prompt: str | Sequence[int], sampling: SamplingParams, n: int, resumed_tokens: int, first_choice: int
    ) -> AddRequest:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise errors.InvalidField("prompts", "this model has no tokenizer: pass token ids")
            prompt = self.tokenizer.encode_now(prompt)
        ids = list(prompt) if isinstance(prompt, Sequence) else []
        if not ids or not all(type(token) is int and 0 <= token <= MAX_INT32 for token in ids):
            raise errors.InvalidField("prompts", "expected texts or sequences of token ids, not empty")
        if not 0 <= resumed_tokens < len(ids):
            raise errors.InvalidField("resumed_tokens", f"expected 0 to {len(ids) - 1}, got {resumed_tokens}")
        return AddRequest(
            request_id=uuid.uuid4().hex,
            prompt_token_ids=ids,
            sampling=sampling,
            n=n,
            resumed_tokens=resumed_tokens,
            first_choice=first_choice,
        )

    def _collect(self, request: AddRequest, stop: tuple[str, ...]) -> RequestOutput:
        options = TextOptions(stops=stop, min_tokens=request.sampling.min_tokens)
        prompt, resumed = request.prompt_token_ids, request.resumed_tokens
        choices = [Choice(self.tokenizer, prompt, options, resumed) for _ in range(request.n)]
        inbox = self._inboxes[request.request_id]
        if self._dead is not None:
            inbox.put(self._dead)
        while any(choice.finish_reason is None for choice in choices):
            output = inbox.get()
            if isinstance(output, Exception):
                raise output
            choice = choices[output.choice]
            if choice.finish_reason is None:
                choice.feed(output)
                if choice.finish_reason == "error" and choice.stop_reason != errors.NonFiniteLogits.code:
                    raise errors.EngineError(choice.message)
                if choice.finish_reason is not None and output.finish_reason is None:
                    self._client.send(m.CancelRequest(request.request_id, output.choice, "stop"))
        self._inboxes.pop(request.request_id)
        return RequestOutput(request.request_id, request.prompt_token_ids, choices)

    def _run(self) -> None:
        dead: Exception = errors.EngineDead("the engine was closed")
        try:
            self._engine.run()
        except Exception as error:
            dead = error
        self._dead = dead
        for inbox in [*self._inboxes.values(), *self._calls.values()]:
            inbox.put(dead)

    def _receive(self, message: m.ToClient) -> None:
        """On the engine's thread: hand over and return."""
        match message:
            case m.Outputs(outputs=outputs):
                for output in outputs:
                    if inbox := self._inboxes.get(output.request_id):
                        inbox.put(output)
            case m.Rejected(request_id=request_id, failure=failure):
                if inbox := self._inboxes.get(request_id):
                    inbox.put(errors.from_wire(failure.code, failure.message, failure.detail))
            case m.Reply(call_id=call_id):
                if inbox := self._calls.get(call_id):
                    inbox.put(message)
