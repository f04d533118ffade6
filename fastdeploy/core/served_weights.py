"""The names of what serves, for clients; the label of the weights that serve, which spans, prefix roots, reports and
metrics read; and all that a commit of base weights changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

WHOLE_ENGINE = "engine"  # the scope above all others; requests that name no adapter belong to it
ADAPTER_PREFIX = "adapter:"
MAX_LORA_NAME_CHARS = 256
# Names of the base model that clients and gateways send for their users who named no model: SkyRL "default",
# smg and sglang-router "unknown".
BASE_NAMES = ("default", "unknown")


def adapter_scope(lora_name: str | None) -> str:
    """Return the id of an adapter's scope; None stands for the whole engine."""
    return WHOLE_ENGINE if lora_name is None else ADAPTER_PREFIX + lora_name


class ServedWeights(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The weights that compute the requests of one model. A commit or a new label replaces the value.

    version: the trainer's label, which may repeat; for an adapter, the label of the adapter. weight_epoch: number of
    the base weights; not an epoch of training. Every commit raises it by one, unless the gateway of a fleet gives a
    higher number. adapter: the number by which the runner knows the packed adapter; every load gets a new one. 0 = no
    adapter. adapter_name, adapter_epoch: the name, and the number of the load under this name. No name has a number
    twice, also if it was unloaded in between. 0 = not loaded yet. quantization: of the base weights, the same in all
    values of one engine; "" = none.
    """

    version: str = "0"
    weight_epoch: int = 0
    adapter: int = 0
    adapter_name: str = ""
    adapter_epoch: int = 0
    quantization: str = ""

    @property
    def kv_namespace(self) -> tuple[int, int]:
        """Names the KV that these weights compute. Requests share cached prefixes only within one namespace."""
        return self.weight_epoch, self.adapter


class CommittedState(NamedTuple):
    """All that a commit of base weights changes. This is the only list: reports, the state of a fleet, the comparison
    at a join and the commit at a joining replica read the fields from here.

    fingerprint: over all tensors; None without complete weights. eos_token_ids: any of them ends a request unless
    ignore_eos."""

    version: str
    weight_epoch: int
    fingerprint: str | None
    eos_token_ids: tuple[int, ...]

    @classmethod
    def of(cls, report: Mapping[str, Any]) -> CommittedState:
        """Return the state that the report of an engine shows."""
        state = cls(*(report[field] for field in cls._fields))
        return state._replace(eos_token_ids=tuple(state.eos_token_ids))

    def without_tensors(self) -> dict[str, Any]:
        """Return the fields that can change while the tensors stay."""
        return {field: value for field, value in self._asdict().items() if field != "fingerprint"}
