"""Publishing weights: all tensors are staged before the commit, so the server has all of them or none. And loading
adapters, counted as publications of their own for the staleness of their tokens."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from fastdeploy.core.errors import BaseMismatch, FastDeployError, InvalidField, WeightUpdateRefused
from fastdeploy.rl import state_encoding
from fastdeploy.rl.connection import Connection, repeat, run_shielded
from fastdeploy.rl.deltas import Difference, Snapshot, require_served, wire_nbytes
from fastdeploy.rl.errors import Unreachable, WrongWeights
from fastdeploy.rl.holds import Holds
from fastdeploy.rl.server_state import ServerState
from fastdeploy.rl.staleness import PublicationLedger
from fastdeploy.rl.state_transfer import (
    NamedTensors,
    Tensors,
    WholeTensors,
    delta_parts,
    split_pairs,
    split_state,
)
from fastdeploy.rl.uploads import PartCall, PartCalls, SendOptions

CONFIRM_S = 30.0  # limit of each call that begins, commits or aborts a session, or asks what is served
# A delta is sent if its bytes are less than this share of the whole: servers take whole tensors faster than changes.
MAX_DELTA_SHARE = 0.8
MAX_NAMES = 10_000  # of adapters whose loads are counted


@dataclass(frozen=True)
class Publication:
    """The weights that the server has committed.

    number: counts this client's publications from 1. version: the label (without a given version, the server makes one
    of its weight_epoch). report: of the commit. tensors, nbytes: of what was sent. full_nbytes: of the whole state.
    changed_values: how many values differ from the last publication. These two are None if not known. is_delta: only
    the changed values were sent."""

    number: int
    version: str
    report: dict[str, Any]
    tensors: int = 0
    nbytes: int = 0
    full_nbytes: int | None = None
    changed_values: int | None = None
    is_delta: bool = False


class SessionOptions(NamedTuple):
    """Options of the weight session of a publication. begin: the body of /v1/weights/begin. deadline_s: limit of the
    staging. before_commit: see RolloutClient.publish."""

    begin: Mapping[str, Any]
    deadline_s: float
    before_commit: Callable[[], Awaitable[Any]] | None = None

    @property
    def is_partial(self) -> bool:
        return bool(self.begin.get("partial"))


class Publisher:
    """The publisher of weights: it makes one publication at a time, and keeps a snapshot of the last one."""

    def __init__(self, connection: Connection, state: ServerState, holds: Holds):
        self.ledger = PublicationLedger()
        self._connection = connection
        self._state = state
        self._holds = holds
        self._snapshot: Snapshot | None = None
        self._lock = asyncio.Lock()

    async def publish_folder(self, path: str, options: SessionOptions) -> Publication:
        """Publish a checkpoint folder that the server can read. See :meth:`publish`."""
        async with self._lock:
            self._snapshot = None
            async with self._staging(options) as session:
                await session.stage(PartCall({"model_path": path}), options.deadline_s)
            return await self._commit(session)

    async def publish(
        self,
        state: Mapping[str, Any] | NamedTensors,
        delta: str,
        sending: SendOptions,
        options: SessionOptions,
    ) -> Publication:
        """Publish a state. delta: "auto" or "never". Raises InvalidField for a state that cannot be sent, HoldLost
        before the commit if a hold of this client has ended, Unreachable if the parts are not staged in time, and
        WrongWeights after the commit."""
        if delta not in ("auto", "never"):
            raise InvalidField("delta", f"expected auto or never, got {delta!r}")
        async with self._lock:
            if not isinstance(state, Mapping):
                return await self._publish_pairs(state, sending, options)
            if not state:
                raise InvalidField("state", "expected at least one tensor")
            tensors = await asyncio.to_thread(state_encoding.host_tensors, state)
            require_served(tensors)
            if delta == "auto" and self._snapshot is not None and self._snapshot.fits(tensors, options.is_partial):
                difference = await asyncio.to_thread(self._snapshot.difference, tensors)
                return await self._publish_difference(tensors, self._snapshot, difference, sending, options)
            return await self._publish_whole(tensors, delta == "auto", sending, options)

    async def _publish_pairs(self, pairs: NamedTensors, sending: SendOptions, options: SessionOptions) -> Publication:
        if sending.via == "folder":
            raise InvalidField("state", "a stream of tensors is sent as an upload or in shared memory")
        self._snapshot = None
        async with self._staging(options) as session:
            whole = WholeTensors(session.dtype, {})
            parts = whole.parts(split_pairs(pairs, sending.part_bytes))
            await session.stage_all(sending.calls(parts), options.deadline_s)
        return await self._commit(session, lambda served: options.is_partial or whole.are_all_of(served))

    async def _publish_whole(
        self, tensors: Tensors, keeps: bool, sending: SendOptions, options: SessionOptions
    ) -> Publication:
        """Publish all tensors. keeps: make a snapshot of them while they are sent."""
        is_partial, self._snapshot = options.is_partial, None
        keeps = keeps and not is_partial
        async with self._staging(options) as session:
            whole = WholeTensors(session.dtype, {}, keeps)
            await session.stage_all(sending.calls(whole.parts(split_state(tensors, sending))), options.deadline_s)

        def settle(served: str) -> bool:
            is_right = is_partial or whole.are_all_of(served)
            if keeps and is_right:
                self._snapshot = whole.snapshot(served)
            return is_right

        return await self._commit(session, settle, full_nbytes=sum(t.data.nbytes for t in tensors.values()))

    async def _publish_difference(
        self,
        tensors: Tensors,
        last: Snapshot,
        difference: Difference,
        sending: SendOptions,
        options: SessionOptions,
    ) -> Publication:
        """Publish the difference from ``last`` if the server serves that, else all tensors."""
        full_nbytes = sum(wire_nbytes(name, tensor, last.dtype) for name, tensor in tensors.items())
        is_small = difference.nbytes < MAX_DELTA_SHARE * full_nbytes
        try:
            async with self._staging(options, last.fingerprint if is_small else None) as session:
                is_known = session.dtype == last.dtype
                whole = WholeTensors(session.dtype, difference.fingerprints if is_known else {})
                parts = whole.parts(split_state(tensors, sending))
                if session.is_delta:
                    parts = delta_parts(tensors, difference, whole, sending)
                await session.stage_all(sending.calls(parts), options.deadline_s)

            def settle(served: str) -> bool:
                if not is_known:
                    self._snapshot = None  # a server in another dtype never serves it
                if expected is None:
                    return options.is_partial or whole.are_all_of(served)
                if served == expected:
                    last.advance(tensors, difference)
                return served == expected

            is_all = session.is_delta or (is_known and not options.is_partial)
            expected = difference.fingerprint if is_all else None
            sizes = {"full_nbytes": full_nbytes, "changed_values": difference.changed_values}
            return await self._commit(session, settle, expected, **sizes)
        except WeightUpdateRefused:  # the trainer may have changed a tensor while the last state was sent
            self._snapshot = None
            raise

    @asynccontextmanager
    async def _staging(self, options: SessionOptions, base: str | None = None) -> AsyncIterator[_WeightSession]:
        """Open a session, which the block fills with new weights. If that fails, the session is aborted. base:
        fingerprint of the weights for which the block has a delta."""
        session = _WeightSession(self._connection)
        try:
            async with asyncio.timeout(options.deadline_s):
                await session.begin(options.begin, base)
                yield session
                if options.before_commit is not None:
                    await options.before_commit()
                await self._holds.require_standing(CONFIRM_S)
        except BaseException as error:
            with suppress(FastDeployError):
                await run_shielded(session.abort())
            if isinstance(error, TimeoutError):
                raise Unreachable(f"not staged within {options.deadline_s} s: nothing was committed") from error
            raise

    async def _commit(
        self,
        session: _WeightSession,
        settle: Callable[[str], bool] = lambda served: True,
        expected: str | None = None,
        **sizes: Any,
    ) -> Publication:
        """Commit the staged weights. settle: gets the fingerprint of what serves then, and returns whether it is that
        of the published weights. expected: this fingerprint, if it is known. sizes: further fields of Publication."""

        async def commit() -> dict[str, Any]:
            try:
                report = await session.commit(expected)
                if not await asyncio.to_thread(settle, report["fingerprint"]):
                    wrong = f"serves weights with the fingerprint {report['fingerprint']}, expected {expected}"
                    raise WrongWeights(wrong)
            except BaseException:
                self.ledger.end_publication()
                raise
            self.ledger.end_publication(report["boot_id"], report["weight_epoch"])
            self._state.note_published(report["boot_id"])
            return report

        number = self.ledger.begin_publication()
        report = await run_shielded(commit())
        sent: dict[str, Any] = {"tensors": session.tensors, "nbytes": session.nbytes, "is_delta": session.is_delta}
        return Publication(number, str(report["version"]), report, **sent, **sizes)


class _WeightSession:
    """One weight session, from begin to commit. dtype: in which the server serves. is_delta: the server serves the base
    of a delta. tensors, nbytes: sent so far."""

    def __init__(self, connection: Connection):
        self._connection = connection
        self._asked: dict[str, Any] | None = None  # the body of a begin that may have opened a session
        self._opened: dict[str, Any] | None = None  # the answer of begin
        self.is_delta = False
        self.tensors = self.nbytes = 0

    async def begin(self, options: Mapping[str, Any], base: str | None) -> None:
        """Open a session: for a delta, if the server serves its base. options: the body of the call."""
        if base is not None:
            of_delta = {name: value for name, value in options.items() if name != "partial"}
            try:
                await self._open(of_delta | {"base_fingerprint": base})
                self.is_delta = True
                return
            except BaseMismatch:
                pass
        await self._open(options)

    async def _open(self, options: Mapping[str, Any]) -> None:
        """Call begin. A second call with the same key gets the session that the first has opened, if its answer was
        lost."""
        self._asked = {**options, "idempotency_key": uuid.uuid4().hex}
        try:
            self._opened = await self._call("begin", self._asked)
        except Unreachable:
            self._opened = await self._call("begin", self._asked)
        except FastDeployError:
            self._asked = None  # refused
            raise

    async def stage(self, call: PartCall, timeout_s: float) -> None:
        """Send one part."""
        arguments = call.arguments(session_id=self._answer["session_id"])
        staged = await self._connection.call("POST", "/v1/weights/chunk", timeout_s, **arguments)
        self.tensors += call.tensors or staged["tensors"]
        self.nbytes += call.nbytes or staged["nbytes"]

    async def stage_all(self, calls: PartCalls, timeout_s: float) -> None:
        """Send all parts."""
        async with aclosing(calls):
            async for call in calls:
                await self.stage(call, timeout_s)

    async def abort(self) -> None:
        """End the session, also one whose begin was not answered."""
        if self._asked is not None:
            self._opened = self._opened or await self._call("begin", self._asked)
            await self._call("abort", {"session_id": self._answer["session_id"]})

    async def commit(self, fingerprint: str | None) -> dict[str, Any]:
        """Commit, and return the report. fingerprint: of the new weights, which the server checks first; None: not
        known. Raises Unreachable if the connection broke and the commit did not take place."""
        body = {"session_id": self._answer["session_id"]} | (
            {} if fingerprint is None else {"fingerprint": fingerprint}
        )
        try:
            return await self._call("commit", body)
        except Unreachable:
            now, before = await repeat(lambda: self._connection.call("GET", "/v1/weights"), CONFIRM_S), self._answer
            if (now["boot_id"], now["weight_epoch"]) != (before["boot_id"], before["weight_epoch"] + 1):
                raise Unreachable("the connection broke at the commit, which did not take place") from None
            return now | {"status": "committed"}

    async def _call(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        return await self._connection.call("POST", f"/v1/weights/{name}", CONFIRM_S, json=body)

    @property
    def _answer(self) -> dict[str, Any]:
        assert self._opened is not None
        return self._opened

    @property
    def dtype(self) -> str:
        return self._answer["dtype"]


class _Loads:
    """The loads of one name, also of before an unload. lock: one load at a time."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.ledger = PublicationLedger()


