"""The label of the weights that serve. Spans, prefix roots, reports and metrics read it."""

from __future__ import annotations

import msgspec


class ServedWeights(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The weights that compute the requests of one model. A commit or a new label replaces the value.

    version: the trainer's label, which may repeat; for an adapter, the label of the adapter. weight_epoch: number of
    the base weights; not an epoch of training. Every commit raises it by one, unless the gateway of a fleet gives a
    higher number. adapter: the number by which the runner knows the packed adapter; every load gets a new one. 0 = no
    adapter. adapter_name, adapter_epoch: the name, and a number that every load under this name raises, from 0 on.
    """

    version: str = "0"
    weight_epoch: int = 0
    adapter: int = 0
    adapter_name: str = ""
    adapter_epoch: int = 0

    @property
    def kv_namespace(self) -> tuple[int, int]:
        """Names the KV that these weights compute. Requests share cached prefixes only within one namespace."""
        return self.weight_epoch, self.adapter
