"""Staging of new weights: start-up, full updates and partial updates, in one part or many."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import paddle

from fastdeploy.core.errors import InvalidField, OutOfSpace, WeightUpdateRefused
from fastdeploy.core.fingerprint import Fingerprint, fingerprint, over_all
from fastdeploy.core.runner import ChunkReceipt, Staged
from fastdeploy.core.safe_files import ANYWHERE, Folder
from fastdeploy.core.weight_source import PLAIN, PartFormat, Source
from fastdeploy.model_executor.models import CONFIG, read_config
from fastdeploy.model_executor.models.interface import Model, ModelWeights
from fastdeploy.model_executor.parameters import (
    Parameter,
    Value,
    digest,
    fits,
    pack,
    sliced,
    unpack,
    unpack_whole,
)
from fastdeploy.model_executor.safetensors_source import (
    SafetensorsReader,
    open_source,
    read_checksums,
    refuse_tensor,
)

Serving: TypeAlias = Callable[[], Mapping[str, Value]]


class StagedWeights(NamedTuple):
    """The argument of ``ModelRunner.commit``. fingerprints: of each tensor."""

    weights: ModelWeights
    fingerprints: Mapping[str, Fingerprint]


class WeightStaging:
    """Implements ``Staging`` (core/runner.py).

    A parameter is packed once all of its tensors have arrived: a tensor of a fused linear waits, unpacked, for the
    others, in this part of the update or a later one. Everything else is held in packed form only.

    serving: returns the values that serve, by parameter key; a partial update takes from it what does not arrive.
    take: like ``serving``, but the runner gives the values up (update in place): each one is freed just before its
    successor is packed. roots: folders must lie below one of these.

    Another thread may call ``abandon`` while ``add`` or ``finish`` hangs in a read. The lock ensures that nothing is
    taken from the runner after ``abandon``.
    """

    def __init__(
        self,
        model: Model,
        partial: bool,
        serving: Serving,
        take: Serving | None = None,
        roots: Sequence[str] = ANYWHERE,
    ):
        self._model, self._ops, self._partial = model, model.ops, partial
        self._serving, self._take, self._roots = serving, take, roots
        self._shapes = {name: shape for p in model.parameters for name, shape in p.shapes.items()}
        self._received: set[str] = set()
        self._waiting: dict[str, dict[str, np.ndarray]] = {}
        self._packed: dict[str, Value] = {}
        self._old: dict[str, Value] | None = None  # in place: values taken from the runner, not yet replaced
        self._alias_digests: dict[str, str] = {}
        self._failed = False
        self._abandoned = False
        self._lock = threading.Lock()

    def add(
        self,
        source: Source,
        checksums: Mapping[str, str],
        verify_checksum: bool = False,
        form: PartFormat = PLAIN,
    ) -> ChunkReceipt:
        """See ``Staging.add``. After an error only ``abandon`` may follow."""
        try:
            with paddle.no_grad(), open_source(source, self._roots) as reader:
                self._check(reader)
                expected = _expected_checksums(reader, checksums, verify_checksum)
                self._receive(reader, expected)
                return ChunkReceipt(len(reader.entries), sum(entry.nbytes for entry in reader.entries.values()))
        except MemoryError as error:
            self._failed = True
            raise OutOfSpace(f"no memory for the new weights: {error}") from error
        except BaseException:
            self._failed = True
            raise

    def finish(self) -> Staged:
        """See ``Staging.finish``."""
        if self._failed:
            raise WeightUpdateRefused("a part of this update was refused: begin again")
        with paddle.no_grad():
            if self._partial:
                self._complete()
            for parameter in self._model.parameters:
                if parameter.key not in self._packed:
                    arrived = self._waiting.get(parameter.key, {})
                    missing = next(name for name in parameter.tensors if name not in arrived)
                    raise refuse_tensor(missing, "is missing: it did not arrive")
            self._check_aliases()
            fingerprints = {
                name: self._fingerprint(parameter, name)
                for parameter in self._model.parameters
                for name in parameter.tensors
            }
            return Staged(StagedWeights(self._model.assemble(self._packed), fingerprints), over_all(fingerprints))

    def _fingerprint(self, parameter: Parameter, name: str) -> Fingerprint:
        return fingerprint(unpack_whole(self._ops, parameter, self._packed[parameter.key], name))

    def abandon(self) -> None:
        """See ``Staging.abandon``. Values taken in place are freed too, because a mixture of weights must not serve."""
        with self._lock:
            self._failed = self._abandoned = True
            self._waiting, self._packed, self._old = {}, {}, None

    def _check(self, reader: SafetensorsReader) -> None:
        """Check all that the headers tell, before a tensor is read or an old value freed. A folder with the whole model
        must have a config.json; a folder with a part of it may have one."""
        if reader.folder is not None:
            whole = all(name in reader.entries for name in self._shapes)
            if (whole and not self._partial) or _has(reader.folder, CONFIG):
                self._check_config(reader.folder)
        aliases = {alias: self._shapes[name] for alias, name in self._model.aliases.items()}
        reader.check(self._shapes | aliases)
        for name, entry in reader.entries.items():
            if name in self._received:
                raise refuse_tensor(name, f"of {entry.file} has arrived before in this update")

    def _check_config(self, folder: Folder) -> None:
        try:
            config = read_config(folder)
        except InvalidField as error:
            where = "" if error.field.endswith(".json") else "config.json: "
            raise WeightUpdateRefused(where + error.message, key=error.field) from error
        key = self._model.config.first_difference(config)
        if key is not None:
            old, new = getattr(self._model.config, key), getattr(config, key)
            raise WeightUpdateRefused(f"config.json: {key} is {new!r}, the serving model has {old!r}", key=key)

    def _receive(self, reader: SafetensorsReader, expected: Mapping[str, str]) -> None:
        with self._lock:
            self._check_wanted()
            if self._take is not None and self._old is None and reader.entries:
                self._old = dict(self._take())
        for parameter in self._model.parameters:
            self._receive_parameter(parameter, reader, expected)
        for alias in self._model.aliases:
            if alias in reader.entries:
                array = self._read(reader, alias, expected)
                self._alias_digests[alias] = digest(sliced(array, self._ops.dtype))
        self._check_aliases()

    def _receive_parameter(self, parameter: Parameter, reader: SafetensorsReader, expected: Mapping[str, str]) -> None:
        arrived = {name: self._read(reader, name, expected) for name in parameter.tensors if name in reader.entries}
        if not arrived:
            return
        arrays = self._waiting.pop(parameter.key, {}) | arrived
        if len(arrays) == len(parameter.tensors):
            self._pack(parameter, arrays)
        else:
            self._waiting[parameter.key] = arrays

    def _check_wanted(self) -> None:
        if self._abandoned:
            raise WeightUpdateRefused("this update was given up while it was read")

    def _read(self, reader: SafetensorsReader, name: str, expected: Mapping[str, str]) -> np.ndarray:
        array = reader.read(name, expected.get(name))
        self._check_wanted()
        if not fits(array, self._ops.dtype):
            raise refuse_tensor(name, f"of {reader.entries[name].file} has values too large for {self._ops.dtype}")
        self._received.add(name)
        return array

    def _pack(self, parameter: Parameter, arrays: Mapping[str, np.ndarray]) -> None:
        if (old := self._old) is not None:
            old.pop(parameter.key, None)
        self._packed[parameter.key] = pack(self._ops, parameter, arrays)

    def _complete(self) -> None:
        """Complete a partial update with the values that serve. Whole parameters are shared, not packed again."""
        serving = self._serving() if self._old is None else self._old
        for parameter in self._model.parameters:
            key = parameter.key
            if key in self._waiting:
                arrays = self._waiting.pop(key)
                for name in parameter.tensors:
                    if name not in arrays:
                        arrays[name] = unpack_whole(self._ops, parameter, serving[key], name)
                self._pack(parameter, arrays)
            elif key not in self._packed:
                self._packed[key] = serving[key]

    def _check_aliases(self) -> None:
        """Compare the aliases that arrived with the tensors that they must equal, once these are packed."""
        for alias, name in self._model.aliases.items():
            parameter = next(p for p in self._model.parameters if name in p.tensors)
            if alias not in self._alias_digests or parameter.key not in self._packed:
                continue
            value = self._packed[parameter.key]
            if self._alias_digests.pop(alias) != digest(unpack(self._ops, parameter, value, name)):
                raise refuse_tensor(alias, f"differs from {name}, but tie_word_embeddings is true")


def _has(folder: Folder, name: str) -> bool:
    try:
        return folder.has(name)
    except OSError as error:
        raise WeightUpdateRefused(f"{name}: cannot be accessed: {error.strerror}", file=name) from error


def _expected_checksums(reader: SafetensorsReader, given: Mapping[str, str], verify: bool) -> dict[str, str]:
    """Return the sha256 that each tensor of the source must have, where one is known. Raises WeightUpdateRefused if
    one is missing and ``verify`` is set."""
    expected = dict(given)
    for name in given:
        if name not in reader.entries:
            raise refuse_tensor(name, "has a checksum, but is not in the source")
    if verify and reader.folder is not None:
        for name, checksum in read_checksums(reader.folder).items():
            if expected.setdefault(name, checksum).lower() != checksum.lower():
                raise refuse_tensor(name, f"has another sha256 in checksums.json than in the call: {checksum}")
    for name in reader.entries:
        if verify and name not in expected:
            raise refuse_tensor(name, "has no checksum, but verify_checksum asks for one of every tensor")
    return expected
