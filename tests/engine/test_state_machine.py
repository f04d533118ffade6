"""A search by hypothesis for an order of events that breaks an invariant of the engine."""

from __future__ import annotations

import logging

import pytest
from hypothesis import Phase as Search
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule, run_state_machine_as_test

from fastdeploy.core.errors import EngineError
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.core.served_weights import adapter_scope
from fastdeploy.core.weight_source import DeltaBase, FolderSource
from fastdeploy.engine.pauses.pause import Mode, PausePhase
from fastdeploy.inter_communicator import messages as m
from support import search
from support.checked_engine import CheckedEngine
from support.fake_runner import fingerprint_of
from support.machine_inputs import (
    ADAPTERS,
    DELTAS,
    FOLDERS,
    FORMS,
    HOLDS,
    KV,
    MODELS,
    PAUSES,
    PROMPTS,
    SAMPLING,
    SCOPES,
    SYSTEM_HOLDS,
    TAGS,
    UPDATES,
)
from support.publications import number_of


class AdapterMachine(CheckedEngine):
    """Requests of several adapters, which are loaded, paused and unloaded."""

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

    @precondition(lambda self: any(stream.tokens for stream in self.witness.streams.values()))
    @rule(data=st.data(), more=st.lists(st.integers(0, 12), max_size=5), sampling=SAMPLING)
    def the_next_turn_of_a_conversation_comes(self, data, more, sampling):
        """Send a prompt that begins with the prompt and the output of another request."""
        before = data.draw(st.sampled_from([stream for stream in self.witness.streams.values() if stream.tokens]))
        prompt = [*before.add.prompt_token_ids, *before.tokens, *more][:40]
        client, salt, adapter = self.some_client(data), before.add.cache_salt, before.add.adapter
        hits = self.engine.kv.hit_tokens
        self.send_add(client, f"r{next(self.ids)}", prompt, sampling, 1, 0, salt, adapter)
        self.step()
        event(f"a turn with hits beyond full blocks: {(self.engine.kv.hit_tokens - hits) % 4 > 0}")

    @precondition(lambda self: self.pause.holds and not SYSTEM_HOLDS & set(self.pause.holds))
    @rule(data=st.data())
    def resume_everything(self, data):
        for pause in self.pauses():
            for hold_id in list(pause.holds):
                self.call(m.ResumeArgs(hold_id, pause.scope.id), self.some_client(data))
        self.step()

    @rule(data=st.data(), name=st.sampled_from([*ADAPTERS, "nobody"]))
    def abort_by_adapter(self, data, name):
        self.call(m.AbortArgs(lora_name=name), self.some_client(data))

    @rule(data=st.data(), args=PAUSES)
    def place_pause(self, data, args):
        self.call(args, self.some_client(data))

    @rule(data=st.data(), hold_id=HOLDS | st.sampled_from(["nobody's", *sorted(SYSTEM_HOLDS)]), scope=SCOPES)
    def resume(self, data, hold_id, scope):
        self.call(m.ResumeArgs(hold_id, scope), self.some_client(data))

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

    @precondition(lambda self: not SYSTEM_HOLDS & set(self.pause.holds))
    @rule(data=st.data(), name=st.sampled_from(ADAPTERS), mode=st.sampled_from(["keep", "keep", "wait", "abort"]),
          clear_cache=st.sampled_from([None, None, True]), resume=st.booleans(),
          meanwhile=st.sampled_from(["replace", "recompute", "unload", "unload, load", "engine", "others", "others"]),
          )  # fmt: skip
    def pause_an_adapter_at_work(self, data, name, mode, clear_cache, meanwhile, resume):
        """Pause an adapter whose requests run, do something ``meanwhile``, and perhaps resume."""
        self.resume_everything(data)
        self.adapters_at_work(data, [name, data.draw(MODELS)], 24)
        running = sorted({r.scope.lora_name for r in self.engine.scheduler.running} - {None})
        name = data.draw(st.sampled_from(running or [name]))
        client, scope = self.some_client(data), adapter_scope(name)
        self.call(m.PauseArgs(mode, clear_cache, hold_id="z", scope=scope), client)
        self.step()
        match meanwhile:
            case "replace" | "recompute":
                self.load_adapter(data, name, None, "keep" if meanwhile == "replace" else "recompute", True, False)
            case "unload" | "unload, load":
                self.unload_adapter(data, name, meanwhile == "unload, load")
            case "engine":
                self.call(m.PauseArgs("keep", hold_id="z"), client)
                self.step()
                self.call(m.ResumeArgs("z"), client)
            case "others":
                self.adapters_at_work(data, [other for other in ("", *ADAPTERS) if other != name], 24)
        self.rounds(5)
        if resume:
            self.call(m.ResumeArgs("z", scope), client)
            self.rounds(3)

    @rule(data=st.data(), names=st.lists(MODELS, min_size=2, max_size=4), max_tokens=st.sampled_from([12, 24]))
    def adapters_at_work(self, data, names, max_tokens):
        for name, prompt in zip(names, PROMPTS, strict=False):
            sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
            self.send_add(self.some_client(data), f"r{next(self.ids)}", prompt, sampling, 1, 0, "", name)
        self.rounds(3)

    @rule(data=st.data(), name=st.sampled_from([*ADAPTERS, "nobody"]), again=st.booleans())
    def unload_adapter(self, data, name, again):
        self.step()
        known = name in self.book.known
        self.call(m.UnloadAdapterArgs(name), self.some_client(data))
        if known:
            self.book.given_up(name)
        self.step()
        assert not known or name not in self.book.known
        if again and name in ADAPTERS:
            self.load_adapter(data, name, None, "keep", True, False)

    @rule()
    def staging_comes_to_its_end(self):
        self.let_staging_end()

    @rule(times=st.sampled_from([1, 1, 2, 5, 20]))
    def time_goes_by(self, times):
        self.rounds(times)

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


