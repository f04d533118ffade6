"""A weight session on one replica, from begin to commit."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from fastdeploy.core.errors import FastDeployError
from fastdeploy.rl.errors import Unreachable, WrongWeights
from fastdeploy.rl.fan_out import fan_out
from fastdeploy.rl.part_calls import PartCall
from fastdeploy.rl.replica import Replica
from fastdeploy.rl.state_transfer import Group, Transfer


class ReplicaSession:
    """One session. options: the body of /v1/weights/begin. confirm_s: limit of the question whether a commit took
    place.

    is_delta: the replica serves the base of the transfer's delta. tensors, nbytes: sent so far."""

    def __init__(self, replica: Replica, options: Mapping[str, Any], confirm_s: float):
        self.replica = replica
        self.is_delta = False
        self.tensors = self.nbytes = 0
        self._options = dict(options)
        self._confirm_s = confirm_s
        self._asked: dict[str, Any] | None = None  # the body of a begin that may have opened a session
        self._opened: dict[str, Any] | None = None  # the answer of begin

    @property
    def group(self) -> Group:
        """The group of this replica alone."""
        assert self._opened is not None
        return Group(self._opened["dtype"], self.is_delta, (self.replica.url,))

    async def begin(self, base: str | None) -> dict[str, Any]:
        """Open a session: for a delta if the replica serves weights with the fingerprint ``base``."""
        if base is not None:
            delta = {name: value for name, value in self._options.items() if name not in ("partial", "in_place")}
            try:
                opened = await self._open(delta | {"base_fingerprint": base})
            except FastDeployError as error:
                if error.code != "base_mismatch":
                    raise
            else:
                self.is_delta = True
                return opened
        return await self._open(self._options)

    async def _open(self, options: Mapping[str, Any]) -> dict[str, Any]:
        self._asked = {**options, "idempotency_key": uuid.uuid4().hex}
        try:
            try:
                return await self._take_up()
            except Unreachable:
                return await self._take_up()
        except Unreachable:
            raise
        except FastDeployError:
            self._asked = None  # refused
            raise

    async def _take_up(self) -> dict[str, Any]:
        """Call begin. A second call with the same key gets the session that the first has opened, if its answer was
        lost."""
        self._opened = await self.replica.call("POST", "/v1/weights/begin", json=self._asked)
        return self._opened

    async def stage(self, call: PartCall, timeout_s: float) -> dict[str, Any]:
        arguments = call.arguments(self._session_id)
        staged = await self.replica.call("POST", "/v1/weights/chunk", timeout_s, **arguments)
        self.tensors += call.tensors or staged["tensors"]
        self.nbytes += call.nbytes or staged["nbytes"]
        return staged

    async def abort(self) -> dict[str, Any]:
        """End the session, also one whose begin was not answered."""
        if self._asked is None:
            return {}
        if self._opened is None:
            await self._take_up()
        return await self.replica.call("POST", "/v1/weights/abort", json={"session_id": self._session_id})

    async def commit(self, transfer: Transfer) -> dict[str, Any]:
        """Commit, and check what the replica serves then. Raises WrongWeights, or Unreachable if the commit did not
        take place."""
        expected = transfer.expected(self.group)
        body = {"session_id": self._session_id} | ({} if expected is None else {"fingerprint": expected})
        try:
            done = await self.replica.call("POST", "/v1/weights/commit", json=body)
        except Unreachable:
            done = await self._find_committed()
        if not transfer.confirm(self.group, done["fingerprint"]):
            raise WrongWeights(f"serves weights with the fingerprint {done['fingerprint']}, expected {expected}")
        return done

    async def _find_committed(self) -> dict[str, Any]:
        """Return what the replica serves after a commit whose answer was lost. Raises Unreachable if the commit did not
        take place."""
        (report,) = await fan_out([self.replica], lambda r: r.call("GET", "/v1/weights"), self._confirm_s, retry=True)
        now, before = report.unwrap(), self._opened
        assert before is not None
        if (now["boot_id"], now["weight_epoch"]) != (before["boot_id"], before["weight_epoch"] + 1):
            raise Unreachable("the connection broke at the commit, which did not take place")
        return now | {"status": "committed"}

    @property
    def _session_id(self) -> str:
        assert self._opened is not None
        return self._opened["session_id"]
