"""The way of a connected replica into the fleet.

The gateway leads the engine, compares the engine's state with that of the fleet, mends the first difference, and looks
again, until there is none. Each look is a new answer of the engine, so nothing is assumed to have worked. In the turn
of the event loop in which the last answer comes, no call may be changing the fleet. Then the replica becomes a member.

An adapter whose source is gone is copied from another replica of the same host. A replica that cannot get an adapter of
the fleet does not join: all members have the same adapters, so that a call for one adapter means the same everywhere.
Load the adapter again, or unload it; then the replica joins.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec

from fastdeploy.client.engine_client import result_of
from fastdeploy.core.errors import FastDeployError, FleetCallFailed, ReplicaMisfit, WrongOrder
from fastdeploy.core.scope import WHOLE_ENGINE
from fastdeploy.core.weight_source import FolderSource
from fastdeploy.fleet.config import FleetConfig
from fastdeploy.fleet.leader import Leadership
from fastdeploy.fleet.pause_plans import TTL_MARGIN_S
from fastdeploy.fleet.rebuild import MODES, SYSTEM, Report, new_fleet, republish_hold
from fastdeploy.fleet.replica import Replica
from fastdeploy.fleet.state import REPUBLISH, FleetState
from fastdeploy.fleet.transfer import WeightTransfer
from fastdeploy.inter_communicator import messages as m

logger = logging.getLogger(__name__)
MIN_TTL_S = 0.001


class RestartNeeded(FleetCallFailed):
    """The engine must be started anew before it can join."""


class JoinBlocked(FleetCallFailed):
    """The replica cannot join before the state of the fleet, or another replica, changes."""


class Difference(NamedTuple):
    """A part of an engine's state that is not the fleet's. what: for people. mend: makes it so."""

    what: str
    mend: Callable[[], Awaitable[None]]


class Joiner:
    """Brings replicas to the state of the fleet. replicas: returns all replicas. profile: facts that are the same on
    all replicas; None as long as there is none."""

    def __init__(
        self,
        config: FleetConfig,
        state: FleetState,
        leadership: Leadership,
        replicas: Callable[[], Sequence[Replica]],
        transfer: WeightTransfer,
    ):
        self._config = config
        self._state = state
        self._leadership = leadership
        self._replicas = replicas
        self._transfer = transfer
        self._without_weights_since: float | None = None
        self.profile: dict[str, Any] | None = None

    async def bring(self, replica: Replica) -> None:
        """Return when the replica has the state of the fleet. The caller makes it a member before anything else runs.
        Raises ReplicaMisfit, RestartNeeded, JoinBlocked, or the error of the engine or of its loss."""
        await self._leadership.lead(replica)
        await self._end_half_done(replica)
        state, mended = self._state, ("", -1)
        while True:
            await state.until(lambda: state.changing == 0)
            revision = state.revision
            report = replica.note(await replica.client.call(m.FleetStateArgs()))
            if state.changing or state.revision != revision:
                continue
            self._check_fit(replica)
            difference = next(self._differences(replica, report), None)
            if difference is None:
                self._without_weights_since = None
                self.profile = profile_of(replica)
                return
            if mended == (difference.what, revision):
                raise FleetCallFailed(f"replica {replica.name}: {difference.what}, also after a try to mend it")
            mended = (difference.what, revision)
            logger.info("replica %s: %s", replica.name, difference.what)
            await difference.mend()

    async def _end_half_done(self, replica: Replica) -> None:
        """End what another gateway, or an earlier connection of this one, has begun on the engine."""
        if replica.report["session"] is not None:
            await replica.client.call(m.AbortUpdateArgs())
        for name in replica.report["prepared_loads"]:
            await replica.client.call(m.EndLoadArgs(name, commit=False))

    def has_weights(self, replica: Replica) -> bool:
        """Whether the last answer of ``replica`` shows the weights of the fleet."""
        state, report = self._state, replica.report
        same = bool(report) and report["fingerprint"] == state.fingerprint and state.fingerprint is not None
        return same and report["weight_epoch"] == state.weight_epoch and replica.client.connected.is_set()

    def _check_fit(self, replica: Replica) -> None:
        """Raise ReplicaMisfit for a replica with another version of the software, or with another model."""
        found = profile_of(replica)
        for field, expected in (self.profile or found).items():
            if found[field] != expected:
                why = f"replica {replica.name}: its {field} is {found[field]!r}, but that of the fleet is {expected!r}"
                raise ReplicaMisfit(why, param=field)

    # ------------------------------------------------------------------ differences

    def _differences(self, replica: Replica, report: Report) -> Iterator[Difference]:
        """Yield the differences, in the order in which they must be mended."""
        state = self._state
        asleep, wanted = set(report["asleep"]), set(state.asleep)
        same_sleep = "weight" in asleep & wanted and report["weight_epoch"] == state.weight_epoch
        too_deep = asleep - wanted if same_sleep else asleep - (wanted - {"weight"})
        if too_deep:
            yield Difference(f"{sorted(too_deep)} sleep", partial(_make, replica, m.WakeArgs(tags=tuple(too_deep))))
        if not same_sleep and (report["fingerprint"] != state.fingerprint or state.fingerprint is None):
            yield Difference("it has other weights", lambda: self._give_weights(replica, report))
        if (report["weight_epoch"], report["version"]) != (state.weight_epoch, state.version):
            self._check_epoch(replica, report)
            label = m.SetVersionArgs(state.version, weight_epoch=state.weight_epoch)
            yield Difference("its weights have another label", partial(_make, replica, label))
        yield from self._adapter_differences(replica, report)
        if wanted - asleep:
            sleep = m.SleepArgs(tags=tuple(sorted(wanted - asleep)))
            yield Difference(f"{sorted(wanted - asleep)} must sleep", partial(_make, replica, sleep))
        yield from self._hold_differences(replica, report)

    def _adapter_differences(self, replica: Replica, report: Report) -> Iterator[Difference]:
        state = self._state
        found = {adapter["lora_name"]: adapter["adapter_epoch"] for adapter in report["adapters"]}
        for name, epoch in found.items():
            if name not in state.adapters or epoch > state.adapters[name][1]:
                unload = m.UnloadAdapterArgs(name)
                yield Difference(f"it has another adapter {name!r}", partial(_make, replica, unload))
        for name, (args, epoch) in state.adapters.items():
            if found.get(name) != epoch:
                what = f"it lacks adapter {name!r}"
                yield Difference(what, partial(self._load, replica, args, epoch))

    def _hold_differences(self, replica: Replica, report: Report) -> Iterator[Difference]:
        state, found = self._state, {(hold["scope"], hold["id"]): hold for hold in report["holds"]}
        for scope, hold_id in found:
            own = found[scope, hold_id]["placed_by"] == SYSTEM and hold_id != REPUBLISH  # ends with its sleep or update
            if (scope, hold_id) not in state.holds and not own:
                resume = m.ResumeArgs(hold_id=hold_id, scope=scope)
                what = f"hold {hold_id!r} of {scope} stands on it"
                yield Difference(what, partial(_make, replica, resume))
        missing = [key for key, hold in state.holds.items() if _is_weaker(found.get(key), hold.args)]
        if missing:
            yield Difference(f"it lacks the holds {missing}", lambda: self._place(replica, missing))

    # ------------------------------------------------------------------ mending

    def _check_epoch(self, replica: Replica, report: Report) -> None:
        if report["weight_epoch"] > self._state.weight_epoch:
            newer = f"its weights have epoch {report['weight_epoch']}, above {self._state.weight_epoch} of the fleet"
            raise RestartNeeded(f"replica {replica.name}: {newer}")

    async def _give_weights(self, replica: Replica, report: Report) -> None:
        state = self._state
        self._check_epoch(replica, report)
        if state.weight_epoch == 0 and state.fingerprint is not None:
            why = f"replica {replica.name}: it was started with other weights ({report['fingerprint']}) than the fleet"
            raise ReplicaMisfit(f"{why} ({state.fingerprint})", param="fingerprint")
        if report["weight_epoch"] == state.weight_epoch and report["fingerprint"] is not None:
            raise RestartNeeded(f"replica {replica.name}: it has other weights of epoch {report['weight_epoch']}")
        peers = [other for other in self._replicas() if other is not replica and self.has_weights(other)]
        try:
            await self._transfer.give(replica, state, peers)
        except WrongOrder as error:  # nobody can give the weights
            if not peers and not any(other.in_quorum for other in self._replicas()):
                self._restart_fleet_if_lost(replica, report)
            raise JoinBlocked(f"replica {replica.name}: {error.message}") from error

    def _restart_fleet_if_lost(self, replica: Replica, report: Report) -> None:
        """Let the fleet begin again with the weights that the replica was started with, if nobody with the fleet's
        weights came back in time. As after the restart of a single engine, the fleet is held until weights are
        published, and has a new boot id. The epoch goes on, so that it never goes back for a client."""
        now, state = asyncio.get_running_loop().time(), self._state
        if self._without_weights_since is None:
            self._without_weights_since = now
        if now - self._without_weights_since < self._config.rebuild_s or report["fingerprint"] is None:
            return
        logger.error("the weights %r of epoch %d are lost: no replica has them", state.version, state.weight_epoch)
        self._leadership.fleet = boot_id = new_fleet(self._config.fleet_id)
        lost = FleetState(
            boot_id=boot_id,
            weight_epoch=state.next_epoch(),
            version=report["version"],
            fingerprint=report["fingerprint"],
            holds={**state.holds, (WHOLE_ENGINE, REPUBLISH): republish_hold()},
        )
        state.replace(lost)
        self._without_weights_since = None

    async def _load(self, replica: Replica, args: m.LoadAdapterArgs, epoch: int) -> None:
        """Load an adapter from its source, or else from the copy of another replica of the same host."""
        call, failures = replica.client.call, []
        args = msgspec.structs.replace(args, prepare=True, replace=True)
        sources = [args]
        while sources:
            try:
                await call(sources.pop(0))
            except FastDeployError as error:
                if not replica.client.connected.is_set():
                    raise
                failures.append(error.message)
                if len(failures) == 1:
                    copies = await self._copies(replica, args.lora_name, epoch)
                    sources = [msgspec.structs.replace(args, source=FolderSource(path), config=None) for path in copies]
            else:
                await call(m.EndLoadArgs(args.lora_name, commit=True, adapter_epoch=epoch))
                return
        lacks = f"replica {replica.name} lacks adapter {args.lora_name!r}, whose source cannot be read again"
        elsewhere = "; no other replica on its host has a copy" if len(failures) == 1 else ""
        raise JoinBlocked(f"{lacks}: {'; '.join(failures)}{elsewhere}")

    async def _copies(self, replica: Replica, name: str, epoch: int) -> list[str]:
        """Return the folders in which other engines of the fleet on the same host keep an adapter."""

        async def ask(other: Replica) -> str | None:
            with contextlib.suppress(FastDeployError, TimeoutError):
                async with asyncio.timeout(self._config.fence_after_s):
                    report = await other.client.call(m.FleetStateArgs())
                epochs = {adapter["lora_name"]: adapter["adapter_epoch"] for adapter in report["adapters"]}
                if report["fleet"] == self._leadership.fleet and epochs.get(name) == epoch:
                    return str(report["adapter_copies"][name])
            return None

        host = replica.placement.host
        peers = [other for other in self._replicas() if other is not replica and other.placement.host == host]
        return [path for path in await asyncio.gather(*map(ask, peers)) if path is not None]

    async def _place(self, replica: Replica, keys: Sequence[tuple[str, str]]) -> None:
        now = asyncio.get_running_loop().time()
        calls = []
        for hold in [self._state.holds[key] for key in keys]:
            left_s = None if hold.expires_at is None else max(hold.expires_at - now, MIN_TTL_S) + TTL_MARGIN_S
            calls.append(replica.client.post(msgspec.structs.replace(hold.args, ttl_s=left_s)))
        for reply in await asyncio.gather(*calls):
            result_of(reply)


def profile_of(replica: Replica) -> dict[str, Any]:
    """Return the facts that are the same on all replicas of a fleet."""
    client = replica.client
    info = client.model_info
    profile = {"dtype": info["dtype"], "vocab_size": info["vocab_size"], "max_model_len": info["max_model_len"]}
    return profile | {"software": client.welcome.software if client.welcome is not None else ""}


def _is_weaker(found: Report | None, wanted: m.PauseArgs) -> bool:
    return found is None or MODES.index(found["mode"]) < MODES.index(wanted.mode)


async def _make(replica: Replica, args: m.Args) -> None:
    await replica.client.call(args)
