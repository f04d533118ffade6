"""The model runner: executes the plans of steps, and exchanges the weights between two steps."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
import paddle

from fastdeploy.core.errors import InvalidField, OutOfSpace, WrongOrder
from fastdeploy.core.files import ANYWHERE
from fastdeploy.core.fingerprint import Fingerprint
from fastdeploy.core.loading import Loading, LoadingStage, ShowLoading
from fastdeploy.core.outputs import Logprob
from fastdeploy.core.plan import NoneAllowed, NonFinite, Sampled, ScheduledChunk, StepPlan, StepResult
from fastdeploy.core.roofline import StepRoofline
from fastdeploy.core.runner import ModelInfo, Staging
from fastdeploy.core.weight_source import FolderSource
from fastdeploy.model_executor.lora import check_config
from fastdeploy.model_executor.models.experts import experts_of_config
from fastdeploy.model_executor.models.interface import ModelWeights, new_kv_cache
from fastdeploy.model_executor.ops.interface import AdapterRows, KVCache, Ops, PackedAdapter
from fastdeploy.model_executor.ops.vocabulary import LogprobBatch
from fastdeploy.model_executor.parameters import Value, checksums
from fastdeploy.worker.memory import free_memory, give_back_freed_memory, resident_memory
from fastdeploy.worker.memory_plan import plan_model
from fastdeploy.worker.roofline import measure_machine, step_roofline
from fastdeploy.worker.routing_store import RoutingStore
from fastdeploy.worker.sampler import Sampler
from fastdeploy.worker.sequences import Adapters, Sequences, picked
from fastdeploy.worker.staging import AdapterStaging, Serving, StagedWeights, WeightStaging
from fastdeploy.worker.standby import StandbyCopy
from fastdeploy.worker.token_logprobs import Wanted, ids_of, token_logprobs
from fastdeploy.worker.token_masks import TokenMaskMaker
from fastdeploy.worker.weight_files import Check, Spill, SpillMove, export_weights, spill

LOGITS_ROWS = 64  # rows of a prompt whose logits are in memory at once
WEIGHT, KV_CACHE = "weight", "kv_cache"  # the tags of sleep and wake


class ModelRunner:
    """Implements ``Runner`` (core/runner.py).

    model_path: a Hugging Face folder. block_size: a multiple of 16. dtype: the type of weights and KV; "auto" follows
    the checkpoint (float16 becomes float32). num_blocks has priority over kv_cache_bytes, and either is refused if it
    exceeds the free memory; without both, the KV cache holds what max_num_seqs sequences of max_model_len need, but at
    most 2 GiB and a quarter of the free memory, divided by engines_on_host; with memory_share instead, at most this
    share of the machine's memory, and the memory that is free, without the weights and 1 GiB. max_model_len None: the
    longest of the model, or of the KV cache if that is less. ops: by default the best ops that this machine can run.
    spill_dir: the folder for sleeping weights ("" = the temporary folder). model_roots: folders of new weights must lie
    below one of these. max_lora_rank: the largest rank of an adapter. standby_weights: "auto", "on" or "off"; see
    StandbyCopy. quantization: see ``build_model``. enable_return_routed_experts: keep the routing of each token beside
    its KV, for sequences that ask for it. show: called with how far the start is.

    Raises InvalidField for a setting or a config key, WeightUpdateRefused for a file or a tensor.
    """

    def __init__(
        self,
        model_path: str,
        dtype: str = "auto",
        block_size: int = 16,
        num_blocks: int | None = None,
        kv_cache_bytes: int | None = None,
        memory_share: float | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 32,
        max_num_batched_tokens: int = 512,
        ops: Ops | None = None,
        spill_dir: str = "",
        model_roots: Sequence[str] = ANYWHERE,
        max_lora_rank: int = 64,
        standby_weights: str = "auto",
        engines_on_host: int = 1,
        quantization: str | None = None,
        enable_return_routed_experts: bool = False,
        show: ShowLoading = lambda state: None,
    ):
        paddle.set_device("cpu")
        show(Loading(LoadingStage.PLAN))
        self.config, self.ops, self.model, plan = plan_model(
            model_path,
            dtype=dtype,
            quantization=quantization,
            block_size=block_size,
            ops=ops,
            num_blocks=num_blocks,
            kv_cache_bytes=kv_cache_bytes,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            engines_on_host=engines_on_host,
            memory_share=memory_share,
            enable_return_routed_experts=enable_return_routed_experts,
        )
        self._token_bytes = plan.token_bytes
        self._sampler = Sampler(self.ops)
        self._sequences = Sequences(block_size)
        self._masks = TokenMaskMaker(model_path, self.config.vocab_size, self.config.eos_token_ids)
        self.asleep: frozenset[str] = frozenset()
        self._spill_dir = spill_dir
        self._spill: Spill | None = None
        self._model_roots = tuple(model_roots)
        self._adapters, self._max_lora_rank = Adapters(), max_lora_rank
        self._standby = StandbyCopy(self.ops, self.model.parameters, standby_weights, reserve=plan.kv_bytes)
        self.weights: ModelWeights | None = None
        self._fingerprints: Mapping[str, Fingerprint] = {}
        self._fingerprint: str | None = None
        staging = WeightStaging(self.model, self._standby, show=lambda *n: show(Loading(LoadingStage.WEIGHTS, *n)))
        staging.add(FolderSource(model_path), {})
        self.commit(staging.finish().weights)
        show(Loading(LoadingStage.KV_CACHE))
        self._cache_bytes = plan.kv_bytes
        self.info = ModelInfo(
            name=Path(model_path).resolve().name,
            dtype=self.ops.dtype,
            vocab_size=self.config.vocab_size,
            max_model_len=plan.max_model_len,
            eos_token_ids=self.config.eos_token_ids,
            num_blocks=plan.num_blocks,
            block_size=block_size,
            quantization=quantization,
            grammars=self._masks.has_grammars,
            experts=experts_of_config(self.config),
            routed_experts=enable_return_routed_experts,
            ignored_tensors=self.model.ignored,
            stacks_experts=any(parameter.experts for parameter in self.model.parameters),
        )
        self.cache: KVCache | None = None
        self._routing: RoutingStore | None = None
        self._make_cache()

    def execute(self, plan: StepPlan, between_layers: Callable[[], bool] | None = None) -> StepResult | None:
        """See ``Runner.execute``. Returns when the results are on the host.
        Raises WrongOrder without complete weights or a KV cache."""
        if self.weights is None or self.cache is None:
            raise WrongOrder("there are no complete weights to execute with" if self.weights is None else "no KV cache")
        started = time.perf_counter()
        with paddle.no_grad():
            if plan.copies:
                self.ops.copy_blocks(self.cache, [c.source for c in plan.copies], [c.target for c in plan.copies])
                if self._routing is not None:
                    self._routing.copy(plan.copies)
            try:
                made = self._compute(plan.chunks, _raising(between_layers)) if plan.chunks else ([], {}, {})
            except _StepGivenUp:
                return None
        sampled, logprobs, routed = made
        return StepResult(plan.step_id, sampled, time.perf_counter() - started, logprobs, routed)

    def measure_roofline(self) -> StepRoofline | None:
        """See ``Runner.measure_roofline``."""
        if self.weights is None:
            return None
        linears = [value for value in self.weights.values.values() if not isinstance(value, paddle.Tensor)]
        machine = measure_machine(self.ops, linears, self.model.quantization)
        return None if machine is None else step_roofline(self.model, machine, self._token_bytes)

    @property
    def has_weights(self) -> bool:
        return self.weights is not None

    @property
    def fingerprint(self) -> str | None:
        return None if self.weights is None else self._fingerprint

    @property
    def fingerprints(self) -> dict[str, str]:
        return {} if self.weights is None else {name: one.hex for name, one in self._fingerprints.items()}

    @property
    def standby_nbytes(self) -> int:
        return self._standby.nbytes

    def begin_update(self, partial: bool, delta: bool = False) -> Staging:
        """See ``Runner.begin_update``. A folder is also refused if its config describes another model than the one that
        serves."""
        if WEIGHT in self.asleep:
            raise WrongOrder("the weights are asleep: wake them up before an update")
        if (partial or delta) and self.weights is None:
            kind = "a delta" if delta else "a partial update"
            raise WrongOrder(f"{kind} needs complete weights to start from: send all tensors")
        base = self._serving if partial or delta else None
        return WeightStaging(self.model, self._standby, base, self._model_roots, delta)

    def commit(self, weights: StagedWeights) -> None:
        """Exchange the weights. The old ones become the standby copy, or are freed here."""
        assert WEIGHT not in self.asleep
        old = {} if self.weights is None else self.weights.values
        self.weights, self._fingerprints, self._fingerprint = weights.weights, weights.fingerprints, weights.fingerprint
        self._standby.commit(weights.loan, old, self.weights.values, weights.missed)

    def refresh_standby(self) -> None:
        """See ``Runner.refresh_standby``. Does nothing without complete weights."""
        weights = self.weights
        if weights is None:
            return
        try:
            with paddle.no_grad():
                self._standby.refresh(weights.values)
        except MemoryError as error:
            raise OutOfSpace(f"no memory for the standby copy of the weights: {error}") from error

    def check_adapter(self, config: bytes) -> None:
        """See ``Runner.check_adapter``."""
        check_config(config, self.model)

    def begin_adapter(self) -> AdapterStaging:
        """See ``Runner.begin_adapter``."""
        return AdapterStaging(self.model, self._max_lora_rank)

    def commit_adapter(self, adapter: int, staged: PackedAdapter) -> None:
        """See ``Runner.commit_adapter``."""
        self._adapters.add(adapter, staged)

    def discard_adapter(self, staged: PackedAdapter) -> None:
        """See ``Runner.discard_adapter``. Does nothing: the memory is freed with the caller's reference."""

    def drop_adapters(self, adapters: Collection[int]) -> None:
        """See ``Runner.drop_adapters``."""
        self._adapters.drop(adapters)

    def checksums(self) -> dict[str, str]:
        """See ``Runner.checksums``."""
        with paddle.no_grad():
            return checksums(self.ops, self.model.parameters, self._values())

    def export(self, path: str, tensors: Collection[str] = ()) -> int:
        """See ``Runner.export``."""
        with paddle.no_grad():
            return export_weights(self.ops, self.model.parameters, self._values(), path, tensors)

    def begin_sleep(self, tags: Collection[str], discard: bool) -> SpillMove[Spill] | None:
        """See ``Runner.begin_sleep``."""
        for tag in tags:
            if tag not in (WEIGHT, KV_CACHE):
                raise InvalidField("tags", f"expected {WEIGHT} or {KV_CACHE}, got {tag!r}")
            if tag in self.asleep:
                raise WrongOrder(f"{tag} sleeps already")
        if WEIGHT not in tags or discard or self.weights is None:
            return None
        values = self.weights.values
        return SpillMove(functools.partial(spill, self.ops, self.model.parameters, values, self._spill_dir))

    def sleep(self, tags: Collection[str], written: SpillMove[Spill] | None) -> int:
        """See ``Runner.sleep``. The returned bytes are the difference in resident memory before and after."""
        before = resident_memory()
        if WEIGHT in tags:
            self._spill = written.result() if written is not None else None
            self.weights = None
            self._standby.drop()
        if KV_CACHE in tags:
            self.cache = self._routing = None
        self.ops.free_scratch()
        self.asleep |= frozenset(tags)
        give_back_freed_memory()
        return max(before - resident_memory(), 0)

    def begin_wake(self, tags: Collection[str]) -> SpillMove[ModelWeights] | None:
        """See ``Runner.begin_wake``."""
        for tag in tags:
            if tag not in self.asleep:
                raise WrongOrder(f"{tag} does not sleep")
        sleeping = self._spill if WEIGHT in tags else None
        needed = (sleeping.nbytes if sleeping else 0) + (self._cache_bytes if KV_CACHE in tags else 0)
        if needed > (free := free_memory()):
            raise OutOfSpace(f"waking up takes {needed / 2**30:.1f} GiB, only {free / 2**30:.1f} GiB are free")
        return None if sleeping is None else SpillMove(functools.partial(self._read_spill, sleeping))

    def wake(self, tags: Collection[str], read: SpillMove[ModelWeights] | None) -> None:
        """See ``Runner.wake``."""
        if KV_CACHE in tags:
            try:
                self._make_cache()
            except MemoryError as error:
                raise OutOfSpace(f"no memory for the KV cache: {error}") from error
        if WEIGHT in tags:
            self.weights = read.result() if read is not None else None
            self._spill = None
        self.asleep -= frozenset(tags)

    def close(self) -> None:
        """Free weights and KV cache; the runner cannot be used afterwards."""
        self._spill = None
        del self.weights, self._standby, self.cache, self._routing, self.model, self._adapters, self._sampler, self.ops

    def _values(self) -> Mapping[str, Value]:
        if self.weights is None:
            raise WrongOrder("there are no complete weights")
        return self.weights.values

    def _serving(self) -> Serving:
        return Serving(self._values(), self._fingerprints)

    def _read_spill(self, sleeping: Spill, check: Check) -> ModelWeights:
        try:
            with paddle.no_grad():
                values = sleeping.read(self.ops, check)
                self.model.quantize(values, np.zeros(1, np.int32))
                weights = self.model.assemble(values)
        except MemoryError as error:
            raise OutOfSpace(f"no memory to wake up: {error}") from error
        give_back_freed_memory()
        return weights

    def _make_cache(self) -> None:
        """Take the memory of the KV cache. Raises MemoryError; then nothing has changed."""
        info = self.info
        cache = new_kv_cache(self.ops, self.config, info.num_blocks, info.block_size)
        if info.routed_experts and info.experts is not None:
            self._routing = RoutingStore(info.experts, info.num_blocks, info.block_size)
        self.cache = cache

    def _compute(
        self, chunks: list[ScheduledChunk], between_layers: Callable[[], None] | None
    ) -> tuple[list[Sampled | NonFinite | NoneAllowed | None], dict[int, list[Logprob] | NonFinite], dict[int, bytes]]:
        """Return the draw of each chunk, and by index of the chunk the prompt logprobs and the routing."""
        token_ids, batch, numbers = self._sequences.batch(chunks)
        [sampling] = np.array([chunk.sample for chunk in chunks]).nonzero()
        drawn_rows, counts = _drawn_rows(chunks, batch.cu_tokens, sampling)
        asking = [i for i, chunk in enumerate(chunks) if chunk.prompt_logprobs]
        of_prompts: dict[int, list[Logprob] | NonFinite] = {}
        spans = [np.arange(chunks[i].prompt_logprobs) + batch.cu_tokens[i] for i in asking]
        rows = np.unique(np.concatenate([drawn_rows, *spans])) if asking else drawn_rows  # ascending
        weights, cache = self.weights, self.cache
        assert weights is not None and cache is not None
        adapters = self._adapters.rows_of(chunks, batch.cu_tokens)
        masks = self._masks.begin(chunks, sampling, self._sequences)
        store = self._routing
        routing = None if store is None else store.routing(len(token_ids))
        try:
            hidden = self.model.forward(weights, token_ids, cache, batch, rows, between_layers, adapters, routing)
        finally:
            if masks is not None:
                masks.result()  # also of a step that is given up: the next one continues the same grammars
        if store is not None and routing is not None:
            store.write(batch, routing)
        for i, span in zip(asking, spans, strict=True):
            first = int(np.searchsorted(rows, span[0]))
            of_prompts[i] = self._prompt_logprobs(chunks[i], hidden, first, between_layers, picked(adapters, span))
        if asking and len(sampling):
            hidden = paddle.index_select(hidden, paddle.to_tensor(np.searchsorted(rows, drawn_rows)))
        result: list[Sampled | NonFinite | NoneAllowed | None] = [None] * len(chunks)
        if len(sampling):
            logits = self.model.logits(weights, hidden, picked(adapters, drawn_rows))
            positions = batch.positions[drawn_rows].astype(np.int64) + 1
            drawing = numbers[sampling] if counts is None else numbers[sampling].repeat(counts)
            of_rows = self._sequences.draws(drawing, positions, counts)
            drawn = self._sampler.sample(logits, of_rows, None if masks is None else masks.result())
            for i, one in zip(sampling.tolist(), drawn if masks is None else masks.explained(drawn), strict=True):
                result[i] = one
        return result, of_prompts, {} if store is None else store.read(chunks, batch, result)

    def _prompt_logprobs(
        self,
        chunk: ScheduledChunk,
        hidden: paddle.Tensor,
        first: int,
        between_slices: Callable[[], None] | None,
        adapters: AdapterRows | None,
    ) -> list[Logprob] | NonFinite:
        """Return the logprobs that the chunk asks for, or the first row that is not finite. hidden: row ``first`` is
        that of the chunk's first token. adapters: of the rows that are asked for. Logits are computed in slices of
        rows: those of a whole prompt may be larger than the model."""
        count, params = chunk.prompt_logprobs, self._sequences.known(chunk.sequence).sampling
        wanted = Wanted(params.prompt_logprobs) if params.prompt_logprobs else Wanted(ids=ids_of(params))
        targets = self._sequences.tokens[chunk.sequence, chunk.start + 1 : chunk.start + 1 + count]
        weights, found = self.weights, list[Logprob]()
        assert weights is not None
        for at in range(0, count, LOGITS_ROWS):
            end = min(at + LOGITS_ROWS, count)
            of_slice = picked(adapters, slice(at, end))
            logits = self.model.logits(weights, hidden[first + at : first + end], of_slice)
            for logprob in token_logprobs(self.ops, logits, LogprobBatch(targets[at:end]), [wanted] * (end - at)):
                if logprob is None:
                    return NonFinite(chunk.start + 1 + len(found))
                found.append(logprob)
            if between_slices is not None:
                between_slices()
        return found


def _drawn_rows(
    chunks: list[ScheduledChunk], cu_tokens: np.ndarray, sampling: np.ndarray
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the token rows whose logits are drawn from, int64 ascending, and how many of them each of the chunks
    ``sampling`` has: the last known token, and its drafts. None = one each."""
    last = cu_tokens[1:][sampling].astype(np.int64) - 1
    drafted = np.array([chunks[i].drafted for i in sampling.tolist()], np.int64)
    if not drafted.any():
        return last, None
    counts = drafted + 1
    return np.arange(counts.sum()) + (last + 1 - counts.cumsum()).repeat(counts), counts


class _StepGivenUp(Exception):
    """The exception that ends the layers of a step. Only this file raises and catches it."""


def _raising(between_layers: Callable[[], bool] | None) -> Callable[[], None] | None:
    """Return a ``between_layers`` for the ops: a function that raises to give the step up."""
    if between_layers is None:
        return None

    def called() -> None:
        if between_layers():
            raise _StepGivenUp

    return called
