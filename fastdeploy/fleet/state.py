"""The state that every member of the fleet has."""

from __future__ import annotations

from dataclasses import dataclass, field

from fastdeploy.core.weight_source import WholeSource
from fastdeploy.inter_communicator.messages import LoadAdapterArgs, PauseArgs


@dataclass
class FleetHold:
    """A hold that stands on all members. args: with the hold's id, also for an anonymous hold, and without a ttl.
    expires_at: on the event loop's clock, when the gateway releases it; None = never."""

    args: PauseArgs
    expires_at: float | None = None


@dataclass
class FleetState:
    """What a replica must have before it may join. Changed by fleet/control.py only, and built anew from the replicas
    when a gateway starts.

    weight_epoch, version, fingerprint: of the weights that serve. source: the last whole source of these weights, which
    may be gone. holds: by (scope, id). adapters: by name, with the adapter epoch that serves. asleep: tags.
    revision: counts the changes. changing: calls or sessions that are changing the state now; nobody joins meanwhile.
    """

    weight_epoch: int = 0
    version: str = ""
    fingerprint: str | None = None
    source: WholeSource | None = None
    holds: dict[tuple[str, str], FleetHold] = field(default_factory=dict)
    adapters: dict[str, tuple[LoadAdapterArgs, int]] = field(default_factory=dict)
    asleep: tuple[str, ...] = ()
    revision: int = 0
    changing: int = 0
