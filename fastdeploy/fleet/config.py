"""Settings of a gateway."""

from __future__ import annotations

import msgspec

from fastdeploy.core.config import require_positive_numbers


class FleetConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of a gateway. Times are in seconds.

    fleet_id: of the fleet; the same for every gateway of it. fence_after_s: a replica that has not answered a call for
    so long is fenced, if the call itself sets no longer time. If most replicas have not answered, the call waits for
    them until stall_s: the cause may be the gateway's own host. lease_s: of the gateway's leadership of the engines.
    stall_s: a silent engine is lost after so long. failover_s: a request whose replica was lost waits so long for
    another one. max_replicas: places in the fleet.
    stage_timeout_s: seconds in which an engine reads and checks new weights, if the call names none; at least the
    --stage-timeout-s of the engines.

    rebuild_s: once one engine has answered, a gateway that starts waits so long for the others before it leads. After
    the loss of every replica, the fleet waits so long for one that still has the weights. drain_s: a removed replica
    may finish its requests for so long; then they go on elsewhere.
    replica_key: bearer key of the replicas' own API servers; "" = none. model_roots: see EngineConfig; shared memory is
    sent to replicas on other hosts only if it is allowed as a source."""

    fleet_id: str
    fence_after_s: float = 5.0
    lease_s: float = 10.0
    stall_s: float = 10.0
    failover_s: float = 60.0
    max_replicas: int = 1024
    stage_timeout_s: float = 600.0
    rebuild_s: float = 5.0
    drain_s: float = 300.0
    replica_key: str = ""
    model_roots: tuple[str, ...] = ()

    def check(self) -> FleetConfig:
        """Return self, or raise InvalidField naming the first setting that is out of range."""
        require_positive_numbers(self)
        return self
