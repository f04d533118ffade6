"""The weights of the fleet for a replica that lacks them: from their last source, or from a replica that has them."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Sequence

import httpx

from fastdeploy.core.errors import EngineError, FastDeployError, WrongOrder
from fastdeploy.core.weight_source import FileSource, WholeSource
from fastdeploy.fleet.config import FleetConfig
from fastdeploy.fleet.replica import Replica
from fastdeploy.fleet.state import FleetState
from fastdeploy.inter_communicator import messages as m

logger = logging.getLogger(__name__)
READ_TIMEOUT_S = 300.0  # between two pieces of a download or upload


class WeightTransfer:
    """Gives weights to a replica in a weight session, whose commit is refused unless the new weights have the
    fingerprint of the fleet's weights. A file is used between two replicas of the gateway's host, HTTP between others.
    """

    def __init__(self, config: FleetConfig):
        self._config = config

    async def give(self, replica: Replica, state: FleetState, peers: Sequence[Replica]) -> None:
        """Give ``replica`` the weights of the fleet. peers: replicas that serve them. Raises WrongOrder, which names the
        tries, if nobody can give them, and EngineError if the replica is lost."""
        tries: list[tuple[str, Callable[[str], Awaitable[object]]]] = []
        if state.source is not None:
            source = state.source
            tries.append((f"from {source}", lambda session: self._part(replica, session, source)))
        here = replica.placement.host
        for peer in sorted(peers, key=lambda peer: (peer.placement.host != here, peer.in_flight)):
            tries.append((f"from replica {peer.name}", lambda session, peer=peer: self._copy(peer, replica, session)))
        failures = []
        for name, part in tries:
            try:
                await self._update(replica, state, part)
                return
            except (FastDeployError, httpx.HTTPError, OSError) as error:
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
        epoch, session = state.weight_epoch, (await call(begin))["session_id"]
        try:
            await part(session)
            await call(m.CommitUpdateArgs(session, weight_epoch=epoch))
        except BaseException:
            with contextlib.suppress(FastDeployError):
                await call(m.AbortUpdateArgs(session))
            raise

    async def _part(self, replica: Replica, session: str, source: WholeSource) -> None:
        await replica.client.call(m.UpdateChunkArgs(session, source))

    async def _copy(self, peer: Replica, replica: Replica, session: str) -> None:
        if peer.placement.host == replica.placement.host == self._config.host:
            path = (await peer.client.call(m.ExportWeightsArgs()))["path"]
            try:
                await self._part(replica, session, FileSource(path))
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
            return
        key = self._config.replica_key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with (
            httpx.AsyncClient(timeout=httpx.Timeout(READ_TIMEOUT_S), headers=headers) as http,
            http.stream("GET", f"{peer.placement.url}/v1/weights/export") as export,
        ):
            export.raise_for_status()
            reply = await http.post(
                f"{replica.placement.url}/v1/weights/chunk",
                params={"session_id": session},
                content=export.aiter_bytes(),
                headers={"Content-Type": "application/octet-stream"},
            )
            reply.raise_for_status()
