"""A search by hypothesis for an order of events that breaks an invariant of the engine."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import HealthCheck, event, settings
from hypothesis import Phase as Search
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from fastdeploy.core.errors import EngineError, ModelNotFound
from fastdeploy.core.request_fields import AddRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.core.scope import WHOLE_ENGINE, adapter_scope
from fastdeploy.core.weight_source import FolderSource
from fastdeploy.engine.pause import Mode, PausePhase, PauseState
from fastdeploy.inter_communicator import messages as m
from support.fake_runner import FakeRunner, nothing
from support.harness import Harness
from support.machine_inputs import (
    ADAPTERS,
    FOLDERS,
    HOLDS,
    KV,
    LATER,
    MODELS,
    PAUSES,
    PROMPTS,
    REFUSALS,
    SAMPLING,
    SCOPES,
    SYSTEM_HOLDS,
    TAGS,
    UPDATES,
)
from support.witness import Expected, Witness


@dataclass
class Publication:
    """The calls of one weight session. names: the folders of the parts before its commit."""

    version: str | None
    partial: bool
    names: list[str] = field(default_factory=list)
    committing: bool = False

    def weights(self, serving: int) -> int:
        last = int((self.names or ["/w0"])[-1][2:].partition("-")[0])
        return last + (serving if self.partial else 0)


class EngineMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.ids = count()
        self.contents = count(1)  # of adapters
        self.start_engine()

    def start_engine(self, lost_commit: bool = False) -> None:
        runner = FakeRunner(num_blocks=13, block_size=4, max_model_len=48, vocab=13)
        limits = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_waiting": 20, "adapter_memory_mb": 2}
        self.h = Harness(runner, lost_commit=lost_commit, **limits)
        self.engine, self.pause = self.h.engine, self.h.engine.pause
        for name in ADAPTERS[:2]:
            content = f"a{next(self.contents)}"
            assert self.h.load_adapter(name, content, path=content).failure is None
        self.witness = Witness(self.h)
        self.book = self.witness.book
        self.clients = ["a"]
        self.doomed: dict[int, list[Expected]] = {}  # by the call of a pause with mode abort
        self.publications: dict[str, Publication] = {}  # by session
        self.read_in_step = 0  # calls that the engine has read, and handles in its next round

    # ---------------------------------------------------------------- clients

    def call(self, args: m.Args, client: str) -> int:
        call_id = self.h.call(args, client)
        self.witness.called(client, call_id, args)
        if isinstance(args, m.PauseArgs) and args.mode == "abort":
            self.doomed[call_id] = self.open_streams(args.scope)
        if isinstance(args, m.AbortArgs) and args.lora_name is not None:
            self.doomed[call_id] = self.open_streams(adapter_scope(args.lora_name))
        return call_id

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

    def live_clients(self) -> list[str]:
        return [c for c in self.clients if c not in self.witness.dropped]

    def some_client(self, data) -> str:
        live = self.live_clients()
        if not live:
            self.connect()
            live = self.live_clients()
        return data.draw(st.sampled_from(live), label="client")

    @precondition(lambda self: len(self.live_clients()) < 3)
    @rule()
    def connect(self):
        client = f"c{next(self.ids)}"
        self.clients.append(client)
        self.h.send(m.Hello(pid=1), client)

    @precondition(lambda self: len(self.live_clients()) > 1)
    @rule(data=st.data())
    def client_dies(self, data):
        client = self.some_client(data)
        self.h.transport.gone.add(client)
        self.witness.lost(client)

    @rule(data=st.data(), mute=st.booleans())
    def client_is_mute_for_a_while(self, data, mute):
        client = self.some_client(data)
        if mute:
            self.h.transport.mute.add(client)
        else:
            self.unmute(client)

    def unmute(self, client: str) -> None:
        """Let the client acknowledge the fences that it has received."""
        self.h.transport.mute.discard(client)
        for at, message in enumerate(self.h.transport.sent.get(client, [])):
            if isinstance(message, m.Fence) and at >= self.h.transport.acked.get(client, 0):
                self.h.send(m.FenceAck(message.fence_id), client)
                self.h.transport.acked[client] = at + 1

    # ---------------------------------------------------------------- requests

    @rule(data=st.data(), prompt=st.sampled_from(PROMPTS), sampling=SAMPLING, n=st.sampled_from([1, 1, 2, 3]),
          priority=st.sampled_from([0, 0, 1, -1]), salt=st.sampled_from(["", "", "s"]), adapter=MODELS)  # fmt: skip
    def add(self, data, prompt, sampling, n, priority, salt, adapter):
        self.send_add(self.some_client(data), f"r{next(self.ids)}", prompt, sampling, n, priority, salt, adapter)

    @rule(data=st.data(), n=st.sampled_from([1, 2]), max_tokens=st.integers(12, 30), adapters=st.permutations(
          ["", *ADAPTERS]) | st.just([""] * 4))  # fmt: skip
    def add_more_than_the_pool_holds(self, data, n, max_tokens, adapters):
        for prompt, adapter in zip(PROMPTS[:4], adapters, strict=True):
            sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
            self.send_add(self.some_client(data), f"r{next(self.ids)}", prompt, sampling, n, 0, "", adapter)

    @rule(data=st.data(), sampling=SAMPLING)
    def add_with_an_id_that_was_used(self, data, sampling):
        self.step()
        keys = sorted({(client, rid) for client, rid, _ in self.witness.streams if client in self.live_clients()})
        if keys:
            client, request_id = data.draw(st.sampled_from(keys))
            if all(add.request_id != request_id for _, add, _ in self.witness.undecided):
                self.send_add(client, request_id, PROMPTS[0], sampling, 1, 0, "")
                self.step()

    def send_add(self, client, request_id, prompt, sampling, n, priority, salt, adapter=""):
        group = f"g{len(prompt) % 2}" if priority else ""
        add = AddRequest(
            request_id, list(prompt), sampling, n=n, priority=priority, cache_salt=salt, group=group, adapter=adapter
        )
        self.h.send(add, client)
        self.witness.added(client, add)

    @rule(data=st.data(), name=st.sampled_from([*ADAPTERS, "nobody"]))
    def abort_by_adapter(self, data, name):
        self.call(m.AbortArgs(lora_name=name), self.some_client(data))

    @rule(data=st.data(), what=st.sampled_from(["some", "some", "unknown", "repeated", "group", "all"]))
    def abort(self, data, what):
        known = sorted({s.add.group or s.add.request_id for s in self.witness.streams.values()})
        ids = ["nobody"] if what == "unknown" or not known else [data.draw(st.sampled_from(known))]
        if what == "repeated":
            ids = ids * 2 + ["nobody"]
        args = m.AbortArgs(abort_all=True) if what == "all" else m.AbortArgs(["g0"] if what == "group" else ids)
        self.call(args, self.some_client(data))

    @rule(data=st.data(), reason=st.sampled_from(["stop", "abort"]), whole=st.booleans(), stranger=st.booleans())
    def disconnect(self, data, reason, whole, stranger):
        keys = sorted(k for k in self.witness.streams if k[0] in self.live_clients())
        if not keys:
            return
        client, request_id, choice = data.draw(st.sampled_from(keys))
        sender = self.some_client(data) if stranger else client
        self.h.send(m.CancelRequest(request_id, None if whole else choice, reason), sender)
        self.witness.cancelled(sender, request_id, None if whole else choice)

    # ---------------------------------------------------------------- control

    @rule(data=st.data(), args=PAUSES)
    def place_pause(self, data, args):
        self.call(args, self.some_client(data))

    @rule(data=st.data(), args=PAUSES, then=st.sampled_from(["", "", "resume", "pause"]))
    def pause_in_the_middle_of_a_step(self, data, args, then):
        """Pause within the next step, if there is one. then: the call after that, "" for none."""
        client = self.some_client(data)
        self.within_a_step(lambda: self.call(args, client))
        if then:
            self.call(m.ResumeArgs(), client)
        if then == "pause":
            self.within_a_step(lambda: self.call(args, client))

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

    @rule(data=st.data(), hold_id=HOLDS | st.sampled_from(["nobody's", *sorted(SYSTEM_HOLDS)]), scope=SCOPES)
    def resume(self, data, hold_id, scope):
        self.call(m.ResumeArgs(hold_id, scope), self.some_client(data))

    @precondition(lambda self: self.pause.mode is Mode.KEEP and not self.engine.scheduler.drained(self.pause.scope))
    @rule(data=st.data())
    def wait_takes_over_from_keep(self, data):
        self.call(m.PauseArgs("wait", hold_id="z"), self.some_client(data))
        for hold in list(self.pause.holds.values()):
            self.call(m.ResumeArgs(hold.id), self.some_client(data))
        self.step()
        self.step()

    @precondition(
        lambda self: self.pause.phase is PausePhase.RUNNING and not self.engine.scheduler.drained(self.pause.scope)
    )
    @rule(
        data=st.data(),
        on_timeout=st.sampled_from([None, "abort", "cancel"]),
        hold_id=HOLDS,
        callers=st.sampled_from([1, 2, 2]),
    )
    def a_drain_times_out(self, data, on_timeout, hold_id, callers):
        args = m.PauseArgs("wait", timeout_s=1.0, on_timeout=on_timeout, hold_id=hold_id)
        for _ in range(callers):
            self.call(args, self.some_client(data))
        self.step()
        self.h.now += 1.5
        self.step()

    @rule(data=st.data(), args=st.sampled_from([m.PauseStatusArgs(), m.PauseStatusArgs(adapter_scope("t")),
          m.AdaptersArgs(), m.MetricsArgs(), m.ModelInfoArgs()]))  # fmt: skip
    def ask(self, data, args):
        call_id = self.call(args, client := self.some_client(data))
        self.step()
        assert (client, call_id) not in self.witness.calls, "a query was not answered at once"

    # ---------------------------------------------------------------- adapters

    @rule(data=st.data(), name=st.sampled_from(ADAPTERS), bad=st.sampled_from([None, None, None, "bad", "garbage"]),
          kv=KV, replace=st.sampled_from([True, True, False]), slow=st.booleans())  # fmt: skip
    def load_adapter(self, data, name, bad, kv, replace, slow):
        self.step()
        if slow:
            self.h.runner.may_stage.clear()
        number = next(self.contents)
        content = f"a{number}" + ("-recompute" if kv == "recompute" else "")
        self.book.names[number] = name
        source = self.h.adapter_folder(bad or content)
        args = m.LoadAdapterArgs(name, source, path=content, kv=kv, replace=replace)
        self.call(args, self.some_client(data))
        if bad is not None:
            self.book.void.add(number)

    @rule(data=st.data(), name=st.sampled_from([*ADAPTERS, "nobody"]), again=st.booleans())
    def unload_adapter(self, data, name, again):
        self.step()
        known = name in self.book.known
        self.call(m.UnloadAdapterArgs(name), self.some_client(data))
        if known:
            self.book.given_up(name)
        self.step()
        assert name not in self.book.known
        if again and name in ADAPTERS:
            self.load_adapter(data, name, None, "keep", True, False)

    # ---------------------------------------------------------------- weights

    def call_and_note(self, args: m.Args, client: str, version: str | None, partial: bool, names: list[str]) -> None:
        """Make a call that may open a session, and note the session if it did."""
        self.call(args, client)
        self.step()
        session = self.engine.weights.session
        if session is not None and session.id not in self.publications:
            one_call = isinstance(args, m.UpdateWeightsArgs)
            self.publications[session.id] = Publication(version, partial, names, committing=one_call)

    @rule(data=st.data(), update=st.sampled_from(UPDATES), version=st.sampled_from([None, "v"]), slow=st.booleans(),
          partial=st.sampled_from([False, False, True]), in_place=st.sampled_from([False, False, True]))  # fmt: skip
    def update_weights(self, data, update, version, slow, partial, in_place):
        self.step()
        if slow:
            self.h.runner.may_stage.clear()
        folder, kv = update
        source = FolderSource(folder)
        args = m.UpdateWeightsArgs(source, version, kv=kv, partial=partial, in_place=in_place)
        self.call_and_note(args, client := self.some_client(data), version, partial, [folder])
        if self.engine.weights.session is not None and client in self.live_clients():
            self.call(m.UpdateWeightsArgs(source), client)  # refused: one at a time

    @rule(data=st.data(), version=st.sampled_from([None, "b"]),
          expected=st.sampled_from([None, None, "serving", "nope"]), kv=st.sampled_from(["keep", "recompute"]),
          partial=st.booleans(), in_place=st.booleans(), lease_s=st.sampled_from([3.0, 300.0]))  # fmt: skip
    def begin_session(self, data, version, expected, kv, partial, in_place, lease_s):
        expected = self.h.served.version if expected == "serving" else expected
        self.begin_with(data, m.BeginUpdateArgs(version, expected, kv, partial, in_place, lease_s))

    def begin_with(self, data, args: m.BeginUpdateArgs) -> None:
        self.step()
        self.call_and_note(args, self.some_client(data), args.version, args.partial, [])

    @precondition(lambda self: self.engine.weights.session)
    @rule(data=st.data(), name=st.sampled_from(FOLDERS), slow=st.booleans())
    def send_chunk(self, data, name, slow):
        session_id = self.some_session(data)
        if slow:
            self.h.runner.may_stage.clear()
        self.call(m.UpdateChunkArgs(session_id, FolderSource(name)), self.some_client(data))
        if not self.publications[session_id].committing:
            self.publications[session_id].names.append(name)

    @precondition(lambda self: self.engine.weights.session)
    @rule(data=st.data(), version=st.sampled_from([None, "c"]))
    def commit_session(self, data, version):
        self.step()
        session_id = self.some_session(data)
        told, session = self.publications[session_id], self.engine.weights.session
        kv = "recompute" if told.names and told.names[-1].endswith("recompute") else None
        fits = session is not None and session.expected_version in (None, self.h.served.version)
        self.call(m.CommitUpdateArgs(session_id, version, kv), self.some_client(data))
        if not told.committing and fits:
            told.version, told.committing = version or told.version, True
        self.step()

    @precondition(lambda self: self.publications)
    @rule(data=st.data(), named=st.booleans(), sure=st.integers(0, 2))
    def abort_session(self, data, named, sure):
        if sure:
            return
        self.call(m.AbortUpdateArgs(self.some_session(data) if named else None), self.some_client(data))

    def some_session(self, data) -> str:
        """Draw a session, mostly the open one."""
        ids = list(self.publications)
        session = self.engine.weights.session
        return data.draw(st.sampled_from([session.id] * 9 + ids[-1:] if session else ids), label="session")

    @precondition(lambda self: self.engine.weights.session is None)
    @rule(data=st.data(), names=st.permutations(["/w1", "/w2"]), lease_s=st.sampled_from([3.0, 300.0]),
          partial=st.booleans(), then=st.sampled_from(["commit", "commit", "silence"]))  # fmt: skip
    def a_trainer_publishes(self, data, names, lease_s, partial, then):
        """Run a session, in place if the engine is paused."""
        self.begin_with(data, m.BeginUpdateArgs(partial=partial, in_place=self.pause.is_paused, lease_s=lease_s))
        session = self.engine.weights.session
        if session is None:
            return
        for name in names:
            self.call(m.UpdateChunkArgs(session.id, FolderSource(name)), self.some_client(data))
            self.publications[session.id].names.append(name)
        if then == "commit":
            self.call(m.CommitUpdateArgs(session.id), self.some_client(data))
            self.publications[session.id].committing = True
        self.step()

    @rule(data=st.data(), version=st.sampled_from(["x", "y"]))
    def relabel(self, data, version):
        self.call(m.SetVersionArgs(version), self.some_client(data))
        self.label_comes(version)

    def label_comes(self, version: str) -> None:
        """Expect the label from this round on: a round handles its messages before it samples."""
        self.witness.versions[self.h.served.weight_epoch] = version
        self.step()

    @rule(data=st.data(), version=st.sampled_from([None, None, "z"]), sure=st.integers(0, 2))
    def reset(self, data, version, sure):
        if sure:
            return
        self.step()
        live = [stream for stream in self.witness.streams.values() if stream.open]
        self.call(m.ResetArgs(version), self.some_client(data))
        self.label_comes(version or self.h.served.version)
        assert not any(stream.open for stream in live), "not aborted"
        assert all(hold.named for hold in self.pause.holds.values()) and self.engine.weights.session is None

    @rule(data=st.data(), running=st.booleans())
    def reset_cache(self, data, running):
        self.call(m.ResetCacheArgs(running), self.some_client(data))
        self.step()

    @rule(data=st.data())
    def ask_for_checksums(self, data):
        self.call(m.WeightInfoArgs(checksums=True), self.some_client(data))

    @rule(data=st.data(), tags=TAGS, mode=st.sampled_from(["keep", "wait", "abort"]), full=st.booleans(),
          discard=st.sampled_from([False, False, True]), timeout_s=st.sampled_from([1.0, 60.0]))  # fmt: skip
    def put_to_sleep(self, data, tags, mode, full, discard, timeout_s):
        self.h.runner.no_space = full
        self.call(m.SleepArgs(tags, mode, discard, timeout_s), self.some_client(data))
        self.step()

    @precondition(lambda self: self.h.runner.asleep)
    @rule(data=st.data(), tags=TAGS, full=st.sampled_from([False, False, True]))
    def wake_up(self, data, tags, full):
        self.h.runner.no_space = full
        self.call(m.WakeArgs(tags), self.some_client(data))
        self.step()

    @precondition(lambda self: not self.h.runner.has_weights)
    @rule(data=st.data())
    def a_trainer_repairs_what_is_broken(self, data):
        self.make_whole(self.some_client(data))

    def make_whole(self, client: str) -> None:
        """Wake the engine, and publish weights if there are none."""
        self.h.runner.no_space = False
        self.call(m.AbortUpdateArgs(), client)
        self.finish_all_work()
        if self.h.runner.asleep:
            self.call(m.WakeArgs(), client)
            self.step()
        if not self.h.runner.has_weights:
            args = m.UpdateWeightsArgs(FolderSource("/w2"))
            self.call_and_note(args, client, None, False, ["/w2"])
        self.finish_all_work()

    def finish_all_work(self) -> None:
        """Run the loop until the staging thread has nothing left to do."""
        self.let_staging_end()
        self.step()
        for _ in range(200):
            if not self.engine.weights.staging_busy and not self.engine.adapters.busy:
                return
            self.step()
        raise AssertionError("the staging thread does not end")

    @rule()
    def staging_comes_to_its_end(self):
        self.let_staging_end()

    def let_staging_end(self) -> None:
        self.h.runner.may_stage.set()
        self.h.join_staging()

    # ---------------------------------------------------------------- time

    @rule(times=st.sampled_from([1, 1, 2, 5, 20]))
    def rounds(self, times):
        for _ in range(times):
            self.step()

    @rule(tokens=st.sampled_from([(), (), (11,), (13, 500)]))
    def logits_behind_some_tokens_are_not_finite(self, tokens):
        self.h.runner.poison = set(tokens)

    @rule(seconds=st.sampled_from([0.5, 1.5, 6.0, 30.0]))
    def time_passes(self, seconds):
        self.h.now += seconds
        if seconds > self.engine.config.heartbeat_s:
            self.step()
            self.step()
            requests = self.engine.lifecycle.requests
            assert not any(r.group.client in self.witness.dropped for r in requests), (
                "a request of a dead client is left"
            )

    @precondition(lambda self: self.engine.scheduler.has_work)
    @rule(data=st.data(), sure=st.integers(0, 3), draining=st.booleans())
    def worker_dies(self, data, sure, draining):
        """Let a step fail, but seldom: the loop answers all open requests and calls, and another engine takes over."""
        self.let_staging_end()
        if draining and not sure:
            self.call(m.PauseArgs("wait"), self.some_client(data))
        self.step()
        if sure or not self.engine.scheduler.has_work:
            return
        self.h.runner.fail_next = True
        with pytest.raises(EngineError):
            self.engine.run()
        event(f"died with calls: {bool(self.witness.calls)}")
        self.witness.look()
        self.witness.assert_nothing_is_owed()
        assert not any(pause.unanswered for pause in self.pauses()) and not self.engine.weights.in_use
        self.start_engine(lost_commit=self.h.served.weight_epoch > 0)

    def step(self) -> None:
        was_paused, computed = self.pause.is_paused, self.h.runner.computed_tokens
        frozen = {pause: self.num_tokens(pause) for pause in self.pauses() if pause.is_paused}
        weight_epoch, seen = self.h.served.weight_epoch, len(self.witness.replies)
        session, serving = self.engine.weights.session, self.h.runner.weights
        self.h.run_rounds()
        if self.h.served.weight_epoch != weight_epoch:
            self.committed(weight_epoch + 1, self.publications[session.id], serving)
        tokens = self.witness.look()
        if was_paused and self.pause.is_paused:
            assert self.h.runner.computed_tokens == computed and tokens == 0, "the engine computed while paused"
        for pause in self.pauses():
            if pause.is_paused and pause in frozen:
                assert self.num_tokens(pause) == frozen[pause], "the engine computed for a paused scope"
        for args, reply in self.witness.replies[seen:]:
            self.check_reply(args, reply)
        self.check_calls()
        session = self.engine.weights.session
        idle = session is not None and session.state.value == "open" and not session.pending
        assert not idle or session.expires_at > self.h.now, "its lease has ended"

    def num_tokens(self, pause: PauseState) -> int:
        """Return the number of tokens that requests of a scope have got, since the engine started."""
        tokens, name = self.witness.num_tokens, pause.scope.lora_name
        return tokens.total() if name is None else tokens[name]

    def committed(self, weight_epoch: int, told: Publication, serving: int) -> None:
        """Note a commit. serving: the weights before it."""
        self.witness.weights[weight_epoch] = told.weights(serving)
        self.witness.versions[weight_epoch] = told.version or str(weight_epoch)
        assert told.committing and "/bad" not in told.names and "/garbage" not in told.names
        assert self.h.runner.weights == told.weights(serving), "other weights than those of the session"
        assert self.h.served.version == self.witness.versions[weight_epoch]
        event("commit")

    def check_reply(self, args: m.Args, reply: m.Reply) -> None:
        code = reply.failure.code if reply.failure else None
        match args:
            case m.PauseArgs() | m.ResumeArgs() if code == "model_not_found":
                assert args.scope != WHOLE_ENGINE and args.scope.removeprefix("adapter:") not in self.book.known
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
            case m.UpdateChunkArgs(session_id, FolderSource(path)) if code == "update_in_progress":
                # Too many reads hang. The session goes on without this part.
                self.publications[session_id].names.remove(path)
            case m.AbortArgs(lora_name=str()) if code is None:
                assert not any(s.open for s in self.doomed[reply.call_id]), "not aborted"
            case m.LoadAdapterArgs(name, path=path) if code is not None:
                assert code in REFUSALS[m.LoadAdapterArgs], reply
                self.book.void.add(int(path[1:].partition("-")[0]))
            case m.LoadAdapterArgs(name) if name in self.book.known:
                event(f"adapter replaced: {reply.result['replaced']}")
            case m.SleepArgs(tags=tags) if code is None:
                assert set(tags) <= self.h.runner.asleep and self.pause.is_paused
            case m.WeightInfoArgs() if code is None and "checksums" in reply.result:
                weights = self.witness.weights[reply.result["weight_epoch"]]
                assert reply.result["checksums"]["weights"] == hashlib.sha256(str(weights).encode()).hexdigest()
            case _:
                assert code is None or code in REFUSALS.get(type(args), ()), reply
        if type(args) in REFUSALS:
            assert code is None or "AssertionError" not in reply.failure.message, reply
            event(f"{type(args).__name__}: {code}")

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
            assert self.engine.weights.in_use, "a call about weights was forgotten"

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
        if "in_place" in holds and not (session is not None and session.in_place) and runner.has_weights:
            assert self.engine.weights.staging_busy or runner.asleep, "the hold of an update in place outlives it"
        if session is not None and not self.engine.weights.staging_busy:
            assert session.state.value == "open", "a session is being committed without a thread"
        if session is not None and session.in_place:
            assert "in_place" in holds and self.pause.is_paused

    # ---------------------------------------------------------------- the end

    def teardown(self):
        """Release all holds: every accepted request must end, and all blocks must be free again."""
        self.let_staging_end()
        if not self.live_clients():
            self.connect()
        for client in self.live_clients():
            self.unmute(client)
        self.step()
        for _ in range(3):  # deadlines and fences
            self.h.now += 6.0
            self.step()
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


def explore(caplog, examples: int, steps: int, shrink: bool) -> None:
    """Run the machine. shrink: whether to reduce a failure to a short one, which takes minutes."""
    caplog.set_level(logging.CRITICAL, logger="fastdeploy.engine")

    profile = settings(
        max_examples=examples,
        stateful_step_count=steps,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
        phases=[Search.generate, Search.shrink] if shrink else [Search.generate],
    )
    run_state_machine_as_test(EngineMachine, settings=profile)


def test_no_order_of_events_breaks_an_invariant(caplog):
    explore(caplog, examples=80, steps=60, shrink=False)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_order_of_events_breaks_an_invariant_in_a_long_search(caplog):
    explore(caplog, examples=3000, steps=150, shrink=True)
