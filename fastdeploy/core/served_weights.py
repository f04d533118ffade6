"""The weights that serve: the one value that spans, prefix roots, reports and metrics read."""

from __future__ import annotations

import msgspec


class ServedWeights(msgspec.Struct, frozen=True):
    """One state of the weights that compute the requests of one scope. A commit or a new label replaces the value.

    version: the trainer's label, which may repeat. weight_epoch: how many commits of weights there were before; it
    orders versions. It has nothing to do with the epochs of a training run.
    kv_namespace: names the KV that these weights compute. Requests share cached prefixes only within one namespace.
    """

    version: str = "0"
    weight_epoch: int = 0
    kv_namespace: tuple[str, int] = ("", 0)
