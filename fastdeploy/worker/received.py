"""The tensors that have arrived in one update of weights, and the checks of their names and fingerprints."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import numpy as np

from fastdeploy.core.fingerprint import Fingerprint
from fastdeploy.core.weight_source import PartFormat
from fastdeploy.model_executor.models.interface import Model
from fastdeploy.model_executor.parameters import as_bytes
from fastdeploy.model_executor.safetensors_source import SafetensorsReader, refuse_tensor


class ReceivedTensors:
    """All tensors that one update has brought so far. shapes: of every tensor that may arrive, by name, aliases
    (Model.aliases) included. fingerprints: of the tensors that arrived; an alias that arrived is in it, though it is
    no tensor of the model.

    An alias may come as values, or as an overwrite that equals the overwrite of its tensor in the same update. The two
    may come in any order, in different parts."""

    def __init__(self, model: Model):
        self._aliases = model.aliases
        self._names = [name for parameter in model.parameters for name in parameter.tensors]
        shapes = {name: shape for parameter in model.parameters for name, shape in parameter.shapes.items()}
        self.shapes = shapes | {alias: shapes[name] for alias, name in model.aliases.items()}
        self.fingerprints: dict[str, Fingerprint] = {}
        self._overwrites: dict[str, str] = {}  # sha256 of the overwrites of aliases and of their tensors
        self._expected: dict[str, str] = {}  # fingerprints in hex that overwritten aliases must have

    def holds_whole_model(self, names: Iterable[str]) -> bool:
        """Return whether ``names`` are, or include, all tensors of the model."""
        return set(self._names) <= set(names)

    def check_new(self, reader: SafetensorsReader) -> None:
        """Raise WeightUpdateRefused for a tensor that arrived before."""
        for name, entry in reader.entries.items():
            if name in self.fingerprints or name in self._overwrites:
                raise refuse_tensor(name, f"of {entry.file} has arrived before in this update")

    def add(self, fingerprints: Mapping[str, Fingerprint], expected: Mapping[str, str]) -> None:
        """Add tensors that have arrived as a whole. expected: fingerprints in hex that these must have. Raises
        WeightUpdateRefused, also for an alias that differs from its tensor, if both have arrived."""
        for name, wanted in expected.items():
            if name not in fingerprints:
                raise refuse_tensor(name, "has a fingerprint, but is not in the source")
            if (found := fingerprints[name].hex) != wanted.lower():
                raise refuse_tensor(name, f"has the fingerprint {found}, expected {wanted}")
        self.fingerprints |= fingerprints
        self._check_aliases(self.fingerprints)

    def remove_aliases(self, overwrites: dict[str, np.ndarray], form: PartFormat) -> None:
        """Remove the overwrites of aliases from a batch. ``complete`` compares them with those of their tensors."""
        for alias, name in self._aliases.items():
            for one in overwrites.keys() & {alias, name}:
                self._overwrites[one] = hashlib.sha256(as_bytes(overwrites[one])).hexdigest()
            if overwrites.pop(alias, None) is not None and alias in form.fingerprints:
                self._expected[alias] = form.fingerprints[alias]

    def complete(self, serving: Mapping[str, Fingerprint]) -> dict[str, Fingerprint]:
        """Return the fingerprint of each tensor of the model. serving: of the tensors that need not arrive. Raises
        WeightUpdateRefused, which names a tensor that is missing, or an alias that differs from its tensor."""
        self._add_overwritten_aliases()
        known = {**serving, **self.fingerprints}
        for name in self._names:
            if name not in known:
                raise refuse_tensor(name, "is missing: it did not arrive")
        self._check_aliases(known)
        return {name: known[name] for name in self._names}

    def _add_overwritten_aliases(self) -> None:
        for alias in self._aliases.keys() & self._overwrites.keys():
            name = self._aliases[alias]
            if self._overwrites.get(name) != self._overwrites[alias]:
                raise refuse_tensor(alias, f"needs a payload equal to that of {name}, as tie_word_embeddings is true")
            expected = {alias: self._expected[alias]} if alias in self._expected else {}
            self.add({alias: self.fingerprints[name]}, expected)

    def _check_aliases(self, known: Mapping[str, Fingerprint]) -> None:
        for alias, name in self._aliases.items():
            if alias in self.fingerprints and name in known and self.fingerprints[alias] != known[name]:
                raise refuse_tensor(alias, f"differs from {name}, but tie_word_embeddings is true")
