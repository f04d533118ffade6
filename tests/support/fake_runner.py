"""A runner without a model, with simulated blocks of KV.

A step whose KV is not, slot by slot, that of its sequence fails. The next token is a hash of the sequence and of the
weights, so a test can compute an undisturbed run with :func:`expected_tokens`. So is the row of each token, which tells
the experts that computed the token, see :func:`row_of`.
"""

from __future__ import annotations

import hashlib
import threading
import zlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fastdeploy.core.config import UPLOAD_PREFIX
from fastdeploy.core.errors import OutOfSpace, WeightUpdateRefused, WrongOrder
from fastdeploy.core.experts import ExpertsInfo
from fastdeploy.core.files import new_file
from fastdeploy.core.outputs import Logprob
from fastdeploy.core.plan import NewSequence, NonFinite, Sampled, ScheduledChunk, StepPlan, StepResult
from fastdeploy.core.runner import AdapterInfo, ModelInfo, PartReceipt, Staged
from fastdeploy.core.weight_source import PLAIN, FileSource, PartFormat, SharedMemorySource, Source

EOS = 0
MIB = 1 << 20


EXPERTS = ExpertsInfo(layers=(1, 3), num_layers=4, num_experts=8, top_k=2)


def nothing() -> None: ...


class Slot(NamedTuple):
    token: int
    position: int
    weights: int
    adapter: int  # number of the packed adapter
    context: int  # checksum of the tokens before it
    row: bytes


@dataclass
class Known:
    """The parts of one sequence that the runner has received."""

    new: NewSequence
    tokens: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)


class Packed(NamedTuple):
    """An adapter at the runner. content: k of "a<k>"; 0 changes nothing."""

    content: int
    keeps_kv: bool


def next_token(token_ids: list[int], weights: int, vocab: int, banned: tuple[int, ...] = (), adapter: int = 0) -> int:
    """Return the token that the model with these weights, and with an adapter "a<k>", samples after ``token_ids``."""
    model = (weights, adapter) if adapter else weights
    token = zlib.crc32(repr((model, *token_ids)).encode()) % vocab
    while token in banned:
        token = (token + 1) % vocab
    return token


def expected_tokens(prompt: list[int], count: int, weights: int = 0, vocab: int = 1000, adapter: int = 0) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, weights, vocab, adapter=adapter))
    return tokens[len(prompt) :]


def context_of(token_ids: list[int]) -> int:
    """Return the checksum of the tokens before another one."""
    return zlib.crc32(repr(token_ids).encode())


def row_of(token_ids: list[int], info: ExpertsInfo, weights: int = 0, adapter: int = 0) -> bytes:
    """Return the row of the last of ``token_ids`` in the model with these weights, and with an adapter "a<k>"."""
    return _row(token_ids[-1], context_of(token_ids[:-1]), info, weights, adapter)


def _row(token: int, context: int, info: ExpertsInfo, weights: int, adapter: int) -> bytes:
    seed = zlib.crc32(repr((weights, adapter, token, context)).encode())
    ids = [(seed >> i) % info.num_experts for i in range(info.row_ids)]
    return np.array(ids, info.dtype).tobytes()


def expected_rows(token_ids: list[int], info: ExpertsInfo, start: int = 0, weights: int = 0) -> bytes:
    """Return the rows of all of ``token_ids`` but the last, from position ``start`` on."""
    ends = range(start + 1, len(token_ids))
    return b"".join(row_of(token_ids[:end], info, weights) for end in ends)


def fingerprint_of(weights: int) -> str:
    """Return the fingerprint of the weights ``weights`` over all their tensors."""
    return hashlib.sha256(f"weights {weights}".encode()).hexdigest()


def tensor_fingerprint(weights: int) -> str:
    """Return the fingerprint of the only tensor of the weights ``weights``."""
    return hashlib.sha256(f"tensor {weights}".encode()).hexdigest()[:32]


def adapter_fingerprint(content: str) -> str:
    """Return the fingerprint of an adapter with these tensors, see FakeAdapterStaging."""
    return hashlib.sha256(f"adapter {content}".encode()).hexdigest()


