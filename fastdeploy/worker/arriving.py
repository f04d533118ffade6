"""The uploads to one staging that are arriving."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from fastdeploy.core.fingerprint import Fingerprint
from fastdeploy.core.runner import ChunkReceipt
from fastdeploy.core.weight_source import PartFormat, StreamSource
from fastdeploy.model_executor.ops.interface import Ops, StageItem
from fastdeploy.model_executor.safetensors_source import SafetensorsReader
from fastdeploy.worker.arrivals import Arrivals
from fastdeploy.worker.part_checks import expected_checksums
from fastdeploy.worker.stream import FILE, RegionOf, TensorStream
from fastdeploy.worker.tensor_reading import check_given_up, refusal


class ArrivingUploads:
    """stop: see ``Ops.stage``. Only an open upload refers to the staging, so that a staging without one is freed at
    once."""

    def __init__(self, ops: Ops, arrivals: Arrivals, stop: np.ndarray):
        self._ops, self._arrivals, self._stop = ops, arrivals, stop
        self._streams: dict[str, TensorStream] = {}

    def add(
        self,
        source: StreamSource,
        checksums: Mapping[str, str],
        verify: bool,
        form: PartFormat,
        check_tensors: Callable[[SafetensorsReader], object],
        region_of: RegionOf,
    ) -> ChunkReceipt:
        """Add one piece. Until its upload is complete, the receipt counts nothing. check_tensors: raises
        WeightUpdateRefused for tensors that may not arrive. region_of: gives the place of a tensor. Raises
        WeightUpdateRefused."""
        if source.state == "broken":
            if (stream := self._streams.pop(source.stream, None)) is not None and stream.reader is not None:
                self._arrivals.arriving.difference_update(stream.reader.entries)
            return ChunkReceipt(0, 0)
        stream = self._streams.get(source.stream)
        if stream is None:

            def check(reader: SafetensorsReader) -> Mapping[str, str]:
                check_tensors(reader)
                self._arrivals.arriving.update(reader.entries)
                return expected_checksums(reader, checksums, verify)

            stream = self._streams[source.stream] = TensorStream(check, region_of, self._stage)
        stream.add(source)
        if source.state == "open":
            return ChunkReceipt(0, 0)
        self._streams.pop(source.stream, None)
        assert stream.reader is not None
        entries = stream.reader.entries
        self._arrivals.arriving.difference_update(entries)
        self._arrivals.add(stream.fingerprints, form.fingerprints)
        return ChunkReceipt(len(entries), sum(entry.nbytes for entry in entries.values()))

    def forget(self) -> None:
        """Forget the open uploads. Called on any thread, when the staging is abandoned."""
        self._streams = {}

    def _stage(self, items: Sequence[tuple[str, StageItem]]) -> list[Fingerprint]:
        results = self._ops.stage([item for _, item in items], self._stop)
        check_given_up(self._stop)
        for (name, _), result in zip(items, results, strict=True):
            if result.problem is not None:
                raise refusal(name, FILE, result, self._ops.dtype)
        return [result.fingerprint for result in results]
