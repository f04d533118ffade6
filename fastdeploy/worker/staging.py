"""Staging of new weights: start-up, full updates and partial updates, in one part or many."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from fastdeploy.core.files import ANYWHERE
from fastdeploy.core.fingerprint import Fingerprint, over_all
from fastdeploy.core.runner import ChunkReceipt, Staged
from fastdeploy.core.weight_source import PLAIN, PartFormat, Source, StreamSource
from fastdeploy.model_executor.models.interface import Model, ModelWeights
from fastdeploy.model_executor.ops.interface import DeltaItem, Region
from fastdeploy.model_executor.parameters import Value, as_linear
from fastdeploy.model_executor.safetensors_source import SafetensorsReader, open_source
from fastdeploy.worker.arrivals import Arrivals
from fastdeploy.worker.arriving import ArrivingUploads
from fastdeploy.worker.part_checks import check_config, eos_token_ids, expected_checksums
from fastdeploy.worker.staged_values import StagedValues
from fastdeploy.worker.staging_guard import StagingGuard
from fastdeploy.worker.standby import Loan, StandbyCopy
from fastdeploy.worker.tensor_reading import check_given_up, stage_tensors


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
    missed: Mapping[str, Sequence[DeltaItem]] = {}


class WeightStaging:
    """Implements ``Staging`` (core/runner.py) for tensors that arrive as a whole. Each is written straight into the
    packed weight that it is a part of, in memory of the standby copy.

    serving: returns what serves; a partial update takes from it what does not arrive. take: like ``serving``, but the
    runner gives its values up (update in place), and the new values are written over them. roots: folders must lie
    below one of these."""

    def __init__(
        self,
        model: Model,
        standby: StandbyCopy,
        partial: bool,
        serving: GetServing,
        take: GetServing | None = None,
        roots: Sequence[str] = ANYWHERE,
    ):
        self._model, self._partial, self._roots = model, partial, roots
        self._serving, self._take = serving, take
        self._guard = StagingGuard(standby)
        self._arrivals = Arrivals(model)
        self._uploads = ArrivingUploads(model.ops, self._arrivals, self._guard.stop)
        self._values: StagedValues | None = None
        self._taken: Serving | None = None  # in place: what the runner gave up
        self._eos_token_ids: tuple[int, ...] | None = None

    def add(
        self,
        source: Source,
        checksums: Mapping[str, str],
        verify_checksum: bool = False,
        form: PartFormat = PLAIN,
    ) -> ChunkReceipt:
        """See ``Staging.add``. The tensors are plain: other encodings need a delta."""
        assert form.is_plain, form
        if isinstance(source, StreamSource):
            with self._guard.working():
                return self._uploads.add(source, checksums, verify_checksum, form, self._check, self._region)
        with self._guard.working(), open_source(source, self._roots) as reader:
            eos = self._check(reader)
            expected = expected_checksums(reader, checksums, verify_checksum)
            if reader.entries:
                values = self._borrow()
                regions = {name: values.region(name) for name in reader.entries}
                found = stage_tensors(self._model.ops, reader, regions, expected, self._guard.stop)
                self._arrivals.add(found, form.fingerprints)
            self._eos_token_ids = self._eos_token_ids if eos is None else eos
            return ChunkReceipt(len(reader.entries), sum(entry.nbytes for entry in reader.entries.values()))

    def finish(self) -> Staged:
        """See ``Staging.finish``."""
        with self._guard.working():
            values = self._borrow()
            old = (self._taken or self._serving()) if self._partial else Serving({}, {})
            fingerprints = self._arrivals.complete(old.fingerprints)
            packed = {
                parameter.key: values.value(parameter, self._arrivals.fingerprints, old.values.get(parameter.key))
                for parameter in self._model.parameters
            }
            check_given_up(self._guard.stop)
            fingerprint = over_all(fingerprints)
            weights = StagedWeights(self._model.assemble(packed), fingerprints, fingerprint, values.loan)
            return Staged(weights, fingerprint, self._eos_token_ids)

    def abandon(self) -> None:
        """See ``Staging.abandon``. Values taken in place are given up too, because a mixture must not serve."""
        self._guard.abandon()
        self._uploads.forget()
        self._values = self._taken = None

    def _check(self, reader: SafetensorsReader) -> tuple[int, ...] | None:
        """Check all that the headers tell, before a tensor is read or an old value overwritten, and return the EOS ids
        of the source. A folder with the whole model must have a config.json; one with a part of it may have one."""
        eos = None
        if reader.folder is not None:
            eos = eos_token_ids(reader.folder)
            whole = not self._partial and self._arrivals.holds_whole_model(reader.entries)
            check_config(reader.folder, self._model.config, required=whole)
        reader.check(self._arrivals.shapes)
        self._arrivals.check_new(reader)
        return eos

    def _region(self, name: str) -> Region:
        return self._borrow().region(name)

    def _borrow(self) -> StagedValues:
        loan = self._guard.borrow(prepare=self._take_serving)
        self._values = values = self._values or StagedValues(self._model, loan)
        return values

    def _take_serving(self, loan: Loan) -> None:
        if self._take is not None:
            self._taken = taken = self._take()
            linears = (p.key for p in self._model.parameters if not p.is_vector and p.key in taken.values)
            loan.adopt({key: as_linear(taken.values[key]) for key in linears})
