"""Interface between the engine and the worker that runs the model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, Protocol

from fastdeploy.core.experts import ExpertsInfo
from fastdeploy.core.plan import StepPlan, StepResult
from fastdeploy.core.roofline import StepRoofline
from fastdeploy.core.weight_source import PLAIN, PartFormat, Source


class PartReceipt(NamedTuple):
    """The receipt for one source: the number of its tensors and of their bytes."""

    tensors: int
    nbytes: int


class ModelInfo(NamedTuple):
    """Facts about the model that the engine needs. eos_token_ids: any of them ends a request unless ignore_eos, until a
    commit brings others. quantization: see ``EngineConfig``. grammars: sequences may have a grammar. experts: of a
    Mixture of Experts. routed_experts: the runner keeps the routing of each token beside its KV, so that sequences may
    ask for it. ignored_tensors: how the names of tensors begin that updates may have and the model ignores.
    stacks_experts: tensors of the model have all experts of a layer."""

    name: str
    dtype: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    num_blocks: int
    block_size: int
    quantization: str | None = None
    grammars: bool = False
    experts: ExpertsInfo | None = None
    routed_experts: bool = False
    ignored_tensors: tuple[str, ...] = ()
    stacks_experts: bool = False


class Staged(NamedTuple):
    """Complete new weights. weights: the argument of ``commit``. fingerprint: over all tensors. eos_token_ids: those
    that the source's generation_config.json names; None = the source names none."""

    weights: Any
    fingerprint: str
    eos_token_ids: tuple[int, ...] | None = None


class Staging(Protocol):
    """New weights under construction, beside the serving weights. One thread at a time
    calls ``add`` and ``finish``, which may hang in a read. Another thread may call ``abandon`` meanwhile."""

    def add(
        self,
        source: Source,
        checksums: Mapping[str, str],
        verify_checksum: bool = False,
        form: PartFormat = PLAIN,
    ) -> PartReceipt:
        """Read all tensors of ``source``, check them (name, shape, type, finite, checksums, not twice), and pack them.
        The source is not needed afterwards. Raises OutOfSpace, or WeightUpdateRefused, which names the file or tensor.
        After an error only ``abandon`` may be called."""

    def finish(self) -> Staged:
        """Return the complete weights. Raises WeightUpdateRefused, which names the tensors that are missing."""

    def abandon(self) -> None:
        """Free the staged weights, without waiting for an ``add`` that
        hangs. Such an ``add`` raises when it comes back, and changes nothing."""


class AdapterInfo(NamedTuple):
    """Facts about a staged adapter. rank: the largest of its modules. nbytes: in memory, packed. fingerprint: over all
    that the adapter computes with: its tensors in the serving dtype, and the rank and scaling of each module."""

    rank: int
    nbytes: int
    fingerprint: str


class AdapterStaging(Protocol):
    """A PEFT adapter under construction. Used by one thread, beside steps. ``read`` is called once."""

    def read(self, path: str) -> AdapterInfo:
        """Read and pack the PEFT folder ``path`` (adapter_config.json, adapter_model.safetensors), which the engine has
        written. Raises WeightUpdateRefused, which names the field or tensor, or OutOfSpace."""

    def finish(self) -> Any:
        """Return the argument of ``commit_adapter`` or ``discard_adapter``."""


class WeightMove(Protocol):
    """A copy of the weights to a file when they go to sleep, or back to memory when they wake up."""

    def run(self) -> None:
        """Make the copy. Called once, on another thread, beside steps. Changes nothing that serves, and may hang in the
        file. Raises OutOfSpace, or WrongOrder after ``abandon``."""

    def abandon(self) -> None:
        """Free the copy, without waiting for a ``run`` that hangs."""


