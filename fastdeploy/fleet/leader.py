"""Leadership of the engines: at most one gateway changes their state.

A gateway that starts asks every engine for its state, leads with a term above all terms that it has seen, and renews
its lease on all engines in one go. The engines decide: an engine follows the highest term, and refuses another gateway
while the lease of a live one runs. So a second gateway waits, and leads soon after the first one has gone.

A gateway that an engine refuses steps down: its control calls are refused with NotLeader, and it takes no new requests.
Requests that run are read to their end. It tries again with a higher term when the lease of the other has ended.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from fastdeploy.client.engine_client import result_of
from fastdeploy.core.errors import EngineDead, FastDeployError, NotLeader
from fastdeploy.fleet.config import FleetConfig
from fastdeploy.fleet.rebuild import StateReport, fleet_of, new_fleet
from fastdeploy.fleet.replica import Replica
from fastdeploy.fleet.state import FleetState
from fastdeploy.inter_communicator import messages as m

logger = logging.getLogger(__name__)
RETRY_S = 0.2
FOLLOW_AGAIN_S = 0.5  # until the next try to follow a gateway that leads and cannot be reached


async def _follow_nobody(leader: str) -> bool:
    return False


@dataclass
class Renewal:
    """A renewal of the lease on ``num`` engines at once. until: its end, on the event loop's clock."""

    until: float
    num: int
    answers: int = 0


