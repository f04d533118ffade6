"""An adapter of the fleet for a replica that lacks it: from the engines' own copies, or else from its source."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager

from msgspec.structs import replace

from fastdeploy.core.errors import EngineError, FastDeployError, WrongOrder
from fastdeploy.core.process import host_id
from fastdeploy.core.weight_source import ADAPTER_TENSORS, FolderSource
from fastdeploy.fleet.remote import RemoteHosts
from fastdeploy.fleet.replica import Replica
from fastdeploy.fleet.state import FleetAdapter
from fastdeploy.inter_communicator import messages as m

logger = logging.getLogger(__name__)
Tries = list[tuple[str, AbstractAsyncContextManager[m.LoadAdapterArgs]]]


class AdapterTransfer:
    """Gives an adapter to a replica in a load that is refused unless the adapter has the fingerprint of the fleet's.

    The copies of other engines come first: as a folder on the replica's host, over HTTP elsewhere. The source comes
    last, since the trainer may have written another adapter to it. ask_s: time in which an engine tells its copy."""

    def __init__(self, hosts: RemoteHosts, ask_s: float):
        self._hosts, self._ask_s = hosts, ask_s

    async def give(self, replica: Replica, adapter: FleetAdapter, others: Sequence[Replica]) -> None:
        """Load ``adapter`` on ``replica``. others: replicas that may have a copy. Raises WrongOrder, which names the
        tries, if nobody can give it, and EngineError if the replica is lost."""
        args = replace(adapter.args, prepare=True, replace=True, lookup=False, fingerprint=adapter.fingerprint)
        failures = []
        for name, source in await self._tries(replica, args, others):
            try:
                async with source as found:
                    await replica.client.call(found)
                await replica.client.call(m.EndLoadArgs(args.lora_name, True, adapter.epoch, adapter.fingerprint))
                return
            except (FastDeployError, OSError) as error:
                if isinstance(error, EngineError) and not replica.client.connected.is_set():
                    raise
                logger.warning("replica %s did not get adapter %r %s: %s", replica.name, args.lora_name, name, error)
                failures.append(f"{name}: {error}")
        raise WrongOrder(f"adapter {args.lora_name!r} of epoch {adapter.epoch} cannot be had: {'; '.join(failures)}")

    async def _tries(self, replica: Replica, args: m.LoadAdapterArgs, others: Sequence[Replica]) -> Tries:
        """Return the ways to get the adapter, in the order of preference, with names for people."""
        paths = await asyncio.gather(*(self._copy_of(other, args) for other in others))
        here = replica.placement.host
        folders: Tries = []
        downloads: Tries = []
        for other, path in zip(others, paths, strict=True):
            if path is None:
                continue
            shares_files = other.placement.host == here
            if shares_files:
                copy = replace(args, source=FolderSource(path), config=None)
                folders.append((f"from the copy of replica {other.name}", contextlib.nullcontext(copy)))
            if not shares_files or here != host_id():
                downloads.append((f"from replica {other.name}, over HTTP", self._sent(other, replica, args)))
        return [*folders, *downloads, ("from its source", contextlib.nullcontext(args))]

    async def _copy_of(self, other: Replica, args: m.LoadAdapterArgs) -> str | None:
        """Return the folder in which another engine keeps the adapter, if it has the same adapter."""
        with contextlib.suppress(FastDeployError, TimeoutError):
            async with asyncio.timeout(self._ask_s):
                copy = await other.client.call(m.ExportAdapterArgs(args.lora_name))
            if copy["fingerprint"] == args.fingerprint:
                return str(copy["path"])
        return None

    @contextlib.asynccontextmanager
    async def _sent(
        self, other: Replica, replica: Replica, args: m.LoadAdapterArgs
    ) -> AsyncIterator[m.LoadAdapterArgs]:
        """Send the copy of ``other`` to a file on the replica's host. Yield the load of this file."""
        config = await self._hosts.adapter_config(other, args.lora_name)
        tensors = self._hosts.exported_adapter(other, args.lora_name, ADAPTER_TENSORS)
        async with tensors as reply, self._hosts.passed_on(replica, reply) as source:
            yield replace(args, source=source, config=config)
