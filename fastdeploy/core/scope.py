"""Scopes of pauses and weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastdeploy.core.served_weights import ServedWeights

WHOLE_ENGINE = "engine"  # the scope above all others; requests that name no scope belong to it


@dataclass
class Totals:
    """Choices that have ended since the engine started, and the output tokens of the aborted choices."""

    aborted: int = 0
    finished: int = 0
    aborted_tokens: int = 0


class Scope:
    """Requests that are paused together and served by the same weights.

    served: replaced by ``serve`` and nowhere else. boot_id: of the engine, whose start begins a new count of
    weight_epoch. above: the scope of the whole engine, or None for that scope itself. totals: of the requests that the
    scope covers."""

    __slots__ = ("above", "boot_id", "id", "served", "totals")

    def __init__(self, scope_id: str, boot_id: str = "", above: Scope | None = None):
        self.id = scope_id
        self.boot_id = boot_id
        self.above = above
        self.totals = Totals()
        self.serve("0" if above is None else above.served.version, 0 if above is None else above.served.weight_epoch)

    def serve(self, version: str, weight_epoch: int) -> None:
        self.served = ServedWeights(version, weight_epoch, (self.id, weight_epoch))

    def covers(self, other: Scope) -> bool:
        """Whether a pause of this scope concerns the requests of ``other``."""
        return other is self or other.above is self

    def __str__(self) -> str:
        return "the engine" if self.above is None else f"scope {self.id!r}"

    def weights_label(self) -> dict[str, Any]:
        """Return the label of the weights that serve, for reports."""
        served = self.served
        return {"version": served.version, "weight_epoch": served.weight_epoch, "boot_id": self.boot_id}
