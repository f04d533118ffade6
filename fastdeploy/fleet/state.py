"""The state that every member of the fleet has."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from msgspec.structs import replace

from fastdeploy.core.served_weights import CommittedState
from fastdeploy.core.weight_source import FolderSource, Source
from fastdeploy.inter_communicator.messages import BeginUpdateArgs, LoadAdapterArgs, PauseArgs

MAX_REMEMBERED_SESSIONS = 64
TTL_MARGIN_S = 30.0  # engines end a hold by themselves so long after the gateway, in case the gateway is gone
MODES = ("wait", "keep", "abort")  # in order of strength
HoldKey = tuple[str, str]  # the scope of a hold, and its id
Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")
REPUBLISH = "republish"  # hold of a fleet that has lost its weights, until weights are published


class Removal:
    """A call that removes something."""


class OverlappingCalls(Generic[Key, Value]):
    """The calls that place or remove things of the fleet, by the key of the thing, in the order in which they are sent.
    Calls may overlap, and all members see them in this order. So a thing is there if the last call has placed it. A
    call that fails leaves the list; one that succeeds drops the calls before it, which do not matter any more.

    standing: the things that are there, as their last call has placed them. Kept up to date and not made anew, since it
    is read for each request, and may have thousands of adapters."""

    def __init__(self, standing: Mapping[Key, Value] | None = None):
        self.standing: dict[Key, Value] = dict(standing or {})
        self._calls: dict[Key, list[Value | Removal]] = {key: [value] for key, value in self.standing.items()}

    def place(self, key: Key, value: Value) -> None:
        """Add a call that places a thing."""
        self._calls.setdefault(key, []).append(value)
        self.standing[key] = value

    def remove(self, matches: Callable[[Key, Value], bool]) -> dict[Key, Removal]:
        """Add a call that removes the things which match, also those that another call is removing. Return it, by the
        keys of these things."""
        placed = {key: [v for v in calls if not isinstance(v, Removal)] for key, calls in self._calls.items()}
        removals = {key: Removal() for key, values in placed.items() if values and matches(key, values[-1])}
        for key, removal in removals.items():
            self._calls[key].append(removal)
            self.standing.pop(key, None)
        return removals

    def before(self, key: Key, value: Value) -> Value | None:
        """Return what would be there if ``value`` had not been placed."""
        calls = self._calls.get(key, [])
        last = calls[calls.index(value) - 1] if value in calls[1:] else None
        return None if isinstance(last, Removal) else last

    def succeed(self, key: Key, call: Value | Removal) -> None:
        """Drop the calls before one that has succeeded. A removal is dropped, too."""
        calls = self._calls.get(key, [])
        if call in calls:
            del calls[: calls.index(call)]
        if isinstance(call, Removal):
            self.fail(key, call)

    def fail(self, key: Key, call: Value | Removal) -> None:
        """Drop a call that has changed nothing."""
        calls = self._calls.get(key, [])
        if call in calls:
            calls.remove(call)
            if not calls:
                self.forget(key)
            elif isinstance(last := calls[-1], Removal):
                self.standing.pop(key, None)
            else:
                self.standing[key] = last

    def forget(self, key: Key) -> None:
        """Drop all calls on a thing: no member has it any more."""
        self._calls.pop(key, None)
        self.standing.pop(key, None)


@dataclass(eq=False)
class FleetHold:
    """A hold, as one pause call has placed it. args: with the hold's id, also for an anonymous hold, and without a ttl.
    expires_at: on the event loop's clock, when the gateway releases it; None = never. settled: it stands on all members
    for sure. owed: an earlier call on this hold failed, and left its release to this one."""

    args: PauseArgs
    expires_at: float | None = None
    settled: bool = True
    owed: bool = False


def stronger_terms(new: PauseArgs, standing: PauseArgs) -> PauseArgs:
    """Return the terms of a hold that ``new`` places again, as the engines do."""
    admissions = {args.admission or ("reject" if args.mode.lower() == "abort" else "hold") for args in (new, standing)}
    return replace(
        new,
        mode=max(new.mode.lower(), standing.mode.lower(), key=MODES.index),
        admission="reject" if "reject" in admissions else "hold",
        placed_by=standing.placed_by,
        anonymous=new.anonymous and standing.anonymous,
    )


@dataclass(eq=False)
class WeightSession:
    """A weight session. ids: the session id of each replica that takes part, by its name. source: of the only part so
    far, if that part was a whole source. parts: number of parts. expires_at: on the event loop's clock, when the
    gateway ends the session if no part comes. begun: its begin was answered."""

    id: str
    begin: BeginUpdateArgs
    ids: dict[str, str]
    expires_at: float
    open: bool = True
    begun: bool = False
    parts: int = 0
    source: Source | None = None


@dataclass(eq=False)
class FleetAdapter:
    """An adapter that all members have. args: of the load, whose source may be gone or have other tensors now. epoch:
    the adapter epoch that serves. fingerprint: see AdapterInfo (core/runner.py)."""

    args: LoadAdapterArgs
    epoch: int
    fingerprint: str


@dataclass
class FleetState:
    """The state that a replica must have before it may join. Changed by calls of fleet/control.py only, and built anew
    from the replicas when a gateway starts.

    weight_epoch, version, fingerprint, eos_token_ids: see ``committed``. source: the last whole source of the weights
    that serve, which may be gone. past_adapter_epoch: the highest number of an adapter that is gone, or of a load that
    failed. asleep: tags.
    revision: counts the changes. changing: calls or sessions that are changing the state now; nobody joins meanwhile.
    last_epoch: the highest number that any commit has tried to use. weight_sessions: by fleet id, the ended ones too.
    changes: counts the commands of calls that change the fleet. num_anonymous: counts anonymous holds. boot_id: of the
    fleet; another one means that its weights were lost.
    """

    weight_epoch: int = 0
    version: str = ""
    fingerprint: str | None = None
    eos_token_ids: tuple[int, ...] = ()
    source: Source | None = None
    hold_calls: OverlappingCalls[HoldKey, FleetHold] = field(default_factory=OverlappingCalls)
    adapter_calls: OverlappingCalls[str, FleetAdapter] = field(default_factory=OverlappingCalls)
    past_adapter_epoch: int = 0
    asleep: tuple[str, ...] = ()
    revision: int = 0
    changing: int = 0
    last_epoch: int = 0
    weight_sessions: dict[str, WeightSession] = field(default_factory=dict)
    changes: int = 0
    num_anonymous: int = 0
    boot_id: str = ""
    _changed: asyncio.Event = field(default_factory=asyncio.Event, init=False, repr=False, compare=False)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in ("revision", "changing") and "_changed" in self.__dict__:
            self._changed.set()

    @property
    def holds(self) -> dict[HoldKey, FleetHold]:
        """The holds that stand."""
        return self.hold_calls.standing

    @property
    def adapters(self) -> dict[str, FleetAdapter]:
        """The adapters that are loaded, by name."""
        return self.adapter_calls.standing

    @property
    def committed(self) -> CommittedState:
        """All that the last commit has set, with the label of a later SetVersionArgs."""
        return CommittedState(*(getattr(self, name) for name in CommittedState._fields))

    @committed.setter
    def committed(self, committed: CommittedState) -> None:
        for name, value in committed._asdict().items():
            setattr(self, name, value)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition`` is true. Looked at after each change of ``revision`` or ``changing``."""
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    def replace(self, other: FleetState) -> None:
        """Take over the content of ``other``, in a new revision."""
        self.committed = other.committed
        self.source, self.hold_calls, self.adapter_calls = other.source, other.hold_calls, other.adapter_calls
        self.asleep, self.boot_id = other.asleep, other.boot_id
        self.raise_past_adapter_epoch(other.past_adapter_epoch)
        self.changes = max(self.changes, other.changes)
        self.last_epoch = max(self.last_epoch, other.last_epoch, other.weight_epoch)
        self.revision += 1

    def follow(self, boot_id: str, adapters: Mapping[str, int]) -> None:
        """Take over what another gateway leads: the fleet with this boot id, and adapters by their adapter_epoch."""
        self.boot_id = boot_id
        if adapters != {name: adapter.epoch for name, adapter in self.adapters.items()}:
            unread = {name: LoadAdapterArgs(name, FolderSource("")) for name in adapters}
            entries = {name: FleetAdapter(unread[name], epoch, "") for name, epoch in adapters.items()}
            self.adapter_calls = OverlappingCalls(entries)

    def end_weight_sessions(self) -> None:
        """Give up all open sessions, when another gateway leads."""
        for session in self.weight_sessions.values():
            self.close_weight_session(session)

    def next_epoch(self) -> int:
        """Return a number for new weights. No number is used twice: a replica that was fenced during a failed commit
        may have served with it."""
        self.last_epoch = max(self.last_epoch, self.weight_epoch) + 1
        return self.last_epoch

    def next_adapter_epoch(self, name: str) -> int:
        """Return a number for a load of an adapter, see ``next_epoch``."""
        serving = self.adapters[name].epoch if name in self.adapters else 0
        return max(serving, self.past_adapter_epoch) + 1

    def raise_past_adapter_epoch(self, adapter_epoch: int) -> None:
        """Use no number up to ``adapter_epoch`` for a load any more."""
        self.past_adapter_epoch = max(self.past_adapter_epoch, adapter_epoch)

    def unload(self, name: str) -> None:
        """Forget the adapter of this name, if there is one. All members have unloaded it."""
        if (entry := self.adapters.get(name)) is not None:
            self.adapter_calls.forget(name)
            self.raise_past_adapter_epoch(entry.epoch)

    def open_weight_session(self, session: WeightSession) -> None:
        self.weight_sessions[session.id] = session
        self.changing += 1
        for old in list(self.weight_sessions.values()):
            if len(self.weight_sessions) > MAX_REMEMBERED_SESSIONS and not old.open:
                del self.weight_sessions[old.id]

    def close_weight_session(self, session: WeightSession) -> None:
        if session.open:
            session.open = False
            self.changing -= 1
            self.revision += 1

    def find_weight_session(self, session_id: str | None, placed_by: str) -> WeightSession | None:
        """Return the session with this id, or else the open one of ``placed_by``."""
        if session_id is not None:
            return self.weight_sessions.get(session_id)
        return next((s for s in self.weight_sessions.values() if s.open and s.begin.placed_by == placed_by), None)

    def weight_session_of(self, replica: str, session_id: str) -> WeightSession | None:
        """Return the session that has this id on this replica."""
        return next((s for s in self.weight_sessions.values() if s.ids.get(replica) == session_id), None)

    def forget_replica(self, name: str) -> None:
        """Take a replica that was fenced out of all weight sessions."""
        for session in self.weight_sessions.values():
            if session.open and session.ids.pop(name, None) is not None and not session.ids and session.begun:
                self.close_weight_session(session)
