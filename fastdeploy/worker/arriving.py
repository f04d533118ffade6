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
    """check: raises WeightUpdateRefused for tensors that may not arrive. region_of: gives the place of a tensor. stop:
    see ``Ops.stage``."""

    def __init__(
        self,
        ops: Ops,
        arrivals: Arrivals,
        check: Callable[[SafetensorsReader], object],
        region_of: RegionOf,
        stop: np.ndarray,
    ):
        self._ops, self._arrivals, self._check, self._region_of, self._stop = ops, arrivals, check, region_of, stop
        self._streams: dict[str, TensorStream] = {}

    def add(self, source: StreamSource, checksums: Mapping[str, str], verify: bool, form: PartFormat) -> ChunkReceipt:
        """Add one piece. Until its upload is complete, the receipt counts nothing. Raises WeightUpdateRefused."""
        if source.state == "broken":
            if (stream := self._streams.pop(source.stream, None)) is not None and stream.reader is not None:
                self._arrivals.arriving.difference_update(stream.reader.entries)
            return ChunkReceipt(0, 0)
        stream = self._streams.get(source.stream)
        if stream is None:

            def check(reader: SafetensorsReader) -> Mapping[str, str]:
                self._check(reader)
                self._arrivals.arriving.update(reader.entries)
                return expected_checksums(reader, checksums, verify)

            stream = self._streams[source.stream] = TensorStream(check, self._region_of, self._stage)
        stream.add(source)
        if source.state == "open":
            return ChunkReceipt(0, 0)
        del self._streams[source.stream]
        assert stream.reader is not None
        entries = stream.reader.entries
        self._arrivals.arriving.difference_update(entries)
        self._arrivals.add(stream.fingerprints, form.fingerprints)
        return ChunkReceipt(len(entries), sum(entry.nbytes for entry in entries.values()))

    def _stage(self, items: Sequence[tuple[str, StageItem]]) -> list[Fingerprint]:
        results = self._ops.stage([item for _, item in items], self._stop)
        check_given_up(self._stop)
        for (name, _), result in zip(items, results, strict=True):
            if result.problem is not None:
                raise refusal(name, FILE, result, self._ops.dtype)
        return [result.fingerprint for result in results]
