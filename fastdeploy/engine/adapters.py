"""The adapters that requests can name."""

from __future__ import annotations

from fastdeploy.core.errors import ModelNotFound
from fastdeploy.core.scope import ServedModel, adapter_scope
from fastdeploy.core.served_weights import ServedWeights
from fastdeploy.engine.scopes import Scopes


class AdapterRegistry:
    """All known adapters, by name."""

    def __init__(self, scopes: Scopes):
        self._scopes = scopes
        self._known: dict[str, ServedModel] = {}
        self._num_loads = 0

    def find(self, name: str) -> ServedModel:
        """Return the adapter of this name. Raises ModelNotFound."""
        if (model := self._known.get(name)) is None:
            raise ModelNotFound(f"model: there is no adapter {name!r}", param="model")
        return model

    def add(self, name: str) -> ServedModel:
        """Make an adapter known."""
        self._num_loads += 1
        weight_epoch = self._scopes.base.served.weight_epoch
        scope = self._scopes.add(adapter_scope(name))
        scope.model = model = ServedModel(scope, ServedWeights("1", weight_epoch, self._num_loads, name, 1))
        self._scopes.adapters.add(model)
        self._known[name] = model
        return model
