"""A chain of hosts along which weights pass: each host writes the bytes to its file, and sends them on as they come.

Each file is made first, by POST SPOOL to the API server of its host, and is there until the gateway closes the
connection of that call. Then one PUT SPOOL carries the bytes to the first host, and makes it send them to the next one.
A host sends what its file has. So a slow host delays those behind it only, and nothing is kept in memory for it.

A host that is lost breaks no chain: the host before it goes on with the host behind it, from the last byte that is
there. All bytes of a file come from one source, so two senders of one file write the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from fastdeploy.core.early_reply import EarlyReply
from fastdeploy.core.errors import EngineDead, FastDeployError, from_wire

if TYPE_CHECKING:
    import httpx

SPOOL, SEND = "/v1/replicas/spool", "/v1/replicas/send"
MOST_BYTES = 1 << 20  # that are read from a file and sent at once
LEAST_BYTES = 256 << 10  # so many bytes, or the end of the file, are waited for: a call for each packet costs too much
MAX_FAILURES = 3  # of hosts in a row; then the sender has perhaps no way to the others, and the gateway sends to them
KEEPALIVES = 4  # empty lines of an answer in each silence_s
Line = TypeVar("Line", bound=msgspec.Struct)


class GrowingFile:
    """A file that is written from its start to its end, and read meanwhile. fd: of the file. nbytes: of all of it.
    written: bytes from its start that are there. Use on one event loop."""

    def __init__(self, fd: int, nbytes: int, written: int = 0):
        self.fd, self.nbytes, self.written = fd, nbytes, written
        self._grown = asyncio.Event()

    def advance(self, nbytes: int) -> None:
        """Tell the readers that ``nbytes`` more bytes are written."""
        self.written += nbytes
        self._grown.set()

    async def pieces(self, offset: int) -> AsyncIterator[bytes]:
        """Yield the bytes from ``offset`` to the end, as they come. Raises EOFError if the file is cut meanwhile."""
        while offset < self.nbytes:
            while self.written < min(offset + LEAST_BYTES, self.nbytes):
                self._grown.clear()
                await self._grown.wait()
            piece = await asyncio.to_thread(os.pread, self.fd, min(self.written - offset, MOST_BYTES), offset)
            if not piece:
                raise EOFError(f"a source of weights ends {self.nbytes - offset} bytes too early")
            yield piece
            offset += len(piece)


class Hop(msgspec.Struct, frozen=True):
    """One file of a chain. name, url: of a replica on its host, and of the API server there."""

    name: str
    url: str
    path: str


class Reserved(msgspec.Struct, frozen=True):
    """The answer to POST SPOOL. path: of the file. is_link: whether the file is that of ``like``."""

    path: str
    is_link: bool = False


class Failure(msgspec.Struct, frozen=True):
    """Why a host could not be sent to. name: of its replica. code, message: of the error."""

    name: str
    code: str
    message: str


class Passed(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer to PUT SPOOL, about the hosts behind the one that answers. All have their bytes but those of
    ``failed``, and those of ``untried``: names of replicas."""

    failed: tuple[Failure, ...] = ()
    untried: tuple[str, ...] = ()


def new_http() -> httpx.AsyncClient:
    """Return a client for HostCalls. Takes some 0.2 s the first time."""
    import httpx  # slow to import: at the start of a gateway, and in an API server of one engine when it is used

    # EarlyReply needs new connections.
    return httpx.AsyncClient(limits=httpx.Limits(max_connections=None, max_keepalive_connections=0), trust_env=False)


