"""Offline use: the engine in a thread of this process, and blocking calls by FastDeploy's signatures."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal, TypeVar, overload

import msgspec

from fastdeploy.client.engine_client import EngineClient
from fastdeploy.client.generation import Generation
from fastdeploy.client.tokenizer import load_tokenizer
from fastdeploy.core import errors
from fastdeploy.core.loop_thread import LoopThread
from fastdeploy.core.offline_outputs import RequestOutput
from fastdeploy.core.offline_params import SamplingParams
from fastdeploy.core.served_weights import adapter_scope
from fastdeploy.core.weight_source import FolderSource
from fastdeploy.entrypoints.cli.flags import read_template
from fastdeploy.entrypoints.offline.requests import (
    Chat,
    Prepared,
    Prompt,
    conversations_of,
    fields_of,
    params_of,
    prepare,
    prompts_of,
    tools_of,
)
from fastdeploy.entrypoints.offline.settings import checked_settings
from fastdeploy.entrypoints.offline.steps import Progress, Step, iterate
from fastdeploy.entrypoints.offline.views import OutputView
from fastdeploy.http.context import ServingContext
from fastdeploy.http.guards.budget import Budget
from fastdeploy.inter_communicator import messages as m
from fastdeploy.inter_communicator.transport import InprocTransport

T = TypeVar("T")
Params = SamplingParams | Sequence[SamplingParams] | None
StepOutputs = list[RequestOutput | None]  # one for each prompt
Lora = str | Sequence[str | None] | None
NO_UPLOADS = Budget(1, 1.0, "no uploads")  # weights come by folder here


class LLM:
    """An engine in this process: ``LLM(model).generate(prompts, SamplingParams(...))``. Call ``close()`` at the end, or
    use the LLM as a context manager.

    model: folder; None = the embedded model. tokenizer: another folder, with the tokenizer's files. chat_template:
    Jinja, or a file of it, instead of the model's. revision, enable_logprob: FastDeploy's, without effect. settings:
    fields of EngineConfig and ServeConfig, and FastDeploy's engine arguments (entrypoints/offline/settings.py). runner:
    replaces the runner that loads the model. Thread-safe: another thread may pause, abort or update weights while
    ``generate`` runs.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        revision: str | None = None,
        tokenizer: str | None = None,
        enable_logprob: bool = True,
        chat_template: str | None = None,
        *,
        runner: Any = None,
        **settings: Any,
    ):
        from fastdeploy.embedded import MODEL_DIR
        from fastdeploy.engine.common_engine import CommonEngine
        from fastdeploy.entrypoints.loading import load_runner

        folder = str(MODEL_DIR) if model is None else _path("model", model)
        if not folder:  # a variable that is not set must not serve the embedded model
            raise errors.InvalidField("model", "expected a folder, got an empty text")
        config, serving = checked_settings(folder, settings)
        self.tokenizer = load_tokenizer(tokenizer or config.model, read_template(chat_template))
        self._runner = runner if runner is not None else load_runner(config)
        self._transport = InprocTransport()
        self._engine = CommonEngine(config, self._runner, self._transport)
        self._engine_thread = threading.Thread(target=self._run_engine, name="engine", daemon=True)
        self._engine_thread.start()
        self._loop = LoopThread("engine-client")  # runs the client and all that wait for answers
        self._client = EngineClient(self._transport, stall_s=None, first_connection_s=60.0)
        self._context = ServingContext(self._client, self.tokenizer, serving, NO_UPLOADS)
        self._closed = False
        self._lock = threading.Lock()  # guards _closed: no work may start in a loop that is being stopped
        self._run(self._connect())

    # fmt: off
    @overload
    def generate(self, prompts: Any, sampling_params: Params = ..., use_tqdm: bool = ...,
                 stream: Literal[False] = ..., *, lora_name: Lora = ..., **fields: Any) -> list[RequestOutput]: ...
    @overload
    def generate(self, prompts: Any, sampling_params: Params = ..., use_tqdm: bool = ..., *,
                 stream: Literal[True], lora_name: Lora = ..., **fields: Any) -> Iterator[StepOutputs]: ...
    # fmt: on
    def generate(
        self,
        prompts: Any,
        sampling_params: Params = None,
        use_tqdm: bool = True,
        stream: bool = False,
        *,
        lora_name: Lora = None,
        **fields: Any,
    ) -> Any:
        """Generate for all prompts. Return the outputs in the order of the prompts.

        prompts: a text, token ids, a dict with "prompt", "prompt_token_ids" or "messages", or a list of these.
        sampling_params: one for all prompts, or one per prompt. Without a seed, each prompt gets a new seed.
        use_tqdm: show a bar of the finished prompts, if stderr is a terminal.
        stream: return an iterator instead. Each item has one entry per prompt: what was added to it, or None. A caller
            that stops iterating cancels the rest.
        lora_name: the adapter, one for all prompts or one per prompt; None = the base model.
        fields: further fields of core.request_fields.RequestFields, one value for all prompts or a list with one per
            prompt.

        The tokens of a prompt depend on its seed, and not on the prompts beside it: two equal prompts with one seed get
        equal tokens. Ask for ``n`` choices of one prompt, or give no seed, to draw apart.

        A choice with logits that are not finite ends with finish_reason "error", a ``message`` and the tokens before.
        Other choices are not affected. Raises RequestError for a refused prompt (ModelNotFound for an unknown adapter),
        EngineError if the engine fails."""
        return self._answer(prompts_of(prompts), sampling_params, use_tqdm, stream, lora_name, fields, {})

    # fmt: off
    @overload
    def chat(self, messages: Any, sampling_params: Params = ..., use_tqdm: bool = ...,
             chat_template_kwargs: Mapping[str, Any] | None = ..., chat_template: str | None = ..., tools: Any = ...,
             stream: Literal[False] = ..., *, lora_name: Lora = ..., **fields: Any) -> list[RequestOutput]: ...
    @overload
    def chat(self, messages: Any, sampling_params: Params = ..., use_tqdm: bool = ...,
             chat_template_kwargs: Mapping[str, Any] | None = ..., chat_template: str | None = ..., tools: Any = ...,
             *, stream: Literal[True], lora_name: Lora = ..., **fields: Any) -> Iterator[StepOutputs]: ...
    # fmt: on
    def chat(
        self,
        messages: Any,
        sampling_params: Params = None,
        use_tqdm: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        tools: Any = None,
        stream: bool = False,
        *,
        lora_name: Lora = None,
        **fields: Any,
    ) -> Any:
        """Answer conversations, as ``generate`` does prompts.

        messages: one conversation (a list of dicts with role and content), or a list of several.
        chat_template_kwargs: variables of the template, such as enable_thinking. chat_template: Jinja, or a file of it.
        tools: one JSON schema of a function, or a list of them, as in OpenAI's chat."""
        template = read_template(chat_template) or None
        chat = {"chat_template_kwargs": chat_template_kwargs, "chat_template": template, "tools": tools_of(tools)}
        return self._answer(conversations_of(messages), sampling_params, use_tqdm, stream, lora_name, fields, chat)

    def pause(self, mode: str = "abort", lora_name: str | None = None, **args: Any) -> dict[str, Any]:
        """Pause the engine, or one adapter. Return the report when it is quiesced. args: see messages.PauseArgs."""
        return self.call(m.PauseArgs(mode=mode, scope=adapter_scope(lora_name), **args))

    def resume(self, hold_id: str | None = None, lora_name: str | None = None) -> dict[str, Any]:
        return self.call(m.ResumeArgs(hold_id=hold_id, scope=adapter_scope(lora_name)))

    def is_paused(self, lora_name: str | None = None) -> dict[str, Any]:
        return self.call(m.PauseStatusArgs(adapter_scope(lora_name)))

    def update_weights(
        self,
        model_path: str | os.PathLike[str] | None = None,
        version: str | None = None,
        kv: str = "keep",
        **args: Any,
    ) -> dict[str, Any]:
        """Load new weights from a checkpoint folder, or without a folder only change the label. args: see
        messages.UpdateWeightsArgs. After WeightUpdateRefused the old weights still serve."""
        if model_path is not None:
            return self.call(m.UpdateWeightsArgs(FolderSource(_path("model_path", model_path)), version, kv=kv, **args))
        if version is None:
            raise errors.InvalidField("model_path", "expected a folder, or a version as the new label of the weights")
        return self.call(m.SetVersionArgs(version))

    def weights(self, checksums: bool = False) -> dict[str, Any]:
        """Return the label of the weights and the state of updates. See messages.WeightInfoArgs."""
        return self.call(m.WeightInfoArgs(checksums=checksums))

    def load_adapter(self, lora_name: str, lora_path: str | os.PathLike[str], **args: Any) -> dict[str, Any]:
        """Load a PEFT folder under a name, or replace the adapter of this name. args: see messages.LoadAdapterArgs.
        After an error the old adapter still serves."""
        path = _path("lora_path", lora_path)
        return self.call(m.LoadAdapterArgs(lora_name, FolderSource(path), path=path, **args))

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
        """Make any control call. Raises the error in the engine's answer, or InvalidField for a wrong type."""
        try:
            msgspec.convert(msgspec.to_builtins(args), type(args))
        except (msgspec.ValidationError, TypeError) as error:
            what, _, place = str(error).partition(" - at `$.")
            raise errors.InvalidField(place.rstrip("`") or type(args).__name__, what) from error
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
        future = self._submit(work)
        try:
            return future.result()
        except BaseException:  # for example Ctrl-C: cancelling the work cancels its requests
            future.cancel()
            raise

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start ``work`` in the client's loop. Raises EngineDead after :meth:`close`."""
        with self._lock:
            if self._closed:
                work.close()
                raise errors.EngineDead("the engine was closed")
            return self._loop.submit(work)

    async def _connect(self) -> None:
        self._client.start()
        await self._client.require_engine()

    async def _disconnect(self) -> None:
        """Close the client, and wait until every waiting coroutine has its answer."""
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await self._client.close()
        await asyncio.gather(*others, return_exceptions=True)

    def _answer(
        self,
        prompts: Sequence[Prompt],
        sampling_params: Params,
        use_tqdm: bool,
        stream: bool,
        lora_name: Any,
        fields: Mapping[str, Any],
        chat: Chat,
    ) -> list[RequestOutput] | Iterator[StepOutputs]:
        """See :meth:`generate`. All prompts are checked before the first one is sent."""
        params = params_of(sampling_params, len(prompts))
        own = fields_of(fields, lora_name, len(prompts))
        prepared = self._run(self._prepare(list(zip(prompts, params, own, strict=True)), chat))
        if stream:
            steps: queue.SimpleQueue[Step | None] = queue.SimpleQueue()
            future = self._submit(self._generate(prepared, steps.put))
            future.add_done_callback(lambda _: steps.put(None))
            return iterate(len(prepared), steps, future)
        with Progress(use_tqdm, len(prepared)) as progress:
            return self._run(self._generate(prepared, on_end=progress.advance))

    async def _prepare(self, asked: Sequence[tuple[Prompt, SamplingParams, Any]], chat: Chat) -> list[Prepared]:
        """Return the checked requests. chat: further fields of conversations."""
        context = self._context
        of_chat = {name: value for name, value in chat.items() if value is not None}
        return [await prepare(context, prompt, params, own, of_chat) for prompt, params, own in asked]

    async def _generate(
        self,
        prepared: Sequence[Prepared],
        on_step: Callable[[Step], None] | None = None,
        on_end: Callable[[], None] = lambda: None,
    ) -> list[RequestOutput]:
        """Run all requests to their end. on_step: gets what each step adds. on_end: called at the end of each."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._one(i, one, on_step, on_end)) for i, one in enumerate(prepared)]
        except BaseExceptionGroup as found:  # the first error has cancelled the other requests
            raise found.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _one(
        self, i: int, prepared: Prepared, on_step: Callable[[Step], None] | None, on_end: Callable[[], None]
    ) -> RequestOutput:
        context = self._context
        request = prepared.request._replace(streams=on_step is not None)
        running = Generation(self._client, self.tokenizer, request, context.pace())
        view = OutputView(context, prepared, running)
        async with running as generation:
            while not generation.finished:
                deltas = await generation.step()
                if on_step is not None and deltas:
                    on_step((i, view.step(deltas)))
        on_end()
        return view.whole()

    def _run_engine(self) -> None:
        """Run the engine. At its end, fail all calls that wait for an answer. The target of the engine's thread."""
        error: errors.EngineError | None = None
        try:
            self._engine.run()
        except Exception as failure:
            error = errors.EngineDead(str(failure))
        self._transport.close(error)


def _path(field: str, given: Any) -> str:
    """Return a path as a text. Raises InvalidField for anything else."""
    path = os.fspath(given) if isinstance(given, os.PathLike) else given
    if not isinstance(path, str):
        raise errors.InvalidField(field, f"expected a path, got {type(given).__name__}")
    return path
