"""Replicas on other hosts: the bytes of weights go to them and come from them over HTTP, through their API servers.

The engine of a replica reads files of its own host only. So a source that is a file or shared memory of the gateway's
host is sent into a file of the replica's host, which is there until the call on the fleet has ended. A folder is not
sent: it must have the same path on all hosts, so it lies on a file system that they share.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from fastdeploy.core.early_reply import EarlyReply
from fastdeploy.core.errors import EngineDead, FastDeployError, from_wire
from fastdeploy.core.files import open_regular
from fastdeploy.core.process import host_id
from fastdeploy.core.weight_source import (
    ADAPTER_CONFIG,
    FileSource,
    FolderSource,
    SharedMemorySource,
    Source,
    SourcePolicy,
)
from fastdeploy.fleet.config import FleetConfig
from fastdeploy.fleet.replica import Replica

if TYPE_CHECKING:
    import httpx

PIECE_BYTES = 1 << 20
READ_TIMEOUT_S = 300.0  # for the answer to weights that were sent, which the engine reads and checks
SPOOL, PART, EXPORT = "/v1/replicas/spool", "/v1/weights/chunk", "/v1/weights/export"
ADAPTER_EXPORT = "/v1/adapters/export"


def is_remote(replica: Replica) -> bool:
    """Return whether the replica is on another host than this process."""
    return replica.placement.host != host_id()


def must_send(replica: Replica, source: Source) -> bool:
    """Return whether the replica cannot read the source where it is."""
    return is_remote(replica) and not source.on_every_host


class RemoteHosts:
    """HTTP calls to the API servers of replicas. All of them raise EngineDead if the API server cannot be reached, or
    sends nothing for too long, and otherwise the error it answered with."""

    def __init__(self, config: FleetConfig):
        import httpx  # slow to import: at the start of a gateway, and never in an API server of one engine

        self._policy = SourcePolicy(config.model_roots, "")
        self._silence_s = max(config.fence_after_s, config.stall_s)
        headers = {"Authorization": f"Bearer {config.replica_key}"} if config.replica_key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)  # EarlyReply needs new connections
        self._http = httpx.AsyncClient(headers=headers, limits=limits, trust_env=False)

    async def close(self) -> None:
        await self._http.aclose()

    @contextlib.asynccontextmanager
    async def staged(self, replica: Replica, source: Source) -> AsyncIterator[Source]:
        """Send the content of a source to the replica's host. Yield the source that its engine can read while the
        block runs. Raises InvalidField for shared memory that is not allowed as a source, see also the class."""
        assert not isinstance(source, FolderSource), "a folder is not sent"
        self._policy_check(source)
        with _opened(source) as (fd, nbytes):
            async with self._spooled(replica, _pieces(fd, nbytes), {"Content-Length": str(nbytes)}) as path:
                yield FileSource(path)

    @contextlib.asynccontextmanager
    async def passed_on(self, replica: Replica, export: httpx.Response) -> AsyncIterator[FileSource]:
        """Send the body of an export to a file on the replica's host, as it comes. Yield the file, which is there while
        the block runs."""
        async with self._spooled(replica, export.aiter_bytes(PIECE_BYTES), _length_of(export)) as path:
            yield FileSource(path)

    @contextlib.asynccontextmanager
    async def _spooled(
        self, replica: Replica, body: AsyncIterator[bytes], length: dict[str, str]
    ) -> AsyncIterator[str]:
        headers = {"Content-Type": "application/octet-stream"} | length
        async with self._reply(replica, "POST", SPOOL, body, headers=headers) as reply:
            pieces = reply.aiter_bytes()  # its end closes the connection, so it must live as long as the block
            yield await _first_path(replica, pieces)

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
        params = {"lora_name": lora_name, "file": file}
        async with self._reply(replica, "GET", ADAPTER_EXPORT, silence_s=READ_TIMEOUT_S, params=params) as reply:
            yield reply

    @contextlib.asynccontextmanager
    async def exported(self, replica: Replica, tensors: Sequence[str] = ()) -> AsyncIterator[httpx.Response]:
        """Yield the answer to GET /v1/weights/export, whose body is not received yet. tensors: names; none = all."""
        params = {"tensors": list(tensors)}
        async with self._reply(replica, "GET", EXPORT, silence_s=READ_TIMEOUT_S, params=params) as reply:
            yield reply

    async def add_part(self, replica: Replica, session: str, weights: httpx.Response) -> None:
        """Send the body of ``weights`` to the weight session ``session`` of the replica's engine, as it comes."""
        headers = {"Content-Type": "application/octet-stream"} | _length_of(weights)
        body, params = weights.aiter_bytes(PIECE_BYTES), {"session_id": session}
        sent = self._reply(replica, "POST", PART, body, silence_s=READ_TIMEOUT_S, params=params, headers=headers)
        async with sent as reply:
            await reply.aread()

    def _policy_check(self, source: Source) -> None:
        if isinstance(source, SharedMemorySource):  # the replica's engine only sees a file
            self._policy.check(source)

    @contextlib.asynccontextmanager
    async def _reply(
        self,
        replica: Replica,
        method: str,
        path: str,
        body: AsyncIterator[bytes] | None = None,
        silence_s: float | None = None,
        **options: Any,
    ) -> AsyncIterator[httpx.Response]:
        import httpx

        if body is not None:
            early = EarlyReply()
            options |= {"content": early.body(body), "extensions": early.extensions}
        timeout = httpx.Timeout(self._silence_s, read=silence_s or self._silence_s)
        url = replica.placement.url + path
        try:
            async with self._http.stream(method, url, timeout=timeout, **options) as reply:
                if reply.status_code != 200:
                    raise _error(replica, reply.status_code, await reply.aread())
                yield reply
        except httpx.HTTPError as error:
            why = f"its API server at {replica.placement.url} failed: {type(error).__name__} {error}".rstrip()
            raise EngineDead(f"replica {replica.name}: {why}") from error