class Adapters:
    """The adapters that this client has loaded. Different names load at the same time."""

    def __init__(self, connection: Connection, state: ServerState, holds: Holds):
        self._connection = connection
        self._state = state
        self._holds = holds
        self._loads: dict[str, _Loads] = {}

    def ledger(self, lora_name: str) -> PublicationLedger:
        """Return the loads of an adapter by this client, as publications. Empty for an unknown name."""
        loads = self._loads.get(lora_name)
        return PublicationLedger() if loads is None else loads.ledger

    def _loads_of(self, lora_name: str) -> _Loads:
        if lora_name not in self._loads and len(self._loads) >= MAX_NAMES:
            unloaded = (name for name in self._loads if name not in self._state.adapters)
            self._loads.pop(next(unloaded, ""), None)
        return self._loads.setdefault(lora_name, _Loads())

    async def load(self, lora_name: str, call: PartCall, deadline_s: float) -> Publication:
        """Load an adapter. call: of /v1/adapters/load. Raises HoldLost, before the load, if a hold of this client on
        the engine or on this adapter had ended."""
        loads = self._loads_of(lora_name)
        async with loads.lock:
            await self._holds.require_standing(CONFIRM_S, lora_name)
            return await run_shielded(self._load(lora_name, loads.ledger, call, deadline_s))

    async def _load(self, lora_name: str, ledger: PublicationLedger, call: PartCall, deadline_s: float) -> Publication:
        number = ledger.begin_publication()
        try:
            report = await self._connection.call("POST", "/v1/adapters/load", deadline_s, **call.arguments())
        except BaseException:
            ledger.end_publication()
            raise
        ledger.end_publication(report["boot_id"], report["adapter_epoch"])
        self._state.note_adapter(lora_name, report["boot_id"])
        return Publication(number, str(report["version"]), report, call.tensors, call.nbytes)

    async def unload(self, lora_name: str, timeout_s: float) -> dict[str, Any]:
        """Remove a name. Raises ModelNotFound if the server does not know the name."""
        self._state.forget_adapter(lora_name)
        return await self._connection.call("POST", "/v1/adapters/unload", timeout_s, json={"lora_name": lora_name})

    def forget_all(self) -> None:
        """Record that a reset unloads all adapters."""
        for lora_name in list(self._state.adapters):
            self._state.forget_adapter(lora_name)
