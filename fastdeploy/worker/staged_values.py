"""New values of parameters under construction: each checkpoint tensor is written straight to its place."""

from __future__ import annotations

from collections.abc import Container
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import paddle

from fastdeploy.model_executor.models.interface import Model
from fastdeploy.model_executor.ops.interface import PackedLinear, Region
from fastdeploy.model_executor.parameters import Parameter, Value, as_linear
from fastdeploy.worker.standby import Loan


class _Place(NamedTuple):
    """Rows [first, first + rows) of a parameter. is_bias: of its bias."""

    parameter: Parameter
    first: int
    rows: int
    is_bias: bool = False


class StagedValues:
    """The new values of parameters, in the memory of a loan of the standby copy. Norms and biases, which are small,
    wait as float32 arrays for ``value``."""

    def __init__(self, model: Model, loan: Loan):
        self._ops, self.loan = model.ops, loan
        self._places = {name: place for parameter in model.parameters for name, place in _places(parameter).items()}
        self._aliases = {alias: self._places[name] for alias, name in model.aliases.items()}
        self._vectors: dict[str, np.ndarray] = {}

    def region(self, name: str) -> Region:
        """Return the place of the tensor ``name``, each time the same. That of an alias only has a size. Raises
        MemoryError."""
        if name in self._aliases:
            parameter, _, rows, _ = self._aliases[name]
            return Region(rows, parameter.columns)
        parameter, first, rows, is_bias = self._places[name]
        if is_bias or parameter.is_vector:
            vector = self._vectors.setdefault(name, np.empty(rows, np.float32))
            return Region(1, rows, vector=vector)
        return Region(rows, parameter.columns, self.loan.take(parameter), first)

    def value(self, parameter: Parameter, arrived: Container[str], serving: Value | None) -> Value:
        """Return the new value of a parameter. Its tensors that are not in ``arrived`` have the values of ``serving``;
        without any that arrived, this is ``serving`` itself."""
        if not any(name in arrived for name in parameter.tensors):
            assert serving is not None
            return serving
        if parameter.is_vector:
            return paddle.to_tensor(self._vectors[parameter.weights[0]])
        weight = self.loan.take(parameter)
        old = None if serving is None else as_linear(serving)
        for name in parameter.weights:
            if name not in arrived and weight is not old:
                _, first, rows, _ = self._places[name]
                assert old is not None
                self._ops.copy_rows(weight, old, first, first + rows)
        self._set_biases(parameter, arrived, weight, old)
        return weight

    def _set_biases(
        self, parameter: Parameter, arrived: Container[str], weight: PackedLinear, old: PackedLinear | None
    ) -> None:
        old_bias = None if old is None else self._ops.unpack_bias(old)
        for name in parameter.biases:
            _, first, rows, _ = self._places[name]
            if name in arrived:
                self._ops.set_bias(weight, first, self._vectors[name])
            else:
                assert old_bias is not None
                self._ops.set_bias(weight, first, old_bias[first : first + rows])


def _places(parameter: Parameter) -> dict[str, _Place]:
    if parameter.is_vector:
        return {parameter.weights[0]: _Place(parameter, 0, parameter.columns)}
    ranges = list(zip(accumulate(parameter.rows, initial=0), parameter.rows, strict=False))
    weights = {name: _Place(parameter, *span) for name, span in zip(parameter.weights, ranges, strict=True)}
    biases = zip(parameter.biases, ranges, strict=bool(parameter.biases))
    return weights | {name: _Place(parameter, *span, is_bias=True) for name, span in biases}
