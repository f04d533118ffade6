"""A runner without a model: each step sleeps for the time of a cost model, and a token is a hash of all before it."""

from __future__ import annotations

import time
import zlib
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from fastdeploy.core.errors import WeightUpdateRefused
from fastdeploy.core.outputs import Logprob
from fastdeploy.core.plan import NewSequence, NonFinite, Sampled, ScheduledChunk, StepPlan, StepResult
from fastdeploy.core.runner import AdapterStaging, ModelInfo, PartReceipt, Staged
from fastdeploy.core.weight_source import PLAIN, PartFormat, SharedMemorySource, Source

EOS = 0
POLL_S = 0.005  # a step looks for messages so often; a layer of a large model takes about as long


class Costs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Cost model of a step, in seconds, and the sizes of a replica. A step that computes p prompt tokens, and one token
    for each of d sequences with c known tokens in all, takes ``step_s + p * prompt_s + d * decode_s + c * context_s``.
    The engine divides by the time of a prompt token, so prompts must take some time.
    """

    step_s: float = 0.0
    prompt_s: float = 0.0
    decode_s: float = 0.0
    context_s: float = 0.0
    num_blocks: int = 1024
    block_size: int = 16
    max_model_len: int = 8192
    vocab_size: int = 1000

    def of(self, plan: StepPlan) -> float:
        """Return the time of a step."""
        decodes = [chunk for chunk in plan.chunks if chunk.sample and chunk.count == 1]
        context = sum(chunk.start for chunk in decodes)
        prompt = plan.num_tokens - len(decodes)
        return self.step_s + prompt * self.prompt_s + len(decodes) * self.decode_s + context * self.context_s


def checksum(token_ids: Sequence[int], before: int = 0) -> int:
    """Return the checksum of a sequence. before: the checksum of the tokens before ``token_ids``."""
    return zlib.crc32(array("i", token_ids).tobytes(), before)


def next_token(known: int, weights: int, vocab_size: int = 1000) -> int:
    """Return the token that the weights sample after a sequence with the checksum ``known``. Never EOS."""
    return 1 + zlib.crc32(b"%d" % weights, known) % (vocab_size - 1)


def expected_tokens(prompt: Sequence[int], count: int, weights: int = 0, vocab_size: int = 1000) -> list[int]:
    """Return the tokens that the runner generates after ``prompt``."""
    known, tokens = checksum(prompt), []
    for _ in range(count):
        tokens.append(next_token(known, weights, vocab_size))
        known = checksum(tokens[-1:], known)
    return tokens


class SleepingStaging:
    """New weights: the name of a folder or segment "w<k>" gives the weights k. It need not exist."""

    def __init__(self, runner: SleepingRunner, partial: bool):
        self._weights = runner.weights if partial else None
        self.abandoned = False

    def add(
        self, source: Source, checksums: Mapping[str, str], verify_checksum: bool = False, form: PartFormat = PLAIN
    ) -> PartReceipt:
        name = source.name if isinstance(source, SharedMemorySource) else Path(source.path).name
        if not isinstance(source, SharedMemorySource) and Path(source.path).is_file():  # written by ``export``
            name = Path(source.path).read_text()
        if not form.is_plain or not name.startswith("w") or not name[1:].isdigit() or self.abandoned:
            raise WeightUpdateRefused(f"{name}: expected the name w<number>")
        self._weights = int(name[1:])
        return PartReceipt(1, 4)

    def finish(self) -> Staged:
        if self._weights is None:
            raise WeightUpdateRefused("tensor weights: is missing: it did not arrive")
        return Staged(self._weights, fingerprint_of(self._weights))

    def abandon(self) -> None:
        self.abandoned = True


class NoMove:
    """A move of sleeping weights, which takes no time."""

    def run(self) -> None: ...

    def abandon(self) -> None: ...


def fingerprint_of(weights: int) -> str:
    """Return the fingerprint of the weights."""
    return f"{weights:064x}"


class SleepingRunner:
    """See Runner. slowness: factor of the duration of the next step."""

    def __init__(self, costs: Costs, slowness: Callable[[], float] = lambda: 1.0):
        self._costs = costs
        self._slowness = slowness
        self.info = ModelInfo(
            "sleeping", "float32", costs.vocab_size, costs.max_model_len, (EOS,), costs.num_blocks, costs.block_size
        )
        self.weights = 0
        self.has_weights = True
        self.asleep: frozenset[str] = frozenset()
        self.standby_nbytes = 0
        self._known: dict[int, tuple[NewSequence, int]] = {}  # by number of the sequence: its checksum

    @property
    def fingerprint(self) -> str | None:
        return fingerprint_of(self.weights) if self.has_weights else None

    @property
    def fingerprints(self) -> dict[str, str]:
        return {"weights": fingerprint_of(self.weights)[-32:]} if self.has_weights else {}

    def execute(self, plan: StepPlan, between_layers: Callable[[], bool] | None = None) -> StepResult | None:
        assert self.has_weights and not self.asleep
        began = time.monotonic()
        steps = [self._take(chunk) for chunk in plan.chunks]
        slowness = self._slowness()
        cost = self._costs.of(plan) * slowness
        while (left := began + cost - time.monotonic()) > 0:
            time.sleep(min(left, POLL_S * slowness))
            if between_layers is not None and between_layers():
                return None
        sampled: list[Sampled | NonFinite | None] = [
            self._sample(chunk, *step) for chunk, step in zip(plan.chunks, steps, strict=True)
        ]
        asked = [(i, chunk) for i, chunk in enumerate(plan.chunks) if chunk.prompt_logprobs]
        of_prompts: dict[int, list[Logprob] | NonFinite] = {
            i: [Logprob(-1.0)] * chunk.prompt_logprobs for i, chunk in asked
        }
        return StepResult(plan.step_id, sampled, cost, of_prompts)

    def _take(self, chunk: ScheduledChunk) -> tuple[NewSequence, int]:
        new, before = (chunk.new, 0) if chunk.new is not None else self._known[chunk.sequence]
        self._known[chunk.sequence] = known = (new, checksum(chunk.token_ids, before))
        return known

    def _sample(self, chunk: ScheduledChunk, new: NewSequence, known: int) -> Sampled | None:
        if not chunk.sample:
            return None
        token = next_token(known, self.weights, self.info.vocab_size)
        return Sampled([token], [Logprob(-1.0)] if new.sampling.logprobs is not None else [])

    def begin_update(self, partial: bool, delta: bool = False) -> SleepingStaging:
        return SleepingStaging(self, partial or delta)

    def commit(self, weights: int) -> None:
        self.weights, self.has_weights = weights, True

    def refresh_standby(self) -> None: ...

    def check_adapter(self, config: bytes) -> None: ...

    def measure_roofline(self) -> None:
        return None

    def begin_adapter(self) -> AdapterStaging:
        raise WeightUpdateRefused("engines without a model have no adapters")

    def commit_adapter(self, adapter: int, staged: Any) -> None: ...

    def discard_adapter(self, staged: Any) -> None: ...

    def drop_adapters(self, adapters: Collection[int]) -> None: ...

    def checksums(self) -> dict[str, str]:
        return {"weights": fingerprint_of(self.weights)}

    def export(self, path: str, tensors: Collection[str] = ()) -> int:
        """Write the text "w<k>" for the weights k, which SleepingStaging reads again."""
        return Path(path).write_text(f"w{self.weights}")

    def begin_sleep(self, tags: Collection[str], discard: bool) -> NoMove | None:
        return NoMove() if "weight" in tags and not discard else None

    def sleep(self, tags: Collection[str], written: Any) -> int:
        self.asleep |= set(tags)
        self.has_weights = self.has_weights and ("weight" not in tags or written is not None)
        return 0

    def begin_wake(self, tags: Collection[str]) -> NoMove | None:
        return NoMove() if "weight" in tags and self.has_weights else None

    def wake(self, tags: Collection[str], read: Any) -> None:
        self.asleep -= set(tags)

    def close(self) -> None: ...
