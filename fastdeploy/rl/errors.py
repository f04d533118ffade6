"""Errors of the trainer's side, added to the tree of fastdeploy.core.errors.

FastDeployError
└── RolloutError
    ├── Unreachable       the server cannot be reached, or the connection broke
    ├── RolloutFailed     a generation was given up (failures or time-out); ``partial`` has its tokens
    ├── TooStale          a token's weights lack more publications than allowed; ``rollouts`` has the results
    ├── MalformedReply    the server broke its contract (too many tokens, or not as many logprobs as tokens)
    ├── WrongWeights      after a commit, the server serves other weights than those published
    └── HoldLost          a hold of this client ended before its release: the server may have run meanwhile

All other errors are those of the server. The ``detail["replicas"]`` of a gateway's error has an entry for each replica.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from fastdeploy.core.errors import FastDeployError

if TYPE_CHECKING:
    from fastdeploy.rl.rollout import Rollout


# Error codes of a healthy server that takes no requests at the moment.
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


class HoldLost(RolloutError):
    code = "hold_lost"


def is_busy(error: FastDeployError) -> bool:
    """Return whether the server is healthy, but takes no requests at the moment. ``detail["retry_after"]`` is the
    wait in seconds, if the server gave one."""
    return error.code in BUSY or error.detail.get("status") == 429


def is_retryable(error: FastDeployError) -> bool:
    """Return whether another attempt may succeed: the server failed or is busy, and the request and its key are
    good."""
    if isinstance(error, RolloutError):
        return isinstance(error, Unreachable)
    return is_busy(error) or error.detail.get("status", error.status) >= 500


@contextlib.contextmanager
def first_of_group() -> Iterator[None]:
    """Let the first FastDeployError of a TaskGroup in the block be raised by itself, not in a group.

    ``except*`` cannot do that: before Python 3.11.4, what it raises is in a group again."""
    try:
        yield
    except BaseExceptionGroup as group:
        failed, others = group.split(FastDeployError)
        if failed is None or others is not None:
            raise
        raise failed.exceptions[0] from None
