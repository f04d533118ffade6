"""A search by hypothesis for an order of events around what a gateway prepares and commits later."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import rule

from engine.test_state_machine import AdapterMachine, EngineMachine, explore
from fastdeploy.core.weight_source import FolderSource
from fastdeploy.inter_communicator import messages as m
from support.checked_engine import CheckedEngine
from support.machine_inputs import ADAPTERS, FOLDERS, KV, PAUSES

MEANWHILE = st.sampled_from(["", "relabel", "pause", "sleep", "part", "prepare", "time", "abort", "reset", "begin"])
NAMES = st.sampled_from(ADAPTERS)
STEPS_UP = st.sampled_from([None, None, 0, 1, 5])  # of a number above the one that serves; None = no number is given


class GatewayMachine(CheckedEngine):
    """Commits and loads in two calls, and what may come between the two."""

    add, resume_everything = AdapterMachine.add, AdapterMachine.resume_everything
    load_adapter, unload_adapter = AdapterMachine.load_adapter, AdapterMachine.unload_adapter
    place_pause, time_passes = AdapterMachine.place_pause, AdapterMachine.time_passes
    time_goes_by, staging_comes_to_its_end = AdapterMachine.time_goes_by, AdapterMachine.staging_comes_to_its_end
    connect, client_dies = EngineMachine.connect, EngineMachine.client_dies
    relabel, reset, update_weights = EngineMachine.relabel, EngineMachine.reset, EngineMachine.update_weights
    put_to_sleep, wake_up = EngineMachine.put_to_sleep, EngineMachine.wake_up
    a_trainer_repairs_what_is_broken = EngineMachine.a_trainer_repairs_what_is_broken

    @rule(data=st.data(), args=PAUSES, hold_id=st.sampled_from(["n", "o"]))
    def place_an_anonymous_hold_with_a_name(self, data, args, hold_id):
        self.call(msgspec.structs.replace(args, hold_id=hold_id, anonymous=True), self.some_client(data))

    @rule(data=st.data(), folder=st.sampled_from(FOLDERS), partial=st.booleans(),
          meanwhile=st.lists(MEANWHILE, max_size=3), up=STEPS_UP, version=st.sampled_from([None, "c"]))  # fmt: skip
    def a_gateway_publishes(self, data, folder, partial, meanwhile, up, version):
        """Prepare an update, let something happen, and commit. Nothing may refuse this commit, but the end of the
        session."""
        self.call(m.AbortUpdateArgs(), client := self.some_client(data))
        self.finish_all_work()
        args = m.BeginUpdateArgs(
            expected_version=self.h.served.version,
            partial=partial,
            lease_s=9.0,
        )
        self.call_and_note(args, client, None, partial, [])
        session = self.engine.weights.session
        if session is None or session.begin is not args:
            return
        told = self.publications[session.id]
        self.call(m.UpdatePartArgs(session.id, FolderSource(folder)), client)
        told.names.append(folder)
        self.call(
            m.CommitUpdateArgs(session.id, kv="recompute" if "recompute" in folder else None, prepare=True), client
        )
        told.committing = True
        self.finish_all_work()
        for what in meanwhile:
            self.something_happens(data, what, session)
        self.step()
        self.commit_prepared(data, session, up, version)

    def commit_prepared(self, data, session, up, version):
        is_prepared = self.engine.weights.session is session and session.state.value == "prepared"
        before, seen, client = self.h.served.weight_epoch, len(self.witness.replies), self.some_client(data)
        number = None if up is None else before + up
        fits = is_prepared and up != 0
        told = self.publications[session.id]
        told.version = (version or told.version) if fits else told.version
        args = m.CommitUpdateArgs(session.id, version, weight_epoch=number)
        self.call(args, client)
        self.step()
        assert self.h.served.weight_epoch == ((number or before + 1) if fits else before)
        if client in self.live_clients():
            (reply,) = [reply for call, reply in self.witness.replies[seen:] if call is args]
            assert (reply.failure is None) == fits
        event(f"commit of what was prepared: {fits}")

    def something_happens(self, data, what, session):
        """Let it happen while an update is prepared."""
        client = self.some_client(data)
        match what:
            case "relabel":
                self.relabel(data, "x")
            case "pause":
                self.call(m.PauseArgs("keep", hold_id="x", ttl_s=2.0), client)
            case "sleep":
                self.call(m.SleepArgs(), client)
            case "part":
                self.call(m.UpdatePartArgs(session.id, FolderSource("/w5")), client)
            case "prepare":
                self.call(m.CommitUpdateArgs(session.id, prepare=True), client)
            case "begin":
                self.call(m.BeginUpdateArgs(), client)
            case "time":
                self.h.now += 5.0
            case "abort":
                self.call(m.AbortUpdateArgs(session.id), client)
            case "reset":
                self.reset(data, None, 0)
        self.step()

    @rule(data=st.data(), name=NAMES, bad=st.sampled_from([None, None, None, "bad"]), kv=KV, slow=st.booleans())
    def prepare_load(self, data, name, bad, kv, slow):
        self.step()
        if slow:
            self.h.runner.may_stage.clear()
        number = next(self.contents)
        content = f"a{number}" + ("-recompute" if kv == "recompute" else "")
        self.book.names[number] = name
        args = m.LoadAdapterArgs(name, self.h.adapter_folder(bad or content), path=content, kv=kv, prepare=True)
        self.call(args, self.some_client(data))
        self.rounds(3)
        committed = [adapter.content for adapter in self.book.loaded.values()]
        assert number not in committed, "it is seen before its commit"

    @rule(data=st.data(), name=NAMES, commit=st.sampled_from([True, True, False]), up=STEPS_UP)
    def end_load(self, data, name, commit, up):
        self.rounds(2)
        load, before = self.engine.adapters._loads.get(name), self.book.epochs.get(self.book.known.get(name, 0), 0)
        fits = load is not None and load.packed is not None and (up != 0 or not commit)
        number = None
        if commit and up is not None:  # a gateway knows the numbers of adapters that are gone
            number = max(before, self.book.past) + up if up else before
        args = m.EndLoadArgs(name, commit, number)
        if fits and number is not None:
            self.book.given[name] = number
        if fits and not commit:
            self.book.void.add(int(load.args.path[1:].partition("-")[0]))
        seen, client = len(self.witness.replies), self.some_client(data)
        self.call(args, client)
        self.step()
        after = self.book.epochs.get(self.book.known.get(name, 0), 0)
        assert not fits or not commit or after == number or (number is None and after > before)
        if client in self.live_clients():
            (reply,) = [reply for call, reply in self.witness.replies[seen:] if call is args]
            assert (reply.failure is None) == (fits or (load is None and not commit))
        event(f"end of a load, commit: {commit}: {fits}")


def test_no_order_of_prepared_calls_and_other_events_breaks_an_invariant(caplog):
    explore(GatewayMachine, caplog, examples=20, steps=30)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_order_of_prepared_calls_and_other_events_breaks_an_invariant_in_a_long_search(caplog):
    explore(GatewayMachine, caplog, examples=1000, steps=100, long=True)
