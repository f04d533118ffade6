"""One control call over the replicas while it runs: carries out what its transaction decides."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from fastdeploy.client.engine_client import result_of
from fastdeploy.core.errors import EngineDead, EngineError, EngineStalled, FastDeployError, NotLeader
from fastdeploy.fleet.call import FleetCall
from fastdeploy.fleet.endings import EndingCall
from fastdeploy.fleet.replica import Replica
from fastdeploy.fleet.reports import refusal, replica_report, with_boot_id
from fastdeploy.fleet.transaction import WAITING, Action, Command, Phase, Rule, Send, Transaction, Vote
from fastdeploy.inter_communicator import messages as m

LATE_TIMER_S = 0.5  # a timer that comes later than this shows that this process was stopped, or its loop was blocked
READ_S = 0.005  # after a deadline, to read the answers that have arrived
COMMANDS = {Phase.PREPARING: Command.PREPARE, Phase.COMMITTING: Command.COMMIT, Phase.ROLLING_BACK: Command.ROLLBACK}


class RunningCall:
    """A call on ``replicas``. ending: the requests that the call ends. fence(replica, why): cuts a replica off.
    ended(call): called once, before the call is answered. not_leader(error): called if a replica is led by another
    gateway; it ends this call. announce(epoch): called before new weights are committed. The commit waits for the
    future that it returns; None = it need not wait.

    announced: whether that was called. future: of the report. A caller may cancel it; the call goes on."""

    def __init__(
        self,
        call: FleetCall[Any],
        replicas: Sequence[Replica],
        ending: EndingCall,
        fence: Callable[[Replica, str], None],
        ended: Callable[[RunningCall], None],
        not_leader: Callable[[NotLeader], None],
        announce: Callable[[int], asyncio.Future[None] | None] = lambda epoch: None,
    ):
        self._loop = asyncio.get_running_loop()
        self._call = call
        self._replicas = {replica.name: replica for replica in replicas}
        self._lives = {replica.name: replica.lives for replica in replicas}
        self._config = call.config
        self._ending = ending
        self._fence = fence
        self._ended = ended
        self._not_leader = not_leader
        self._announce = announce
        self.announced = False
        self._transaction = Transaction(self._replicas, call.rule)
        self._actions: deque[Action] = deque()
        self._acting = False
        self._over = False
        self._phase: Phase | None = None
        self._sending: Command | None = None  # and its number (see messages.Call)
        self._change = 0
        self._deadline: asyncio.TimerHandle | None = None
        self._patient_until = 0.0
        self._began = self._loop.time()
        self._answered_ms = dict.fromkeys(self._replicas, 0.0)
        self._fenced: dict[str, str] = {}
        self._done_already: dict[str, FastDeployError] = {}
        self.future: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self.future.add_done_callback(lambda future: future.cancelled() or future.exception())

    def start(self) -> None:
        """Send the call to all replicas, without a break."""
        call = self._call
        if call.rule is not Rule.READ:
            call.state.changing += 1
            call.state.revision += 1
        call.on_send()
        self._act(self._transaction.start())

    def abandon(self, error: FastDeployError) -> None:
        """End the call with ``error``, without waiting for the replicas."""
        if not self._over:
            self._finish(error)

    # ------------------------------------------------------------------ actions

    def _act(self, actions: list[Action]) -> None:
        """Carry out ``actions``, and those that follow from them. No break between messages of one command."""
        self._actions += actions
        if self._acting or self._over:
            return
        self._acting = True
        self._carry_out()

    def _carry_out(self) -> None:
        while self._actions:
            if self._must_wait(self._actions[0]):
                return
            action = self._actions.popleft()
            if isinstance(action, Send):
                self._send(action.name, action.command)
            else:
                self._fenced[action.name] = action.why
                self._fence(self._replicas[action.name], action.why)
        self._acting = False
        if self._transaction.ended:
            self._conclude()
        elif self._phase is not self._transaction.phase:
            self._phase = self._transaction.phase
            self._begin_wait(COMMANDS[self._phase])

    def _must_wait(self, action: Action) -> bool:
        """Return whether ``action`` begins a commit of new weights, and must wait. It is carried out later then."""
        is_commit = isinstance(action, Send) and action.command is Command.COMMIT
        if not is_commit or self.announced or (epoch := self._call.new_epoch()) is None:
            return False
        self.announced = True
        if (waiting := self._announce(epoch)) is None:
            return False
        waiting.add_done_callback(self._announced)
        return True

    def _announced(self, waiting: asyncio.Future[None]) -> None:
        if not self._over:
            self._carry_out()

    @property
    def may_have_committed(self) -> bool:
        """Whether the call has failed, and a replica that was lost may serve the new weights."""
        votes = self._transaction.votes.values()
        return self._transaction.phase is not Phase.DONE and Vote.LOST in votes

    def _send(self, name: str, command: Command) -> None:
        calls = [args for args in self._messages(name, command) if args is not None]
        if not calls:
            self._act(self._transaction.answer(name, command, True))
            return
        if command is not self._sending and self._call.rule is not Rule.READ:
            self._call.state.changes += 1
            self._sending, self._change = command, self._call.state.changes
        replica = self._replicas[name]
        if replica.lives != self._lives[name]:  # its engine, or another one, may be connected again
            self._act(self._transaction.lose(name, f"it was lost during the call: {replica.why}"))
            return
        try:
            futures = [replica.client.post(args, self._change) for args in calls]
        except EngineError as error:  # not connected
            self._act(self._transaction.lose(name, error.message))
            return
        answers = asyncio.gather(*futures, return_exceptions=True)
        answers.add_done_callback(partial(self._answered, name, command, calls))

    def _messages(self, name: str, command: Command) -> Sequence[m.Args | None]:
        if command is Command.PREPARE:
            return self._call.messages_to_prepare(name)
        if command is Command.COMMIT:
            return [self._call.message_to_commit(name)]
        if self._phase is not Phase.ROLLING_BACK:  # the first one
            self._phase = Phase.ROLLING_BACK
            self._begin_wait(command)
            self._call.on_rollback()
        return [self._call.message_to_undo(name)]

    def _begin_wait(self, command: Command) -> None:
        seconds = self._call.timeout_s(command)
        self._patient_until = self._loop.time() + max(seconds, self._config.stall_s)
        self._set_deadline(command, seconds)

    def _set_deadline(self, command: Command, seconds: float) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        due = self._loop.time() + seconds
        self._deadline = self._loop.call_at(due, self._passed, command, due)

    def _passed(self, command: Command, due: float) -> None:
        """Handle a deadline, after the answers that are here already: this process may have been busy."""
        self._deadline = self._loop.call_later(READ_S, self._late, command, due)

    def _late(self, command: Command, due: float) -> None:
        """Fence the replicas that are late. They get more time if the timer itself is late, since answers may wait
        unread. So do they if most replicas are late: then it is rather this process, its host or the network that is
        slow, and to fence them all would lose the weights. A replica that is silent for ``stall_s`` is lost anyway."""
        now = self._loop.time()
        votes = [vote for vote in self._transaction.votes.values() if vote is not Vote.LOST]
        most_are_late = 2 * sum(vote in WAITING for vote in votes) > len(votes)
        if now - due > LATE_TIMER_S or (most_are_late and now < self._patient_until):
            self._set_deadline(command, self._config.fence_after_s)
        else:
            self._act(self._transaction.deadline(command))

    # ------------------------------------------------------------------ answers

    def _answered(
        self, name: str, command: Command, calls: list[m.Args], answers: asyncio.Future[list[m.Reply | BaseException]]
    ) -> None:
        """Handle the answers of one replica to the messages of one command."""
        if self._over or WAITING.get(self._transaction.votes[name]) is not command:
            return
        self._answered_ms[name] = (self._loop.time() - self._began) * 1000
        result: dict[str, Any] = {}
        errors: list[FastDeployError] = []
        for args, answer in zip(calls, answers.result(), strict=True):
            if isinstance(answer, BaseException):  # the connection is lost
                self._act(self._transaction.lose(name, str(answer)))
                return
            try:
                result = result_of(answer)
            except (EngineDead, EngineStalled) as lost:  # the engine is ending
                self._act(self._transaction.lose(name, lost.message))
                return
            except NotLeader as refused:
                self._not_leader(refused)
                return
            except FastDeployError as refused:
                errors.append(refused)
            else:
                if command is not Command.ROLLBACK:
                    self._call.on_result(name, args, result)
        error = errors[0] if errors else self._call.disagreement(name, command, result)
        if error is None:
            self._accepted(name, command, result)
        elif self._call.is_done_already(error):
            self._done_already[name] = error
            self._act(self._transaction.answer(name, command, True))
        else:
            if command is not Command.ROLLBACK:
                self._call.errors[name] = error
            self._act(self._transaction.answer(name, command, False))

    def _accepted(self, name: str, command: Command, result: dict[str, Any]) -> None:
        if command is not Command.ROLLBACK:
            self._call.results[name] = result
        replica = self._replicas[name]
        if "weight_epoch" in result and "lora_name" not in result:
            replica.weight_epoch, replica.version = result["weight_epoch"], result["version"]
        self._act(self._transaction.answer(name, command, True))

    # ------------------------------------------------------------------ end

    def _conclude(self) -> None:
        call, votes = self._call, self._transaction.votes
        present = {name for name, vote in votes.items() if vote is not Vote.LOST}
        replicas = self._reports()
        if self._transaction.phase is Phase.FAILED:
            call.on_failure()
            lost = EngineDead("every replica was lost during the call", replicas=replicas)
            self._finish(refusal(call.errors, replicas, self._boot_id) if call.errors else lost)
            return
        call.results = {name: result for name, result in call.results.items() if name in present}
        try:
            if not call.results:
                call.on_failure()
                raise refusal(self._done_already, replicas, self._boot_id)
            report = self._ending.report(with_boot_id(call.on_success(), self._boot_id))
        except FastDeployError as error:
            self._finish(error)
        else:
            self._finish(report | {"replicas": replicas} if call.args.shows_replicas else report)

    @property
    def _boot_id(self) -> str:
        return self._call.state.boot_id or self._config.fleet_id

    def _reports(self) -> list[dict[str, Any]]:
        return [
            replica_report(name, vote, self._answered_ms[name], self._call.errors.get(name), self._fenced.get(name, ""))
            for name, vote in self._transaction.votes.items()
        ]

    def _finish(self, outcome: dict[str, Any] | FastDeployError) -> None:
        self._over = True
        if self._deadline is not None:
            self._deadline.cancel()
        if self._call.rule is not Rule.READ:
            self._call.state.changing -= 1
            self._call.state.revision += 1
        if isinstance(outcome, FastDeployError):
            self._ending.failed = True
        self._ended(self)
        if self.future.done():
            return
        if isinstance(outcome, FastDeployError):
            self.future.set_exception(outcome)
        else:
            self.future.set_result(outcome)
