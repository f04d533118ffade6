"""A worker as the engine sees it. No Paddle here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, Protocol

from fastdeploy.core.plan import StepPlan, StepResult
from fastdeploy.core.weight_source import Source


def nothing() -> None: ...


class ChunkReceipt(NamedTuple):
    """What one source held: how many tensors, and their bytes."""

    tensors: int
    nbytes: int


class ModelInfo(NamedTuple):
    """What the engine must know of the model. eos_token_ids: any of them ends a request unless ignore_eos."""

    name: str
    dtype: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    num_blocks: int
    block_size: int


class Staging(Protocol):
    """New weights under construction, beside the serving ones (or, in place, instead of them). ``add`` and ``finish``
    are called by one thread at a time. They may hang in a read; ``abandon`` may come meanwhile, from another thread."""

    def add(self, source: Source, checksums: Mapping[str, str], verify_checksum: bool = False) -> ChunkReceipt:
        """Read all tensors of ``source``, check them (name, shape, type, finite, checksum; twice is an error) and pack
        what is complete. Nothing of the source is needed afterwards. Raises WeightUpdateRefused, naming the file or
        tensor, or OutOfSpace; after either only ``abandon`` is left."""

    def finish(self) -> Any:
        """Everything has arrived: what ``commit`` takes. Raises WeightUpdateRefused, naming what is missing."""

    def abandon(self) -> None:
        """Free what was staged (in place: and what was left of the old weights), without waiting for an ``add`` that
        hangs. After this an ``add`` that comes back takes nothing from the runner, and raises."""


class Runner(Protocol):
    """A worker as the engine sees it. ``execute``, ``commit``, ``sleep`` and ``wake`` run on the engine's loop thread;
    a Staging and ``checksums`` on a thread of their own, beside steps. Only a commit changes what ``execute`` computes
    (in place: nothing may execute from the first ``add`` to the commit).

    has_weights: there are whole weights to execute with. False while they sleep, after a sleep that discarded them, and
    from the first tensor of an in-place update on; a commit makes it True.
    asleep: the tags that sleep.
    """

    @property
    def info(self) -> ModelInfo: ...

    @property
    def has_weights(self) -> bool: ...

    @property
    def asleep(self) -> frozenset[str]: ...

    def execute(self, plan: StepPlan, between_layers: Callable[[], bool] | None = None) -> StepResult | None:
        """Copy blocks, compute every chunk, draw for those that sample. A row of logits that is not finite concerns its
        own chunk alone: the others get the same bits as without it.

        ``between_layers`` is called now and then while the step computes. When it returns True, the step is given up
        and the result is None: the copies are made then, all that the plan tells of sequences is known, and KV of the
        plan's own positions may be overwritten, but nothing else is changed."""
        ...

    def begin_update(self, partial: bool, in_place: bool) -> Staging:
        """partial: tensors that do not arrive keep the value that serves when it is committed. Raises WrongOrder while
        "weight" sleeps, and for a partial update of weights that are not whole."""

    def commit(self, staged: Any) -> None:
        """Swap the staged weights in. Cannot fail half-way: it exchanges references."""

    def checksums(self) -> dict[str, str]:
        """sha256 hex of each tensor of the checkpoint that serves, of its bytes in the serving dtype. Raises WrongOrder
        without whole weights."""

    def sleep(self, tags: Collection[str], discard: bool, beat: Callable[[], None] = nothing) -> int:
        """Give the memory of "weight" and "kv_cache" back to the system; returns its bytes. Weights are written to a
        file unless ``discard``; raises OutOfSpace, having changed nothing, where that is not possible, and WrongOrder
        for a tag that sleeps. ``beat`` is called between the pieces of long work."""

    def wake(self, tags: Collection[str], beat: Callable[[], None] = nothing) -> None:
        """Take it again: the same weights bit for bit (after a discard: none, until a commit), an empty KV cache.
        Raises OutOfSpace, having changed nothing, where memory is short, and WrongOrder for a tag that does not
        sleep. ``beat``: as for ``sleep``."""

    def check_alive(self) -> None:
        """Raise EngineError if the runner can never answer again, since its process has ended."""

    def close(self) -> None:
        """Free everything. The runner cannot be used afterwards."""
