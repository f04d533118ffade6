"""New values of parameters under construction: each checkpoint tensor is written straight to its place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import paddle

from fastdeploy.core.serving_dtype import in_dtype
from fastdeploy.model_executor.models.interface import Model
from fastdeploy.model_executor.ops.blocks import PackedLinear
from fastdeploy.model_executor.ops.interface import DeltaItem, Region
from fastdeploy.model_executor.parameters import Parameter, Value, as_linear, unpack
from fastdeploy.worker.standby import MISSED_SHARE, Loan


class _Place(NamedTuple):
    """Rows [first, first + rows) of a parameter. is_bias: of its bias."""

    parameter: Parameter
    first: int
    rows: int
    is_bias: bool = False


class StagedValues:
    """The new values of parameters, in the memory of a loan of the standby copy. Norms and biases, which are small,
    wait as float32 arrays for ``complete``.

    missed: the deltas of linears by parameter key, for ``StandbyCopy.commit``. A linear of which a larger part changed
    is not in it, as a copy is faster."""

    def __init__(self, model: Model, loan: Loan):
        self._model, self._ops, self.loan = model, model.ops, loan
        self._places = {name: place for parameter in model.parameters for name, place in _places(parameter).items()}
        self._vectors: dict[str, np.ndarray] = {}
        self._current: set[str] = set()  # keys of linears that began as the value that serves
        self._rewritten: set[str] = set()  # keys of linears that ``missed`` does not have
        self.missed: dict[str, list[DeltaItem]] = {}
        self._missed_bytes: Counter[str] = Counter()  # of the deltas in ``missed``, by key

    def region(self, name: str) -> Region:
        """Return the place of a tensor that is written as a whole. That of an alias only has a size. Raises
        MemoryError."""
        if name in self._model.aliases:
            parameter, _, rows, _ = self._places[self._model.aliases[name]]
            return Region(rows, parameter.columns)
        parameter = self._places[name].parameter
        self._rewritten.add(parameter.key)
        self.missed.pop(parameter.key, None)
        return self._region(name)

    def current_region(self, name: str, serving: Mapping[str, Value]) -> Region:
        """Return the place of a tensor, not of an alias, with its values that serve. Raises MemoryError."""
        parameter, first, rows, _ = self._places[name]
        if not parameter.is_vector:
            self._begin_with_serving(parameter, as_linear(serving[parameter.key]))
        region = self._region(name)
        if region.vector is not None:
            [old] = unpack(self._ops, parameter, serving[parameter.key], name)
            region.vector[:] = in_dtype(old, "float32")
        elif parameter.key not in self._current:
            self._ops.copy_rows(self.loan.linear(parameter), as_linear(serving[parameter.key]), first, first + rows)
        return region

    def add_missed(self, name: str, item: DeltaItem) -> None:
        """Add the delta of a tensor to ``missed``."""
        parameter = self._places[name].parameter
        key = parameter.key
        if parameter.is_vector or key in self._rewritten:
            return
        self.missed.setdefault(key, []).append(item)
        self._missed_bytes[key] += item.payload.nbytes
        if self._missed_bytes[key] > MISSED_SHARE * self.loan.written[key].nbytes:
            self._rewritten.add(key)
            del self.missed[key]

    def complete(self, arrived: Container[str], serving: Mapping[str, Value], stop: np.ndarray) -> dict[str, Value]:
        """Return the new value of every parameter, by key. Tensors that are not in ``arrived`` have the values of
        ``serving``; a parameter without any that arrived is that of ``serving`` itself. stop: see ``Ops.stage``."""
        values = {p.key: self._value(p, arrived, serving.get(p.key)) for p in self._model.parameters}
        self._model.quantize(self.loan.written, stop)
        return values

    def _region(self, name: str) -> Region:
        parameter, first, rows, is_bias = self._places[name]
        if is_bias or parameter.is_vector:
            vector = self._vectors.setdefault(name, np.empty(rows, np.float32))
            return Region(1, rows, vector=vector)
        linear = self.loan.linear(parameter)
        return Region(
            rows, parameter.columns, linear, first, experts=parameter.experts, interleaved=int(parameter.interleaved)
        )

    def _begin_with_serving(self, parameter: Parameter, serving: PackedLinear) -> None:
        if parameter.key not in self.loan.written:
            self.loan.current_linear(parameter, serving)
            self._current.add(parameter.key)

    def _value(self, parameter: Parameter, arrived: Container[str], serving: Value | None) -> Value:
        if not any(name in arrived for name in parameter.tensors):
            assert serving is not None
            return serving
        if parameter.is_vector:
            return paddle.to_tensor(self._vectors[parameter.weights[0]])
        weight = self.loan.linear(parameter)
        old = None if serving is None else as_linear(serving)
        for name in parameter.weights:
            if name not in arrived and parameter.key not in self._current:
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
                bias = self._vectors[name]
                bias = parameter.rows_of_experts(bias).reshape(-1) if parameter.experts else bias
                self._ops.set_bias(weight, first, bias)
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
