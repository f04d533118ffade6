"""The experts layers of a Mixture of Experts, and the routing of tokens: which experts computed them.

A token's *row* is its routing: for each experts layer, in the order of the layers, the ids of the ``top_k`` experts
that the router chose for the token there. The expert with the highest rank (``RouterSpec``) comes first, and of equal
ones that with the lower id. The row at position p belongs to the token at position p of the sequence, prompt
included. The last token of an answer has no row, since it was drawn, but never computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np

# In the names of tensors: the module that has the bias of ERNIE's router in transformers, and in a checkpoint.
ERNIE_ROUTER_BIAS = (".mlp.gate.moe_statics.", ".mlp.moe_statics.")


class ExpertsInfo(msgspec.Struct, frozen=True):
    """The experts layers of a model. layers: their indices among the ``num_layers`` layers of the model, ascending.
    num_experts: in each of them, without shared experts, which compute every token. top_k: experts chosen for a
    token."""

    layers: tuple[int, ...]
    num_layers: int
    num_experts: int
    top_k: int

    @property
    def dtype(self) -> np.dtype:
        """The type of an expert's id in a row: the smallest one, little-endian."""
        return np.dtype("|u1" if self.num_experts <= 256 else "<u2")

    @property
    def row_ids(self) -> int:
        """Number of expert ids in a row."""
        return len(self.layers) * self.top_k

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.row_ids * self.dtype.itemsize


class RoutedExperts(NamedTuple):
    """The rows of consecutive tokens of a sequence, from position ``start`` on. data: see ``array``."""

    info: ExpertsInfo
    data: bytes
    start: int = 0

    @property
    def num_rows(self) -> int:
        return len(self.data) // self.info.row_bytes

    def array(self) -> np.ndarray:
        """Return the ids of the experts, of type ``info.dtype``, [rows, experts layers, top_k]. Cannot be written."""
        shape = self.num_rows, len(self.info.layers), self.info.top_k
        return np.frombuffer(self.data, self.info.dtype).reshape(shape)


def experts_of(model_info: Mapping[str, Any]) -> ExpertsInfo | None:
    """Return the experts layers of the model that the reply to ModelInfoArgs describes; None for a dense model."""
    described = model_info.get("experts")
    return None if described is None else msgspec.convert(described, ExpertsInfo)
