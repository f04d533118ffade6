"""The contract between scheduler and worker: one StepPlan down, one StepResult up. No Paddle here.

What is made for every sequence in every step is a msgspec.Struct, which takes a quarter of a NamedTuple's time to make.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from fastdeploy.engine.sampling_params import SamplingParams
from fastdeploy.inter_communicator.messages import Logprob, Source


def nothing() -> None: ...


class ScheduledChunk(msgspec.Struct, frozen=True):
    """Compute ``token_ids`` at positions start, start+1, ... of one sequence.

    block_table: KV block ids, of type "i"; position p lives in slot ``p % block_size`` of block_table[p // block_size].
    sample: the chunk reaches the end of what is known, so draw the next token, at absolute position
    ``start + len(token_ids)``, from the logits of the last row.
    key: names the sequence; its second part, the number of the choice, keys random numbers.
    all_token_ids / num_prompt_tokens: the whole sequence known so far (read-only view), for penalties: what follows the
    first num_prompt_tokens is output, be it of an earlier attempt.
    banned: ids that may not be drawn (EOS and stop ids while min_tokens is not reached).
    prompt_logprobs: how many of its tokens, from the first, have a prompt token behind them whose logprob is asked for.
    request: the scheduler's own handle; a runner does not look at it.
    """

    key: tuple[str, int]
    token_ids: Sequence[int]
    start: int
    block_table: array[int]
    sample: bool
    sampling: SamplingParams
    all_token_ids: Sequence[int]
    num_prompt_tokens: int
    banned: tuple[int, ...]
    request: Any = None
    prompt_logprobs: int = 0


class BlockCopy(NamedTuple):
    """Copy KV block ``source`` to ``target`` in every layer before the step computes."""

    source: int
    target: int


class StepPlan(NamedTuple):
    """``epoch`` and ``version`` are those of the weights that will run it, fixed at launch."""

    step_id: int
    epoch: int
    version: str
    chunks: list[ScheduledChunk]
    copies: list[BlockCopy]

    @property
    def num_tokens(self) -> int:
        return sum(len(c.token_ids) for c in self.chunks)


class Sampled(msgspec.Struct, frozen=True):
    """``logprob`` is None unless the chunk's sampling asked for logprobs."""

    token_id: int
    logprob: Logprob | None


class NonFinite(msgspec.Struct, frozen=True):
    """The row of logits for the token at ``position`` of the sequence has a NaN or +inf, or -inf for every token. So no
    token can be drawn there, or no logprob returned."""

    position: int


class StepResult(NamedTuple):
    """``sampled`` is aligned with plan.chunks; None where the chunk did not sample. elapsed_s: wall time of the step.
    prompt_logprobs: by index of the chunk, as many as the chunk asked for, or the first row that is not finite."""

    step_id: int
    sampled: list[Sampled | NonFinite | None]
    elapsed_s: float
    prompt_logprobs: dict[int, list[Logprob] | NonFinite] = {}


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

    info: ModelInfo
    has_weights: bool
    asleep: frozenset[str]

    def execute(self, plan: StepPlan, between_layers: Callable[[], None] | None = None) -> StepResult:
        """Copy blocks, compute every chunk, draw for those that sample. A row of logits that is not finite concerns its
        own chunk alone: the others get the same bits as without it. What ``between_layers`` raises goes through:
        the copies are made then, and KV of the plan's own positions may be overwritten, but nothing else is changed."""
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

    def close(self) -> None: ...
