"""Replicas on other hosts: the bytes of weights go to them and come from them over HTTP, through their API servers.

The engine of a replica reads files of its own host only. So a source that is a file or shared memory of the gateway's
host is sent into a file of each other host (fleet/chain.py), which is there until the call on the fleet has ended. A
folder is not sent: it must have the same path on all hosts, so it lies on a file system that they share.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from fastdeploy.core.errors import EngineDead, FastDeployError
from fastdeploy.core.files import open_regular
from fastdeploy.core.process import host_id
from fastdeploy.core.weight_source import (
    ADAPTER_CONFIG,
    ADAPTER_TENSORS,
    FileSource,
    FolderSource,
    SharedMemorySource,
    Source,
    SourcePolicy,
)
from fastdeploy.fleet.chain import MOST_BYTES, SEND, GrowingFile, Hop, HostCalls, Reserved, first_line, new_http
from fastdeploy.fleet.config import FleetConfig
from fastdeploy.fleet.replica import Replica

if TYPE_CHECKING:
    import httpx

logger = logging.getLogger(__name__)
READ_TIMEOUT_S = 300.0  # for an export, which the engine writes first
EXPORT, ADAPTER_EXPORT = "/v1/weights/export", "/v1/adapters/export"
Outcomes = dict[str, FileSource | FastDeployError]  # by the name of a replica: what its engine can read, or why not


def is_remote(replica: Replica) -> bool:
    """Return whether the replica is on another host than this process."""
    return replica.placement.host != host_id()


def must_send(replica: Replica, source: Source) -> bool:
    """Return whether the replica cannot read the source where it is."""
    return is_remote(replica) and not source.on_every_host


class RemoteHosts:
    """The files of replicas on other hosts. All errors about a replica are those of HostCalls."""

    def __init__(self, config: FleetConfig):
        self._policy = SourcePolicy(config.model_roots, "")
        self._silence_s = max(config.fence_after_s, config.stall_s)
        headers = {"Authorization": f"Bearer {config.replica_key}"} if config.replica_key else {}
        self._http = new_http()
        self._calls = HostCalls(self._http, headers, self._silence_s)

    async def close(self) -> None:
        await self._http.aclose()

    # ------------------------------------------------------------------ from this host

    @contextlib.asynccontextmanager
    async def staged(self, replicas: Sequence[Replica], source: Source) -> AsyncIterator[Outcomes]:
        """Send the content of a source to the hosts of ``replicas``. Yield the outcomes. The files are there while the
        block runs. Raises InvalidField for shared memory that is not allowed as a source, and OSError."""
        assert not isinstance(source, FolderSource), "a folder is not sent"
        if isinstance(source, SharedMemorySource):  # the replica's engine only sees a file
            self._policy.check(source)
        fd = open_regular(source.file)
        try:
            nbytes = source.nbytes or os.fstat(fd).st_size
            async with self.sent(replicas, GrowingFile(fd, nbytes, written=nbytes)) as outcomes:
                yield outcomes
        finally:
            os.close(fd)

    @contextlib.asynccontextmanager
    async def sent(self, replicas: Sequence[Replica], content: GrowingFile) -> AsyncIterator[Outcomes]:
        """Send ``content``, which may still be written, as :meth:`staged` does."""
        async with contextlib.AsyncExitStack() as files:
            outcomes: Outcomes = {}
            by_host: dict[str, list[Replica]] = {}
            for replica in replicas:
                by_host.setdefault(replica.placement.host, []).append(replica)
            reserving = (self._reserve(on_host, content.nbytes, files, outcomes) for on_host in by_host.values())
            groups = [group for on_host in await asyncio.gather(*reserving) for group in on_host]
            outcomes |= await self._fill(groups, content)
            yield outcomes

    async def _reserve(
        self, replicas: Iterable[Replica], nbytes: int, files: contextlib.AsyncExitStack, outcomes: Outcomes
    ) -> list[list[Hop]]:
        """Make files on one host, which are there until ``files`` is closed. Return the hops to each file, one for each
        replica that shares the file. outcomes: gets the errors."""
        groups: list[list[Hop]] = []
        for replica in replicas:
            name, url, like = replica.name, replica.placement.url, groups[0][0].path if groups else ""
            try:
                file = await files.enter_async_context(self._calls.reserved(name, url, nbytes, like))
            except FastDeployError as error:
                outcomes[name] = error
                continue
            hop = Hop(name, url, file.path)
            if file.is_link:
                groups[0].append(hop)
            else:
                groups.append([hop])
        return groups

    async def _fill(self, groups: Sequence[list[Hop]], content: GrowingFile) -> Outcomes:
        """Send ``content`` along a chain of one hop of each group. That a host has not reached the next one may be no
        fault of the next one, so this host tries that itself, and decides."""
        doubtful, errors, again = set[str](), dict[str, FastDeployError](), False
        todo = [group[0] for group in groups]
        while todo:
            head, *behind = todo
            try:
                passed = await self._calls.send(content, head, behind, again)
            except FastDeployError as error:
                errors[head.name], todo = error, behind
            else:
                for failure in passed.failed:
                    logger.warning("weights were not passed on from host to host: %s", failure.message)
                doubtful.update(failure.name for failure in passed.failed)
                todo = [hop for hop in behind if hop.name in passed.untried]
            again = True
        # A group of one hop that failed here is lost. Other replicas of the group may still reach their file.
        tries = [hop for group in groups if group[0].name in doubtful for hop in group]
        tries += [hop for group in groups if group[0].name in errors for hop in group[1:]]
        results = await asyncio.gather(*(self._send_alone(content, hop) for hop in tries))
        errors |= {hop.name: error for hop, error in zip(tries, results, strict=True) if error is not None}
        return {hop.name: errors.get(hop.name, FileSource(hop.path)) for group in groups for hop in group}

    async def _send_alone(self, content: GrowingFile, hop: Hop) -> FastDeployError | None:
        try:
            await self._calls.send(content, hop, (), again=True)
        except FastDeployError as error:
            return error
        return None

    # ------------------------------------------------------------------ from another host

    @contextlib.asynccontextmanager
    async def copied(self, owner: Replica, replica: Replica, lora_name: str | None = None) -> AsyncIterator[FileSource]:
        """Copy the weights that ``owner`` serves, or the tensors of its adapter ``lora_name``, to a file on the host of
        ``replica``. Yield the file, which is there while the block runs. The bytes go from host to host; if that fails,
        through this process as they come."""
        async with contextlib.AsyncExitStack() as files:
            file = None
            if is_remote(replica):  # perhaps nobody else can use the address of a replica on this host
                try:
                    file = await files.enter_async_context(self._sent_by(owner, replica, lora_name))
                except FastDeployError as error:
                    logger.info("weights pass through the gateway, since another way failed: %s", error)
            if file is None:
                file = await files.enter_async_context(self._passed_through(owner, replica, lora_name))
            yield FileSource(file.path)

    @contextlib.asynccontextmanager
    async def _sent_by(self, owner: Replica, replica: Replica, lora_name: str | None) -> AsyncIterator[Reserved]:
        to = {"name": replica.name, "url": replica.placement.url}
        body = {"lora_name": lora_name, "to": to, "silence_s": self._silence_s}
        async with self._calls.reply(owner.name, owner.placement.url, "POST", SEND, json=body) as reply:
            pieces = reply.aiter_bytes()  # its end closes the connection, so it must live as long as the block
            yield await first_line(owner.name, pieces, Reserved)

    @contextlib.asynccontextmanager
    async def _passed_through(self, owner: Replica, replica: Replica, lora_name: str | None) -> AsyncIterator[Reserved]:
        export = self.exported(owner) if lora_name is None else self.exported_adapter(owner, lora_name, ADAPTER_TENSORS)
        async with export as tensors:
            nbytes = int(tensors.headers["Content-Length"])
            async with self._calls.reserved(replica.name, replica.placement.url, nbytes) as file:
                hop = Hop(replica.name, replica.placement.url, file.path)
                await self._calls.send_pieces(tensors.aiter_bytes(MOST_BYTES), nbytes, hop)
                yield file

    async def adapter_config(self, replica: Replica, lora_name: str) -> dict[str, Any]:
        """Return the content of adapter_config.json of the copy that the replica's engine keeps."""
        async with self.exported_adapter(replica, lora_name, ADAPTER_CONFIG) as reply:
            data = await reply.aread()
        try:
            return msgspec.json.decode(data, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise EngineDead(f"replica {replica.name}: its {ADAPTER_CONFIG} of {lora_name!r} is no JSON") from error

    @contextlib.asynccontextmanager
    async def exported_adapter(self, replica: Replica, lora_name: str, file: str) -> AsyncIterator[httpx.Response]:
        """Yield the answer to GET /v1/adapters/export, whose body is not received yet."""
        async with self._get(replica, ADAPTER_EXPORT, {"lora_name": lora_name, "file": file}) as reply:
            yield reply

    @contextlib.asynccontextmanager
    async def exported(self, replica: Replica, tensors: Sequence[str] = ()) -> AsyncIterator[httpx.Response]:
        """Yield the answer to GET /v1/weights/export, whose body is not received yet. tensors: names; none = all."""
        async with self._get(replica, EXPORT, {"tensors": list(tensors)}) as reply:
            yield reply

    def _get(
        self, replica: Replica, path: str, params: dict[str, Any]
    ) -> contextlib.AbstractAsyncContextManager[httpx.Response]:
        url = replica.placement.url
        return self._calls.reply(replica.name, url, "GET", path, silence_s=READ_TIMEOUT_S, params=params)
