"""A fleet without processes: model replicas, and a gateway that runs the real calls and the real transaction table over
a network in which each message may be late, doubled or lost.

A connection keeps its order, as ZMQ does. So a message is lost only together with the connection, or in a replica that
hangs; a doubled one comes twice in a row."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from fastdeploy.core import errors
from fastdeploy.core.process import host_id
from fastdeploy.core.weight_source import FolderSource
from fastdeploy.fleet.call import Context, FleetCall
from fastdeploy.fleet.calls import call_for
from fastdeploy.fleet.config import FleetConfig
from fastdeploy.fleet.join import JoinBlocked, Joiner
from fastdeploy.fleet.leader import GatewayLeadership
from fastdeploy.fleet.pause_calls import PauseCall
from fastdeploy.fleet.remote import RemoteHosts
from fastdeploy.fleet.replica import Replica
from fastdeploy.fleet.state import FleetAdapter, FleetHold, FleetState, OverlappingCalls
from fastdeploy.fleet.transaction import WAITING, Action, Command, Phase, Rule, Send, Transaction, Vote
from fastdeploy.fleet.transfer import Transfer
from fastdeploy.inter_communicator import messages as m
from fleet.model_replica import START, ModelReplica, Sent, Sources

SOURCE = FolderSource("/w")  # of all weights
TAKE_TURNS = (m.SleepArgs, m.WakeArgs)


class SimulatedCall:
    """A call that a gateway makes. outcome: "done" or the error; None as long as it runs."""

    def __init__(self, gateway: SimulatedGateway, number: int, fleet_call: FleetCall[Any], names: list[str]):
        self.gateway, self.number, self.fleet_call, self.names = gateway, number, fleet_call, names
        self.transaction = gateway.fleet.make_transaction(names, fleet_call.rule)
        self.outcome: str | Exception | None = None
        self.answers = 0
        self.takes_turns = isinstance(fleet_call.args, TAKE_TURNS)
        self._got: dict[tuple[str, Command], dict[int, Any]] = {}
        self._rolled_back = False

    def start(self) -> None:
        self.fleet_call.on_send()
        self.act(self.transaction.start())

    def act(self, actions: list[Action]) -> None:
        queue = deque(actions)
        while queue:
            action = queue.popleft()
            if isinstance(action, Send):
                queue += self._send(action.name, action.command)
            else:
                self.gateway.fence(action.name)
        if self.transaction.ended and self.outcome is None:
            self._end()

    def _send(self, name: str, command: Command) -> list[Action]:
        if command is Command.ROLLBACK and not self._rolled_back:
            self._rolled_back = True
            self.fleet_call.on_rollback()
        if command is Command.PREPARE:
            messages = list(self.fleet_call.messages_to_prepare(name))
        else:
            one = (
                self.fleet_call.message_to_commit(name)
                if command is Command.COMMIT
                else self.fleet_call.message_to_undo(name)
            )
            messages = [] if one is None else [one]
        if not messages:
            return self.transaction.answer(name, command, True)
        if name not in self.gateway.members:
            return self.transaction.lose(name, "not connected")
        self._got[name, command] = {}
        for index, args in enumerate(messages):
            replica = self.gateway.fleet.replicas[name]
            replica.inbox.append((self.gateway.term, Sent(self.number, command, index, args, len(messages))))
        return []

    def answered(self, name: str, sent: Sent, result: Any) -> None:
        got = self._got.setdefault((name, sent.command), {})
        got.setdefault(sent.index, (sent.args, result))
        if isinstance(result, errors.NotLeader):
            self.outcome = result
        if (
            self.outcome is not None
            or len(got) < sent.result
            or WAITING.get(self.transaction.votes[name]) is not sent.command
        ):
            return
        error = next((value for _, value in got.values() if isinstance(value, Exception)), None)
        for args, value in got.values():
            if not isinstance(value, Exception) and sent.command is not Command.ROLLBACK:
                self.fleet_call.on_result(name, args, value)
        last = got[sent.result - 1][1]
        if error is not None and self.fleet_call.is_done_already(error):
            error, last = None, None
        elif error is None:
            error = self.fleet_call.disagreement(name, sent.command, last)
        if error is not None and sent.command is not Command.ROLLBACK:
            self.fleet_call.errors[name] = error
        elif error is None and last is not None and sent.command is not Command.ROLLBACK:
            self.fleet_call.results[name] = last
        self.act(self.transaction.answer(name, sent.command, error is None))

    def _end(self) -> None:
        self.answers += 1
        lost = [name for name, vote in self.transaction.votes.items() if vote is Vote.LOST]
        self.fleet_call.results = {name: r for name, r in self.fleet_call.results.items() if name not in lost}
        if self.transaction.phase is Phase.DONE and self.fleet_call.results:
            self.outcome = "done"
            self.gateway.fleet.note_done(self.fleet_call.on_success())
        else:
            self.fleet_call.on_failure()
            self.outcome = next(iter(self.fleet_call.errors.values()), errors.EngineDead("no member is left"))
        self.gateway.ended(self)


class SimulatedGateway:
    """A gateway in one term. It knows its members, and nothing else but what they answer."""

    def __init__(self, fleet: SimulatedFleet, term: int, state: FleetState, members: list[str]):
        self.fleet, self.term, self.state = fleet, term, state
        self.members = dict.fromkeys(members)
        self.calls: list[SimulatedCall] = []
        self.waiting: deque[m.Args] = deque()  # sleeps and wake-ups, which are made one after the other

    def call(self, args: m.Args) -> SimulatedCall | None:
        if not self.members:
            return None
        if isinstance(args, TAKE_TURNS) and any(c.outcome is None for c in self.calls if c.takes_turns):
            self.waiting.append(args)
            return None
        fleet_call = call_for(args, Context(self.state, self.fleet.config, 0.0))
        try:
            names = list(fleet_call.participants(list(self.members)))
        except errors.FastDeployError:
            return None
        call = SimulatedCall(self, len(self.calls), fleet_call, names)
        self.calls.append(call)
        call.start()
        return call

    def ended(self, call: SimulatedCall) -> None:
        if call.takes_turns and self.waiting:
            self.call(self.waiting.popleft())

    def fence(self, name: str) -> None:
        """Cut a replica off: its messages are gone, and it is restarted. A gateway that leads no more does nothing."""
        if name in self.members and self.fleet.gateway is self:
            del self.members[name]
            self.state.forget_replica(name)
            self.fleet.restart(name)

    def lost(self, name: str) -> None:
        """The connection to ``name`` has ended."""
        self.fence(name)
        for call in self.calls:
            if call.outcome is None and name in call.transaction.votes:
                call.act(call.transaction.lose(name, "the connection is lost"))

    def deadline(self, call: SimulatedCall) -> None:
        for command in Command:
            if call.outcome is None:
                call.act(call.transaction.deadline(command))
        for name in [name for name in call.names if name not in self.members]:
            for other in self.calls:
                if other.outcome is None and name in other.transaction.votes:
                    other.act(other.transaction.lose(name, "fenced by another call"))


class ConnectedReplica:
    """A model replica as a gateway sees it while it joins. Its answers come at once."""

    def __init__(self, replica: ModelReplica, in_quorum: bool):
        self.name, self.in_quorum, self.in_flight = replica.name, in_quorum, 0
        self.placement = SimpleNamespace(host=host_id())
        self.client, self._replica = self, replica
        self.connected, self.welcome = asyncio.Event(), None
        self.connected.set()
        self.model_info = {"dtype": "float32", "vocab_size": 1000, "max_model_len": 128}
        self.keep_report(replica.do(m.FleetStateArgs()))

    def keep_report(self, report: dict[str, Any]) -> dict[str, Any]:
        self.report = report
        return report

    async def call(self, args: m.Args) -> dict[str, Any]:
        return self._replica.do(args)

    def note_past_adapter(self, adapter_epoch: int) -> None:
        self._replica.past_adapter_epoch = max(self._replica.past_adapter_epoch, adapter_epoch)

    async def post(self, args: m.Args) -> m.Reply:
        return m.Reply(0, self._replica.do(args))


class SimulatedLeadership:
    """Leads each replica at once. state: of the fleet."""

    fleet = "simulated"

    def __init__(self, state: FleetState):
        self._state = state

    async def lead(self, replica: ConnectedReplica) -> None:
        replica.note_past_adapter(self._state.past_adapter_epoch)


class SimulatedFleet:
    """Replicas, and the gateway that leads them. make_transaction: of each call, which a test may spoil. sources: that
    the replicas read. loop: runs the joins."""

    def __init__(
        self,
        num: int,
        loop: asyncio.AbstractEventLoop,
        make_transaction: Callable[[list[str], Rule], Transaction] = Transaction,
    ):
        self.config = FleetConfig(fleet_id="simulated")
        self.make_transaction = make_transaction
        self.sources = Sources()
        self.labels: dict[tuple[str, int], str] = {}  # of adapters, see ModelReplica
        self._loop = loop
        self.replicas = {f"r{i}": ModelReplica(f"r{i}", self.sources, self.labels, term=1) for i in range(num)}
        state = FleetState()
        state.committed = START
        self.gateway = SimulatedGateway(self, 1, state, list(self.replicas))
        self.old_gateways: list[SimulatedGateway] = []
        self.replies: dict[str, deque[tuple[int, Sent, Any]]] = {name: deque() for name in self.replicas}
        self.answered_epoch = 0

    def note_done(self, report: dict[str, Any]) -> None:
        self.answered_epoch = max(self.answered_epoch, report.get("weight_epoch", 0))

    # ------------------------------------------------------------------ the network

    def handle_one(self, name: str, doubled: bool = False) -> None:
        """Let a replica handle its next message."""
        replica = self.replicas[name]
        if replica.hangs or not replica.inbox:
            return
        term, sent = replica.inbox.popleft()
        if term != replica.term:
            result: Any = errors.NotLeader("another gateway leads")
        else:
            try:
                result = replica.do(sent.args)
            except errors.FastDeployError as error:
                result = error
        self.replies[name] += [(term, sent, result)] * (2 if doubled else 1)

    def deliver_one(self, name: str) -> None:
        """Hand the next answer of a replica to the gateway that asked."""
        if self.replies[name]:
            term, sent, result = self.replies[name].popleft()
            gateway = next((g for g in (self.gateway, *self.old_gateways) if g.term == term), None)
            if gateway is not None and name in gateway.members:
                gateway.calls[sent.run].answered(name, sent, result)

    def settle(self) -> None:
        """Deliver everything, and let every deadline pass."""
        while True:
            while any(r.inbox and not r.hangs for r in self.replicas.values()) or any(self.replies.values()):
                for name in self.replicas:
                    self.handle_one(name)
                    self.deliver_one(name)
            running = [call for call in self.gateway.calls if call.outcome is None]
            if not running:
                return
            self.gateway.deadline(running[0])

    # ------------------------------------------------------------------ faults

    def restart(self, name: str) -> None:
        """Start a replica again, with the weights of its start."""
        self.replicas[name] = ModelReplica(name, self.sources, self.labels, term=self.gateway.term)
        self.replies[name].clear()

    def die(self, name: str) -> None:
        self.restart(name)
        self.gateway.lost(name)

    def join(self, name: str) -> None:
        """Let a replica that is out join with the real code, while no call changes the fleet. It stays out if nobody
        can give what it lacks, or if it refuses to take it."""
        gateway, state = self.gateway, self.gateway.state
        busy = any(call.outcome is None for call in gateway.calls) or any(
            s.open for s in state.weight_sessions.values()
        )
        if name in gateway.members or busy or not gateway.members:
            return
        connected = {
            other: cast(Replica, ConnectedReplica(replica, other in gateway.members))
            for other, replica in self.replicas.items()
            if other == name or other in gateway.members
        }
        nowhere = cast(RemoteHosts, None)  # all replicas are on this host
        transfer = Transfer(nowhere, self.config.fence_after_s)
        leadership = cast(GatewayLeadership, SimulatedLeadership(state))
        joiner = Joiner(self.config, state, leadership, connected, transfer)
        try:
            self._loop.run_until_complete(joiner.bring(connected[name]))
        except (JoinBlocked, errors.WrongOrder):  # the second one: the replica refuses for reasons of its own
            return
        gateway.members[name] = None

    def new_gateway(self) -> None:
        """The gateway dies between two messages, and the next one leads. Its state is made of those of the replicas:
        the highest epoch, and the union of the holds. What the old gateway has sent is refused from now on."""
        old, term = self.gateway, self.gateway.term + 1
        self.old_gateways.append(old)
        for name, replica in self.replicas.items():
            replica.term = term
            if replica.hangs:
                self.restart(name)
                replica = self.replicas[name]
                replica.term = term
                old.members.pop(name, None)
        known = [self.replicas[name] for name in old.members]
        epoch = max((replica.committed.weight_epoch for replica in known), default=0)
        best = [replica for replica in known if replica.committed.weight_epoch == epoch]
        used = [epoch for replica in known for epoch, _ in replica.adapters.values()]
        used += [replica.past_adapter_epoch for replica in known]
        state = FleetState(weight_epoch=epoch, last_epoch=epoch, past_adapter_epoch=max(used, default=0))
        self._forget_labels(state.past_adapter_epoch)
        members = []
        if best:
            holds = set().union(*(replica.holds for replica in known))
            first = best[0]
            state.committed, state.asleep = first.committed, tuple(first.asleep)
            state.hold_calls = OverlappingCalls({("engine", hold): FleetHold(self._hold(hold)) for hold in holds})
            adapters = {
                name: FleetAdapter(m.LoadAdapterArgs(name, SOURCE), *adapter)
                for name, adapter in first.adapters.items()
            }
            state.adapter_calls = OverlappingCalls(adapters)
            for replica in best:
                replica.holds = set(holds)
                replica.session, replica.loads = None, {}
                if replica.state() == first.state():
                    members.append(replica.name)
        self.gateway = SimulatedGateway(self, term, state, members)
        for name in self.replicas:
            if name not in members:
                self.restart(name)

    def _forget_labels(self, last: int) -> None:
        """Expect no number above ``last`` to be remembered: those who knew it died together with the gateway."""
        for label in [label for label in self.labels if label[1] > last]:
            del self.labels[label]

    def _hold(self, hold_id: str) -> m.PauseArgs:
        return m.PauseArgs("keep", hold_id=hold_id, anonymous=hold_id.startswith("anonymous"))

    # ------------------------------------------------------------------ invariants

    def check(self) -> None:
        """Check a fleet in which every message is delivered."""
        members = [self.replicas[name] for name in self.gateway.members]
        states = {replica.name: replica.state() for replica in members}
        assert len({repr(state) for state in states.values()}) <= 1, states
        state = self.gateway.state
        for replica in members:
            assert replica.holds == {hold_id for _, hold_id in state.holds}, (replica, state.holds)
            assert replica.committed == state.committed
            assert replica.adapters == {name: (a.epoch, a.fingerprint) for name, a in state.adapters.items()}
            assert replica.asleep == set(state.asleep)
            assert (replica.session is not None) == any(s.open for s in state.weight_sessions.values())
            assert not replica.loads
            assert replica.committed.weight_epoch >= self.answered_epoch, (
                "a member serves older weights than an earlier answer"
            )
        for call in self.gateway.calls:
            assert call.outcome is not None and call.answers == 1
            assert not members or call.outcome != "done" or self._stands(call), "a pause that succeeded does not hold"

    def _stands(self, call: SimulatedCall) -> bool:
        """Return whether the hold of a call stands, if the call is a pause and no later call may have released it."""
        if not isinstance(call.fleet_call, PauseCall):
            return True
        hold_id = call.fleet_call.args.hold_id
        for later in self.gateway.calls[call.number + 1 :]:
            args = later.fleet_call.args
            if isinstance(args, m.ResumeArgs) and args.hold_id in (None, hold_id):
                return True
            if isinstance(args, m.PauseArgs) and args.hold_id == hold_id and later.outcome != "done":
                return True
        return ("engine", hold_id) in self.gateway.state.holds
