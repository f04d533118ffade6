"""What starts and ends replicas: the parent process on one host, Ray on many (entrypoints/ray_launcher.py), or somebody
else.

The parent starts its replicas on the host of the gateway, and the two speak over a socket pair, in JSON lines. The
parent sends the placements, at first and after each change, and one Answer for each Ask of the gateway.

A rolling change (fleet/roll.py) starts every process again with other settings, or another version of this package. The
parent keeps how far it is, so any gateway can carry it on.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from enum import Enum
from typing import Any, Protocol

import msgspec

from fastdeploy.core.errors import ControlError, EngineDead

READ_BYTES = 1 << 16
MAX_LINE = 1 << 24  # bytes; a placement has some 200


class Placement(msgspec.Struct, frozen=True):
    """A replica that was started. name: unique in the fleet, kept by a restart. endpoint: ZMQ address of its engine.
    url: of its API servers. host: id of the machine; replicas of one host share its memory and files. settings: number
    of the settings that it was started with, which counts the rolling changes."""

    name: str
    endpoint: str
    url: str
    host: str
    settings: int = 0


class RollPhase(Enum):
    """The part of the fleet that a rolling change replaces now. FAILED: it went back to the settings from before, or
    could not even do that."""

    REPLICAS = "replicas"
    GATEWAYS = "gateways"
    PARENT = "parent"
    DONE = "done"
    FAILED = "failed"


class Roll(msgspec.Struct, frozen=True):
    """A rolling change. settings: number of the settings that every process gets: those of the change, or those from
    before if it goes back. given: flags that differ from those of the command line. drain_s: how long a replica may
    finish its requests before they go on elsewhere. why: reason to go back; "" = none."""

    settings: int
    phase: RollPhase
    given: dict[str, str] = {}
    drain_s: float = 0.0
    why: str = ""

    @property
    def runs(self) -> bool:
        """Whether it has not ended."""
        return self.phase not in (RollPhase.DONE, RollPhase.FAILED)


class Launcher(Protocol):
    """Starts, restarts and ends replicas. A replica that dies is started again without being asked. roll: the last
    rolling change, if there was one."""

    roll: Roll | None

    def placements(self) -> AsyncIterator[Sequence[Placement]]:
        """Yield the list of all replicas, now and after each change."""
        ...

    async def restart(self, name: str, why: str) -> None:
        """End the replica at once, even if its process is stopped, and start it again. Returns without waiting for
        the new one."""
        ...

    async def add(self) -> str:
        """Start one more replica. Return its name."""
        ...

    async def remove(self, name: str) -> None:
        """End the replica in an orderly way, and do not start it again."""
        ...

    async def begin_roll(self, given: dict[str, str], drain_s: float) -> Roll:
        """Begin a rolling change. Raises ControlError for settings that are refused, while another change runs, or if
        these replicas cannot be started with other settings."""
        ...

    async def replace(self, name: str) -> None:
        """End the replica in an orderly way, and start it with the settings of the rolling change. Returns when the old
        process has ended."""
        ...

    async def go_back(self, name: str, why: str) -> None:
        """Let the rolling change go back to the settings from before, since the replica does not work with the new
        ones."""
        ...

    async def replicas_replaced(self) -> None:
        """Go on with the next phase of the rolling change: all replicas have its settings, and are members."""
        ...

    async def close(self) -> None: ...


class WithoutRoll:
    """The part of a Launcher that can start no replica with other settings. why_no_roll: the reason, for people."""

    roll: Roll | None = None
    why_no_roll = "the replicas of this fleet cannot be started with other settings"

    async def begin_roll(self, given: dict[str, str], drain_s: float) -> Roll:
        """Raises ControlError."""
        raise ControlError(self.why_no_roll)

    async def replace(self, name: str) -> None:
        """See begin_roll."""
        raise ControlError(self.why_no_roll)

    async def go_back(self, name: str, why: str) -> None:
        """See begin_roll."""
        raise ControlError(self.why_no_roll)

    async def replicas_replaced(self) -> None:
        """See begin_roll."""
        raise ControlError(self.why_no_roll)


class StaticLauncher(WithoutRoll):
    """Replicas that somebody else runs. They cannot be restarted, added or removed from here."""

    def __init__(self, placements: Sequence[Placement]):
        self._placements = list(placements)
        names = ", ".join(placement.name for placement in placements)
        self.why_no_roll = f"{names}: started by somebody else, who must drain each, start it again and undrain it"

    async def placements(self) -> AsyncIterator[Sequence[Placement]]:
        yield self._placements

    async def restart(self, name: str, why: str) -> None:
        return

    async def add(self) -> str:
        raise ControlError("this gateway does not start replicas: add one to its command line")

    async def remove(self, name: str) -> None:
        self._placements = [placement for placement in self._placements if placement.name != name]

    async def close(self) -> None:
        return


# ---------------------------------------------------------------------- replicas that the parent starts


class Action(Enum):
    """What a gateway asks its parent to do (see Launcher)."""

    RESTART = "restart"
    ADD = "add"
    REMOVE = "remove"
    ROLL = "roll"
    REPLACE = "replace"
    GO_BACK = "go_back"
    REPLICAS_REPLACED = "replicas_replaced"


class Placements(msgspec.Struct, frozen=True, tag=True):
    """All replicas, and the last rolling change."""

    replicas: list[Placement]
    roll: Roll | None = None


class Ask(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """A message of the gateway to its parent. name: of a replica, if the action is about one. why: for the log. given,
    drain_s: of ROLL."""

    ask_id: int
    action: Action
    name: str = ""
    why: str = ""
    given: dict[str, str] = {}
    drain_s: float = 0.0


class Answer(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """The answer of the parent to an Ask. name: of the replica. error: why the parent did nothing; "" = it did what was
    asked. roll: that it has begun."""

    ask_id: int
    name: str = ""
    error: str = ""
    roll: Roll | None = None


class ParentEnd:
    """The parent's end of the socket pair, for a selector. It never blocks."""

    def __init__(self, link: socket.socket):
        link.setblocking(False)
        self._link = link
        self._in, self._out = b"", b""

    def fileno(self) -> int:
        return self._link.fileno()

    @property
    def wants_to_write(self) -> bool:
        """Whether a part of what was sent still waits for room: then call :meth:`flush` when there is room."""
        return bool(self._out)

    def send(self, message: Placements | Answer) -> None:
        self._out += msgspec.json.encode(message) + b"\n"
        self.flush()

    def flush(self) -> None:
        try:
            while self._out:
                self._out = self._out[self._link.send(self._out) :]
        except BlockingIOError:
            return
        except OSError:  # the gateway has died; its end is seen elsewhere
            self._out = b""

    def read(self) -> list[Ask] | None:
        """Return the messages of all complete lines that are there; None once the gateway has closed its end."""
        closed = False
        try:
            while data := self._link.recv(READ_BYTES):
                self._in += data
            closed = True
        except BlockingIOError:
            pass
        except OSError:
            closed = True
        *lines, self._in = self._in.split(b"\n")
        if closed and not lines:
            return None
        return [msgspec.json.decode(line, type=Ask) for line in lines]

    def close(self) -> None:
        self._link.close()


