"""The contract between scheduler and worker: one StepPlan down, one StepResult up. No Paddle here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from fastdeploy.engine.sampling_params import SamplingParams
from fastdeploy.inter_communicator.messages import Logprob


class ScheduledChunk(NamedTuple):
    """Compute ``token_ids`` at positions start, start+1, ... of one sequence.

    block_table: KV block ids; position p lives in slot ``p % block_size`` of block_table[p // block_size].
    sample: the chunk reaches the end of what is known, so draw the next token, at absolute position
    ``start + len(token_ids)``, from the logits of the last row.
    all_token_ids / num_prompt_tokens: the whole sequence known so far (read-only view), for penalties.
    banned: ids that may not be drawn (EOS and stop ids while min_tokens is not reached).
    request: the scheduler's own handle; a runner does not look at it.
    """

    key: tuple[str, int]
    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    sample: bool
    sampling: SamplingParams
    all_token_ids: Sequence[int]
    num_prompt_tokens: int
    banned: tuple[int, ...]
    request: Any = None


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


class Sampled(NamedTuple):
    """``logprob`` is None unless the chunk's sampling asked for logprobs."""

    token_id: int
    logprob: Logprob | None


class StepResult(NamedTuple):
    """``sampled`` is aligned with plan.chunks; None where the chunk did not sample. elapsed_s: wall time of it."""

    step_id: int
    sampled: list[Sampled | None]
    elapsed_s: float


class ModelInfo(NamedTuple):
    """What the engine must know of the model. eos_token_ids: any of them ends a request unless ignore_eos."""

    name: str
    dtype: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    num_blocks: int
    block_size: int


class Runner(Protocol):
    """A worker as the engine sees it. ``execute`` and ``commit`` run on the engine's loop thread; ``stage`` on a
    thread of its own, beside steps. Only a committed stage changes what ``execute`` computes."""

    info: ModelInfo

    def execute(self, plan: StepPlan) -> StepResult: ...

    def stage(self, model_path: str) -> Any:
        """Read, check and pack a checkpoint folder; the folder may be deleted once this returns.

        Raises WeightUpdateRefused, naming the file or tensor, and leaves the serving weights untouched.
        """

    def commit(self, staged: Any) -> None:
        """Swap the staged weights in. Cannot fail half-way: it exchanges references."""

    def close(self) -> None: ...
