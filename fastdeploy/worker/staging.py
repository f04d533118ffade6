"""Staging of new weights: start-up, full and partial updates, and deltas, in one part or many. The checks of the names
and fingerprints of the tensors that have arrived. And the staging of adapters."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
import paddle

from fastdeploy.core.errors import OutOfSpace
from fastdeploy.core.files import ANYWHERE
from fastdeploy.core.fingerprint import Fingerprint, over_all
from fastdeploy.core.runner import AdapterInfo, PartReceipt, Staged
from fastdeploy.core.serving_dtype import dtype_of
from fastdeploy.core.weight_source import PLAIN, PartFormat, Source
from fastdeploy.model_executor.checkpoint_layout import describe, drop_ignored
from fastdeploy.model_executor.lora import read_adapter
from fastdeploy.model_executor.models.interface import Model, ModelWeights
from fastdeploy.model_executor.ops.interface import DeltaItem, PackedAdapter, StageItem
from fastdeploy.model_executor.parameters import Value, as_bytes
from fastdeploy.model_executor.safetensors_source import SafetensorsReader, open_source, refuse_tensor
from fastdeploy.worker.part_reading import (
    DTYPES,
    PayloadReader,
    ShowBytes,
    by_dtype,
    check_config,
    check_given_up,
    eos_token_ids,
    expected_checksums,
    stage_items,
    stage_tensors,
)
from fastdeploy.worker.staged_values import StagedValues
from fastdeploy.worker.standby import Loan, LoanGuard, StandbyCopy

BATCH_BYTES = 64 << 20  # of payloads that are staged at once


class Serving(NamedTuple):
    """The packed values that serve, by parameter key, and the fingerprint of each tensor. Both are empty without
    complete weights."""

    values: Mapping[str, Value]
    fingerprints: Mapping[str, Fingerprint]


GetServing: TypeAlias = Callable[[], Serving]


class StagedWeights(NamedTuple):
    """The argument of ``ModelRunner.commit``. fingerprints: of each tensor. fingerprint: over all. loan: the standby
    copy, in whose memory the new values are. missed: see ``StandbyCopy.commit``."""

    weights: ModelWeights
    fingerprints: Mapping[str, Fingerprint]
    fingerprint: str
    loan: Loan
    missed: Mapping[str, Sequence[DeltaItem]]


class ReceivedTensors:
    """All tensors that one update has brought so far. shapes: of every tensor that may arrive, by name, aliases
    (Model.aliases) included. fingerprints: of the tensors that arrived; an alias that arrived is in it, though it is
    no tensor of the model.

    An alias may come as values, or as an overwrite that equals the overwrite of its tensor in the same update. The two
    may come in any order, in different parts."""

    def __init__(self, model: Model):
        self._aliases = model.aliases
        self._names = [name for parameter in model.parameters for name in parameter.tensors]
        shapes = {name: shape for parameter in model.parameters for name, shape in parameter.shapes.items()}
        self.shapes = shapes | {alias: shapes[name] for alias, name in model.aliases.items()}
        self.fingerprints: dict[str, Fingerprint] = {}
        self._overwrites: dict[str, str] = {}  # sha256 of the overwrites of aliases and of their tensors
        self._expected: dict[str, str] = {}  # fingerprints in hex that overwritten aliases must have

    def holds_whole_model(self, names: Iterable[str]) -> bool:
        """Return whether ``names`` are, or include, all tensors of the model."""
        return set(self._names) <= set(names)

    def check_new(self, reader: SafetensorsReader) -> None:
        """Raise WeightUpdateRefused for a tensor that arrived before."""
        for name, entry in reader.entries.items():
            if name in self.fingerprints or name in self._overwrites:
                raise refuse_tensor(name, f"of {entry.file} has arrived before in this update")

    def add(self, fingerprints: Mapping[str, Fingerprint], expected: Mapping[str, str]) -> None:
        """Add tensors that have arrived as a whole. expected: fingerprints in hex that these must have. Raises
        WeightUpdateRefused, also for an alias that differs from its tensor, if both have arrived."""
        for name, wanted in expected.items():
            if name not in fingerprints:
                raise refuse_tensor(name, "has a fingerprint, but is not in the source")
            if (found := fingerprints[name].hex) != wanted.lower():
                raise refuse_tensor(name, f"has the fingerprint {found}, expected {wanted}")
        self.fingerprints |= fingerprints
        self._check_aliases(self.fingerprints)

    def remove_aliases(self, overwrites: dict[str, np.ndarray], form: PartFormat) -> None:
        """Remove the overwrites of aliases from a batch. ``complete`` compares them with those of their tensors."""
        for alias, name in self._aliases.items():
            for one in overwrites.keys() & {alias, name}:
                self._overwrites[one] = hashlib.sha256(as_bytes(overwrites[one])).hexdigest()
            if overwrites.pop(alias, None) is not None and alias in form.fingerprints:
                self._expected[alias] = form.fingerprints[alias]

    def complete(self, serving: Mapping[str, Fingerprint]) -> dict[str, Fingerprint]:
        """Return the fingerprint of each tensor of the model. serving: of the tensors that need not arrive. Raises
        WeightUpdateRefused, which names a tensor that is missing, or an alias that differs from its tensor."""
        self._add_overwritten_aliases()
        known = {**serving, **self.fingerprints}
        for name in self._names:
            if name not in known:
                raise refuse_tensor(name, "is missing: it did not arrive")
        self._check_aliases(known)
        return {name: known[name] for name in self._names}

    def _add_overwritten_aliases(self) -> None:
        for alias in self._aliases.keys() & self._overwrites.keys():
            name = self._aliases[alias]
            if self._overwrites.get(name) != self._overwrites[alias]:
                raise refuse_tensor(alias, f"needs a payload equal to that of {name}, as tie_word_embeddings is true")
            expected = {alias: self._expected[alias]} if alias in self._expected else {}
            self.add({alias: self.fingerprints[name]}, expected)

    def _check_aliases(self, known: Mapping[str, Fingerprint]) -> None:
        for alias, name in self._aliases.items():
            if alias in self.fingerprints and name in known and self.fingerprints[alias] != known[name]:
                raise refuse_tensor(alias, f"differs from {name}, but tie_word_embeddings is true")


class WeightStaging:
    """Implements ``Staging`` (core/runner.py). Each tensor is written straight into the packed weight that it is a part
    of, in memory of the standby copy, which is lent from the first part on.

    base: returns the weights that serve, whose values stay where no part changes them; they stay the same until the
    commit. None: all tensors must arrive. roots: folders must lie below one of these. delta: parts may be payloads,
    and so may later updates. show(done, total): called with the bytes of plain tensors while they are read; they are
    then read in several pieces."""

    def __init__(
        self,
        model: Model,
        standby: StandbyCopy,
        base: GetServing | None = None,
        roots: Sequence[str] = ANYWHERE,
        delta: bool = False,
        show: ShowBytes | None = None,
    ):
        self._model, self._base, self._roots, self._show = model, base, roots, show
        self._guard = LoanGuard(standby, delta)
        self._received = ReceivedTensors(model)
        self._values: StagedValues | None = None
        self._eos_token_ids: tuple[int, ...] | None = None

    def add(
        self,
        source: Source,
        checksums: Mapping[str, str],
        verify_checksum: bool = False,
        form: PartFormat = PLAIN,
    ) -> PartReceipt:
        """See ``Staging.add``. checksums: of the bytes in the source, so of a payload as it was sent. Payloads need a
        base."""
        form = msgspec.structs.replace(form, fingerprints=self._used(form.fingerprints))
        with self._guard.working(), open_source(source, self._roots) as reader:
            drop_ignored(reader, self._model)
            eos = self._check(reader, form)
            expected = expected_checksums(reader, self._used(checksums), verify_checksum)
            if form.is_plain:
                self._stage(reader, expected, form)
            else:
                self._stage_payloads(reader, expected, form)
            self._eos_token_ids = self._eos_token_ids if eos is None else eos
            return PartReceipt(len(reader.entries), sum(entry.nbytes for entry in reader.entries.values()))

    def finish(self) -> Staged:
        """See ``Staging.finish``."""
        with self._guard.working():
            values, serving = self._borrow(), self._serving()
            fingerprints = self._received.complete(serving.fingerprints)
            packed = values.complete(self._received.fingerprints, serving.values, self._guard.stop)
            check_given_up(self._guard.stop)
            fingerprint = over_all(fingerprints)
            weights = self._model.assemble(packed)
            staged = StagedWeights(weights, fingerprints, fingerprint, values.loan, values.missed)
            return Staged(staged, fingerprint, self._eos_token_ids)

    def abandon(self) -> None:
        """See ``Staging.abandon``."""
        self._guard.abandon()
        self._values = None

    def _used(self, of_tensors: Mapping[str, str]) -> dict[str, str]:
        """Return what belongs to tensors that the model does not ignore. of_tensors: by name."""
        return {name: one for name, one in of_tensors.items() if not name.startswith(self._model.ignored)}

    def _check(self, reader: SafetensorsReader, form: PartFormat) -> tuple[int, ...] | None:
        """Check all that the headers tell of plain tensors, before a tensor is read, and return the EOS ids of the
        source. A folder with the whole model must have a config.json, unless it is an update of a base."""
        eos = None
        if reader.folder is not None:
            eos = eos_token_ids(reader.folder)
            check_config(reader.folder, self._model.config, required=False)
        if form.is_plain:
            describe(reader, self._model, form.layout)
        if reader.folder is not None and self._base is None and self._received.holds_whole_model(reader.entries):
            check_config(reader.folder, self._model.config, required=True)
        self._received.check_new(reader)
        return eos

    def _stage(self, reader: SafetensorsReader, expected: Mapping[str, str], form: PartFormat) -> None:
        if reader.entries:
            values = self._borrow()
            regions = {name: values.region(name) for name in reader.entries}
            found = stage_tensors(self._model.ops, reader, regions, expected, self._guard.stop, self._show)
            self._received.add(found, form.fingerprints)

    def _stage_payloads(self, reader: SafetensorsReader, expected: Mapping[str, str], form: PartFormat) -> None:
        payloads = PayloadReader(reader, self._received.shapes, form, self._model.ops.dtype)
        found: dict[str, Fingerprint] = {}
        for batch in payloads.batches(expected, BATCH_BYTES):
            check_given_up(self._guard.stop)
            if form.encoding == "dense":
                found |= self._stage_dense(reader, batch)
            else:
                self._received.remove_aliases(batch, form)
                found |= self._overwrite(payloads, batch)
        later = reader.entries.keys() - found.keys()  # aliases
        self._received.add(found, {name: wanted for name, wanted in form.fingerprints.items() if name not in later})

    def _stage_dense(self, reader: SafetensorsReader, batch: Mapping[str, np.ndarray]) -> dict[str, Fingerprint]:
        values, kinds = self._borrow(), {name: DTYPES[dtype_of(name, self._model.ops.dtype)][0] for name in batch}
        items = {name: StageItem(values.region(name), kinds[name], 0, memory=one) for name, one in batch.items()}
        return stage_items(self._model.ops, reader, items, self._guard.stop)

    def _overwrite(self, payloads: PayloadReader, batch: Mapping[str, np.ndarray]) -> dict[str, Fingerprint]:
        """Change tensors by their payloads. Returns the new fingerprints."""
        values, serving = self._borrow(), self._serving()
        items = {name: DeltaItem(values.current_region(name, serving.values), one) for name, one in batch.items()}
        found = {}
        for dtype, some in by_dtype(items, self._model.ops.dtype):
            results = self._model.ops.apply_deltas(list(some.values()), self._guard.stop, dtype)
            check_given_up(self._guard.stop)
            for (name, item), result in zip(some.items(), results, strict=True):
                if result.problem is not None:
                    raise payloads.refusal(name, item.payload, result)
                values.add_missed(name, item)
                found[name] = serving.fingerprints[name] + result.fingerprint
        return found

    def _serving(self) -> Serving:
        return Serving({}, {}) if self._base is None else self._base()

    def _borrow(self) -> StagedValues:
        loan = self._guard.borrow()
        self._values = values = self._values or StagedValues(self._model, loan)
        return values


class AdapterStaging:
    """Implements ``AdapterStaging`` (core/runner.py). max_rank: the largest rank that is accepted."""

    def __init__(self, model: Model, max_rank: int):
        self._model, self._max_rank = model, max_rank
        self._packed: PackedAdapter | None = None

    def read(self, path: str) -> AdapterInfo:
        """See ``AdapterStaging.read``."""
        try:
            with paddle.no_grad():
                self._packed, rank, fingerprint = read_adapter(path, self._model, self._max_rank)
        except MemoryError as error:
            raise OutOfSpace(f"no memory for the adapter: {error}") from error
        return AdapterInfo(rank, self._packed.nbytes, fingerprint)

    def finish(self) -> PackedAdapter:
        """See ``AdapterStaging.finish``. Returns the argument of ``ModelRunner.commit_adapter``."""
        assert self._packed is not None, "nothing was read"
        return self._packed
