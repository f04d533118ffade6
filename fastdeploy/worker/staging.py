"""Staging of new weights: start-up, full and partial updates, and deltas, in one part or many."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from fastdeploy.core.files import ANYWHERE
from fastdeploy.core.fingerprint import Fingerprint, over_all
from fastdeploy.core.runner import PartReceipt, Staged
from fastdeploy.core.weight_source import PLAIN, PartFormat, Source
from fastdeploy.model_executor.models.interface import Model, ModelWeights
from fastdeploy.model_executor.ops.interface import DeltaItem, StageItem
from fastdeploy.model_executor.parameters import Value
from fastdeploy.model_executor.safetensors_source import SafetensorsReader, open_source
from fastdeploy.worker.part_reading import (
    DTYPES,
    PayloadReader,
    check_config,
    check_given_up,
    eos_token_ids,
    expected_checksums,
    stage_items,
    stage_tensors,
)
from fastdeploy.worker.received import ReceivedTensors
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


class WeightStaging:
    """Implements ``Staging`` (core/runner.py). Each tensor is written straight into the packed weight that it is a part
    of, in memory of the standby copy, which is lent from the first part on.

    base: returns the weights that serve, whose values stay where no part changes them; they stay the same until the
    commit. None: all tensors must arrive. roots: folders must lie below one of these. delta: parts may be payloads,
    and so may later updates."""

    def __init__(
        self,
        model: Model,
        standby: StandbyCopy,
        base: GetServing | None = None,
        roots: Sequence[str] = ANYWHERE,
        delta: bool = False,
    ):
        self._model, self._base, self._roots = model, base, roots
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
        with self._guard.working(), open_source(source, self._roots) as reader:
            eos = self._check(reader, form)
            expected = expected_checksums(reader, checksums, verify_checksum)
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
            packed = values.complete(self._received.fingerprints, serving.values)
            check_given_up(self._guard.stop)
            fingerprint = over_all(fingerprints)
            weights = self._model.assemble(packed)
            staged = StagedWeights(weights, fingerprints, fingerprint, values.loan, values.missed)
            return Staged(staged, fingerprint, self._eos_token_ids)

    def abandon(self) -> None:
        """See ``Staging.abandon``."""
        self._guard.abandon()
        self._values = None

    def _check(self, reader: SafetensorsReader, form: PartFormat) -> tuple[int, ...] | None:
        """Check all that the headers tell of plain tensors, before a tensor is read, and return the EOS ids of the
        source. A folder with the whole model must have a config.json, unless it is an update of a base."""
        eos = None
        if reader.folder is not None:
            eos = eos_token_ids(reader.folder)
            whole = self._base is None and self._received.holds_whole_model(reader.entries)
            check_config(reader.folder, self._model.config, required=whole)
        if form.is_plain:
            reader.check(self._received.shapes)
        self._received.check_new(reader)
        return eos

    def _stage(self, reader: SafetensorsReader, expected: Mapping[str, str], form: PartFormat) -> None:
        if reader.entries:
            values = self._borrow()
            regions = {name: values.region(name) for name in reader.entries}
            found = stage_tensors(self._model.ops, reader, regions, expected, self._guard.stop)
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
        values, dtype = self._borrow(), DTYPES[self._model.ops.dtype][0]
        items = {name: StageItem(values.region(name), dtype, 0, memory=payload) for name, payload in batch.items()}
        return stage_items(self._model.ops, reader, items, self._guard.stop)

    def _overwrite(self, payloads: PayloadReader, batch: Mapping[str, np.ndarray]) -> dict[str, Fingerprint]:
        """Change tensors by their payloads. Returns the new fingerprints."""
        values, serving = self._borrow(), self._serving()
        items = [DeltaItem(values.current_region(name, serving.values), payload) for name, payload in batch.items()]
        results = self._model.ops.apply_deltas(items, self._guard.stop)
        check_given_up(self._guard.stop)
        found = {}
        for name, item, result in zip(batch, items, results, strict=True):
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
