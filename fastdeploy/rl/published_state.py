"""The state that this client published last, from publication to publication."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from fastdeploy.core.errors import InvalidField, WeightUpdateRefused
from fastdeploy.rl import state_encoding
from fastdeploy.rl.deltas import Snapshot, require_served
from fastdeploy.rl.errors import FleetError
from fastdeploy.rl.fan_out import run_shielded
from fastdeploy.rl.part_calls import Means
from fastdeploy.rl.state_transfer import DeltaTransfer, NamedTensors, WholeTransfer, state_parts, stream_parts


class PublishedState:
    """Keeps a snapshot of this client's last publication."""

    def __init__(self) -> None:
        self._snapshot: Snapshot | None = None

    async def transfer(
        self, state: Mapping[str, Any] | NamedTensors, delta: str, means: Means, options: Mapping[str, Any]
    ) -> WholeTransfer:
        """Return the transfer of ``state``. delta: "auto" or "never". options: of /v1/weights/begin. Raises
        InvalidField for a state that cannot be sent."""
        if delta not in ("auto", "never"):
            raise InvalidField("delta", f"expected auto or never, got {delta!r}")
        is_partial = bool(options.get("partial"))
        if not isinstance(state, Mapping):
            if means.via == "folder":
                raise InvalidField("state", "a stream of tensors is sent as an upload or in shared memory")
            self.forget()
            return WholeTransfer(stream_parts(state), means, is_partial, keeps=False)
        if not state:
            raise InvalidField("state", "expected at least one tensor")
        tensors = await asyncio.to_thread(state_encoding.host_tensors, state)
        require_served(tensors)
        if delta == "never" or (self._snapshot is not None and not self._snapshot.fits(tensors, is_partial)):
            self.forget()
        if self._snapshot is None:
            nbytes = sum(tensor.data.nbytes for tensor in tensors.values())
            return WholeTransfer(state_parts(tensors), means, is_partial, delta == "auto", nbytes)
        difference = await asyncio.to_thread(self._snapshot.difference, tensors)
        in_place = bool(options.get("in_place"))
        return DeltaTransfer(tensors, self._snapshot, difference, means, is_partial, in_place)

    @asynccontextmanager
    async def publishing(self, transfer: WholeTransfer) -> AsyncIterator[None]:
        """Note at the end of the block what the replicas serve then. If a replica has refused the new weights, the
        snapshot may be wrong (the trainer changed a tensor during a publication), so it is dropped."""
        try:
            yield
        except FleetError as error:
            if any(report.error and report.error.code == WeightUpdateRefused.code for report in error.reports):
                self.forget()
            raise
        finally:
            await run_shielded(self._settle(transfer))

    async def _settle(self, transfer: WholeTransfer) -> None:
        old, self._snapshot = self._snapshot, None
        self._snapshot = await asyncio.to_thread(transfer.next_snapshot, old)

    def forget(self) -> None:
        """Note that the weights of the replicas are unknown: the next publication is sent whole."""
        self._snapshot = None
