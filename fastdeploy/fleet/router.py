"""Choosing the replica of a request."""

from __future__ import annotations

from collections.abc import Sequence

from fastdeploy.core.request_fields import AddRequest
from fastdeploy.fleet.replica import Replica


class Router:
    """Chooses the replica with the fewest choices in flight."""

    def pick(self, request: AddRequest, replicas: Sequence[Replica]) -> Replica | None:
        """Return the replica for ``request`` among ``replicas``, or None if none may have it now."""
        return min(replicas, key=lambda replica: replica.in_flight, default=None)