class Runner(Protocol):
    """A worker that runs the model. ``execute``, ``commit``, ``sleep`` and ``wake`` run on the engine's loop thread, a
    Staging, a WeightMove, ``checksums`` and ``export`` on other threads, beside steps. Only a commit changes the
    results of ``execute``.

    fingerprint: over all tensors that serve; None without complete weights. fingerprints: of each of these tensors, in
    hex, in the order of the model; none without complete weights. standby_nbytes: memory of the standby copy,
    the packed weights that do not serve. New weights are written into it, and the old weights become the next one.
    has_weights: there are complete weights to execute with. False while weights sleep, and after a sleep that discarded
    them; a commit makes it True.
    asleep: the tags that sleep.
    """

    @property
    def info(self) -> ModelInfo: ...

    @property
    def has_weights(self) -> bool: ...

    @property
    def asleep(self) -> frozenset[str]: ...

    @property
    def fingerprint(self) -> str | None: ...

    @property
    def fingerprints(self) -> dict[str, str]: ...

    @property
    def standby_nbytes(self) -> int: ...

    def measure_roofline(self) -> StepRoofline | None:
        """Measure what bounds a decode step here: read the weights that serve a few times, and multiply in registers.
        Takes about as long as some decode steps. None where the ops cannot measure it. No step may be running."""
        ...

    def execute(self, plan: StepPlan, between_layers: Callable[[], bool] | None = None) -> StepResult | None:
        """Copy blocks, compute every chunk, and draw a token for each chunk that samples. A row of logits that is not
        finite changes no bit of other chunks.

        ``between_layers`` is called now and then while the step computes. If it returns True, the step is given up and
        the result is None. The copies are made in that case, the runner knows what the plan says of sequences, and the
        KV at the plan's positions may be overwritten. Nothing else has changed."""
        ...

    def begin_update(self, partial: bool, delta: bool = False) -> Staging:
        """Begin to stage. partial: tensors that do not arrive keep the value that serves at the commit. delta: the same
        for each value, as parts may change some values of a tensor. Raises WrongOrder while
        "weight" sleeps, and for a partial update of incomplete weights, or a delta."""

    def commit(self, weights: Any) -> None:
        """Replace the weights by the staged ones. Only references are exchanged, so this cannot fail half-way."""

    def refresh_standby(self) -> None:
        """Make the standby copy, if there is memory for it, or bring it up to the weights that serve, so that the next
        delta needs to write only what it changes. Runs beside steps, like a Staging, and not at the same time as one,
        though ``begin_update`` may be called meanwhile. Raises OutOfSpace."""

    def check_adapter(self, config: bytes) -> None:
        """Check the content of an adapter_config.json, on any thread and beside other checks. May take seconds for
        hostile regular expressions; after that a repeated check and a read of the same content take none. Raises
        WeightUpdateRefused, which names the field."""

    def begin_adapter(self) -> AdapterStaging:
        """Begin to stage an adapter, on any thread. Works in every state of the weights."""

    def commit_adapter(self, adapter: int, staged: Any) -> None:
        """Make an adapter ready to execute with, under a number above 0. The number is new, or was dropped and belongs
        to the same adapter, which was read again. Cannot fail."""

    def discard_adapter(self, staged: Any) -> None:
        """Free a staged adapter, the result of ``AdapterStaging.finish``, instead of committing it."""

    def drop_adapters(self, adapters: Collection[int]) -> None:
        """Free the adapters of these numbers. No later plan names them, unless they are committed again. A number
        without an adapter is ignored."""

    def checksums(self) -> dict[str, str]:
        """Return the sha256 (hex) of each tensor that serves, over its bytes in the serving dtype. Raises WrongOrder
        without complete weights."""

    def export(self, path: str, tensors: Collection[str] = ()) -> int:
        """Write the weights that serve to the new file ``path``, as safetensors with the names of the checkpoint and in
        the serving dtype, and return the bytes of the file. tensors: names; none = all. Runs beside steps, like a
        Staging. After an error there is no file. Raises OutOfSpace, WrongOrder without complete weights, or
        InvalidField for a name that is no tensor of the model."""
        ...

    def begin_sleep(self, tags: Collection[str], discard: bool) -> WeightMove | None:
        """Begin to write the weights to a file, if ``tags`` ("weight", "kv_cache") names them. None: there is nothing
        to write, since ``discard`` is set or the weights are not complete. Raises WrongOrder for a tag that sleeps."""

    def sleep(self, tags: Collection[str], written: Any) -> int:
        """Give the memory of ``tags`` back to the system, and return its bytes. written: the WeightMove of
        ``begin_sleep``, which has run, or None: the weights are lost then. Nothing may have been committed since.
        Adapters keep their memory until they are dropped. Cannot fail."""
        ...

    def begin_wake(self, tags: Collection[str]) -> WeightMove | None:
        """Begin to read the weights back, if ``tags`` names them. None: there is no file of them. Raises OutOfSpace if
        memory is short, and WrongOrder for a tag that does not sleep."""

    def wake(self, tags: Collection[str], read: Any) -> None:
        """Take the memory of ``tags`` again, with an empty KV cache and the same weights bit for bit. read: the
        WeightMove of ``begin_wake``, which has run, or None: there are no weights until a commit then. Raises
        OutOfSpace if memory is short; then nothing has changed."""

    def close(self) -> None:
        """Free everything. The runner cannot be used afterwards."""
