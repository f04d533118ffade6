"""Errors of the trainer's side, added to the tree of fastdeploy.core.errors.

FastDeployError
└── RolloutError
    ├── Unreachable       a replica cannot be reached, or the connection broke
    ├── RolloutFailed     a generation was given up (failures or time-out); ``partial`` has its tokens
    ├── TooStale          a token's weights lack more publications than allowed; ``rollouts`` has the results
    ├── MalformedReply    the server broke its contract (too many tokens, or not as many logprobs as tokens)
    ├── WrongWeights      after a commit, a replica serves other weights than those published
    └── FleetError        a call to all replicas failed on some; ``reports`` has one entry per replica
        └── HoldLost      a hold of this client ended before its release: the servers may have run meanwhile
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastdeploy.core.errors import FastDeployError

if TYPE_CHECKING:
    from fastdeploy.rl.rollout import Rollout


# Error codes of a healthy replica that takes no requests at the moment.
BUSY = frozenset({"rejecting_new_requests", "queue_full"})


class RolloutError(FastDeployError):
    code = "rollout_error"


class Unreachable(RolloutError):
    code, status = "unreachable", 503


class RolloutFailed(RolloutError):
    code, status = "rollout_failed", 503

    def __init__(self, message: str, partial: list[Rollout]):
        super().__init__(message)
        self.partial = partial


class TooStale(RolloutError):
    code = "too_stale"

    def __init__(self, message: str, rollouts: list[Rollout]):
        super().__init__(message)
        self.rollouts = rollouts


class MalformedReply(RolloutError):
    code = "malformed_reply"


class WrongWeights(RolloutError):
    code = "wrong_weights"


@dataclass(frozen=True)
class Report:
    """The answer of one replica: ``result``, or ``error``."""

    replica: str
    result: dict[str, Any] | None = None
    error: FastDeployError | None = None

    @property
    def ok(self) -> bool:
        return self.error is None

    def unwrap(self) -> dict[str, Any]:
        """Return ``result``, or raise ``error``."""
        if self.error is not None:
            raise self.error
        assert self.result is not None
        return self.result


class FleetError(RolloutError):
    code = "fleet_error"

    def __init__(self, message: str, reports: list[Report]):
        failed = "; ".join(f"{r.replica}: {r.error.message}" for r in reports if r.error is not None)
        super().__init__(f"{message}: {failed}")
        self.reports = reports


class HoldLost(FleetError):
    code = "hold_lost"


def is_busy(error: FastDeployError) -> bool:
    """Return whether the replica is healthy, but takes no requests at the moment. ``detail["retry_after"]`` is the
    wait in seconds, if the replica gave one."""
    return error.code in BUSY or error.detail.get("status") == 429


def is_retryable(error: FastDeployError) -> bool:
    """Return whether another attempt may succeed: the replica failed or is busy, and the request and its key are
    good."""
    if isinstance(error, RolloutError):
        return isinstance(error, Unreachable)
    return is_busy(error) or error.detail.get("status", error.status) >= 500
