"""New values of parameters that begin as the values that serve."""

from __future__ import annotations

from collections.abc import Container, Mapping

from fastdeploy.model_executor.models.interface import Model
from fastdeploy.model_executor.ops.interface import DeltaItem, Region
from fastdeploy.model_executor.parameters import Value, as_linear, in_dtype, unpack
from fastdeploy.worker.staged_values import StagedValues
from fastdeploy.worker.standby import MISSED_SHARE, Loan


class DeltaValues:
    """The new values of parameters, in the memory of a loan of the standby copy, and the changes that made them.

    missed: the changes of linears by parameter key, for ``StandbyCopy.commit``. A linear of which a larger part changed
    is not in it, as a copy is faster."""

    def __init__(self, model: Model, loan: Loan):
        self.loan = loan
        self.missed: dict[str, list[DeltaItem]] = {}
        self._model, self._staged = model, StagedValues(model, loan)
        self._parameters = {name: parameter for parameter in model.parameters for name in parameter.tensors}
        self._rewritten: set[str] = set()

    def region(self, name: str, serving: Mapping[str, Value]) -> Region:
        """Return the place of the tensor ``name``, with its values that serve. That of an alias only has a size. Called
        once for each tensor. Raises MemoryError."""
        parameter = self._parameters.get(name)
        if parameter is not None and not parameter.is_vector:
            self.loan.take_current(parameter, as_linear(serving[parameter.key]))
        region = self._staged.region(name)
        if parameter is not None and region.vector is not None:
            [old] = unpack(self._model.ops, parameter, serving[parameter.key], name)
            region.vector[:] = in_dtype(old, "float32")
        return region

    def note_written(self, name: str) -> None:
        """Note that a tensor was written as a whole."""
        if name in self._parameters:
            self._rewritten.add(self._parameters[name].key)
            self.missed.pop(self._parameters[name].key, None)

    def note_changed(self, name: str, item: DeltaItem) -> None:
        """Note the change of a tensor."""
        parameter = self._parameters[name]
        if parameter.is_vector or parameter.key in self._rewritten:
            return
        items = self.missed.setdefault(parameter.key, [])
        items.append(item)
        nbytes = sum(one.payload.nbytes for one in items)
        if nbytes > MISSED_SHARE * self.loan.written[parameter.key].nbytes:
            self._rewritten.add(parameter.key)
            del self.missed[parameter.key]

    def complete(self, arrived: Container[str], serving: Mapping[str, Value]) -> dict[str, Value]:
        """Return the new value of every parameter, by key. A parameter without a tensor in ``arrived`` keeps the value
        that serves."""
        return {p.key: self._staged.value(p, arrived, serving[p.key]) for p in self._model.parameters}
