"""Reading of plain tensors from a safetensors source into packed weights, in one pass over their bytes."""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np

from fastdeploy.core.errors import WeightUpdateRefused
from fastdeploy.core.fingerprint import Fingerprint
from fastdeploy.model_executor.ops.interface import Ops, Problem, Region, StageItem, StageResult
from fastdeploy.model_executor.safetensors_source import SafetensorsReader, refuse_tensor


def stage_tensors(
    ops: Ops, reader: SafetensorsReader, regions: Mapping[str, Region], checksums: Mapping[str, str], stop: np.ndarray
) -> dict[str, Fingerprint]:
    """Read each tensor of ``regions`` to its region, and return the fingerprints. checksums: the sha256 of the bytes of
    some tensors; such a tensor is read to private memory, hashed, and staged from there, one at a time. stop: see
    ``Ops.stage``. Raises WeightUpdateRefused, which names the tensor and the file."""
    found: dict[str, Fingerprint] = {}

    def stage(items: Mapping[str, StageItem]) -> None:
        results = ops.stage(list(items.values()), stop)
        check_given_up(stop)
        for name, result in zip(items, results, strict=True):
            if result.problem is not None:
                raise refusal(name, reader.entries[name].file, result, ops.dtype)
            found[name] = result.fingerprint

    direct = {name: region for name, region in regions.items() if name not in checksums}
    entries = reader.entries
    stage({n: StageItem(region, entries[n].dtype, entries[n].offset, entries[n].fd) for n, region in direct.items()})
    for name, region in regions.items():
        if name in checksums:
            check_given_up(stop)
            memory = reader.read_bytes(name, checksums[name])
            stage({name: StageItem(region, entries[name].dtype, 0, memory=memory)})
    return found


def check_given_up(stop: np.ndarray) -> None:
    """Raise WeightUpdateRefused if ``stop`` was set."""
    if stop[0]:
        raise WeightUpdateRefused("this update was given up while it was read")


def refusal(name: str, file: str, result: StageResult, dtype: str) -> WeightUpdateRefused:
    """Return the error for values that ``Ops.stage`` refused. file: where they came from. dtype: of the ops."""
    match result.problem:
        case Problem.NOT_FINITE:
            return refuse_tensor(name, f"of {file} holds values that are not finite")
        case Problem.TOO_LARGE:
            return refuse_tensor(name, f"of {file} has values too large for {dtype}")
        case Problem.CUT_SHORT:
            return refuse_tensor(name, f"is cut short: {file} ended while it was read")
        case Problem.READ_ERROR:
            return refuse_tensor(name, f"cannot be read from {file}: {os.strerror(result.errno)}")
        case Problem.MALFORMED:
            return refuse_tensor(name, f"of {file} is malformed")
        case _:
            return WeightUpdateRefused("this update was given up while it was read")
