"""Scopes of pauses, and the models that requests name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastdeploy.core.served_weights import ServedWeights

if TYPE_CHECKING:
    from fastdeploy.core.request import Request

WHOLE_ENGINE = "engine"  # the scope above all others; requests that name no adapter belong to it
ADAPTER_PREFIX = "adapter:"
MAX_LORA_NAME_CHARS = 256
# Names of the base model that clients and gateways send for their users who named no model: SkyRL "default",
# smg and sglang-router "unknown".
BASE_NAMES = ("default", "unknown")


def adapter_scope(lora_name: str | None) -> str:
    """Return the id of an adapter's scope; None stands for the whole engine."""
    return WHOLE_ENGINE if lora_name is None else ADAPTER_PREFIX + lora_name


@dataclass
class Totals:
    """Choices that have ended since the engine started, and the output tokens of the aborted choices."""

    aborted: int = 0
    finished: int = 0
    aborted_tokens: int = 0


class ServedModel:
    """A model that requests can name: the base model, or an adapter over it.

    scope: the scope that its requests are paused with. served: the weights that compute its requests from the next
    step on; only the engine's loop replaces the value, between two steps. requests: all choices in the engine that name
    the model, in order of arrival. nbytes: of an adapter, packed in memory; None until the adapter has been read."""

    __slots__ = ("nbytes", "requests", "scope", "served")

    def __init__(self, scope: Scope, served: ServedWeights):
        self.scope = scope
        self.served = served
        self.requests: dict[Request, None] = {}
        self.nbytes: int | None = None


class Scope:
    """Requests that are paused together: of the whole engine, or of one adapter name.

    above: the scope of the whole engine, or None for that scope itself. boot_id: of the engine, whose start begins a
    new count of weight_epoch. totals: of the requests that the scope covers. model: the model whose label the reports
    of the scope show. num_models: models of an adapter's scope that are known or have requests."""

    __slots__ = ("above", "boot_id", "id", "model", "num_models", "totals")

    model: ServedModel

    def __init__(self, scope_id: str, boot_id: str = "", above: Scope | None = None):
        self.id = scope_id
        self.boot_id = boot_id
        self.above = above
        self.totals = Totals()
        self.num_models = 0
        self.model = ServedModel(self, ServedWeights()) if above is None else above.model

    @property
    def lora_name(self) -> str | None:
        """The adapter name of the scope; None for the whole engine."""
        return None if self.above is None else self.id.removeprefix(ADAPTER_PREFIX)

    def covers(self, other: Scope) -> bool:
        """Whether a pause of this scope concerns the requests of ``other``."""
        return other is self or other.above is self

    def __str__(self) -> str:
        return "the engine" if self.above is None else f"adapter {self.lora_name!r}"

    def weights_label(self) -> dict[str, Any]:
        """Return the label of the weights that serve, for reports. That of an adapter's scope has its name."""
        served = self.model.served
        label = {"version": served.version, "weight_epoch": served.weight_epoch, "boot_id": self.boot_id}
        if self.lora_name is not None:
            label["lora_name"] = self.lora_name
        if served.adapter:
            label["adapter_epoch"] = served.adapter_epoch
        return label
