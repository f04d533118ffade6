"""An engine that a state machine drives, and the checks of everything that the engine does."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from itertools import count

from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant

from fastdeploy.core.errors import ModelNotFound
from fastdeploy.core.request_fields import AddRequest
from fastdeploy.core.served_weights import WHOLE_ENGINE, adapter_scope
from fastdeploy.core.weight_source import DeltaBase, FolderSource
from fastdeploy.engine.pauses.holds import Hold
from fastdeploy.engine.pauses.pause import Mode, PausePhase, PauseState
from fastdeploy.engine.updates.weight_session import WeightSession
from fastdeploy.inter_communicator import messages as m
from fastdeploy.scheduler.queue import Gate
from support.drafters import adversary, coming_tokens
from support.fake_runner import EXPERTS, FakeRunner, fingerprint_of, nothing
from support.harness import Harness
from support.machine_inputs import ADAPTERS, LATER, REFUSALS, SYSTEM_HOLDS
from support.publications import Publication
from support.witness import Expected, Witness


class CheckedEngine(RuleBasedStateMachine):
    """The parts of a state machine that are not rules. Every round is checked."""

    @property
    def is_updating(self) -> bool:
        return self.engine.weights.session is not None or self.engine.weights.thread.busy

    def __init__(self):
        super().__init__()
        self.ids = count()
        self.contents = count(1)  # of adapters
        self.start_engine()

    def start_engine(self, lost_commit: bool = False) -> None:
        runner = FakeRunner(num_blocks=13, block_size=4, max_model_len=48, vocab=13, experts=EXPERTS)
        limits = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_waiting": 20, "adapter_memory_mb": 2}
        drafter = adversary(functools.partial(coming_tokens, runner), runner.info.vocab_size)
        self.h = Harness(runner, drafter=drafter, lost_commit=lost_commit, **limits)
        self.engine, self.pause = self.h.engine, self.h.engine.pause
        self.engine.adapters._copies._width = 1  # copies that run at once end in any order
        for name in ADAPTERS[:2]:
            content = f"a{next(self.contents)}"
            assert self.h.load_adapter(name, content, path=content).failure is None
        self.witness = Witness(self.h)
        self.book = self.witness.book
        self.clients = ["a"]
        self.doomed: dict[int, list[Expected]] = {}  # by the call of a pause with mode abort
        self.publications: dict[str, Publication] = {}  # by session
        self.opened: dict[str | int, dict] = {}  # replies to begins, by their key
        self.has_same_clients = True  # since the last round began
        self.had_weights = True  # when the last round began
        self.known = self.book.known  # when the last round began
        self.calls_of_two_rounds: list[m.Args] = []  # a call that a step has read is handled in the next round
        self.num_older_calls = 0
        self.cancelling: set[str] = set()  # scopes with a pause whose time-out releases its hold
        self.read_in_step = 0  # calls that the engine has read, and handles in its next round

    # ---------------------------------------------------------------- the clients

    def live_clients(self) -> list[str]:
        return [c for c in self.clients if c not in self.witness.dropped]

    def some_client(self, data) -> str:
        if not self.live_clients():
            self.new_client()
        return data.draw(st.sampled_from(self.live_clients()), label="client")

    def new_client(self) -> None:
        client = f"c{next(self.ids)}"
        self.clients.append(client)
        self.h.send(m.Hello(pid=1), client)

    def unmute(self, client: str) -> None:
        """Let the client acknowledge the fences that it has received."""
        self.h.transport.mute.discard(client)
        for at, message in enumerate(self.h.transport.sent.get(client, [])):
            if isinstance(message, m.Fence) and at >= self.h.transport.acked.get(client, 0):
                self.h.send(m.FenceAck(message.fence_id), client)
                self.h.transport.acked[client] = at + 1

    def call(self, args: m.Args, client: str) -> int:
        call_id = self.h.call(args, client)
        self.witness.called(client, call_id, args)
        self.calls_of_two_rounds.append(args)
        if isinstance(args, m.PauseArgs) and args.on_timeout == "cancel":
            self.cancelling.add(args.scope)
        if isinstance(args, m.PauseArgs) and args.mode == "abort":
            self.doomed[call_id] = self.open_streams(args.scope)
        if isinstance(args, m.AbortArgs) and args.lora_name is not None:
            self.doomed[call_id] = self.open_streams(adapter_scope(args.lora_name))
        return call_id

    def call_and_note(self, args: m.Args, client: str, version: str | None, partial: bool, names: list[str]) -> None:
        """Make a call that may open a session, and note the session if it did."""
        self.call(args, client)
        self.step()
        session = self.engine.weights.session
        if session is not None and session.id not in self.publications:
            one_call = isinstance(args, m.UpdateWeightsArgs)
            delta = session.begin.base is not None
            self.publications[session.id] = Publication(version, partial, delta, names, committing=one_call)

    def begin_with(self, data, args: m.BeginUpdateArgs) -> None:
        """Begin, and expect that a base that does not serve is refused."""
        self.step()
        serves = self.serves(args.base)
        self.call_and_note(args, self.some_client(data), args.version, args.partial, [])
        session = self.engine.weights.session
        assert serves or session is None or session.begin is not args, "a delta against other weights"

    def serves(self, base: DeltaBase | None) -> bool:
        """Return whether no base is asked for, or the weights that serve are this base."""
        served, fingerprint = self.h.served, self.h.runner.fingerprint
        return base is None or (
            (base.fingerprint, base.weight_epoch or served.weight_epoch) == (fingerprint, served.weight_epoch)
            and base.version in (None, served.version)
        )

    def may_commit(self, session: WeightSession) -> bool:
        """Return whether the engine takes a commit of this session that names nothing."""
        begin = session.begin
        fits = begin.expected_version in (None, self.h.served.version) and self.serves(begin.base)
        return fits and (begin.base is None or session.fingerprint is not None)

    def send_add(self, client, request_id, prompt, sampling, n, priority, salt, adapter=""):
        group = f"g{len(prompt) % 2}" if priority else ""
        add = AddRequest(
            request_id, list(prompt), sampling, n=n, priority=priority, cache_salt=salt, group=group, adapter=adapter
        )
        self.h.send(add, client)
        self.witness.added(client, add)

    def open_streams(self, scope: str) -> list[Expected]:
        streams = [stream for stream in self.witness.streams.values() if stream.open]
        return [s for s in streams if scope in (WHOLE_ENGINE, adapter_scope(s.add.adapter or None))]

    def pauses(self) -> list[PauseState]:
        """Return the pause states of the whole engine and of each adapter name that has one."""
        found = [self.pause]
        for name in ADAPTERS:
            with contextlib.suppress(ModelNotFound):
                found.append(self.engine.scopes.pause_of(adapter_scope(name)))
        return found

    def num_tokens(self, pause: PauseState) -> int:
        """Return the number of tokens that requests of a scope have got, since the engine started."""
        tokens, name = self.witness.num_tokens, pause.scope.lora_name
        return tokens.total() if name is None else tokens[name]

    # ---------------------------------------------------------------- rounds

    def step(self) -> None:
        was_paused, computed = self.pause.is_paused, self.h.runner.computed_tokens
        frozen = {pause: self.num_tokens(pause) for pause in self.pauses() if pause.is_paused}
        weight_epoch, seen = self.h.served.weight_epoch, len(self.witness.replies)
        session, serving = self.engine.weights.session, self.h.runner.weights
        self.had_weights = self.h.runner.has_weights
        self.known = self.book.known
        holds = {(pause.scope.id, hold.id): hold for pause in self.pauses() for hold in pause.holds.values()}
        clients = set(self.engine.delivery.clients)
        self.h.run_rounds()
        self.has_same_clients = clients == set(self.engine.delivery.clients)
        self.check_released_holds(holds)
        if self.h.served.weight_epoch != weight_epoch:
            assert self.h.served.weight_epoch == (session.weight_epoch or weight_epoch + 1)
            self.committed(self.h.served.weight_epoch, self.publications[session.id], serving)
            assert session.fingerprint in (None, self.h.runner.fingerprint), "not the result that was asked for"
        tokens = self.witness.look()
        if was_paused and self.pause.is_paused:
            assert self.h.runner.computed_tokens == computed and tokens == 0, "the engine computed while paused"
        for pause in self.pauses():
            if pause.is_paused and pause in frozen:
                assert self.num_tokens(pause) == frozen[pause], "the engine computed for a paused scope"
            ends = [hold.expires_at for hold in pause.holds.values() if hold.expires_at is not None]
            assert not ends or min(ends) > self.h.now, "a hold outlives its ttl"
        for args, reply in self.witness.replies[seen:]:
            self.check_reply(args, reply)
        self.check_calls()
        session = self.engine.weights.session
        idle = session is not None and session.state.value in ("open", "prepared") and not session.pending
        idle = idle and self.has_same_clients
        assert not idle or session.expires_at > self.h.now, "its lease has ended"
        if session is not None and session.state.value == "open" and self.has_same_clients:
            assert session.owner is None or session.owner in self.engine.delivery.clients, "it outlives its API server"

    def rounds(self, times: int) -> None:
        for _ in range(times):
            self.step()

    def within_a_step(self, action) -> None:
        self.step()  # messages sent before are handled before the step
        self.h.runner.in_step = action
        self.read_in_step = 1
        self.step()
        self.read_in_step = 0
        if self.h.runner.in_step is action:
            self.h.runner.in_step = nothing
            action()
        self.step()

    def label_comes(self, version: str) -> None:
        """Expect the label from this round on: a round handles its messages before it samples."""
        self.witness.versions[self.h.served.weight_epoch] = version
        self.step()

    def committed(self, weight_epoch: int, told: Publication, serving: int) -> None:
        """Note a commit. serving: the weights before it."""
        self.witness.weights[weight_epoch] = told.weights(serving)
        self.witness.versions[weight_epoch] = told.version or str(weight_epoch)
        assert told.committing and "/bad" not in told.names and "/garbage" not in told.names
        assert self.h.runner.weights == told.weights(serving), "other weights than those of the session"
        assert self.h.served.version == self.witness.versions[weight_epoch]
        event(f"commit, delta: {told.delta}")

    def let_staging_end(self) -> None:
        self.h.runner.may_stage.set()
        self.h.join_staging()

    def finish_all_work(self) -> None:
        """Run the loop until the staging thread has nothing left to do."""
        self.let_staging_end()
        self.step()
        for _ in range(200):
            if not self.engine.weights.thread.busy and not self.engine.adapters.busy:
                return
            self.step()
        raise AssertionError("the staging thread does not end")

    def make_whole(self, client: str) -> None:
        """Wake the engine, and publish weights if there are none."""
        self.h.runner.no_space = False
        self.call(m.AbortUpdateArgs(), client)
        self.finish_all_work()
        if self.h.runner.asleep:
            self.call(m.WakeArgs(), client)
            self.step()
            self.finish_all_work()
        if not self.h.runner.has_weights:
            args = m.UpdateWeightsArgs(FolderSource("/w2"))
            self.call_and_note(args, client, None, False, ["/w2"])
        self.finish_all_work()

    # ---------------------------------------------------------------- checks

    def check_reply(self, args: m.Args, reply: m.Reply) -> None:
        code = reply.failure.code if reply.failure else None
        match args:
            case m.PauseArgs() | m.ResumeArgs() if code == "model_not_found":
                assert args.scope != WHOLE_ENGINE and args.scope.removeprefix("adapter:") not in self.known
            case m.PauseArgs(mode="wait") if code == "pause_blocked":
                assert args.scope != WHOLE_ENGINE and reply.failure.detail["held_by"]
                event("a wait that the whole engine blocks")
            case m.PauseArgs():
                assert code in (None, "pause_interrupted", "pause_timeout"), reply
                event(f"pause {args.mode}: {code}")
                if code is None:
                    assert reply.result["is_paused"] and reply.result["rejecting_new_requests"]
                    if args.scope == WHOLE_ENGINE:
                        self.assert_everything_is_delivered()
                    assert not any(s.open for s in self.doomed.get(reply.call_id, [])), "not aborted"
                if code == "pause_timeout":
                    assert args.on_timeout == "cancel" or args.hold_id is not None
                    holds = [h for pause in self.pauses() if pause.scope.id == args.scope for h in pause.holds]
                    assert reply.result["hold"]["id"] not in holds, "a failed pause still holds"
            case m.ResumeArgs(hold_id) if code is not None:
                assert code == "resume_refused" and hold_id in SYSTEM_HOLDS, reply
            case m.ResumeArgs(hold_id):
                released = set(reply.result["released"])
                assert released <= {hold_id} if hold_id else not released & {"x", "y", "z", *SYSTEM_HOLDS}, reply
            case m.UpdatePartArgs(session_id, FolderSource(path)) if code == "update_in_progress":
                # Too many reads hang. The session goes on without this part.
                self.publications[session_id].names.remove(path)
            case m.UpdatePartArgs(session_id) if code == "invalid_field":
                assert not args.form.is_plain and not self.publications[session_id].delta
            case m.BeginUpdateArgs(idempotency_key=key) if code is None:
                assert self.opened.setdefault(key or reply.call_id, reply.result) == reply.result
                self.check_fingerprint(reply)
            case m.CommitUpdateArgs(session_id, prepare=True) if code is None:
                weights = self.publications[session_id].weights(self.h.runner.weights)
                assert reply.result["fingerprint"] == fingerprint_of(weights)
            case m.CommitUpdateArgs() | m.UpdateWeightsArgs() if code is None:
                self.check_fingerprint(reply)
            case m.AbortArgs(lora_name=str()) if code is None:
                assert not any(s.open for s in self.doomed[reply.call_id]), "not aborted"
            case m.LoadAdapterArgs(name, path=path) if code is not None:
                assert code in REFUSALS[m.LoadAdapterArgs], reply
                self.book.void.add(int(path[1:].partition("-")[0]))
            case m.LoadAdapterArgs(prepare=True):
                assert reply.result["status"] == "prepared"
            case m.LoadAdapterArgs(name) if name in self.book.known:
                event(f"adapter replaced: {reply.result['replaced']}")
            case m.SleepArgs(tags=tags) if code is None:
                assert set(tags) <= self.h.runner.asleep and self.pause.is_paused
            case m.WeightInfoArgs() if code is None and "checksums" in reply.result:
                weights = self.witness.weights[reply.result["weight_epoch"]]
                assert reply.result["checksums"]["weights"] == hashlib.sha256(str(weights).encode()).hexdigest()
                self.check_fingerprint(reply)
            case m.WeightInfoArgs() if code is None:
                self.check_fingerprint(reply)
            case _:
                assert code is None or code in REFUSALS.get(type(args), ()), reply
        if type(args) in REFUSALS:
            assert code is None or "AssertionError" not in reply.failure.message, reply
            event(f"{type(args).__name__}: {code}")

    def check_fingerprint(self, reply: m.Reply) -> None:
        """Assert that a reply shows the fingerprint of the weights that computed the tokens of its weight_epoch."""
        shown = reply.result["fingerprint"]
        if shown is None:
            assert not (self.had_weights and self.h.runner.has_weights), "there are weights, but no fingerprint"
        else:
            assert shown == fingerprint_of(self.witness.weights[reply.result["weight_epoch"]])

    def check_released_holds(self, before: dict[tuple[str, str], Hold]) -> None:
        """Assert that no hold of an adapter has gone without a reason. before: the holds when the round began."""
        recent, self.calls_of_two_rounds = self.calls_of_two_rounds, self.calls_of_two_rounds[self.num_older_calls :]
        self.num_older_calls = len(self.calls_of_two_rounds)
        after = {(pause.scope.id, hold_id) for pause in self.pauses() for hold_id in pause.holds}
        for (scope, hold_id), hold in before.items():
            ended = hold.expires_at is not None and hold.expires_at <= self.h.now
            if scope == WHOLE_ENGINE or (scope, hold_id) in after or ended or scope in self.cancelling:
                continue
            reset = not hold.named and any(isinstance(args, m.ResetArgs) for args in recent)
            resumed = any(isinstance(args, m.ResumeArgs) and args.scope == scope for args in recent)
            assert reset or resumed, f"nobody has released hold {hold_id} of {scope}"

    def assert_everything_is_delivered(self) -> None:
        """Assert that every live client has acknowledged all outputs, as it must have when a pause is answered."""
        for client in self.live_clients():
            sent = self.h.transport.sent.get(client, [])
            outputs = [at for at, message in enumerate(sent) if isinstance(message, m.Outputs)]
            assert not outputs or outputs[-1] < self.h.transport.acked.get(client, 0), f"{client} did not acknowledge"

    def check_calls(self) -> None:
        calls = list(self.witness.calls.values())
        pauses = [args for args in calls if isinstance(args, m.PauseArgs | m.SleepArgs)]
        unanswered = sum(p.unanswered for p in (*self.pauses(), self.engine.sleeper)) + self.read_in_step
        assert len(pauses) <= unanswered, "a pause call was forgotten"
        other = [args for args in calls if not isinstance(args, LATER)]
        assert not other, f"not answered at once: {other}"
        loads = [args for args in calls if isinstance(args, m.LoadAdapterArgs)]
        assert not loads or self.engine.adapters.busy, "the load of an adapter was forgotten"
        if len(calls) > len(pauses) + len(loads):
            assert self.is_updating, "a call about weights was forgotten"

    @invariant()
    def flags_are_legal(self):
        for pause in self.pauses():
            assert bool(pause.holds) == (pause.phase is not PausePhase.RUNNING) == pause.rejecting_new_requests
            assert not pause.is_paused or pause.rejecting_new_requests
            assert pause.unanswered == 0 or pause.holds
        phase = self.pause.phase
        may_run = phase is PausePhase.RUNNING or (phase is PausePhase.DRAINING and self.pause.mode is Mode.WAIT)
        assert may_run or not self.engine.scheduler.has_work
        self.engine.lifecycle.check_integrity()
        self.engine.adapters.check_integrity()
        self.what_runs_is_whole()

    def what_runs_is_whole(self) -> None:
        """Assert that a hold of the system stands exactly while weights or KV are missing."""
        runner, session, holds = self.h.runner, self.engine.weights.session, self.pause.holds
        if runner.asleep or not runner.has_weights:
            assert self.pause.is_paused and SYSTEM_HOLDS & set(holds)
        assert not runner.asleep or "sleep" in holds
        assert "sleep" not in holds or runner.asleep or self.engine.sleeper.unanswered or self.pause.unanswered
        if session is not None and not self.engine.weights.thread.busy:
            assert session.state.value in ("open", "prepared"), "a session is being committed without a thread"

    # ---------------------------------------------------------------- the end

    def teardown(self):
        """Release all holds: every accepted request must end, and all blocks must be free again."""
        self.let_staging_end()
        if not self.live_clients():
            self.new_client()
        for client in self.live_clients():
            self.unmute(client)
        self.step()
        for _ in range(3):  # deadlines and fences
            self.h.now += 6.0
            self.step()
        at_rest = [p for p in self.pauses() if p.gate is Gate.CLOSED or self.engine.scheduler.drained(p.scope)]
        self.step()  # the last request may have ended in the step before, with the acknowledgement on its way
        for pause in at_rest:
            assert pause.phase is not PausePhase.DRAINING, f"{pause.scope} never comes to rest"
        for _ in range(2):  # a sleep that drained is answered when the requests have ended
            self.let_go(self.live_clients()[0])
        self.h.now += 2.0  # a heartbeat finds dead clients
        self.step()
        self.step()
        assert all(pause.phase is PausePhase.RUNNING for pause in self.pauses())
        named = {pause.scope.lora_name for pause in self.pauses()} - {None}
        assert named == set(self.book.known), "the scope of an unloaded adapter is left"
        self.witness.look()
        self.witness.assert_nothing_is_owed()
        assert not len(self.engine.lifecycle.requests) and self.engine.kv.num_free == self.h.runner.info.num_blocks
        event(f"preempted: {self.engine.scheduler.num_preemptions > 0}")
        event(f"copied on write: {any(p.copies for p in self.h.runner.plans)}")
        event(f"drafts accepted: {self.engine.scheduler.speculation.num_accepted > 0}")

    def let_go(self, client: str) -> None:
        self.make_whole(client)
        self.call(m.ResumeArgs(), client)
        for pause in self.pauses():
            for hold_id in list(pause.holds):
                self.call(m.ResumeArgs(hold_id, pause.scope.id), client)
        for _ in range(500):
            self.step()
            if not len(self.engine.lifecycle.requests):
                break
        self.step()
        self.step()
