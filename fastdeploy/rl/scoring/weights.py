"""The weights of a scorer: float32 parameters, their values in the serving dtype, and these values packed for the ops.

Rounding and packing are those of a weight update: ``Ops.stage`` reads float32 bytes, rounds them to the serving dtype
and writes them to their place in the packed weights (worker/staged_values.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import paddle

from fastdeploy.core.serving_dtype import widen
from fastdeploy.core.weight_source import FolderSource
from fastdeploy.model_executor.models.interface import Model, ModelWeights
from fastdeploy.model_executor.ops.interface import StageItem
from fastdeploy.model_executor.safetensors_source import open_source, refuse_tensor
from fastdeploy.worker.part_reading import refusal
from fastdeploy.worker.staged_values import StagedValues
from fastdeploy.worker.standby import StandbyCopy

DTYPES = {"float32": paddle.float32, "bfloat16": paddle.bfloat16}


def read_parameters(path: str, model: Model) -> dict[str, paddle.Tensor]:
    """Return the tensors of a checkpoint folder in float32, by name, with gradients. A tied tensor appears once.
    Raises WeightUpdateRefused, which names the tensor that is missing, unknown or damaged."""
    shapes = {name: shape for parameter in model.parameters for name, shape in parameter.shapes.items()}
    with open_source(FolderSource(path)) as reader:
        reader.check(shapes | {alias: shapes[name] for alias, name in model.aliases.items()})
        if missing := sorted(shapes.keys() - reader.entries.keys()):
            raise refuse_tensor(missing[0], f"is missing in {path}")
        return {name: paddle.to_tensor(widen(reader.read(name)), stop_gradient=False) for name in shapes}


class Snapshot(NamedTuple):
    """The parameters at one moment. rounded: in the serving dtype, by name. packed: the same values in the layout of
    the ops; valid until the next snapshot."""

    rounded: Mapping[str, paddle.Tensor]
    packed: ModelWeights


class Packer:
    """Makes snapshots. Two sets of packed weights take turns, so that a snapshot allocates nothing."""

    def __init__(self, model: Model):
        self._model = model
        self._standby = StandbyCopy(model.ops, model.parameters, policy="on")
        self._serving: ModelWeights | None = None

    def snapshot(self, parameters: Mapping[str, paddle.Tensor]) -> Snapshot:
        """Round and pack the parameters. Raises WeightUpdateRefused for a value that is not finite, or not finite in
        the serving dtype; then the last snapshot stays valid."""
        ops, loan = self._model.ops, self._standby.lend()
        values = StagedValues(self._model, loan)
        sources = {name: np.ascontiguousarray(tensor.numpy()) for name, tensor in parameters.items()}
        items = [
            StageItem(values.region(name), "F32", 0, memory=source.reshape(-1).view(np.uint8))
            for name, source in sources.items()
        ]
        for name, result in zip(sources, ops.stage(items, np.zeros(1, np.int32)), strict=True):
            if result.problem is not None:
                self._standby.give_back(loan)
                raise refusal(name, "the parameters", result, ops.dtype)
        packed = self._model.assemble(values.complete(sources, {}))
        old = {} if self._serving is None else self._serving.values
        self._standby.commit(loan, old, packed.values, {})
        self._serving = packed
        with paddle.no_grad():
            rounded = {name: paddle.to_tensor(source).astype(DTYPES[ops.dtype]) for name, source in sources.items()}
        return Snapshot(rounded, packed)