class GatewayLeadership:
    """The leadership of one gateway. replicas: all, by name. state: of the fleet. begin(reports): called when this
    gateway leads, with the answers of the engines from before. renewed(replica, revision): called after each renewal,
    with the revision of the fleet's state when it was sent; -1 = the state was changing. end(why): called when this
    gateway does not lead any more. address: at which other gateways reach this one. follow(leader): follows the gateway
    at that address for as long as it leads, and returns whether it led.

    fleet: boot id of the fleet, which the engines keep. leads: whether this gateway leads, as far as it knows. why: why
    not. deposed: set when it has stepped down, until it tries to lead again."""

    def __init__(
        self,
        config: FleetConfig,
        replicas: Mapping[str, Replica],
        state: FleetState,
        begin: Callable[[Sequence[StateReport]], None],
        renewed: Callable[[Replica, int], None],
        end: Callable[[str], None],
        address: str = "",
        follow: Callable[[str], Awaitable[bool]] = _follow_nobody,
    ):
        self._config = config
        self._replicas = replicas
        self._state = state
        self._begin = begin
        self._renewed = renewed
        self._end = end
        self._address = address
        self._follow = follow
        self._moved = asyncio.Event()
        self.deposed = asyncio.Event()
        self._resigned = False
        self.controller = uuid.uuid4().hex
        self.fleet = ""
        self.term = 0
        self.leads = False
        self._sure_until = 0.0
        self.why = "this gateway does not lead yet: no engine is connected"

    def replicas_changed(self) -> None:
        """Look at the replicas again: one was added or removed, has connected, or was lost."""
        self._moved.set()

    @property
    def is_sure(self) -> bool:
        """Whether this gateway leads for sure: most members have renewed its lease in time. A gateway that stood still
        is not sure for a moment. One that has no others needs not ask."""
        return self.leads and (not self._address or asyncio.get_running_loop().time() < self._sure_until)

    def require(self) -> None:
        """Raise NotLeader unless this gateway leads, or EngineDead if it has seen no engine yet."""
        if not self.leads:
            if not self.term:
                raise EngineDead(self.why)
            raise NotLeader(self.why, controller=self.controller, term=self.term)

    def depose(self, why: str) -> None:
        """Step down, because an engine follows another gateway."""
        if self.leads:
            self.leads, self.why = False, why
            logger.warning("this gateway steps down: %s", why)
            self.deposed.set()
            self._end(why)

    def resign(self) -> None:
        """Step down, and do not lead again: this process ends."""
        self._resigned = True
        self.depose("it is being replaced")

    async def lead(self, replica: Replica) -> StateReport:
        """Lead one engine, and return its state. Raises NotLeader; after a higher term this gateway has stepped
        down."""
        try:
            return replica.keep_report(await replica.client.call(self._args()))
        except NotLeader as error:
            if self.leads and error.detail.get("term", 0) > self.term:
                self.depose(error.message)
            raise

    def confirm(self, replica: Replica, change: int) -> None:
        """Send an engine that has just joined the number of the change of the fleet that it has."""
        answer = replica.client.post(self._args(), change)
        answer.add_done_callback(lambda future: future.cancelled() or future.exception())

    async def run(self) -> None:
        """Lead, and lead again after each time that another gateway led, until :meth:`resign` or until this is
        cancelled."""
        while not self._resigned:
            self.deposed.clear()
            reports = await self._become_leader()
            self.leads, self.why = True, ""
            self._sure_until = asyncio.get_running_loop().time() + self._config.lease_s / 2  # until the first renewal
            logger.info("leading fleet %s in term %d, with %d engines", self.fleet, self.term, len(reports))
            self._begin(reports)
            await self._keep()

    # ------------------------------------------------------------------ inside

    def _args(self) -> m.LeadArgs:
        past = self._state.past_adapter_epoch
        config, address = self._config, self._address
        patience_s = config.fence_after_s / 2 if address else 0.0  # the call has to be answered in time
        return m.LeadArgs(self.fleet, self.controller, self.term, config.lease_s, past, address, patience_s)

    def _connected(self) -> list[Replica]:
        return [replica for replica in self._replicas.values() if replica.client.connected.is_set()]

    async def _become_leader(self) -> list[StateReport]:
        """Return the states of the engines from before, once this gateway leads one of them. Follow the gateway that
        leads until then."""
        followed = False
        while True:
            if not followed:  # else the members are connected already, and need not wait for others
                await self._gather()
            found = await self._ask_all()
            if not found:
                await asyncio.sleep(RETRY_S)
                continue
            before = [report for _, report in found]
            self.term = max(self.term, *(report["term"] for report in before)) + 1
            self.fleet = fleet_of(self._config.fleet_id, before) or new_fleet(self._config.fleet_id)
            # The engine with the highest term first: a gateway that leads now leads this one. Two gateways that start
            # at the same time ask the same engine first, and it takes one of them.
            found.sort(key=lambda item: (-item[1]["term"], item[0].name))
            try:
                await self.lead(found[0][0])
                # Nobody else has changed the state since the first answers, unless another gateway's lease ended in
                # between. So the answers that count are new ones.
                others = [self.lead(replica) for replica, _ in found[1:]]
                for refusal in await asyncio.gather(*others, return_exceptions=True):
                    if isinstance(refusal, NotLeader) and refusal.detail.get("leader"):
                        raise refusal  # it has only lost its connection to the first engine
            except NotLeader as error:
                self.why = error.message
                followed = await self._until_free(error)
            except FastDeployError as error:
                self.why = error.message
                await asyncio.sleep(RETRY_S)
            else:
                return await self._before_and_after(found)

    async def _until_free(self, refusal: NotLeader) -> bool:
        """Follow the gateway that leads until it is lost, and return True; or wait for the end of its lease."""
        leader = refusal.detail.get("leader", "")
        if leader and await self._follow(leader):
            return True
        left_s = refusal.detail.get("lease_left_s", 0.0)
        await asyncio.sleep((min(left_s, FOLLOW_AGAIN_S) if leader else left_s) + RETRY_S)
        return False

    async def _before_and_after(self, found: Sequence[tuple[Replica, StateReport]]) -> list[StateReport]:
        """Return the present states of the engines, with the fleet that each belonged to before."""
        fleets = {replica.name: report["fleet"] for replica, report in found}
        now = {replica.name: report for replica, report in await self._ask_all()}
        return [{**now.get(replica.name, report), "fleet": fleets[replica.name]} for replica, report in found]

    async def _gather(self) -> None:
        """Wait until all engines are connected, or one is and the others have had their time."""
        while not self._connected():
            await self._wait_moved(None)
        now = asyncio.get_running_loop().time
        end = now() + self._config.rebuild_s
        while 0 < len(self._connected()) < len(self._replicas) and now() < end:
            await self._wait_moved(end - now())

    async def _wait_moved(self, seconds: float | None) -> None:
        self._moved.clear()
        try:
            await asyncio.wait_for(self._moved.wait(), seconds)
        except TimeoutError:
            return

    async def _ask_all(self) -> list[tuple[Replica, StateReport]]:
        """Return the states of the engines that answer in time."""

        async def ask(replica: Replica) -> tuple[Replica, StateReport] | None:
            try:
                async with asyncio.timeout(self._config.fence_after_s):
                    return replica, replica.keep_report(await replica.client.call(m.FleetStateArgs()))
            except (FastDeployError, TimeoutError) as error:
                logger.warning("replica %s did not tell its state: %s", replica.name, error)
                return None

        answers = await asyncio.gather(*(ask(replica) for replica in self._connected()))
        return [answer for answer in answers if answer is not None]

    async def _keep(self) -> None:
        """Renew the lease on all engines until another gateway leads."""
        while not self.deposed.is_set():
            revision = -1 if self._state.changing else self._state.revision
            led = [replica for replica in self._connected() if self._is_led(replica)]
            renewal = Renewal(asyncio.get_running_loop().time() + self._config.lease_s, len(led))
            for replica in led:
                self._renew(replica, revision, renewal)
            try:
                await asyncio.wait_for(self.deposed.wait(), self._config.lease_s / 3)
            except TimeoutError:
                continue

    def _is_led(self, replica: Replica) -> bool:
        report = replica.report
        return (report.get("controller"), report.get("term")) == (self.controller, self.term)

    def _renew(self, replica: Replica, revision: int, renewal: Renewal) -> None:
        client = replica.client

        def answered(future: asyncio.Future[m.Reply]) -> None:
            if future.cancelled() or future.exception() is not None or client is not replica.client:
                return  # Replica handles the loss of its engine
            try:
                replica.keep_report(result_of(future.result()))
            except NotLeader as error:
                self.depose(error.message)
            except FastDeployError as error:
                logger.error("replica %s did not renew the lease: %s", replica.name, error)
            else:
                renewal.answers += 1
                if 2 * renewal.answers > renewal.num and self.leads:
                    self._sure_until = max(self._sure_until, renewal.until)
                self._renewed(replica, revision)

        client.post(self._args()).add_done_callback(answered)
