"""FleetClient: what an EngineClient is for one engine, for all replicas of a fleet."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from fastdeploy.client.engine_client import MakeStream
from fastdeploy.client.request_stream import Reader, RequestStream
from fastdeploy.core import errors
from fastdeploy.core.process import VERSION
from fastdeploy.core.request_fields import AddRequest
from fastdeploy.fleet.chain import GrowingFile
from fastdeploy.fleet.config import FleetConfig
from fastdeploy.fleet.control import FleetControl
from fastdeploy.fleet.dispatch import Dispatcher, Lookups
from fastdeploy.fleet.endings import ENDS, EndingCall
from fastdeploy.fleet.homes import Homes
from fastdeploy.fleet.launcher import Launcher
from fastdeploy.fleet.leader_calls import LeaderCalls
from fastdeploy.fleet.membership import MakeConnector, Membership
from fastdeploy.fleet.peers import PeerLink, Peers
from fastdeploy.fleet.relay import Relay
from fastdeploy.fleet.remote import is_remote
from fastdeploy.fleet.replica import Replica
from fastdeploy.fleet.retained import RetainedRequests
from fastdeploy.fleet.router import Router
from fastdeploy.fleet.staging import Staging
from fastdeploy.inter_communicator import messages as m

if TYPE_CHECKING:
    import httpx

logger = logging.getLogger(__name__)


class FleetClient:
    """All requests and control calls of one gateway (see ServingClient). Use from one event loop only. link: to the
    other gateways of the fleet; None = this is the only one.

    The boot id that clients see is that of the fleet. It stays the same as long as the fleet keeps its weights."""

    def __init__(
        self,
        config: FleetConfig,
        launcher: Launcher,
        connector: MakeConnector,
        router: Router | None = None,
        link: PeerLink | None = None,
    ):
        self._config = config
        self.peers = Peers(link, config, self._answer_peer, self._peer_gone) if link is not None else None
        self.membership = Membership(config, launcher, connector, self._members_changed, self.peers)
        self._staging = Staging(config, self.membership)
        self._control = FleetControl(config, self.membership, self._staging, self._end_requests)
        self.membership.following.end_requests = self._end_requests
        self.leader_calls = LeaderCalls(config, self.membership, self._control, self._staging, self.peers)
        self.router = router or Router()
        self._open: list[Replica] = []  # as of the last change of the members
        state, members = self.membership.state, lambda: self.membership.quorum
        self._lookups = Lookups(state, members, self.leader_calls.make, self._looked_up)
        address, ready = self.peers.endpoint if self.peers is not None else "", self._lookups.ready
        self._homes = Homes(self.router, self._takers, address, lambda: self.membership.view.gateways, self._ask)
        self._dispatcher = Dispatcher(config, self._homes, self._takers, self._max_waiting, ready, self._least_epoch)
        self._relays: dict[str, Relay] = {}
        self._by_client_id: dict[str, set[str]] = {}  # request ids by the id that the client knows
        self._retained = RetainedRequests(config, self.membership)
        self._task: asyncio.Task[None] | None = None
        self._without_members_since = 0.0  # on the event loop's clock
        self.connected = asyncio.Event()
        self.closing = asyncio.Event()
        self.welcome: m.Welcome | None = None
        self.model_info: dict[str, Any] = {}

    def start(self) -> asyncio.Task[None]:
        """Begin to connect to the replicas. Returns the task that does so until :meth:`close`."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name="fleet-client")
        return self._task

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self.membership.run(), name="fleet-membership")
            if self.peers is not None:
                group.create_task(self.peers.run(), name="fleet-peers")

    async def close(self) -> None:
        """Drop all connections. Open requests and calls fail with EngineDead."""
        self._control.close()
        await self._dispatcher.close()
        await self._lookups.close()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.membership.close()
        if self.peers is not None:
            await self.peers.close()
        for relay in list(self._relays.values()):
            relay.outer.fail(errors.EngineDead("the gateway is shutting down"))

    def _members_changed(self) -> None:
        self.leader_calls.members_changed()
        self._control.rearm()
        members, self._open = self.membership.quorum, self.membership.open
        boot_id = self.membership.boot_id
        if members and (self.welcome is None or self.welcome.boot_id != boot_id):
            welcome = members[0].client.welcome
            assert welcome is not None
            self.model_info = members[0].client.model_info
            self.welcome = m.Welcome(boot_id, 0, welcome.max_model_len, VERSION)
        if members:
            self.connected.set()
        elif self.connected.is_set():
            self._without_members_since = asyncio.get_running_loop().time()
            self.connected.clear()
        self._dispatcher.send_waiting()

    @property
    def loading(self) -> None:
        """See EngineClient. Each replica says so itself."""

    @property
    def missing_because(self) -> str:
        """See EngineClient."""
        return self.membership.missing_because

    def _takers(self) -> list[Replica]:
        """Return the replicas that take new requests now: of a gateway that follows, only while its view is valid."""
        membership = self.membership
        return self._open if self.peers is None or membership.leadership.is_sure or membership.following.valid else []

    def _least_epoch(self) -> int:
        """Return the oldest weight_epoch that a request of a session may get, see FleetView."""
        if self.peers is None:
            return 0
        leads, views = self.membership.leadership.leads, self.membership.views
        return views.least_epoch if leads else self.membership.following.view.least_epoch

    @property
    def closed_because(self) -> str:
        """See EngineClient."""
        if self._takers():
            return ""
        if self._open:
            return "the gateway that leads does not answer"
        return "every member of the fleet is drained" if self.membership.quorum else self.missing_because

    async def require_engine(self) -> m.Welcome:
        """Return the Welcome of the fleet. In a gateway that starts, wait for its first member. If the fleet has lost
        its last member, a request may wait for the next one, so this is no error for ``failover_s`` seconds. Raises
        EngineDead after these times, and while another gateway leads."""
        await self.leader_calls.until_begun()
        if not self.connected.is_set():
            waited_s = asyncio.get_running_loop().time() - self._without_members_since
            leads = self.membership.leadership.leads or self.peers is not None  # or may lead soon
            may_wait = self.welcome is not None and leads
            if not may_wait or waited_s >= self._config.failover_s:
                raise errors.EngineDead(f"no replica is ready: {self.missing_because}")
        assert self.welcome is not None
        return self.welcome

    @property
    def num_waiting(self) -> int:
        """Number of choices that wait for a replica."""
        return self._dispatcher.num_waiting

    # ------------------------------------------------------------------ requests

    def _max_waiting(self) -> int:
        """Return how many choices may wait in the queues of all replicas, whatever their states."""
        return sum(replica.max_waiting for replica in self.membership.replicas.values())

    async def submit(
        self, request: AddRequest, reader: Reader | None = None, make_stream: MakeStream = RequestStream
    ) -> RequestStream:
        """See EngineClient.submit. A request without a seed gets one here, so that every replica draws the same tokens.
        If no replica may have the request now, the request waits, and its stream is returned at once. Raises QueueFull
        if as many wait as the queues of all replicas may hold, and EngineDead while this process ends."""
        await self.require_engine()
        self.membership.require_known(request)
        retained = request.retain_s > 0
        if request.sampling.seed is None:
            # Another gateway that is asked for the result of the same request computes the same tokens, if it is lost.
            name = f"{self._config.fleet_id}/{request.request_id}" if retained else ""
            request = replace(request, sampling=request.sampling.seeded(name))
        if retained:
            request = replace(request, recomputes_lost=True)
        seen = self.router.seen(request)
        holder = await self._retained.holder(request) if retained else None
        if self.closing.is_set():
            raise errors.EngineDead("the server is shutting down")  # ``abort_open`` would not end it
        self._require_unused(request)  # after the wait above, in which another request with this id may have begun
        fingerprint = request.fingerprint if retained else ""
        outer = make_stream(request.request_id, request.n, self._cancel, self._forget, reader, fingerprint)
        relay = Relay(request, outer, seen, self._dispatcher, self._turn_ended)
        self._relays[request.request_id] = relay
        self._by_client_id.setdefault(relay.client_id, set()).add(request.request_id)
        try:
            await self._dispatcher.submit(relay.whole(), holder)
        except BaseException:
            outer.close()
            raise
        if request.retain_s > 0:
            self._retained.sent(request, self.replicas_of(request.request_id))
        return outer

    def replicas_of(self, request_id: str) -> list[Replica]:
        """Return the replicas at which a request runs."""
        relay = self._relays.get(request_id)
        return [attempt.route.replica for attempt in relay.attempts] if relay is not None else []

    def _require_unused(self, request: AddRequest) -> None:
        """Raise DuplicateRequest if an id of ``request`` is in use. A request with retain_s takes over from an earlier
        one with its id and body."""
        name = request.request_id
        if (relay := self._relays.get(name)) is not None:
            if request.retain_s <= 0 or relay.outer.fingerprint != request.fingerprint:
                message = f"request_id: {name!r} is still running, without retain_s or with another body"
                raise errors.DuplicateRequest(message, param="request_id")
            relay.outer.fail(errors.AttachedElsewhere(f"a later request with request_id {name!r} took over"))
        others: Collection[str] = self._relays if request.group else self._by_client_id
        if (request.group or name) in others:
            message = f"request_id {request.group or name!r} is in use already"
            raise errors.DuplicateRequest(message, param="request_id")

    def _looked_up(self, name: str, error: errors.FastDeployError | None) -> None:
        """Send the requests that wait for an adapter, or give them the error of its lookup."""
        for relay in list(self._relays.values()):
            if error is not None and relay.parts and relay.request.adapter == name:
                relay.outer.fail(error)
        self._dispatcher.send_waiting()

    def _turn_ended(self, relay: Relay, tokens: int) -> None:
        if session := relay.request.session:
            self.router.grown(session, len(relay.request.prompt_token_ids) + tokens)

    def _cancel(self, request_id: str, choice: int | None, reason: str) -> None:
        if choice is not None:  # without a choice, ``_forget`` follows and cancels all choices
            self._relays[request_id].cancel(choice, reason)

    def _forget(self, request_id: str) -> None:
        if (relay := self._relays.pop(request_id, None)) is None:
            return
        self._dispatcher.forget(relay.parts)
        relay.close()
        same = self._by_client_id[relay.client_id]
        same.discard(request_id)
        if not same:
            del self._by_client_id[relay.client_id]

    # ------------------------------------------------------------------ control

    async def call(self, args: m.Args) -> dict[str, Any]:
        """Make a control call on the whole fleet. See FleetControl. A gateway that does not lead answers reads, from
        the replicas that it is connected to, and raises NotLeader for all others. A gateway that starts lets them
        wait for its first member."""
        await self.leader_calls.until_ready(args)
        made = args.call if isinstance(args, m.SentCallArgs) else args
        if isinstance(made, m.LoadAdapterArgs):
            with self._lookups.loading(made.lora_name):
                await self._lookups.settled(made.lora_name)
                return await self._call(args)
        return await self._call(args)

    async def _answer_peer(self, gateway: str, args: m.Args) -> dict[str, Any]:
        """Answer a call of another gateway."""
        if isinstance(args, m.FollowArgs):
            return await self.membership.views.poll(args)
        if isinstance(args, m.PlaceArgs):
            return await self._homes.answer(args)
        leadership = self.membership.leadership
        if not leadership.leads:
            raise errors.NotLeader(f"this gateway does not lead: {leadership.why}", began=False)
        return await self.call(args)

    async def _ask(self, gateway: str, args: m.PlaceArgs) -> dict[str, Any]:
        """Ask another gateway."""
        assert self.peers is not None
        return await self.peers.client(gateway).call(args)

    def _peer_gone(self, gateway: str) -> None:
        self.membership.views.gone(gateway)

    async def _call(self, args: m.Args) -> dict[str, Any]:
        if isinstance(args, m.AbortArgs) and not self.membership.quorum:  # the call fails, but ends what waits
            self._end_requests(args).failed = True
        try:
            return await self.leader_calls.make(args)
        finally:
            self._dispatcher.send_waiting()  # the replicas may have newer weights now

    def sending_early(self, path: str, nbytes: int) -> AbstractAsyncContextManager[GrowingFile | None]:
        """Send an upload to other hosts while it is received. See Staging."""
        return self._staging.sending_early(path, nbytes)

    def remote_export(self, tensors: Sequence[str]) -> AbstractAsyncContextManager[httpx.Response] | None:
        """Return the answer to GET /v1/weights/export of a member on another host; None = the member that answers
        ExportWeightsArgs is on this host, or there is none. Raises NotLeader."""
        member = self._remote_exporter()
        return self.membership.hosts.exported(member, tensors) if member is not None else None

    def remote_adapter_export(self, lora_name: str, file: str) -> AbstractAsyncContextManager[httpx.Response] | None:
        """Return the answer to GET /v1/adapters/export of a member on another host, as :meth:`remote_export` does for
        weights."""
        member = self._remote_exporter()
        return self.membership.hosts.exported_adapter(member, lora_name, file) if member is not None else None

    def _remote_exporter(self) -> Replica | None:
        if self.peers is None:
            self.membership.leadership.require()
        member = next(iter(self.membership.quorum), None)
        return member if member is not None and is_remote(member) else None

    def _end_requests(self, args: m.Args, before: float | None = None) -> EndingCall:
        """Add the call to the requests that it ends, and end what of them is at no replica. In one turn of the event
        loop with the sending of the call, so nothing that waits goes to a replica behind the call. before: only those
        that came before this time on the event loop's clock."""
        ending = EndingCall(args)
        for relay in list(self._relays.values()) if isinstance(args, ENDS) else ():
            if ending.why(relay.request) is not None and (before is None or relay.began < before):
                relay.endings.append(ending)
                self._dispatcher.forget(relay.parts)
                relay.end_parts()
        return ending

    @property
    def quiet(self) -> bool:
        """Whether no request of this gateway runs, and it is not changing the fleet: by a call or a weight session."""
        leads = self.membership.leadership.leads
        return not self._relays and not (leads and self.membership.state.changing)

    def sign_off(self) -> None:
        """Leave the fleet to the other gateways, since this process ends."""
        self.membership.leadership.resign()

    async def abort_open(self, bound_s: float) -> None:
        """Abort every open request, at the end of this process. See EngineClient.abort_open."""
        self.closing.set()
        self.leader_calls.close()
        to_abort = [relay.client_id for relay in self._relays.values() if not relay.outer.fingerprint]
        if to_abort and self.membership.quorum:
            try:
                async with asyncio.timeout(bound_s):
                    await self.call(m.AbortArgs(request_ids=to_abort))
            except (TimeoutError, errors.FastDeployError) as error:
                logger.warning("could not abort the open requests: %r", error)
        self._dispatcher.closed = True
        for relay in list(self._relays.values()):
            if not relay.outer.ended:
                relay.outer.fail(errors.EngineDead("the server is shutting down"))
