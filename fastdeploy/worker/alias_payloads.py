"""Payloads of aliases (Model.aliases) in a delta."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np

from fastdeploy.core.weight_source import PartFormat
from fastdeploy.model_executor.parameters import as_bytes
from fastdeploy.model_executor.safetensors_source import SafetensorsReader, refuse_tensor
from fastdeploy.worker.arrivals import Arrivals


class AliasPayloads:
    """Compares the payload of an alias with the one of the tensor that the alias must equal. Both may arrive in any
    order, in different parts of one update."""

    def __init__(self, aliases: Mapping[str, str]):
        self._aliases = aliases
        self._digests: dict[str, str] = {}  # of the payloads of aliases and of their tensors
        self._wanted: dict[str, str] = {}  # fingerprints in hex that aliases must have

    def check_new(self, reader: SafetensorsReader) -> None:
        """Raise WeightUpdateRefused for an alias whose payload arrived before."""
        for name in self._aliases.keys() & self._digests.keys() & reader.entries.keys():
            raise refuse_tensor(name, f"of {reader.entries[name].file} has arrived before in this update")

    def take(self, batch: dict[str, np.ndarray], form: PartFormat) -> None:
        """Note the payloads of aliases and of their tensors, and remove those of aliases from ``batch``."""
        for alias, name in self._aliases.items():
            for one in batch.keys() & {alias, name}:
                self._digests[one] = f"{form.encoding} {hashlib.sha256(as_bytes(batch[one])).hexdigest()}"
            if batch.pop(alias, None) is not None and alias in form.fingerprints:
                self._wanted[alias] = form.fingerprints[alias]

    def resolve(self, arrivals: Arrivals) -> None:
        """Add the aliases to what arrived, at the end of the update. Raises WeightUpdateRefused."""
        for alias in self._aliases.keys() & self._digests.keys():
            name = self._aliases[alias]
            if self._digests.get(name) != self._digests[alias]:
                raise refuse_tensor(alias, f"needs a payload equal to that of {name}, as tie_word_embeddings is true")
            wanted = {alias: self._wanted[alias]} if alias in self._wanted else {}
            arrivals.add({alias: arrivals.fingerprints[name]}, wanted)
