"""Staging of deltas: new weights that are changes of the weights that serve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fastdeploy.core.files import ANYWHERE
from fastdeploy.core.fingerprint import Fingerprint, over_all
from fastdeploy.core.runner import ChunkReceipt, Staged
from fastdeploy.core.weight_source import PLAIN, PartFormat, Source, StreamSource
from fastdeploy.model_executor.models.interface import Model
from fastdeploy.model_executor.ops.interface import DeltaItem
from fastdeploy.model_executor.safetensors_source import SafetensorsReader, open_source
from fastdeploy.worker.alias_payloads import AliasPayloads
from fastdeploy.worker.arrivals import Arrivals
from fastdeploy.worker.delta_payload import PayloadReader
from fastdeploy.worker.delta_values import DeltaValues
from fastdeploy.worker.part_checks import check_config, eos_token_ids, expected_checksums
from fastdeploy.worker.staging import GetServing, StagedWeights
from fastdeploy.worker.staging_guard import StagingGuard
from fastdeploy.worker.standby import StandbyCopy
from fastdeploy.worker.tensor_reading import check_given_up, stage_tensors

BATCH_BYTES = 64 << 20  # of payloads that are applied at once


class DeltaStaging:
    """Implements ``Staging`` (core/runner.py). All values that no part changes are those that serve. Changed linears
    are written in the standby copy, which holds the values that serve.

    An alias (Model.aliases) may come as a plain tensor with the new values of the tensor that it must equal, or with
    the same payload as that tensor has in this update.

    standby: lends its memory from the first part on. serving: returns what serves; it stays the same until the commit.
    roots: folders must lie below one of these."""

    def __init__(self, model: Model, standby: StandbyCopy, serving: GetServing, roots: Sequence[str] = ANYWHERE):
        self._model, self._serving, self._roots = model, serving, roots
        self._guard = StagingGuard(standby)
        self._arrivals = Arrivals(model)
        self._aliases = AliasPayloads(model.aliases)
        self._values: DeltaValues | None = None
        self._eos_token_ids: tuple[int, ...] | None = None

    def add(
        self,
        source: Source,
        checksums: Mapping[str, str],
        verify_checksum: bool = False,
        form: PartFormat = PLAIN,
    ) -> ChunkReceipt:
        """See ``Staging.add``. checksums: of the bytes in the source, so of a payload as it was sent."""
        assert not isinstance(source, StreamSource), source
        with self._guard.working(), open_source(source, self._roots) as reader:
            eos = self._check(reader, form)
            expected = expected_checksums(reader, checksums, verify_checksum)
            if form.is_plain:
                self._stage(reader, expected, form)
            else:
                self._apply(reader, expected, form)
            self._eos_token_ids = self._eos_token_ids if eos is None else eos
            return ChunkReceipt(len(reader.entries), sum(entry.nbytes for entry in reader.entries.values()))

    def finish(self) -> Staged:
        """See ``Staging.finish``."""
        with self._guard.working():
            self._aliases.resolve(self._arrivals)
            serving, values = self._serving(), self._borrow()
            fingerprints = self._arrivals.complete(serving.fingerprints)
            packed = values.complete(self._arrivals.fingerprints, serving.values)
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
        """Check what the headers tell of plain tensors, and of those that arrived before. Returns the EOS ids of the
        source."""
        eos = None
        if reader.folder is not None:
            eos = eos_token_ids(reader.folder)
            check_config(reader.folder, self._model.config, required=False)
        if form.is_plain:
            reader.check(self._arrivals.shapes)
        self._arrivals.check_new(reader)
        self._aliases.check_new(reader)
        return eos

    def _stage(self, reader: SafetensorsReader, expected: Mapping[str, str], form: PartFormat) -> None:
        values, serving = self._borrow(), self._serving()
        regions = {name: values.region(name, serving.values) for name in reader.entries}
        found = stage_tensors(self._model.ops, reader, regions, expected, self._guard.stop)
        self._arrivals.add(found, form.fingerprints)
        for name in found:
            values.note_written(name)

    def _apply(self, reader: SafetensorsReader, expected: Mapping[str, str], form: PartFormat) -> None:
        payloads = PayloadReader(reader, self._arrivals.shapes, form, self._model.ops.dtype)
        found: dict[str, Fingerprint] = {}
        for batch in payloads.batches(expected, BATCH_BYTES):
            check_given_up(self._guard.stop)
            self._aliases.take(batch, form)
            found |= self._apply_batch(payloads, batch, form.encoding)
        of_aliases = self._model.aliases.keys() & reader.entries.keys()
        self._arrivals.add(found, {n: wanted for n, wanted in form.fingerprints.items() if n not in of_aliases})

    def _apply_batch(
        self, payloads: PayloadReader, batch: Mapping[str, np.ndarray], encoding: str
    ) -> dict[str, Fingerprint]:
        """Change tensors by their payloads. Returns the new fingerprints."""
        values, serving, ops = self._borrow(), self._serving(), self._model.ops
        items = [DeltaItem(values.region(name, serving.values), encoding, payload) for name, payload in batch.items()]
        results = ops.apply_deltas(items, self._guard.stop)
        check_given_up(self._guard.stop)
        found = {}
        for name, item, result in zip(batch, items, results, strict=True):
            if result.problem is not None:
                raise payloads.refusal(name, item.payload, result)
            values.note_changed(name, item)
            found[name] = serving.fingerprints[name] + result.fingerprint
        return found

    def _borrow(self) -> DeltaValues:
        loan = self._guard.borrow(for_delta=True)
        self._values = values = self._values or DeltaValues(self._model, loan)
        return values