class HostCalls:
    """HTTP calls to the API servers of replicas. All of them raise EngineDead if the API server cannot be reached, or
    sends nothing for too long, and otherwise the error it answered with. headers: of each call."""

    def __init__(self, http: httpx.AsyncClient, headers: Mapping[str, str], silence_s: float):
        self._http, self._headers, self._silence_s = http, dict(headers), silence_s

    @contextlib.asynccontextmanager
    async def reserved(self, name: str, url: str, nbytes: int, like: str = "") -> AsyncIterator[Reserved]:
        """Make a file for ``nbytes`` bytes on a replica's host, which is there while the block runs. like: the file of
        another replica, perhaps of the same host: then both are one."""
        body = {"nbytes": nbytes, "like": like, "silence_s": self._silence_s}
        async with self.reply(name, url, "POST", SPOOL, json=body) as reply:
            pieces = reply.aiter_bytes()  # its end closes the connection, so it must live as long as the block
            yield await first_line(name, pieces, Reserved)

    async def send(self, content: GrowingFile, hop: Hop, behind: Sequence[Hop], again: bool = False) -> Passed:
        """Send ``content`` to the file of ``hop``, and have it sent on to those ``behind``. again: some of the bytes
        may be there from an earlier try."""
        offset = await self._written(hop) if again else 0
        return await self.send_pieces(content.pieces(offset), content.nbytes, hop, behind, offset)

    async def send_pieces(
        self, pieces: AsyncIterator[bytes], nbytes: int, hop: Hop, behind: Sequence[Hop] = (), offset: int = 0
    ) -> Passed:
        """Send a file as :meth:`send` does. nbytes: of the file. pieces: its bytes from ``offset`` on."""
        plan = msgspec.json.encode(behind)
        params = {"path": hop.path, "plan": len(plan), "nbytes": nbytes, "offset": offset, "silence_s": self._silence_s}
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(len(plan) + nbytes - offset)}
        body = _joined(plan, pieces)
        async with self.reply(hop.name, hop.url, "PUT", SPOOL, body, params=params, headers=headers) as reply:
            return await first_line(hop.name, reply.aiter_bytes(), Passed)

    async def send_on(self, content: GrowingFile, hops: Sequence[Hop], again: bool) -> Passed:
        """Send ``content`` to the first of ``hops`` that takes it, and have it sent on from there. again: see
        :meth:`send`."""
        failed: list[Failure] = []
        for at, hop in enumerate(hops):
            if len(failed) == MAX_FAILURES:
                return Passed(tuple(failed), tuple(hop.name for hop in hops[at:]))
            try:
                passed = await self.send(content, hop, hops[at + 1 :], again or bool(failed))
            except FastDeployError as error:
                failed.append(Failure(hop.name, error.code, error.message))
            else:
                return Passed((*failed, *passed.failed), passed.untried)
        return Passed(tuple(failed))

    async def _written(self, hop: Hop) -> int:
        """Return the number of bytes that the file of ``hop`` has."""
        async with self.reply(hop.name, hop.url, "GET", SPOOL, params={"path": hop.path}) as reply:
            data = await reply.aread()
        try:
            return msgspec.json.decode(data, type=dict[str, int])["nbytes"]
        except (msgspec.DecodeError, KeyError) as error:
            raise EngineDead(f"replica {hop.name}: {hop.url} has not told the length of its file") from error

    @contextlib.asynccontextmanager
    async def reply(
        self,
        name: str,
        url: str,
        method: str,
        path: str,
        body: AsyncIterator[bytes] | None = None,
        silence_s: float | None = None,
        headers: Mapping[str, str] = {},
        **options: Any,
    ) -> AsyncIterator[httpx.Response]:
        """Yield the answer of the API server at ``url``, whose body is not received yet. name: of its replica.
        silence_s: until the answer, and between its pieces."""
        import httpx

        if body is not None:
            early = EarlyReply()
            options |= {"content": early.body(body), "extensions": early.extensions}
        timeout = httpx.Timeout(self._silence_s, read=silence_s or self._silence_s)
        options |= {"headers": {**self._headers, **headers}, "timeout": timeout}
        try:
            async with self._http.stream(method, url + path, **options) as reply:
                if reply.status_code != 200:
                    raise _error(name, url, reply.status_code, await reply.aread())
                yield reply
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            why = f"its API server at {url} failed: {type(error).__name__} {error}".rstrip()
            raise EngineDead(f"replica {name}: {why}") from error


async def first_line(name: str, pieces: AsyncIterator[bytes], kind: type[Line]) -> Line:
    """Return the first line of an answer that is not empty. The answer may go on. name: of the replica."""
    line, ended = b"", False
    while not ended and (piece := await anext(pieces, b"")):
        line += piece
        line, ended = line.lstrip(b"\n").split(b"\n", 1)[0], b"\n" in line.lstrip(b"\n")
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EngineDead(f"replica {name}: its API server has not said what became of the file") from error


async def _joined(first: bytes, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for piece in pieces:
        yield piece


def _error(name: str, url: str, status: int, body: bytes) -> FastDeployError:
    """Return the error that an API server answered."""
    try:
        detail = msgspec.json.decode(body)["error"]
        code, message = str(detail.pop("code")), str(detail.pop("message"))
    except (msgspec.DecodeError, TypeError, KeyError):
        return EngineDead(f"replica {name}: {url} answered with status {status}")
    return from_wire(code, f"replica {name}: {message}", {})