class EngineMachine(AdapterMachine):
    """All that may happen to an engine."""

    # ---------------------------------------------------------------- clients

    @precondition(lambda self: len(self.live_clients()) < 3)
    @rule()
    def connect(self):
        self.new_client()

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

    # ---------------------------------------------------------------- requests

    @rule(data=st.data(), sampling=SAMPLING)
    def add_with_an_id_that_was_used(self, data, sampling):
        self.step()
        keys = sorted({(client, rid) for client, rid, _ in self.witness.streams if client in self.live_clients()})
        if keys:
            client, request_id = data.draw(st.sampled_from(keys))
            if all(add.request_id != request_id for _, add, _ in self.witness.undecided):
                self.send_add(client, request_id, PROMPTS[0], sampling, 1, 0, "")
                self.step()

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

    @rule(data=st.data(), args=PAUSES, then=st.sampled_from(["", "", "resume", "pause"]))
    def pause_in_the_middle_of_a_step(self, data, args, then):
        """Pause within the next step, if there is one. then: the call after that, "" for none."""
        client = self.some_client(data)
        self.within_a_step(lambda: self.call(args, client))
        if then:
            self.call(m.ResumeArgs(), client)
        if then == "pause":
            self.within_a_step(lambda: self.call(args, client))

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
          m.AdaptersArgs(), m.MetricsArgs(), m.ModelInfoArgs(), m.WeightInfoArgs()]))  # fmt: skip
    def ask(self, data, args):
        call_id = self.call(args, client := self.some_client(data))
        self.step()
        assert (client, call_id) not in self.witness.calls, "a query was not answered at once"

    # ---------------------------------------------------------------- weights

    @rule(data=st.data(), update=st.sampled_from(UPDATES), version=st.sampled_from([None, "v"]), slow=st.booleans(),
          partial=st.sampled_from([False, False, True]))  # fmt: skip
    def update_weights(self, data, update, version, slow, partial):
        self.step()
        if slow:
            self.h.runner.may_stage.clear()
        folder, kv = update
        source = FolderSource(folder)
        args = m.UpdateWeightsArgs(source, version, kv=kv, partial=partial)
        self.call_and_note(args, client := self.some_client(data), version, partial, [folder])
        if self.engine.weights.session is not None and client in self.live_clients():
            self.call(m.UpdateWeightsArgs(source), client)  # refused: one at a time

    @rule(data=st.data(), version=st.sampled_from([None, "b"]),
          expected=st.sampled_from([None, None, "serving", "nope"]), kv=st.sampled_from(["keep", "recompute"]),
          partial=st.booleans(), lease_s=st.sampled_from([3.0, 300.0]))  # fmt: skip
    def begin_session(self, data, version, expected, kv, partial, lease_s):
        expected = self.h.served.version if expected == "serving" else expected
        self.begin_with(data, m.BeginUpdateArgs(version, expected, kv, partial, lease_s))

    @precondition(lambda self: self.engine.weights.session)
    @rule(data=st.data(), name=st.sampled_from(FOLDERS + DELTAS), form=st.sampled_from(FORMS), slow=st.booleans())
    def send_part(self, data, name, form, slow):
        session_id = self.some_session(data)
        if slow:
            self.h.runner.may_stage.clear()
        self.call(m.UpdatePartArgs(session_id, FolderSource(name), form=form), self.some_client(data))
        told = self.publications[session_id]
        if not told.committing and (form.is_plain or told.delta):
            told.names.append(name)

    @precondition(lambda self: self.engine.weights.session)
    @rule(data=st.data(), version=st.sampled_from([None, "c"]))
    def commit_session(self, data, version):
        self.step()
        session_id = self.some_session(data)
        told, session = self.publications[session_id], self.engine.weights.session
        kv = "recompute" if told.names and told.names[-1].endswith("recompute") else None
        fits = session is not None and self.may_commit(session)
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
        """Run a session."""
        self.begin_with(data, m.BeginUpdateArgs(partial=partial, lease_s=lease_s))
        session = self.engine.weights.session
        if session is None:
            return
        for name in names:
            self.call(m.UpdatePartArgs(session.id, FolderSource(name)), self.some_client(data))
            self.publications[session.id].names.append(name)
        if then == "commit":
            self.call(m.CommitUpdateArgs(session.id), self.some_client(data))
            self.publications[session.id].committing = True
        self.step()

    @precondition(lambda self: self.h.runner.has_weights)
    @rule(data=st.data(), parts=st.lists(st.sampled_from(DELTAS), min_size=1, max_size=2, unique=True),
          base=st.sampled_from([None, None, None, "fingerprint", "epoch", "version"]),
          wrong=st.sampled_from([0, 0, 0, 1]), slow=st.booleans(), one_call=st.booleans(),
          meanwhile=st.sampled_from(["", "", "relabel", "sleep", "begin", "reset", "silence"]))  # fmt: skip
    def a_trainer_publishes_a_delta(self, data, parts, base, wrong, slow, one_call, meanwhile):
        """Publish a delta. base: what is wrong in its base. wrong: added to the result that is asked for."""
        self.step()
        if slow:
            self.h.runner.may_stage.clear()
        parts = parts[:1] if one_call else parts
        serving, served = self.h.runner.weights, self.h.served
        result = fingerprint_of(serving + sum(number_of(part) for part in parts if part != "/bad") + wrong)
        delta = DeltaBase(
            fingerprint_of(serving + (base == "fingerprint")),
            served.weight_epoch + (base == "epoch"),
            "nope" if base == "version" else served.version,
        )
        kv = "recompute" if parts[-1].endswith("recompute") else "keep"
        client = self.some_client(data)
        if one_call:
            args = m.UpdateWeightsArgs(FolderSource(parts[0]), kv=kv, base=delta, fingerprint=result, form=FORMS[1])
            self.call_and_note(args, client, None, False, parts)
            return
        args = m.BeginUpdateArgs(
            kv=kv, base=delta, fingerprint=result, lease_s=3.0, idempotency_key=f"k{next(self.ids)}"
        )
        self.begin_with(data, args)
        session = self.engine.weights.session
        if session is None or session.begin is not args:
            return
        for part in parts:
            self.call(m.UpdatePartArgs(session.id, FolderSource(part), form=FORMS[1]), client)
            self.publications[session.id].names.append(part)
        match meanwhile:
            case "relabel":
                self.relabel(data, "x")
            case "sleep":
                self.call(m.SleepArgs(), client)
            case "begin":
                seen = len(self.witness.replies)
                self.call(args, client)
                self.step()
                again = [reply for call, reply in self.witness.replies[seen:] if call is args]
                assert self.engine.weights.session is not session or all(reply.failure is None for reply in again)
            case "reset":
                self.reset(data, None, 0)
        self.step()
        if meanwhile != "silence" and client in self.live_clients():
            self.call(m.CommitUpdateArgs(session.id), client)
            self.publications[session.id].committing = self.may_commit(session)
        self.step()

    @rule(data=st.data(), version=st.sampled_from(["x", "y"]))
    def relabel(self, data, version):
        self.call(m.SetVersionArgs(version), self.some_client(data))
        self.label_comes(version)

    @rule(data=st.data(), version=st.sampled_from([None, None, "z"]), sure=st.integers(0, 2))
    def reset(self, data, version, sure):
        if sure:
            return
        self.step()
        live = [stream for stream in self.witness.streams.values() if stream.open]
        for name in self.book.known:
            self.book.given_up(name)
        self.call(m.ResetArgs(version), self.some_client(data))
        self.label_comes(version or self.h.served.version)
        assert not any(stream.open for stream in live), "not aborted"
        assert not self.book.known and not self.engine.scopes.adapters, "an adapter of the run before"
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

    # ---------------------------------------------------------------- time

    @rule(tokens=st.sampled_from([(), (), (11,), (13, 500)]))
    def logits_behind_some_tokens_are_not_finite(self, tokens):
        self.h.runner.poison = set(tokens)

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
        assert not any(pause.unanswered for pause in self.pauses()) and not self.is_updating
        self.start_engine(lost_commit=self.h.served.weight_epoch > 0)


def explore(machine, caplog, examples: int, steps: int, long: bool = False) -> None:
    """Run a machine. A failure of a long or random search is reduced to a short one, which takes minutes."""
    caplog.set_level(logging.CRITICAL, logger="fastdeploy.engine")

    profile = settings(
        max_examples=examples if long else examples * search.TIMES,
        stateful_step_count=steps,
        print_blob=False,
        phases=[Search.generate, Search.shrink] if long or search.FACTOR else [Search.generate],
    )
    run_state_machine_as_test(machine, settings=profile)


@pytest.mark.parametrize(("machine", "examples"), [(AdapterMachine, 20), (EngineMachine, 40)])
def test_no_order_of_events_breaks_an_invariant(machine, examples, caplog):
    explore(machine, caplog, examples, steps=50)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("machine", [AdapterMachine, EngineMachine])
def test_no_order_of_events_breaks_an_invariant_in_a_long_search(machine, caplog):
    explore(machine, caplog, examples=2000, steps=150, long=True)