class LocalLauncher:
    """The gateway's end of the socket pair, as a Launcher. on_lost: called when the parent has died."""

    def __init__(self, link: socket.socket, on_lost: Callable[[], None]):
        self._link = link
        self._on_lost = on_lost
        self._now: list[Placement] | None = None
        self.roll: Roll | None = None
        self._changed = asyncio.Event()
        self._asked: dict[int, asyncio.Future[Answer]] = {}
        self._ids = itertools.count(1)
        self._writer: asyncio.StreamWriter | None = None
        self._task: asyncio.Task[None] | None = None

    async def placements(self) -> AsyncIterator[Sequence[Placement]]:
        """See Launcher. Iterate once."""
        reader, self._writer = await asyncio.open_connection(sock=self._link, limit=MAX_LINE)
        self._task = asyncio.create_task(self._read(reader), name="local-launcher")
        self._task.add_done_callback(lambda _: self._changed.set())
        while not self._task.done():
            await self._changed.wait()
            self._changed.clear()
            if self._now is not None:
                yield self._now
        self._task.result()  # raises the error of a message that cannot be read

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):  # of a parent that has died before it read all
            while line := await reader.readline():
                match msgspec.json.decode(line, type=Placements | Answer):
                    case Placements(replicas=replicas, roll=roll):
                        self._now, self.roll = replicas, roll
                        self._changed.set()
                    case Answer(ask_id=ask_id) as answer:
                        if (future := self._asked.pop(ask_id, None)) and not future.done():
                            future.set_result(answer)
        for future in self._asked.values():
            if not future.done():
                future.set_exception(EngineDead("the process that starts the replicas has died"))
        self._on_lost()

    async def restart(self, name: str, why: str) -> None:
        await self._ask(Action.RESTART, name, why)

    async def add(self) -> str:
        return (await self._ask(Action.ADD)).name

    async def remove(self, name: str) -> None:
        await self._ask(Action.REMOVE, name)

    async def begin_roll(self, given: dict[str, str], drain_s: float) -> Roll:
        answer = await self._ask(Action.ROLL, given=given, drain_s=drain_s)
        assert answer.roll is not None
        return answer.roll

    async def replace(self, name: str) -> None:
        await self._ask(Action.REPLACE, name)

    async def go_back(self, name: str, why: str) -> None:
        await self._ask(Action.GO_BACK, name, why)

    async def replicas_replaced(self) -> None:
        await self._ask(Action.REPLICAS_REPLACED)

    async def _ask(self, action: Action, name: str = "", why: str = "", **fields: Any) -> Answer:
        """Send a message, and wait for its answer. Raises ControlError if the parent refuses."""
        if self._writer is None or (self._task is not None and self._task.done()):
            raise EngineDead("the process that starts the replicas is not connected")
        ask = Ask(next(self._ids), action, name, why, **fields)
        future = self._asked[ask.ask_id] = asyncio.get_running_loop().create_future()
        self._writer.write(msgspec.json.encode(ask) + b"\n")
        try:
            answer = await future
        finally:
            self._asked.pop(ask.ask_id, None)
        if answer.error:
            raise ControlError(answer.error)
        return answer

    async def close(self) -> None:
        """Close the connection. The replicas run on, until their parent ends them."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._writer is not None:
            self._writer.close()
        else:
            self._link.close()
