"""The weights and adapters of the fleet for a replica that lacks them: from another replica, or from their source."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial

from msgspec.structs import replace

from fastdeploy.core.errors import EngineError, FastDeployError, WrongOrder
from fastdeploy.core.process import host_id
from fastdeploy.core.weight_source import FileSource, FolderSource, Source
from fastdeploy.fleet.remote import RemoteHosts
from fastdeploy.fleet.replica import Replica
from fastdeploy.fleet.state import FleetAdapter, FleetState
from fastdeploy.inter_communicator import messages as m

logger = logging.getLogger(__name__)
Way = tuple[str, Callable[[], Awaitable[object]]]  # to get something, with a name for people


class Transfer:
    """The way of weights and adapters to replicas that lack them. An engine refuses those that do not have the
    fingerprint of the fleet's. Files are used between replicas of one host, HTTP between others. ask_s: time in which
    an engine tells where its copy of an adapter is."""

    def __init__(self, hosts: RemoteHosts, ask_s: float):
        self._hosts, self._ask_s = hosts, ask_s

    # ------------------------------------------------------------------ weights

    async def give_weights(self, replica: Replica, state: FleetState, peers: Callable[[], Sequence[Replica]]) -> None:
        """Give ``replica`` the weights of the fleet, and all else that a commit of the fleet has set. Their last source
        comes first. peers: returns the replicas that serve them. Raises WrongOrder, which names the tries, if nobody
        can give them, and EngineError if the replica is lost."""
        what = f"the weights {state.version!r} of epoch {state.weight_epoch}"
        await _try_each(replica, what, self._ways_of_weights(replica, state, peers))

    def _ways_of_weights(
        self, replica: Replica, state: FleetState, peers: Callable[[], Sequence[Replica]]
    ) -> Iterator[Way]:
        if state.source is not None:
            yield f"from {state.source}", partial(self._update, replica, state, self._part, state.source)
        here = replica.placement.host
        for peer in sorted(peers(), key=lambda peer: (peer.placement.host != here, peer.in_flight)):
            yield f"from replica {peer.name}", partial(self._update, replica, state, self._copy, peer)

    async def _update(
        self, replica: Replica, state: FleetState, part: Callable[..., Awaitable[object]], origin: Source | Replica
    ) -> None:
        """Update the weights in a session, whose only part ``part(replica, session, origin)`` adds."""
        call = replica.client.call
        begin = m.BeginUpdateArgs(
            version=state.version, fingerprint=state.fingerprint, placed_by="fleet", ends_with_client=True
        )
        committed, session = state.committed, (await call(begin))["session_id"]
        try:
            await part(replica, session, origin)
            await call(m.CommitUpdateArgs(session, **committed._asdict()))
        except BaseException:
            with contextlib.suppress(FastDeployError):
                await call(m.AbortUpdateArgs(session))
            raise

    async def _part(self, replica: Replica, session: str, source: Source) -> None:
        await replica.client.call(m.UpdatePartArgs(session, source))

    async def _copy(self, replica: Replica, session: str, peer: Replica) -> None:
        if peer.placement.host == replica.placement.host == host_id():
            path = (await peer.client.call(m.ExportWeightsArgs()))["path"]
            try:
                await self._part(replica, session, FileSource(path))
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
            return
        async with self._hosts.copied(peer, replica) as source:
            await self._part(replica, session, source)

    # ------------------------------------------------------------------ adapters

    async def give_adapter(self, replica: Replica, adapter: FleetAdapter, peers: Sequence[Replica]) -> None:
        """Load ``adapter`` on ``replica``. The copies of other engines come first, one after the other, and the source
        last, since the trainer may have written another adapter to it. peers: the replicas that have a copy. Raises
        WrongOrder, which names the tries, if nobody can give it, and EngineError if the replica is lost."""
        what = f"adapter {adapter.args.lora_name!r} of epoch {adapter.epoch}"
        await _try_each(replica, what, self._ways_of_adapter(replica, adapter, peers))

    def _ways_of_adapter(self, replica: Replica, adapter: FleetAdapter, peers: Sequence[Replica]) -> Iterator[Way]:
        args = replace(adapter.args, prepare=True, replace=True, lookup=False, fingerprint=adapter.fingerprint)
        here = replica.placement.host
        for peer in peers:
            if peer.placement.host == here:
                yield f"from the copy of replica {peer.name}", partial(_load, replica, adapter, self._kept(peer, args))
        for peer in peers:
            if peer.placement.host != here or here != host_id():
                sent = self._sent(peer, replica, args)
                yield f"from replica {peer.name}, over HTTP", partial(_load, replica, adapter, sent)
        yield "from its source", partial(_load, replica, adapter, contextlib.nullcontext(args))

    @contextlib.asynccontextmanager
    async def _kept(self, peer: Replica, args: m.LoadAdapterArgs) -> AsyncIterator[m.LoadAdapterArgs]:
        """Yield the load of the folder in which ``peer`` keeps its copy."""
        async with asyncio.timeout(self._ask_s):
            copy = await peer.client.call(m.ExportAdapterArgs(args.lora_name))
        yield replace(args, source=FolderSource(copy["path"]), config=None)

    @contextlib.asynccontextmanager
    async def _sent(self, peer: Replica, replica: Replica, args: m.LoadAdapterArgs) -> AsyncIterator[m.LoadAdapterArgs]:
        """Send the copy of ``peer`` to a file on the replica's host. Yield the load of this file."""
        config = await self._hosts.adapter_config(peer, args.lora_name)
        async with self._hosts.copied(peer, replica, args.lora_name) as source:
            yield replace(args, source=source, config=config)


async def _load(
    replica: Replica, adapter: FleetAdapter, source: AbstractAsyncContextManager[m.LoadAdapterArgs]
) -> None:
    async with source as args:
        await replica.client.call(args)
    await replica.client.call(m.EndLoadArgs(args.lora_name, True, adapter.epoch, adapter.fingerprint))


async def _try_each(replica: Replica, what: str, ways: Iterable[Way]) -> None:
    """Try the ways in their order until one of them works."""
    failures = []
    for name, way in ways:
        try:
            await way()
            return
        except (FastDeployError, OSError) as error:
            if isinstance(error, EngineError) and not replica.client.connected.is_set():
                raise
            failures.append(f"{name}: {str(error) or 'no answer in time'}")
            logger.warning("replica %s did not get %s %s", replica.name, what, failures[-1])
    why = "; ".join(failures) or "their source is not known, and no other replica has them"
    raise WrongOrder(f"{what} cannot be had: {why}")
