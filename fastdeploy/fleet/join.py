"""The way of a connected replica into the fleet.

The gateway leads the engine, compares the engine's state with that of the fleet, mends the first difference, and looks
again, until there is none. Each look is a new answer of the engine, so nothing is assumed to have worked. In the turn
of the event loop in which the last answer comes, no call may be changing the fleet. Then the replica becomes a member.

All members have the same adapters with the same fingerprints, so that a name means the same everywhere. A replica that
cannot get an adapter of the fleet does not join. Load the adapter again, or unload it; then the replica joins. Without
any member nobody can do that, so the adapter is given up after a while.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec

from fastdeploy.client.engine_client import result_of
from fastdeploy.core.errors import FleetCallFailed, ReplicaMisfit, WrongOrder
from fastdeploy.core.process import VERSION
from fastdeploy.core.served_weights import WHOLE_ENGINE, CommittedState
from fastdeploy.fleet.config import FleetConfig
from fastdeploy.fleet.leader import GatewayLeadership
from fastdeploy.fleet.rebuild import SYSTEM, StateReport, new_fleet, republish_hold
from fastdeploy.fleet.replica import Replica
from fastdeploy.fleet.state import MODES, REPUBLISH, TTL_MARGIN_S, FleetAdapter, FleetState, OverlappingCalls
from fastdeploy.fleet.transfer import Transfer
from fastdeploy.inter_communicator import messages as m
from fastdeploy.inter_communicator.known_messages import foreign_to

logger = logging.getLogger(__name__)
MIN_TTL_S = 0.001
PROFILE = ("dtype", "quantization", "vocab_size", "max_model_len", "experts", "routed_experts")  # they change tokens


class RestartNeeded(FleetCallFailed):
    """The engine must be started anew before it can join."""


class JoinBlocked(FleetCallFailed):
    """The replica cannot join before the state of the fleet, or another replica, changes."""


class Difference(NamedTuple):
    """A difference between the state of an engine and that of the fleet. what: a description for people. mend: removes
    the difference."""

    what: str
    mend: Callable[[], Awaitable[object]]


class Joiner:
    """The helper that brings replicas to the state of the fleet. replicas: all, by name. profile: facts that are the
    same on all replicas; None as long as there is none."""

    def __init__(
        self,
        config: FleetConfig,
        state: FleetState,
        leadership: GatewayLeadership,
        replicas: Mapping[str, Replica],
        transfer: Transfer,
    ):
        self._config = config
        self._state = state
        self._leadership = leadership
        self._replicas = replicas
        self._transfer = transfer
        self._lost_since: float | None = None  # time since which no replica can join, because nobody has what it lacks
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
            report = replica.keep_report(await replica.client.call(m.FleetStateArgs()))
            if state.changing or state.revision != revision:
                continue
            state.raise_past_adapter_epoch(report["past_adapter_epoch"])
            self._check_fit(replica)
            difference = next(self._differences(replica, report), None)
            if difference is None:
                self._lost_since = None
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
        """Raise ReplicaMisfit for a replica with another model, or with a version of this package that does not know
        what this gateway must send it."""
        welcome = replica.client.welcome
        if welcome is not None and welcome.software and (foreign := foreign_to(welcome.knows)):
            why = f"its version {welcome.software} and {VERSION} of the gateway do not both know {', '.join(foreign)}"
            raise ReplicaMisfit(f"replica {replica.name}: {why}", param="software")
        found = profile_of(replica)
        for field, expected in (self.profile or found).items():
            if found[field] != expected:
                why = f"replica {replica.name}: its {field} is {found[field]!r}, but that of the fleet is {expected!r}"
                raise ReplicaMisfit(why, param=field)

    # ------------------------------------------------------------------ differences

    def _differences(self, replica: Replica, report: StateReport) -> Iterator[Difference]:
        """Yield the differences, in the order in which they must be mended."""
        state = self._state
        asleep, wanted = set(report["asleep"]), set(state.asleep)
        same_sleep = "weight" in asleep & wanted and report["weight_epoch"] == state.weight_epoch
        too_deep = asleep - wanted if same_sleep else asleep - (wanted - {"weight"})
        if too_deep:
            yield Difference(
                f"{sorted(too_deep)} sleep", partial(replica.client.call, m.WakeArgs(tags=tuple(too_deep)))
            )
        if not same_sleep and (report["fingerprint"] != state.fingerprint or state.fingerprint is None):
            yield Difference("it has other weights", lambda: self._give_weights(replica, report))
        found, expected = CommittedState.of(report).without_tensors(), state.committed.without_tensors()
        if found != expected:
            self._check_epoch(replica, report)
            what = f"its weights have the label {found}, not {expected}"
            yield Difference(what, partial(replica.client.call, m.SetVersionArgs(**expected)))
        yield from self._adapter_differences(replica, report)
        if wanted - asleep:
            sleep = m.SleepArgs(tags=tuple(sorted(wanted - asleep)))
            yield Difference(f"{sorted(wanted - asleep)} must sleep", partial(replica.client.call, sleep))
        yield from self._hold_differences(replica, report)

    def _adapter_differences(self, replica: Replica, report: StateReport) -> Iterator[Difference]:
        state = self._state
        found = {a["lora_name"]: (a["adapter_epoch"], a["fingerprint"]) for a in report["adapters"]}
        for name, (epoch, fingerprint) in found.items():
            adapter = state.adapters.get(name)
            if (
                adapter is None
                or epoch > adapter.epoch
                or (epoch == adapter.epoch and fingerprint != adapter.fingerprint)
            ):
                unload = m.UnloadAdapterArgs(name)
                yield Difference(f"it has another adapter {name!r}", partial(replica.client.call, unload))
        for name, adapter in state.adapters.items():
            if found.get(name) != (adapter.epoch, adapter.fingerprint):
                yield Difference(f"it lacks adapter {name!r}", partial(self._give_adapter, replica, adapter))
        if report["past_adapter_epoch"] < state.past_adapter_epoch:
            what = f"it does not know that adapter epochs up to {state.past_adapter_epoch} were used"
            yield Difference(what, partial(self._leadership.lead, replica))

    def _hold_differences(self, replica: Replica, report: StateReport) -> Iterator[Difference]:
        state, found = self._state, {(hold["scope"], hold["id"]): hold for hold in report["holds"]}
        for scope, hold_id in found:
            own = found[scope, hold_id]["placed_by"] == SYSTEM and hold_id != REPUBLISH  # ends with its sleep or update
            if (scope, hold_id) not in state.holds and not own:
                resume = m.ResumeArgs(hold_id=hold_id, scope=scope)
                what = f"hold {hold_id!r} of {scope} stands on it"
                yield Difference(what, partial(replica.client.call, resume))
        missing = [key for key, hold in state.holds.items() if _is_weaker(found.get(key), hold.args)]
        if missing:
            yield Difference(f"it lacks the holds {missing}", lambda: self._place(replica, missing))

    # ------------------------------------------------------------------ mending

    def _check_epoch(self, replica: Replica, report: StateReport) -> None:
        if report["weight_epoch"] > self._state.weight_epoch:
            newer = f"its weights have epoch {report['weight_epoch']}, above {self._state.weight_epoch} of the fleet"
            raise RestartNeeded(f"replica {replica.name}: {newer}")

    async def _give_weights(self, replica: Replica, report: StateReport) -> None:
        state = self._state
        self._check_epoch(replica, report)
        if state.weight_epoch == 0 and state.fingerprint is not None:
            why = f"replica {replica.name}: it was started with other weights ({report['fingerprint']}) than the fleet"
            raise ReplicaMisfit(f"{why} ({state.fingerprint})", param="fingerprint")
        if report["weight_epoch"] == state.weight_epoch and report["fingerprint"] is not None:
            raise RestartNeeded(f"replica {replica.name}: it has other weights of epoch {report['weight_epoch']}")

        def peers() -> list[Replica]:
            return [other for other in self._replicas.values() if other is not replica and self.has_weights(other)]

        try:
            await self._transfer.give_weights(replica, state, peers)
        except WrongOrder as error:  # nobody can give the weights
            if not peers() and self._is_lost() and report["fingerprint"] is not None:
                self._restart_fleet(report)
            raise JoinBlocked(f"replica {replica.name}: {error.message}") from error

    def _is_lost(self) -> bool:
        """Return whether what a replica lacks is gone: the fleet has no member, and has had none for ``rebuild_s``,
        since nobody has it."""
        if any(replica.in_quorum for replica in self._replicas.values()):
            return False
        now = asyncio.get_running_loop().time()
        if self._lost_since is None:
            self._lost_since = now
        return now - self._lost_since >= self._config.rebuild_s

    def _restart_fleet(self, report: StateReport) -> None:
        """Begin again with the weights that the replica was started with, after nobody with the fleet's
        weights came back in time. As after the restart of a single engine, the fleet is held until weights are
        published, and has a new boot id. The epoch goes on, so that it never goes back for a client."""
        state = self._state
        logger.error("the weights %r of epoch %d are lost: no replica has them", state.version, state.weight_epoch)
        started_with = CommittedState.of(report)._replace(weight_epoch=state.next_epoch())
        lost = FleetState(
            **started_with._asdict(),
            boot_id=self._new_boot_id(),
            hold_calls=OverlappingCalls({**state.holds, (WHOLE_ENGINE, REPUBLISH): republish_hold()}),
        )
        state.replace(lost)
        self._lost_since = None

    def _new_boot_id(self) -> str:
        self._leadership.fleet = boot_id = new_fleet(self._config.fleet_id)
        return boot_id

    async def _give_adapter(self, replica: Replica, adapter: FleetAdapter) -> None:
        peers = [other for other in self._replicas.values() if other is not replica and _has_adapter(other, adapter)]
        try:
            await self._transfer.give_adapter(replica, adapter, peers)
        except WrongOrder as error:
            if self._is_lost():
                self._forget_adapter(adapter)
            raise JoinBlocked(
                f"replica {replica.name} lacks adapter {adapter.args.lora_name!r}: {error.message}"
            ) from error

    def _forget_adapter(self, adapter: FleetAdapter) -> None:
        """Begin again without an adapter that nobody has. As after the restart of a single engine, its
        name is not known then, and the boot id is another one."""
        state, name = self._state, adapter.args.lora_name
        if state.adapters.get(name) is not adapter:
            return
        logger.error("adapter %r of epoch %d is lost: no replica has it", name, adapter.epoch)
        state.unload(name)
        state.boot_id = self._new_boot_id()
        state.revision += 1

    async def _place(self, replica: Replica, keys: Sequence[tuple[str, str]]) -> None:
        now = asyncio.get_running_loop().time()
        calls = []
        for hold in [self._state.holds[key] for key in keys]:
            left_s = None if hold.expires_at is None else max(hold.expires_at - now, MIN_TTL_S) + TTL_MARGIN_S
            args = msgspec.structs.replace(hold.args, ttl_s=left_s)
            if args.mode.lower() == "wait":  # the members have drained, so what still runs here is frozen
                args = msgspec.structs.replace(args, timeout_s=0.0, on_timeout="keep")
            calls.append(replica.client.post(args))
        for reply in await asyncio.gather(*calls):
            result_of(reply)


def profile_of(replica: Replica) -> dict[str, Any]:
    """Return the facts that are the same on all replicas of a fleet: a request may go on at any of them."""
    return {field: replica.client.model_info.get(field) for field in PROFILE}


def _has_adapter(replica: Replica, adapter: FleetAdapter) -> bool:
    """Return whether a replica has an adapter of the fleet. All members do, and the others tell it when they join. So
    the replicas of a join storm need not ask each other."""
    copy = adapter.args.lora_name, adapter.fingerprint
    told = ((a["lora_name"], a["fingerprint"]) for a in replica.report.get("adapters", ()))
    return replica.client.connected.is_set() and (replica.in_quorum or copy in told)


def _is_weaker(found: StateReport | None, wanted: m.PauseArgs) -> bool:
    return found is None or MODES.index(found["mode"]) < MODES.index(wanted.mode)
