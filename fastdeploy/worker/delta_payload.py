"""Reading of the payloads of a delta (core/delta_format.py) from a safetensors source."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np

from fastdeploy.core import delta_format
from fastdeploy.core.errors import WeightUpdateRefused
from fastdeploy.core.weight_source import PartFormat
from fastdeploy.model_executor.ops.interface import Problem, StageResult
from fastdeploy.model_executor.safetensors_source import SafetensorsReader, TensorEntry, refuse_tensor
from fastdeploy.worker.tensor_reading import refusal

ITEMSIZES = {"float32": 4, "bfloat16": 2}


class PayloadReader:
    """Reads the payloads of one source. shapes: of the tensors that may arrive, by name. dtype: the serving dtype.

    The headers are checked when the object is made. Raises WeightUpdateRefused for an unknown name, and for a tensor
    whose type or size is not that of a payload."""

    def __init__(self, reader: SafetensorsReader, shapes: Mapping[str, tuple[int, ...]], form: PartFormat, dtype: str):
        self._reader, self._entries = reader, reader.entries
        self._shapes, self._form, self._dtype = shapes, form, dtype
        for name, entry in reader.entries.items():
            self._check_header(name, entry)

    def batches(self, checksums: Mapping[str, str], nbytes: int) -> Iterator[dict[str, np.ndarray]]:
        """Yield all payloads by name, as ``read`` returns them, in batches of at least ``nbytes`` bytes."""
        batch: dict[str, np.ndarray] = {}
        size = 0
        for name in self._entries:
            batch[name] = payload = self.read(name, checksums.get(name))
            size += payload.nbytes
            if size >= nbytes:
                yield batch
                batch, size = {}, 0
        if batch:
            yield batch

    def read(self, name: str, checksum: str | None) -> np.ndarray:
        """Return a decompressed copy of a payload, as uint8. Raises WeightUpdateRefused if the sha256 of its bytes in
        the source differs from ``checksum`` (hexadecimal), and for a payload of a wrong size, before memory for more
        than the largest payload of the tensor is allocated."""
        raw = self._reader.read_bytes(name, checksum)
        if self._form.compression == "zstd":
            try:
                raw = delta_format.decompress(raw, self._largest(name))
            except ValueError as error:
                raise self._refuse(name, str(error)) from error
            self._check_size(name, raw.nbytes)
        return raw

    def refusal(self, name: str, payload: np.ndarray, result: StageResult) -> WeightUpdateRefused:
        """Return the error for a payload that ``Ops.apply_deltas`` refused."""
        if result.problem is Problem.MALFORMED and self._form.encoding == "overwrite":
            try:
                delta_format.read_overwrite(payload, math.prod(self._shapes[name]), ITEMSIZES[self._dtype])
            except ValueError as error:
                return self._refuse(name, str(error))
        return refusal(name, self._entries[name].file, result, self._dtype)

    def _check_header(self, name: str, entry: TensorEntry) -> None:
        form = self._form
        if name not in self._shapes:
            raise refuse_tensor(name, f"in {entry.file} is not a tensor of this model")
        if entry.dtype != "U8" or entry.shape != (entry.nbytes,):
            got = f"has dtype {entry.dtype} and shape {list(entry.shape)}"
            expected = (
                f"with encoding {form.encoding} and compression {form.compression}, expected a payload: U8 [bytes]"
            )
            raise refuse_tensor(name, f"of {entry.file} {got}; {expected}")
        if form.compression == "none":
            self._check_size(name, entry.nbytes)
        elif entry.nbytes > (limit := delta_format.largest_frame(self._largest(name))):
            raise self._refuse(name, f"expected a zstd frame of at most {limit} bytes, got {entry.nbytes}")

    def _check_size(self, name: str, nbytes: int) -> None:
        exact, limit = self._form.encoding != "overwrite", self._largest(name)
        if nbytes > limit or (exact and nbytes < limit):
            raise self._refuse(name, f"expected {'' if exact else 'at most '}{limit} bytes, got {nbytes}")

    def _largest(self, name: str) -> int:
        size = math.prod(self._shapes[name])
        return delta_format.largest_payload(self._form.encoding, size, ITEMSIZES[self._dtype])

    def _refuse(self, name: str, why: str) -> WeightUpdateRefused:
        shape = f"a tensor {list(self._shapes[name])} of {self._dtype}, the serving dtype"
        return refuse_tensor(
            name, f"of {self._entries[name].file} is no {self._form.encoding} payload of {shape}: {why}"
        )
