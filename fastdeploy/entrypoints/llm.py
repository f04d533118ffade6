"""Offline use: the engine in a thread of this process, and a blocking ``generate``."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Coroutine, Sequence
from typing import Any, NamedTuple, TypeVar

from fastdeploy.client.choice import Choice, TextOptions
from fastdeploy.client.engine_client import EngineClient
from fastdeploy.client.generation import Generation, GenerationRequest
from fastdeploy.client.pace import Pace
from fastdeploy.client.tokenizer import load_tokenizer
from fastdeploy.core import errors
from fastdeploy.core.config import EngineConfig
from fastdeploy.core.loop_thread import LoopThread
from fastdeploy.core.request_fields import AddRequest
from fastdeploy.core.sampling_params import MAX_INT32, SamplingParams
from fastdeploy.core.served_weights import adapter_scope
from fastdeploy.core.weight_source import FolderSource
from fastdeploy.inter_communicator import messages as m
from fastdeploy.inter_communicator.transport import InprocTransport

T = TypeVar("T")


class RequestOutput(NamedTuple):
    """One prompt and its n choices. The first choice has the prompt_logprobs; None after an abort within the prompt."""

    request_id: str
    prompt_token_ids: list[int]
    choices: list[Choice]


class LLM:
    """An engine in this process: ``LLM(model).generate(prompts, SamplingParams(...))``. Call ``close()`` at the end, or
    use the LLM as a context manager.

    model: folder; None = the embedded model. settings: fields of EngineConfig. runner: replaces the runner that loads
    the model. Thread-safe: another thread may pause, abort or update weights while ``generate`` runs.
    """

    def __init__(self, model: str | None = None, *, runner: Any = None, **settings: Any):
        from fastdeploy.embedded import MODEL_DIR
        from fastdeploy.engine.common_engine import CommonEngine
        from fastdeploy.entrypoints.loading import load_runner

        config = EngineConfig(model=model or str(MODEL_DIR), **({"model_roots": ("/",)} | settings)).check()
        self.tokenizer = load_tokenizer(config.model)
        self._runner = runner if runner is not None else load_runner(config)
        self._transport = InprocTransport()
        self._engine = CommonEngine(config, self._runner, self._transport)
        self._engine_thread = threading.Thread(target=self._run_engine, name="engine", daemon=True)
        self._engine_thread.start()
        self._loop = LoopThread("engine-client")  # runs the client and all that wait for answers
        self._client = EngineClient(self._transport, stall_s=None, first_connection_s=60.0)
        self._closed = False
        self._lock = threading.Lock()  # guards _closed: no work may start in a loop that is being stopped
        self._run(self._connect())

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        n: int = 1,
        stop: str | Sequence[str] = (),
        lora_name: str | Sequence[str | None] | None = None,
        **fields: Any,
    ) -> list[RequestOutput]:
        """Generate for all prompts (texts, or lists of token ids). Return the outputs in the order of the prompts.

        sampling: one for all prompts, or one per prompt. Without a seed, each prompt gets a new seed.
        lora_name: the adapter, one for all prompts or one per prompt; None = the base model.
        fields: further fields of core.request_fields.RequestFields, one value for all prompts or a list with one per
            prompt. A single first_choice is for the first prompt; the choices of the next prompts are numbered on.

        A choice with logits that are not finite ends with finish_reason "error", a ``message`` and the tokens before.
        Other choices are not affected. Raises RequestError for a refused prompt (ModelNotFound for an unknown adapter),
        EngineError if the engine fails."""
        requests = self._requests(prompts, sampling, n, lora_name, fields)
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        texts = [TextOptions(stops=stops, min_tokens=request.sampling.min_tokens) for request in requests]
        choices = self._run(self._generate(GenerationRequest(requests, texts))) if requests else []
        return [
            RequestOutput(request.request_id, request.prompt_token_ids, choices[i * n : (i + 1) * n])
            for i, request in enumerate(requests)
        ]

    def pause(self, mode: str = "abort", lora_name: str | None = None, **args: Any) -> dict[str, Any]:
        """Pause the engine, or one adapter. Return the report when it is quiesced. args: see messages.PauseArgs."""
        return self.call(m.PauseArgs(mode=mode, scope=adapter_scope(lora_name), **args))

    def resume(self, hold_id: str | None = None, lora_name: str | None = None) -> dict[str, Any]:
        return self.call(m.ResumeArgs(hold_id=hold_id, scope=adapter_scope(lora_name)))

    def is_paused(self, lora_name: str | None = None) -> dict[str, Any]:
        return self.call(m.PauseStatusArgs(adapter_scope(lora_name)))

    def update_weights(
        self, model_path: str | None = None, version: str | None = None, kv: str = "keep", **args: Any
    ) -> dict[str, Any]:
        """Load new weights from a checkpoint folder, or without a folder only change the label. args: see
        messages.UpdateWeightsArgs. After WeightUpdateRefused the old weights still serve."""
        if model_path is not None:
            return self.call(m.UpdateWeightsArgs(FolderSource(model_path), version, kv=kv, **args))
        if version is None:
            raise errors.InvalidField("model_path", "expected a folder, or a version as the new label of the weights")
        return self.call(m.SetVersionArgs(version))

    def weights(self, checksums: bool = False) -> dict[str, Any]:
        """Return the label of the weights and the state of updates. See messages.WeightInfoArgs."""
        return self.call(m.WeightInfoArgs(checksums=checksums))

    def load_adapter(self, lora_name: str, lora_path: str, **args: Any) -> dict[str, Any]:
        """Load a PEFT folder under a name, or replace the adapter of this name. args: see messages.LoadAdapterArgs.
        After an error the old adapter still serves."""
        return self.call(m.LoadAdapterArgs(lora_name, FolderSource(lora_path), path=lora_path, **args))

    def unload_adapter(self, lora_name: str) -> dict[str, Any]:
        """Remove a name. Running requests of the adapter finish. Raises ModelNotFound."""
        return self.call(m.UnloadAdapterArgs(lora_name))

    def adapters(self) -> list[dict[str, Any]]:
        """Return a description of every adapter that requests can name. See messages.AdaptersArgs."""
        return self.call(m.AdaptersArgs())["adapters"]

    def sleep(self, *tags: str, **args: Any) -> dict[str, Any]:
        """Give memory back to the system. tags: "weight", "kv_cache"; none = both. args: see messages.SleepArgs."""
        return self.call(m.SleepArgs(tags, **args))

    def wake_up(self, *tags: str) -> dict[str, Any]:
        """Take memory again. tags: as for ``sleep``; none = all that sleep."""
        return self.call(m.WakeArgs(tags))

    def reset(self, version: str | None = None) -> dict[str, Any]:
        """Reset the engine for a trainer that starts over. See messages.ResetArgs."""
        return self.call(m.ResetArgs(version=version))

    def call(self, args: m.Args) -> dict[str, Any]:
        """Make any control call. Raises the error in the engine's answer."""
        return self._run(self._client.call(args))

    def close(self) -> None:
        """Stop the engine. Open requests end with finish_reason "abort". A second call does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._engine.stop()
        self._engine_thread.join()
        self._loop.run(self._disconnect())
        self._loop.stop()
        self._runner.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ------------------------------------------------------------------ inside

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` in the client's loop, and return its result. Raises EngineDead after :meth:`close`."""
        with self._lock:
            if self._closed:
                work.close()
                raise errors.EngineDead("the engine was closed")
            future = self._loop.submit(work)
        try:
            return future.result()
        except BaseException:  # for example Ctrl-C: cancelling the work cancels its requests
            future.cancel()
            raise

    async def _connect(self) -> None:
        self._client.start()
        await self._client.require_engine()

    async def _disconnect(self) -> None:
        """Close the client, and wait until every waiting coroutine has its answer."""
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await self._client.close()
        await asyncio.gather(*others, return_exceptions=True)

    async def _generate(self, request: GenerationRequest) -> list[Choice]:
        stops = any(text.stops for text in request.texts)  # stop strings are searched in each token as it comes
        running = Generation(self._client, self.tokenizer, request, Pace(asyncio.Lock()), for_tokens=stops)
        async with running as generation:
            while not generation.finished:
                await generation.step()
        return generation.choices

    def _run_engine(self) -> None:
        """Run the engine. At its end, fail all calls that wait for an answer. The target of the engine's thread."""
        error: errors.EngineError | None = None
        try:
            self._engine.run()
        except Exception as failure:
            error = errors.EngineDead(str(failure))
        self._transport.close(error)

    def _requests(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        n: int,
        lora_name: str | Sequence[str | None] | None,
        fields: dict[str, Any],
    ) -> list[AddRequest]:
        """Return one checked request per prompt. See :meth:`generate`."""
        if not isinstance(prompts, Sequence):
            raise errors.InvalidField("prompts", "expected a text, or a sequence of texts or token ids")
        if type(n) is not int or n < 1:
            raise errors.InvalidField("n", f"expected an integer >= 1, got {n!r}")
        ids = [self._token_ids(prompt) for prompt in ([prompts] if isinstance(prompts, str) else prompts)]
        first = fields.get("first_choice", 0)
        if isinstance(first, int):
            fields = fields | {"first_choice": range(first, first + n * len(ids), n)}
        own = {field: _per_prompt(field, values, len(ids)) for field, values in fields.items()}
        own["adapter"] = [name or "" for name in _per_prompt("lora_name", lora_name, len(ids))]
        if not all(isinstance(name, str) for name in own["adapter"]):
            raise errors.InvalidField("lora_name", "expected the name of an adapter, or a list of one per prompt")
        requests = [
            AddRequest(uuid.uuid4().hex, prompt, params.check(), n=n, **{field: own[field][i] for field in own})
            for i, (prompt, params) in enumerate(
                zip(ids, _per_prompt("sampling", sampling or SamplingParams(), len(ids)), strict=True)
            )
        ]
        for request in requests:
            request.check_fields()
        return requests

    def _token_ids(self, prompt: object) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise errors.InvalidField("prompts", "this model has no tokenizer: pass token ids")
            prompt = self.tokenizer.encode_now(prompt)
        ids = list(prompt) if isinstance(prompt, Sequence) else []
        if not ids or not all(type(token) is int and 0 <= token <= MAX_INT32 for token in ids):
            raise errors.InvalidField("prompts", "expected texts or sequences of token ids, not empty")
        return ids


def _per_prompt(field: str, value: Any, num_prompts: int) -> Sequence[Any]:
    """Return one value per prompt: ``value`` itself if it is a list, else copies of it. Raises InvalidField."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        return [value] * num_prompts
    if len(value) != num_prompts:
        raise errors.InvalidField(field, f"got {len(value)} values for {num_prompts} prompts")
    return value
