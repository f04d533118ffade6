"""The source of a call on its way to replicas that cannot read it where it is.

The gateway that gets an upload has its file, whether this gateway leads or follows. So this gateway sends the file to
the other hosts (see remote.py). If another gateway leads, its call carries the path of each copy.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Mapping, Sequence

from fastdeploy.core.errors import EngineDead
from fastdeploy.core.files import open_regular
from fastdeploy.core.weight_source import FileSource, Source
from fastdeploy.fleet.chain import GrowingFile
from fastdeploy.fleet.config import FleetConfig
from fastdeploy.fleet.membership import Membership
from fastdeploy.fleet.remote import Outcomes, RemoteHosts, must_send
from fastdeploy.fleet.replica import Replica

Boots = Mapping[str, str]  # boot ids of engines, by the name of the replica


class Staging:
    """The sources that this gateway has sent to other hosts, or is sending. Use from one event loop only."""

    def __init__(self, config: FleetConfig, membership: Membership):
        self._config = config
        self._membership = membership
        self._early: dict[Source, EarlySending] = {}

    def needed(self, source: Source) -> dict[str, str]:
        """Return the members that need a copy of the source, each with the boot id of its engine."""
        return {replica.name: replica.boot_id for replica in self._membership.quorum if must_send(replica, source)}

    @contextlib.asynccontextmanager
    async def sending_early(self, path: str, nbytes: int) -> AsyncIterator[GrowingFile | None]:
        """Send an upload of ``nbytes`` bytes to the other hosts while the block receives it into the file ``path``, for
        the call that names it as its source, and is made in the block. Yield the file, which the block tells what is
        written; None = nobody needs it elsewhere."""
        source = FileSource(path)
        remote = [replica for replica in self._membership.quorum if must_send(replica, source)]
        if not remote:
            yield None
            return
        fd = open_regular(path)
        content = GrowingFile(fd, nbytes)
        self._early[source] = EarlySending(self._membership.hosts, remote, content)
        try:
            yield content
        finally:
            await self._early.pop(source).close()
            os.close(fd)

    async def outcomes(self, source: Source, boots: Boots, files: contextlib.AsyncExitStack) -> Outcomes:
        """Send the source to these replicas, unless it was sent early. The copies are there until ``files`` is closed.
        Raises EngineDead if this gateway does not come to know one of the engines in ``fence_after_s``, and the errors
        of RemoteHosts.staged."""
        replicas = await self._connected(boots)
        early = self._early.get(source)
        outcomes = await early.outcomes(boots) if early is not None else {}
        if missing := [replica for replica in replicas if replica.name not in outcomes]:
            outcomes |= await files.enter_async_context(self._membership.hosts.staged(missing, source))
        return outcomes

    async def _connected(self, boots: Boots) -> list[Replica]:
        """Return the replicas of these names, once this gateway is connected to these engines. Only then it certainly
        knows where they are now."""
        now, known = asyncio.get_running_loop().time, self._membership.replicas
        end = now() + self._config.fence_after_s
        while lacks := [name for name, boot in boots.items() if name not in known or known[name].boot_id != boot]:
            if now() >= end:
                raise EngineDead(f"this gateway has no connection to {', '.join(lacks)}: nothing was changed")
            await self._membership.until_moved(end - now())
        return [known[name] for name in boots]


class EarlySending:
    """The sending of one file to replicas on other hosts, while this host still receives the file. Its files are there
    until :meth:`close`."""

    def __init__(self, hosts: RemoteHosts, replicas: Sequence[Replica], content: GrowingFile):
        self._boots = {replica.name: replica.boot_id for replica in replicas}
        self._outcomes: asyncio.Future[Outcomes] = asyncio.get_running_loop().create_future()
        self._outcomes.add_done_callback(lambda future: future.cancelled() or future.exception())
        self._task = asyncio.create_task(self._run(hosts, replicas, content))

    async def _run(self, hosts: RemoteHosts, replicas: Sequence[Replica], content: GrowingFile) -> None:
        try:
            async with hosts.sent(replicas, content) as outcomes:
                self._outcomes.set_result(outcomes)
                await asyncio.Event().wait()
        except Exception as error:
            if self._outcomes.done():
                raise
            self._outcomes.set_exception(error)

    async def outcomes(self, boots: Boots) -> Outcomes:
        """Return the outcomes for those of the engines ``boots`` to which the file was sent."""
        all_outcomes = await asyncio.shield(self._outcomes)
        same = {name for name, boot in boots.items() if self._boots.get(name) == boot}
        return {name: outcome for name, outcome in all_outcomes.items() if name in same}

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._outcomes.cancel()