def _length_of(reply: httpx.Response) -> dict[str, str]:
    length = reply.headers.get("Content-Length")
    return {} if length is None else {"Content-Length": length}


def _error(replica: Replica, status: int, body: bytes) -> FastDeployError:
    """Return the error that an API server answered."""
    try:
        detail = msgspec.json.decode(body)["error"]
        code, message = str(detail.pop("code")), str(detail.pop("message"))
    except (msgspec.DecodeError, TypeError, KeyError):
        return EngineDead(f"replica {replica.name}: {replica.placement.url} answered with status {status}")
    return from_wire(code, f"replica {replica.name}: {message}", {})


async def _first_path(replica: Replica, pieces: AsyncIterator[bytes]) -> str:
    """Return the path in the first line of an answer to SPOOL. The answer goes on."""
    line, ended = b"", False
    while not ended and (piece := await anext(pieces, b"")):
        line += piece
        line, ended = line.split(b"\n", 1)[0], b"\n" in line
    try:
        path: str = msgspec.json.decode(line)["path"]
    except (msgspec.DecodeError, UnicodeDecodeError, TypeError, KeyError) as error:
        raise EngineDead(f"replica {replica.name}: {replica.placement.url} has not named its file") from error
    return path


@contextlib.contextmanager
def _opened(source: FileSource | SharedMemorySource) -> Iterator[tuple[int, int]]:
    """Yield the descriptor and the number of bytes of the content. Raises OSError."""
    fd = open_regular(source.file)
    try:
        yield fd, source.nbytes or os.fstat(fd).st_size
    finally:
        os.close(fd)


async def _pieces(fd: int, nbytes: int) -> AsyncIterator[bytes]:
    offset = 0
    while offset < nbytes:
        piece = await asyncio.to_thread(os.pread, fd, min(nbytes - offset, PIECE_BYTES), offset)
        if not piece:
            raise EOFError(f"a source of weights ends {nbytes - offset} bytes too early")
        yield piece
        offset += len(piece)