def write_adapter(folder: Path, content: str) -> str:
    """Write a PEFT folder for the fake runner, and return its path. content: see FakeAdapterStaging."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_text(content)
    return str(folder)


class FakeAdapterStaging:
    """The tensors of a folder are "a<k>", or "a<k>-recompute" for an adapter after whose commit no sequence may use KV
    of the adapter before it. ":<bytes>" may follow, the packed size. Anything else is refused."""

    def __init__(self, runner: FakeRunner):
        self._runner = runner
        self._packed: Packed | None = None

    def read(self, path: str) -> AdapterInfo:
        assert self._runner.may_stage.wait(30)
        self._runner.adapter_reads += 1
        text = (Path(path) / "adapter_model.safetensors").read_text()
        content, _, size = text.partition(":")
        if content == "garbage":
            raise ValueError("an unexpected error of a reader")
        if not content.startswith("a"):
            raise WeightUpdateRefused(f"{content}: not the tensors of an adapter")
        k, _, recompute = content[1:].partition("-")
        self._packed = Packed(int(k), recompute != "recompute")
        return AdapterInfo(rank=8, nbytes=int(size or MIB), fingerprint=adapter_fingerprint(text))

    def finish(self) -> Packed:
        assert self._packed is not None
        return self._packed


class FakeStaging:
    """Parts are folders named "w<k>", which need not exist: the last gives the weights k. Any other name is refused,
    and so is a repeated one. The folder "w<k>-eos<id>" names an EOS id. partial: k is added to the weights that serve.
    delta: parts are named "d<k>", have any form, and each adds its k to the weights that serve. The name of an upload
    is that of its file without UPLOAD_PREFIX.

    All weights are one tensor "weights". form.fingerprints may name what ``tensor_fingerprint`` returns for it."""

    def __init__(self, runner: FakeRunner, partial: bool, delta: bool = False):
        self._runner, self._partial, self.delta = runner, partial, delta
        self.names: list[str] = []
        self.abandoned, self.was_abandoned = False, threading.Event()

    def add(
        self,
        source: Source,
        checksums: Mapping[str, str],
        verify_checksum: bool = False,
        form: PartFormat = PLAIN,
    ) -> PartReceipt:
        assert self._runner.may_stage.wait(30)
        self._check_wanted()
        name = (source.name if isinstance(source, SharedMemorySource) else source.path).rsplit("/", 1)[-1]
        name = name.removeprefix(UPLOAD_PREFIX)
        if isinstance(source, FileSource) and (exported := Path(source.path)).is_file():
            name = exported.read_text()
        assert self.delta or form.is_plain, "a form that only a delta session takes"
        if name == "garbage":
            raise ValueError("an unexpected error of a reader")
        if not name.startswith("d" if self.delta else "w") or name in self.names:
            raise WeightUpdateRefused(f"{name}: not a checkpoint, or twice in one update")
        self._check_fingerprints(form.fingerprints, self._weights([*self.names, name]))
        self.names.append(name)
        return PartReceipt(3, 12)

    def _check_fingerprints(self, expected: Mapping[str, str], weights: int) -> None:
        for name, fingerprint in expected.items():
            if (name, fingerprint) != ("weights", tensor_fingerprint(weights)):
                raise WeightUpdateRefused(f"tensor {name}: its fingerprint is {tensor_fingerprint(weights)}")

    def _weights(self, names: list[str]) -> int:
        """Return the weights that these parts make."""
        numbers = [int(name[1:].partition("-")[0]) for name in names]
        if self.delta:
            return self._runner.weights + sum(numbers)
        return (numbers[-1] if numbers else 0) + (self._runner.weights if self._partial else 0)

    def finish(self) -> Staged:
        assert self._runner.may_stage.wait(30)
        self._check_wanted()
        if not self.names and not self._partial and not self.delta:
            raise WeightUpdateRefused("tensor a: is missing: it did not arrive")
        weights, keeps_kv = self._weights(self.names), not any(name.endswith("-recompute") for name in self.names[-1:])
        more = self.names[-1].partition("-")[2] if self.names else ""
        eos = (int(more.removeprefix("eos")),) if more.startswith("eos") else None
        return Staged((weights, keeps_kv), fingerprint_of(weights), eos)

    def abandon(self) -> None:
        self.abandoned = True
        self.was_abandoned.set()
        assert self._runner.may_stage.wait(30)

    def _check_wanted(self) -> None:
        if self.abandoned:
            raise WeightUpdateRefused("given up")


class FakeMove:
    """A move of sleeping weights. state: "begun", "ran" or "abandoned". runs: set when ``run`` was called."""

    def __init__(self, runner: FakeRunner):
        self._runner, self.weights, self.state = runner, runner.weights, "begun"
        self.runs = threading.Event()

    def run(self) -> None:
        self.runs.set()
        assert self._runner.may_stage.wait(30)
        self.check()
        self.state = "ran"

    def check(self) -> None:
        if self._runner.no_space:
            raise OutOfSpace("no room for the weights")
        if self.state == "abandoned":
            raise WrongOrder("given up")

    def abandon(self) -> None:
        self.state = "abandoned"


class FakeRunner:
    """``weights`` is an int, see FakeStaging. Sequences may use their KV after a commit of "w<k>", but not after a
    commit of "w<k>-recompute".

    in_step: called once, in the middle of the next step. plans: the steps that were completed.
    mixed_ok: keys of sequences whose KV may be of several weights, until they are computed again.
    fail_next: the next execute raises. step_s: the duration that StepResult names.
    poison: tokens behind which the logits are not finite. bad_weights: weights whose logits are never finite.
    may_stage: staging, and moves of sleeping weights, wait until this is set, as it is at first. no_space: sleep and
    wake fail. moves: of sleeping weights, in order. refreshes: completed calls of refresh_standby.
    faults: wrong calls on the staging thread, where an assertion would only be logged.
    adapters: by number. adapter_reads: folders of adapters that were read, also refused ones.
    experts: of a Mixture of Experts, whose routing the runner keeps.
    """

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 4,
        max_model_len: int = 128,
        vocab: int = 1000,
        quantization: str | None = None,
        experts: ExpertsInfo | None = None,
    ):
        self.info = ModelInfo(
            "fake", "float32", vocab, max_model_len, (EOS,), num_blocks, block_size, quantization,
            experts=experts, routed_experts=experts is not None,
        )  # fmt: skip
        self.slots: list[list[Slot | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.weights = 0
        self.plans: list[StepPlan] = []
        self.fail_next = False
        self.poison: set[int] = set()
        self.bad_weights: set[int] = set()
        self.in_step: Callable[[], object] = nothing
        self.step_s = 0.001
        self.computed_tokens = 0
        self.may_stage = threading.Event()
        self.may_stage.set()
        self.has_weights, self.no_space = True, False
        self.standby_nbytes = self.refreshes = 0
        self.faults: list[str] = []
        self._spilled = False
        self.asleep: frozenset[str] = frozenset()
        self.adapters: dict[int, Packed] = {}
        self.adapter_reads = 0
        self._adapters_of: dict[tuple[str, int], set[int]] = {}
        self.stagings: list[FakeStaging] = []
        self.mixed_ok: set[tuple[str, int]] = set()
        self.moves: list[FakeMove] = []
        self._known: dict[int, Known] = {}  # by the number of the sequence
        self._end: dict[tuple[str, int], int] = {}  # how far each sequence was computed

    def export(self, path: str, tensors: Collection[str] = ()) -> int:
        """Write "w<k>" for the weights k, which FakeStaging reads again."""
        assert self.may_stage.wait(30)
        text = f"w{self.weights}"
        if self.no_space:
            raise OutOfSpace("no room for the weights")
        with new_file(path, 0o600) as file:
            file.write(text.encode())
        return len(text)

    def execute(self, plan: StepPlan, between_layers: Callable[[], bool] | None = None) -> StepResult | None:
        assert not self.asleep and self.has_weights, f"a step without weights or KV: {self.asleep}"
        numbers = [chunk.served.adapter for chunk in plan.chunks]
        assert all(number in self.adapters for number in numbers if number), "an adapter that the runner does not have"
        runs = [number for i, number in enumerate(numbers) if i == 0 or numbers[i - 1] != number]
        assert len(runs) == len(set(runs)) and 0 not in runs[1:], f"chunks are not grouped by adapter: {numbers}"
        if self.fail_next:
            raise RuntimeError("the worker died")
        sequences = [self._take(chunk) for chunk in plan.chunks]
        for copy in plan.copies:
            self.slots[copy.target] = list(self.slots[copy.source])
        for chunk, known in zip(plan.chunks, sequences, strict=True):
            for position in range(chunk.start, chunk.start + chunk.count):  # an abandoned step leaves no usable KV
                self.slots[known.blocks[position // self.info.block_size]][position % self.info.block_size] = None
        in_step, self.in_step = self.in_step, nothing
        in_step()
        if between_layers is not None and between_layers():
            return None
        self.plans.append(plan)
        assert len({chunk.sequence for chunk in plan.chunks}) == len(plan.chunks), "a sequence is in the plan twice"
        steps = list(zip(plan.chunks, sequences, strict=True))
        sampled = [self._run(chunk, known) for chunk, known in steps]
        of_prompts = {i: self._prompt_logprobs(*step) for i, step in enumerate(steps) if step[0].prompt_logprobs}
        asking = [i for i, chunk in enumerate(plan.chunks) if chunk.routed_from >= 0]
        routed = {i: self._rows(*steps[i], drawn) for i in asking if isinstance(drawn := sampled[i], Sampled)}
        return StepResult(plan.step_id, sampled, self.step_s, of_prompts, routed)

    def _take(self, chunk: ScheduledChunk) -> Known:
        if chunk.new is not None:
            self._known[chunk.sequence] = Known(chunk.new)
        known = self._known[chunk.sequence]
        first = 0 if chunk.new is not None else chunk.start + chunk.count - len(chunk.token_ids)
        if chunk.token_ids or chunk.sample:  # the drafts of the step before are no tokens
            assert first <= len(known.tokens), "a token is missing"
            known.tokens[first:] = chunk.token_ids
        known.blocks += chunk.blocks
        return known

    def _spoiled(self, tokens: list[int]) -> bool:
        return self.weights in self.bad_weights or not self.poison.isdisjoint(tokens)

    def _prompt_logprobs(self, chunk: ScheduledChunk, known: Known) -> list[Logprob] | NonFinite:
        """Return the logprob ``-1 - weights`` for every prompt token of the chunk."""
        for position in range(chunk.start, chunk.start + chunk.prompt_logprobs):
            if self._spoiled(known.tokens[: position + 1]):
                return NonFinite(position + 1)
        asked = known.tokens[chunk.start + 1 :][: chunk.prompt_logprobs]
        return [Logprob.of(-1.0 - self.weights, ((token, 0.0),)) for token in asked]

    def _run(self, chunk: ScheduledChunk, known: Known) -> Sampled | NonFinite | None:
        size, tokens, blocks, key = self.info.block_size, known.tokens, known.blocks, known.new.key
        number, end = chunk.served.adapter, chunk.start + chunk.count
        adapters = self._adapters_of_kv(chunk, key)
        assert chunk.num_known and end <= len(tokens) and (chunk.sample or not chunk.drafted)
        if chunk.start != self._end.get(key):
            self.mixed_ok.discard(key)
        for position in range(chunk.start):
            slot = self.slots[blocks[position // size]][position % size]
            assert slot is not None, f"{key}: position {position} was never computed"
            assert (slot.token, slot.position) == (tokens[position], position), f"{key}: foreign KV at {position}"
            assert slot.context == context_of(tokens[:position]), f"{key}: foreign context"
            assert slot.weights == self.weights or key in self.mixed_ok, f"{key}: stale KV at {position}"
            assert slot.adapter in adapters, f"{key}: KV of another adapter at {position}"
        info, content = self.info.experts, self._content(number)
        for position in range(chunk.start, end):
            token, context = tokens[position], context_of(tokens[:position])
            row = b"" if info is None else _row(token, context, info, self.weights, content)
            slot = Slot(token, position, self.weights, number, context, row)
            self.slots[blocks[position // size]][position % size] = slot
        self.computed_tokens += chunk.count
        assert chunk.sample == (end == len(tokens))
        self._end[key] = end
        if not chunk.sample:
            return None
        drawn = self._draw(chunk, known)
        if isinstance(drawn, Sampled):
            self._end[key] = end - chunk.drafted + len(drawn.token_ids) - 1
        return drawn

    def _rows(self, chunk: ScheduledChunk, known: Known, drawn: Sampled) -> bytes:
        """Return the rows that a chunk asks for, which are kept beside the KV."""
        assert chunk.sample and self.info.routed_experts
        size, end = self.info.block_size, chunk.start + chunk.num_known + len(drawn.token_ids) - 1
        slots = [self.slots[known.blocks[p // size]][p % size] for p in range(chunk.routed_from, end)]
        return b"".join([slot.row for slot in slots])

    def _content(self, number: int) -> int:
        return self.adapters[number].content if number else 0

    def _draw(self, chunk: ScheduledChunk, known: Known) -> Sampled | NonFinite:
        """Draw the next token, and those behind drafts that are right."""
        end, content = chunk.start + chunk.count, self._content(chunk.served.adapter)
        drawn: list[int] = []
        for at in range(end - chunk.drafted, end + 1):
            so_far = known.tokens[:at]
            if self._spoiled(so_far):
                if not drawn:
                    return NonFinite(at)
                break
            banned = known.new.banned if at < known.new.banned_before else ()
            drawn.append(next_token(so_far, self.weights, self.info.vocab_size, banned, content))
            if drawn[-1:] != known.tokens[at : at + 1]:
                break
        asks = known.new.sampling.logprobs is not None
        return Sampled(drawn, [Logprob(-float(token)) for token in drawn] if asks else [])

    def _adapters_of_kv(self, chunk: ScheduledChunk, key: tuple[str, int]) -> set[int]:
        """Return the numbers of the adapters that may have computed the KV of a sequence: those of its own steps, since
        an adapter was committed after whose commit no sequence may use older KV."""
        number = chunk.served.adapter
        used = self._adapters_of.setdefault(key, set())
        if number and number not in used and not self.adapters[number].keeps_kv:
            used.clear()
        used.add(number)
        return used

    @property
    def fingerprint(self) -> str | None:
        return fingerprint_of(self.weights) if self.has_weights else None

    @property
    def fingerprints(self) -> dict[str, str]:
        return {"weights": tensor_fingerprint(self.weights)} if self.has_weights else {}

    def refresh_standby(self) -> None:
        assert self.may_stage.wait(30)
        if "weight" in self.asleep or not self.has_weights:
            self.faults.append("a refresh without weights")
        if self.no_space:
            raise OutOfSpace("no room for the standby copy")
        self.refreshes += 1
        self.standby_nbytes = MIB

    def begin_update(self, partial: bool, delta: bool = False) -> FakeStaging:
        if "weight" in self.asleep or ((partial or delta) and not self.has_weights):
            raise WrongOrder("asleep, or nothing to complete")
        assert not (delta and partial)
        self.stagings.append(FakeStaging(self, partial, delta))
        return self.stagings[-1]

    def commit(self, weights: Any) -> None:
        assert "weight" not in self.asleep
        self.weights, keeps_kv = weights
        self.has_weights = True
        self.mixed_ok = set(self._end) if keeps_kv else set()

    def check_adapter(self, config: bytes) -> None:
        """Take any config."""

    def measure_roofline(self) -> None:
        return None

    def begin_adapter(self) -> FakeAdapterStaging:
        return FakeAdapterStaging(self)

    def commit_adapter(self, adapter: int, staged: Packed) -> None:
        assert adapter > 0 and adapter not in self.adapters
        self.adapters[adapter] = staged

    def discard_adapter(self, staged: Packed) -> None: ...

    def drop_adapters(self, adapters: Collection[int]) -> None:
        for adapter in adapters:
            self.adapters.pop(adapter, None)

    def checksums(self) -> dict[str, str]:
        assert self.may_stage.wait(30)
        if not self.has_weights:
            raise WrongOrder("there are no whole weights")
        return {"weights": hashlib.sha256(str(self.weights).encode()).hexdigest()}

    def begin_sleep(self, tags: Collection[str], discard: bool) -> FakeMove | None:
        assert not self.asleep & set(tags)
        return self._move() if "weight" in tags and self.has_weights and not discard else None

    def _move(self) -> FakeMove:
        self.moves.append(FakeMove(self))
        return self.moves[-1]

    def sleep(self, tags: Collection[str], written: FakeMove | None) -> int:
        assert not self.asleep & set(tags) and (written is None or written.state == "ran")
        if "weight" in tags:
            assert written is None or written.weights == self.weights, "other weights were committed meanwhile"
            self.has_weights, self._spilled = False, written is not None
            self.standby_nbytes = 0
        if "kv_cache" in tags:
            self.slots = [[None] * self.info.block_size for _ in self.slots]
        self.asleep |= set(tags)
        return 1000 * len(tags)

    def begin_wake(self, tags: Collection[str]) -> FakeMove | None:
        assert set(tags) <= self.asleep
        return self._move() if "weight" in tags and self._spilled else None

    def wake(self, tags: Collection[str], read: FakeMove | None) -> None:
        assert set(tags) <= self.asleep and (read is None or read.state == "ran")
        if self.no_space:
            raise OutOfSpace("no memory to wake up")
        if "weight" in tags:
            assert (read is not None) == self._spilled
            self.has_weights = self._spilled
        self.asleep -= set(tags)

    def close(self) -> None: ...
