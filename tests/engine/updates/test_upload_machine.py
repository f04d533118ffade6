"""A search by hypothesis for an order of events around uploads, which a session reads while they arrive."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from engine.test_state_machine import AdapterMachine, EngineMachine, explore
from fastdeploy.inter_communicator import messages as m
from support.checked_engine import CheckedEngine
from support.publications import Upload

PARTS = st.sampled_from(["/w4", "/w5", "/w6-recompute", "/w4", "/w5", "/bad", "/garbage"])
STATES = st.sampled_from(["open", "open", "complete", "broken"])
MEANWHILE = st.sampled_from(["commit", "commit", "piece", "piece", "death", "break", "time", "abort", "sleep"])
NBYTES = st.sampled_from([0, 5, 5])


class UploadMachine(CheckedEngine):
    """Uploads in pieces, and what may come between the pieces."""

    add, resume_everything = AdapterMachine.add, AdapterMachine.resume_everything
    place_pause, time_passes = AdapterMachine.place_pause, AdapterMachine.time_passes
    connect, client_dies = EngineMachine.connect, EngineMachine.client_dies
    client_is_mute_for_a_while = EngineMachine.client_is_mute_for_a_while
    begin_session, some_session = EngineMachine.begin_session, EngineMachine.some_session
    send_chunk, commit_session = EngineMachine.send_chunk, EngineMachine.commit_session
    abort_session, relabel, reset = EngineMachine.abort_session, EngineMachine.relabel, EngineMachine.reset
    put_to_sleep, wake_up = EngineMachine.put_to_sleep, EngineMachine.wake_up

    @precondition(lambda self: self.engine.weights.session)
    @rule(data=st.data(), part=PARTS, nbytes=NBYTES, state=STATES, new=st.booleans(), slow=st.booleans(),
          skip=st.sampled_from([0, 0, 0, 0, 1, -1]), stranger=st.sampled_from([False, False, True]))  # fmt: skip
    def a_piece_comes(self, data, part, nbytes, state, new, slow, skip, stranger):
        """Send the next piece of a known or of a new upload. skip, stranger: what may be wrong with it."""
        self.step()
        if slow:
            self.h.runner.may_stage.clear()
        session_id = self.some_session(data)
        known = [] if new else self.uploads_to(session_id)
        client = self.some_client(data)
        upload = data.draw(st.sampled_from(known)) if known else self.new_upload(session_id, client, part)
        upload_is_known = upload.name in self.uploads
        self.send_piece(
            upload,
            nbytes,
            state,
            max(skip, -upload.received),
            client if stranger and upload_is_known else "",
        )

    @rule(data=st.data(), parts=st.lists(PARTS, min_size=1, max_size=3, unique=True), slow=st.booleans(),
          in_place=st.booleans(), one_call=st.booleans(), lease_s=st.sampled_from([3.0, 300.0]),
          meanwhile=st.lists(MEANWHILE, min_size=1, max_size=4), commit=st.booleans())  # fmt: skip
    def a_trainer_uploads(self, data, parts, slow, in_place, one_call, lease_s, meanwhile, commit):
        """Run a session whose uploads are received at the same time. one_call: it ends with its API server."""
        self.call(m.AbortUpdateArgs(), client := self.some_client(data))
        self.finish_all_work()
        in_place = in_place and self.pause.is_paused
        args = m.BeginUpdateArgs(in_place=in_place, lease_s=lease_s, ends_with_client=one_call)
        self.call_and_note(args, client, None, False, [])
        session = self.engine.weights.session
        if session is None or session.begin is not args:
            return
        if slow:
            self.h.runner.may_stage.clear()
        uploads = [self.new_upload(session.id, client if one_call else self.some_client(data), part) for part in parts]
        for upload in uploads:
            self.send_piece(upload, 5, "open")
        for what in meanwhile:
            self.something_happens(data, what, session)
        for upload in uploads:
            if upload.client in self.live_clients():
                self.send_piece(upload, 3, "complete")
        if commit:
            self.try_to_commit(data, session)
            self.let_staging_end()
            self.step()

    def something_happens(self, data, what, session) -> None:
        """Let it happen while all uploads of the session are received."""
        match what:
            case "commit":
                self.try_to_commit(data, session)
            case "piece":
                for upload in self.uploads_to(session.id):
                    if upload.client in self.live_clients():
                        client = data.draw(st.sampled_from([upload.client, *self.live_clients()]))
                        skip = data.draw(st.sampled_from([0, 0, 1, -1]))
                        self.send_piece(upload, 5, "open", skip, "" if client == upload.client else client)
            case "death":
                self.client_dies(data)
                self.time_passes(6.0)
            case "break":
                for upload in self.uploads_to(session.id)[:1]:
                    self.send_piece(upload, 0, "broken")
            case "abort":
                self.call(m.AbortUpdateArgs(session.id), self.some_client(data))
            case "sleep":
                self.call(m.SleepArgs(), self.some_client(data))
            case "time":
                self.the_lease_waits_for_uploads()

    def try_to_commit(self, data, session) -> None:
        """Commit, and expect that it is refused while an upload is received."""
        self.step()
        told, fits = self.publications[session.id], self.may_commit(session)
        is_open = self.engine.weights.session is session and session.state.value == "open"
        kv = "recompute" if told.names and told.names[-1].endswith("recompute") else None
        args, seen, client = m.CommitUpdateArgs(session.id, kv=kv), len(self.witness.replies), self.some_client(data)
        self.call(args, client)
        told.committing |= is_open and fits
        self.step()
        if not (is_open and fits) and client in self.live_clients():
            assert any(call is args and reply.failure for call, reply in self.witness.replies[seen:])

    @precondition(lambda self: self.engine.weights.session and self.uploads_to(self.engine.weights.session.id))
    @rule()
    def the_lease_waits_for_uploads(self):
        self.finish_all_work()
        session = self.engine.weights.session
        if session is None or not self.uploads_to(session.id):
            return
        living = [upload for upload in self.uploads_to(session.id) if upload.client not in self.h.transport.gone]
        self.h.now += session.begin.lease_s + 10
        self.step()
        owned = session.owner is not None and session.owner in self.h.transport.gone | self.h.transport.mute
        mute = {upload.client for upload in living} & self.h.transport.mute
        assert self.engine.weights.session is session or not living or owned or mute, "its lease ran"

    def new_upload(self, session_id: str, client: str, part: str) -> Upload:
        return Upload(f"u{next(self.ids)}", session_id, client, part)


def test_no_order_of_uploads_and_other_events_breaks_an_invariant(caplog):
    explore(UploadMachine, caplog, examples=40, steps=40)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_order_of_uploads_and_other_events_breaks_an_invariant_in_a_long_search(caplog):
    explore(UploadMachine, caplog, examples=1000, steps=100, long=True)
