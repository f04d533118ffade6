"""One control call over the replicas while it runs: carries out what its transaction decides."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from fastdeploy.client.engine_client import result_of
from fastdeploy.core.errors import EngineDead, EngineError, EngineStalled, FastDeployError, NotLeader
from fastdeploy.fleet.config import FleetConfig
from fastdeploy.fleet.plan import Plan
from fastdeploy.fleet.replica import Replica
from fastdeploy.fleet.reports import refusal, replica_report, with_boot_id
from fastdeploy.fleet.transaction import WAITING, Action, Phase, Rule, Send, Step, Transaction, Vote
from fastdeploy.fleet.waiting import Ending
from fastdeploy.inter_communicator import messages as m

LATE_TIMER_S = 0.5  # a timer that comes later than this shows that this process was stopped, or its loop was blocked
READ_S = 0.005  # after a deadline, to read the answers that have arrived
STEPS = {Phase.PREPARING: Step.PREPARE, Phase.COMMITTING: Step.COMMIT, Phase.ROLLING_BACK: Step.ROLLBACK}


class RunningCall:
    """A call on ``replicas``. shows_replicas: whether the report has a list "replicas". ending: the requests that the
    call ends; withdrawn if the call fails. fence(replica, why): cuts a replica off. ended(call): called once,
    before the call is answered. deposed(error): called if a replica is led by another gateway; it ends this call.

    future: of the report. A caller may cancel it; the call goes on."""

    def __init__(
        self,
        plan: Plan[Any],
        replicas: Sequence[Replica],
        config: FleetConfig,
        shows_replicas: bool,
        ending: Ending,
        fence: Callable[[Replica, str], None],
        ended: Callable[[RunningCall], None],
        deposed: Callable[[NotLeader], None],
    ):
        self._loop = asyncio.get_running_loop()
        self._plan = plan
        self._replicas = {replica.name: replica for replica in replicas}
        self._config = config
        self._shows_replicas = shows_replicas
        self._ending = ending
        self._fence = fence
        self._ended = ended
        self._deposed = deposed
        self._transaction = Transaction(self._replicas, plan.rule)
        self._actions: deque[Action] = deque()
        self._acting = False
        self._over = False
        self._phase: Phase | None = None
        self._step: Step | None = None  # that is being sent, and its number (see messages.Call)
        self._change = 0
        self._deadline: asyncio.TimerHandle | None = None
        self._patient_until = 0.0
        self._began = self._loop.time()
        self._answered_ms = dict.fromkeys(self._replicas, 0.0)
        self._fenced: dict[str, str] = {}
        self._forgiven: dict[str, FastDeployError] = {}
        self.future: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self.future.add_done_callback(lambda future: future.cancelled() or future.exception())

    def start(self) -> None:
        """Send the call to all replicas, without a break."""
        plan = self._plan
        plan.state.order += 1
        plan.order = plan.state.order
        if plan.rule is not Rule.READ:
            plan.state.changing += 1
            plan.state.revision += 1
        plan.begin()
        self._act(self._transaction.start())

    def abandon(self, error: FastDeployError) -> None:
        """End the call with ``error``, without waiting for the replicas."""
        if not self._over:
            self._finish(error)

    # ------------------------------------------------------------------ actions

    def _act(self, actions: list[Action]) -> None:
        """Carry out ``actions``, and those that follow from them. The messages of one step are sent without a break."""
        self._actions += actions
        if self._acting or self._over:
            return
        self._acting = True
        while self._actions:
            action = self._actions.popleft()
            if isinstance(action, Send):
                self._send(action.name, action.step)
            else:
                self._fenced[action.name] = action.why
                self._fence(self._replicas[action.name], action.why)
        self._acting = False
        if self._transaction.ended:
            self._conclude()
        elif self._phase is not self._transaction.phase:
            self._phase = self._transaction.phase
            self._begin_wait(STEPS[self._phase])

    def _send(self, name: str, step: Step) -> None:
        calls = [args for args in self._messages(name, step) if args is not None]
        if not calls:
            self._act(self._transaction.answer(name, step, True))
            return
        if step is not self._step and self._plan.rule is not Rule.READ:
            self._plan.state.changes += 1
            self._step, self._change = step, self._plan.state.changes
        try:
            futures = [self._replicas[name].client.post(args, self._change) for args in calls]
        except EngineError as error:  # not connected
            self._act(self._transaction.lose(name, error.message))
            return
        answers = asyncio.gather(*futures, return_exceptions=True)
        answers.add_done_callback(partial(self._answered, name, step, calls))

    def _messages(self, name: str, step: Step) -> Sequence[m.Args | None]:
        if step is Step.PREPARE:
            return self._plan.prepare(name)
        if step is Step.COMMIT:
            return [self._plan.commit(name)]
        if self._phase is not Phase.ROLLING_BACK:  # the first one
            self._phase = Phase.ROLLING_BACK
            self._begin_wait(step)
            self._plan.rolling_back()
        return [self._plan.rollback(name)]

    def _begin_wait(self, step: Step) -> None:
        seconds = self._plan.seconds(step)
        self._patient_until = self._loop.time() + max(seconds, self._config.stall_s)
        self._set_deadline(step, seconds)

    def _set_deadline(self, step: Step, seconds: float) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        due = self._loop.time() + seconds
        self._deadline = self._loop.call_at(due, self._passed, step, due)

    def _passed(self, step: Step, due: float) -> None:
        """Handle a deadline, after the answers that are here already: this process may have been busy."""
        self._deadline = self._loop.call_later(READ_S, self._late, step, due)

    def _late(self, step: Step, due: float) -> None:
        """Fence the replicas that are late. They get more time if the timer itself is late, since answers may wait
        unread. So do they if most replicas are late: then it is rather this process, its host or the network that is
        slow, and to fence them all would lose the weights. A replica that is silent for ``stall_s`` is lost anyway."""
        now = self._loop.time()
        votes = [vote for vote in self._transaction.votes.values() if vote is not Vote.LOST]
        most_are_late = 2 * sum(vote in WAITING for vote in votes) > len(votes)
        if now - due > LATE_TIMER_S or (most_are_late and now < self._patient_until):
            self._set_deadline(step, self._config.fence_after_s)
        else:
            self._act(self._transaction.deadline(step))

    # ------------------------------------------------------------------ answers

    def _answered(
        self, name: str, step: Step, calls: list[m.Args], answers: asyncio.Future[list[m.Reply | BaseException]]
    ) -> None:
        """Handle the answers of one replica to the messages of one step."""
        if self._over or WAITING.get(self._transaction.votes[name]) is not step:
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
                self._deposed(refused)
                return
            except FastDeployError as refused:
                errors.append(refused)
            else:
                if step is not Step.ROLLBACK:
                    self._plan.heard(name, args, result)
        error = errors[0] if errors else self._plan.judge(name, step, result)
        if error is None:
            self._accepted(name, step, result)
        elif self._plan.forgives(error):
            self._forgiven[name] = error
            self._act(self._transaction.answer(name, step, True))
        else:
            if step is not Step.ROLLBACK:
                self._plan.errors[name] = error
            self._act(self._transaction.answer(name, step, False))

    def _accepted(self, name: str, step: Step, result: dict[str, Any]) -> None:
        if step is not Step.ROLLBACK:
            self._plan.results[name] = result
        replica = self._replicas[name]
        if "weight_epoch" in result and "lora_name" not in result:
            replica.weight_epoch, replica.version = result["weight_epoch"], result["version"]
        self._act(self._transaction.answer(name, step, True))

    # ------------------------------------------------------------------ end

    def _conclude(self) -> None:
        plan, votes = self._plan, self._transaction.votes
        present = {name for name, vote in votes.items() if vote is not Vote.LOST}
        replicas = self._reports()
        if self._transaction.phase is Phase.FAILED:
            plan.failed()
            lost = EngineDead("every replica was lost during the call", replicas=replicas)
            self._finish(refusal(plan.errors, replicas, self._boot_id) if plan.errors else lost)
            return
        plan.results = {name: result for name, result in plan.results.items() if name in present}
        try:
            if not plan.results:
                plan.failed()
                raise refusal(self._forgiven, replicas, self._boot_id)
            report = self._ending.report(with_boot_id(plan.done(), self._boot_id))
        except FastDeployError as error:
            self._finish(error)
        else:
            self._finish(report | {"replicas": replicas} if self._shows_replicas else report)

    @property
    def _boot_id(self) -> str:
        return self._plan.state.boot_id or self._config.fleet_id

    def _reports(self) -> list[dict[str, Any]]:
        return [
            replica_report(name, vote, self._answered_ms[name], self._plan.errors.get(name), self._fenced.get(name, ""))
            for name, vote in self._transaction.votes.items()
        ]

    def _finish(self, outcome: dict[str, Any] | FastDeployError) -> None:
        self._over = True
        if self._deadline is not None:
            self._deadline.cancel()
        if self._plan.rule is not Rule.READ:
            self._plan.state.changing -= 1
            self._plan.state.revision += 1
        if isinstance(outcome, FastDeployError):
            self._ending.withdraw()
        self._ended(self)
        if self.future.done():
            return
        if isinstance(outcome, FastDeployError):
            self.future.set_exception(outcome)
        else:
            self.future.set_result(outcome)
