"""The label of the weights that serve. Spans, prefix roots, reports and metrics read it."""

from __future__ import annotations

import msgspec


class ServedWeights(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The weights that compute the requests of one scope. A commit or a new label replaces the value.

    version: the trainer's label, which may repeat. weight_epoch: number of commits of weights so far; not an epoch of
    training. kv_namespace: names the KV that these weights compute. Requests share cached prefixes only within one
    namespace.
    """

    version: str = "0"
    weight_epoch: int = 0
    kv_namespace: tuple[str, int] = ("", 0)
