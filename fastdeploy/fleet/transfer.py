"""The weights of the fleet for a replica that lacks them: from their last source, or from a replica that has them."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from fastdeploy.core.errors import EngineError, FastDeployError, WrongOrder
from fastdeploy.core.process import host_id
from fastdeploy.core.weight_source import FileSource, WholeSource
from fastdeploy.fleet.remote import RemoteHosts
from fastdeploy.fleet.replica import Replica
from fastdeploy.fleet.state import FleetState
from fastdeploy.inter_communicator import messages as m

logger = logging.getLogger(__name__)


class WeightTransfer:
    """Gives weights to a replica in a weight session, whose commit is refused unless the new weights have the
    fingerprint of the fleet's weights. The commit sets all else that a commit of the fleet has set. A file is used
    between two replicas of the gateway's host, HTTP between others."""

    def __init__(self, hosts: RemoteHosts):
        self._hosts = hosts

    async def give(self, replica: Replica, state: FleetState, peers: Sequence[Replica]) -> None:
        """Give ``replica`` the weights of the fleet. peers: replicas that serve them. Raises WrongOrder, which names
        the tries, if nobody can give them, and EngineError if the replica is lost."""
        tries: list[tuple[str, Callable[[str], Awaitable[object]]]] = []
        if state.source is not None:
            tries.append((f"from {state.source}", partial(self._part, replica, state.source)))
        here = replica.placement.host
        for peer in sorted(peers, key=lambda peer: (peer.placement.host != here, peer.in_flight)):
            tries.append((f"from replica {peer.name}", partial(self._copy, peer, replica)))
        failures = []
        for name, part in tries:
            try:
                await self._update(replica, state, part)
                return
            except (FastDeployError, OSError) as error:
                if isinstance(error, EngineError) and not replica.client.connected.is_set():
                    raise
                logger.warning("replica %s did not get the weights %s: %s", replica.name, name, error)
                failures.append(f"{name}: {error}")
        why = "; ".join(failures) or "their source is not known, and no other replica has them"
        raise WrongOrder(f"the weights {state.version!r} of epoch {state.weight_epoch} cannot be had: {why}")

    async def _update(self, replica: Replica, state: FleetState, part: Callable[[str], Awaitable[object]]) -> None:
        call = replica.client.call
        begin = m.BeginUpdateArgs(
            version=state.version, fingerprint=state.fingerprint, placed_by="fleet", ends_with_client=True
        )
        committed, session = state.committed, (await call(begin))["session_id"]
        try:
            await part(session)
            await call(m.CommitUpdateArgs(session, **committed._asdict()))
        except BaseException:
            with contextlib.suppress(FastDeployError):
                await call(m.AbortUpdateArgs(session))
            raise

    async def _part(self, replica: Replica, source: WholeSource, session: str) -> None:
        await replica.client.call(m.UpdateChunkArgs(session, source))

    async def _copy(self, peer: Replica, replica: Replica, session: str) -> None:
        if peer.placement.host == replica.placement.host == host_id():
            path = (await peer.client.call(m.ExportWeightsArgs()))["path"]
            try:
                await self._part(replica, FileSource(path), session)
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
            return
        async with self._hosts.exported(peer) as weights:
            await self._hosts.add_part(replica, session, weights)
