"""Publishing weights: all tensors are staged before the commit, so the server has all of them or none."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any

from fastdeploy.core.errors import FastDeployError, InvalidField, WeightUpdateRefused
from fastdeploy.rl import state_encoding
from fastdeploy.rl.connection import Connection, repeat, run_shielded
from fastdeploy.rl.deltas import Snapshot, require_served
from fastdeploy.rl.errors import Unreachable, WrongWeights
from fastdeploy.rl.holds import Holds
from fastdeploy.rl.server_state import ServerState
from fastdeploy.rl.staleness import PublicationLedger
from fastdeploy.rl.state_transfer import (
    DeltaTransfer,
    FolderTransfer,
    NamedTensors,
    Transfer,
    WholeTransfer,
    split_state,
    split_stream,
)
from fastdeploy.rl.uploads import Means, PartCall

CONFIRM_S = 30.0  # limit of each call that begins, commits or aborts a session, or asks what is served


@dataclass(frozen=True)
class Publication:
    """Weights that the server has committed.

    number: counts this client's publications from 1. version: the label (without a given version, the server makes one
    of its weight_epoch). report: of the commit. tensors, nbytes: sent. full_nbytes: of the whole. changed_values:
    values that differ from the last publication. Both are None if not known. is_delta: only these were sent."""

    number: int
    version: str
    report: dict[str, Any]
    tensors: int = 0
    nbytes: int = 0
    full_nbytes: int | None = None
    changed_values: int | None = None
    is_delta: bool = False


class Publisher:
    """Publishes weights, one publication at a time, and keeps a snapshot of the last one."""

    def __init__(self, connection: Connection, state: ServerState, holds: Holds):
        self.ledger = PublicationLedger()
        self._connection = connection
        self._state = state
        self._holds = holds
        self._snapshot: Snapshot | None = None
        self._lock = asyncio.Lock()

    async def publish(
        self,
        state: Mapping[str, Any] | NamedTensors,
        delta: str,
        means: Means,
        options: Mapping[str, Any],
        deadline_s: float,
    ) -> Publication:
        """Publish a state. delta: "auto" or "never". options: the body of /v1/weights/begin. Raises InvalidField for a
        state that cannot be sent, HoldLost before the commit if a hold of this client has ended, Unreachable if the
        parts are not staged in ``deadline_s``, and WrongWeights after the commit."""
        async with self._lock:
            transfer = await self._transfer(state, delta, means, options)
            try:
                return await self._send(transfer, options, deadline_s)
            except WeightUpdateRefused:  # the trainer may have changed a tensor while the last state was sent
                transfer.forget_snapshot()
                raise
            finally:
                self._snapshot = await run_shielded(asyncio.to_thread(transfer.next_snapshot))

    async def publish_folder(self, path: str, options: Mapping[str, Any], deadline_s: float) -> Publication:
        """Publish a checkpoint folder that the server can read. See :meth:`publish`."""
        async with self._lock:
            self._snapshot = None
            return await self._send(FolderTransfer(path), options, deadline_s)

    async def _transfer(
        self, state: Mapping[str, Any] | NamedTensors, delta: str, means: Means, options: Mapping[str, Any]
    ) -> WholeTransfer:
        if delta not in ("auto", "never"):
            raise InvalidField("delta", f"expected auto or never, got {delta!r}")
        is_partial, old = bool(options.get("partial")), self._snapshot
        if not isinstance(state, Mapping):
            if means.via == "folder":
                raise InvalidField("state", "a stream of tensors is sent as an upload or in shared memory")
            self._snapshot = None
            return WholeTransfer(split_stream(state, means.part_bytes), means, is_partial, keeps=False)
        if not state:
            raise InvalidField("state", "expected at least one tensor")
        tensors = await asyncio.to_thread(state_encoding.host_tensors, state)
        require_served(tensors)
        if delta == "never" or old is None or not old.fits(tensors, is_partial):
            self._snapshot = None
            nbytes = sum(tensor.data.nbytes for tensor in tensors.values())
            return WholeTransfer(split_state(tensors, means), means, is_partial, delta == "auto", nbytes)
        difference = await asyncio.to_thread(old.difference, tensors)
        return DeltaTransfer(tensors, old, difference, means, is_partial, bool(options.get("in_place")))

    async def _send(self, transfer: Transfer, options: Mapping[str, Any], deadline_s: float) -> Publication:
        session = _WeightSession(self._connection, options)
        try:
            async with asyncio.timeout(deadline_s):
                await session.begin(transfer)
                async with aclosing(transfer.calls()) as calls:
                    async for call in calls:
                        await session.stage(call, deadline_s)
                await self._holds.require_standing(CONFIRM_S)
        except BaseException as error:
            with suppress(FastDeployError):
                await run_shielded(session.abort())
            if isinstance(error, TimeoutError):
                raise Unreachable(f"not staged within {deadline_s} s: nothing was committed") from error
            raise
        number = self.ledger.begin_publication()
        report = await run_shielded(self._commit(session, transfer))
        sent = session.tensors, session.nbytes, transfer.full_nbytes, transfer.changed_values, session.is_delta
        return Publication(number, str(report["version"]), report, *sent)

    async def _commit(self, session: _WeightSession, transfer: Transfer) -> dict[str, Any]:
        try:
            report = await session.commit(transfer)
        except BaseException:
            self.ledger.end_publication()
            raise
        self.ledger.end_publication(report["boot_id"], report["weight_epoch"])
        self._state.note_published(report["boot_id"])
        return report


class _WeightSession:
    """One weight session, from begin to commit. options: the body of /v1/weights/begin. tensors, nbytes: sent so
    far."""

    def __init__(self, connection: Connection, options: Mapping[str, Any]):
        self._connection = connection
        self._options = dict(options)
        self._asked: dict[str, Any] | None = None  # the body of a begin that may have opened a session
        self._opened: dict[str, Any] | None = None  # the answer of begin
        self.is_delta = False
        self.tensors = self.nbytes = 0

    async def begin(self, transfer: Transfer) -> None:
        """Open a session: for a delta, if the server serves its base."""
        if transfer.base is not None:
            delta = {name: value for name, value in self._options.items() if name not in ("partial", "in_place")}
            try:
                opened = await self._open(delta | {"base_fingerprint": transfer.base})
            except FastDeployError as error:
                if error.code != "base_mismatch":
                    raise
            else:
                self.is_delta = True
                transfer.begin(opened["dtype"], is_delta=True)
                return
        opened = await self._open(self._options)
        transfer.begin(opened["dtype"], is_delta=False)

    async def _open(self, options: Mapping[str, Any]) -> dict[str, Any]:
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
        return self._opened

    async def stage(self, call: PartCall, timeout_s: float) -> None:
        """Send one part."""
        arguments = call.arguments(session_id=self._session_id)
        staged = await self._connection.call("POST", "/v1/weights/chunk", timeout_s, **arguments)
        self.tensors += call.tensors or staged["tensors"]
        self.nbytes += call.nbytes or staged["nbytes"]

    async def abort(self) -> None:
        """End the session, also one whose begin was not answered."""
        if self._asked is not None:
            self._opened = self._opened or await self._call("begin", self._asked)
            await self._call("abort", {"session_id": self._session_id})

    async def commit(self, transfer: Transfer) -> dict[str, Any]:
        """Commit, and check what the server serves then. Raises WrongWeights, or Unreachable if the commit did not take
        place."""
        expected = transfer.expected
        body = {"session_id": self._session_id} | ({} if expected is None else {"fingerprint": expected})
        try:
            report = await self._call("commit", body)
        except Unreachable:
            report = await self._find_committed()
        if not transfer.confirm(report["fingerprint"]):
            raise WrongWeights(f"serves weights with the fingerprint {report['fingerprint']}, expected {expected}")
        return report

    async def _find_committed(self) -> dict[str, Any]:
        """Return what is served after a commit whose answer was lost. Raises Unreachable if the commit did not take
        place."""
        now = await repeat(lambda: self._connection.call("GET", "/v1/weights", CONFIRM_S), CONFIRM_S)
        before = self._opened
        assert before is not None
        if (now["boot_id"], now["weight_epoch"]) != (before["boot_id"], before["weight_epoch"] + 1):
            raise Unreachable("the connection broke at the commit, which did not take place")
        return now | {"status": "committed"}

    async def _call(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        return await self._connection.call("POST", f"/v1/weights/{name}", CONFIRM_S, json=body)

    @property
    def _session_id(self) -> str:
        assert self._opened is not None
        return self._opened["session_id"]
