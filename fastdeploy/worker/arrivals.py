"""The tensors that have arrived in one update of weights, and the checks of their names and fingerprints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fastdeploy.core.fingerprint import Fingerprint
from fastdeploy.model_executor.models.interface import Model
from fastdeploy.model_executor.safetensors_source import SafetensorsReader, refuse_tensor


class Arrivals:
    """shapes: of every tensor that may arrive, by name, aliases included. fingerprints: of the tensors that arrived. Of
    an alias, it tells what arrived, but the alias is no tensor of the model. arriving: names in uploads that are not
    complete."""

    def __init__(self, model: Model):
        self._aliases = model.aliases
        self._names = [name for parameter in model.parameters for name in parameter.tensors]
        shapes = {name: shape for parameter in model.parameters for name, shape in parameter.shapes.items()}
        self.shapes = shapes | {alias: shapes[name] for alias, name in model.aliases.items()}
        self.fingerprints: dict[str, Fingerprint] = {}
        self.arriving: set[str] = set()

    def holds_whole_model(self, names: Iterable[str]) -> bool:
        """Return whether ``names`` are, or include, all tensors of the model."""
        return set(self._names) <= set(names)

    def check_new(self, reader: SafetensorsReader) -> None:
        """Raise WeightUpdateRefused for a tensor that arrived before, or arrives in an upload."""
        for name, entry in reader.entries.items():
            if name in self.fingerprints or name in self.arriving:
                raise refuse_tensor(name, f"of {entry.file} has arrived before in this update")

    def add(self, fingerprints: Mapping[str, Fingerprint], expected: Mapping[str, str]) -> None:
        """Note tensors that have arrived as a whole. expected: fingerprints in hex that these must have. Raises
        WeightUpdateRefused, also for an alias that differs from its tensor, if both have arrived."""
        for name, wanted in expected.items():
            if name not in fingerprints:
                raise refuse_tensor(name, "has a fingerprint, but is not in the source")
            if (found := fingerprints[name].hex) != wanted.lower():
                raise refuse_tensor(name, f"has the fingerprint {found}, expected {wanted}")
        self.fingerprints |= fingerprints
        self._check_aliases(self.fingerprints)

    def complete(self, serving: Mapping[str, Fingerprint]) -> dict[str, Fingerprint]:
        """Return the fingerprint of each tensor of the model. serving: of the tensors that need not arrive. Raises
        WeightUpdateRefused, which names a tensor that is missing."""
        known = {**serving, **self.fingerprints}
        for name in self._names:
            if name not in known:
                raise refuse_tensor(name, "is missing: it did not arrive")
        self._check_aliases(known)
        return {name: known[name] for name in self._names}

    def _check_aliases(self, known: Mapping[str, Fingerprint]) -> None:
        for alias, name in self._aliases.items():
            if alias in self.fingerprints and name in known and self.fingerprints[alias] != known[name]:
                raise refuse_tensor(alias, f"differs from {name}, but tie_word_embeddings is true")
