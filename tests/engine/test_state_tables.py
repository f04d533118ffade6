"""Each state machine moves as its table says, and raises on an event that the table does not list."""

from __future__ import annotations

from itertools import product

import pytest

from fastdeploy.core import request as r
from fastdeploy.core.request import Scope
from fastdeploy.core.request_fields import AddRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.core.served_weights import WHOLE_ENGINE
from fastdeploy.engine.pauses import pause as p
from fastdeploy.engine.updates import weight_session as w
from fastdeploy.inter_communicator.messages import BeginUpdateArgs
from support.harness import Harness


def request_in(state: r.RequestState) -> r.Request:
    request = r.Request(r.Group("a", AddRequest("r", [1], SamplingParams()), Scope(WHOLE_ENGINE).model), 0, (0, 1), 1)
    request.state = state
    return request


def session_in(state: w.SessionState) -> w.WeightSession:
    session = w.WeightSession(
        "s", BeginUpdateArgs(), opened={}, timeout_s=1.0, staging=None, started_at=0.0, owner=None
    )
    session.state = state
    return session


def assert_follows(table, machine, attribute, advance, event) -> None:
    before = getattr(machine, attribute)
    if (before, event) in table:
        advance(event)
    else:
        with pytest.raises(KeyError):
            advance(event)
    assert getattr(machine, attribute) is table.get((before, event), before)


@pytest.mark.parametrize(("state", "event"), list(product(r.RequestState, r.RequestEvent)))
def test_a_request_follows_its_table(state, event):
    request = request_in(state)
    assert_follows(r.TRANSITIONS, request, "state", request.advance, event)
    assert len(r.TRANSITIONS) == 5


@pytest.mark.parametrize(("phase", "event"), list(product(p.PausePhase, p.PauseEvent)))
def test_a_pause_follows_its_table(phase, event):
    pause = Harness().engine.pause
    pause.phase = phase
    assert_follows(p.TRANSITIONS, pause, "phase", pause._advance, event)
    assert len(p.TRANSITIONS) == 7


@pytest.mark.parametrize(("state", "event"), list(product(w.SessionState, w.SessionEvent)))
def test_a_weight_session_follows_its_table(state, event):
    session = session_in(state)
    assert_follows(w.TRANSITIONS, session, "state", session.advance, event)


def test_every_weight_session_can_end_and_then_never_moves_again():
    ending = {state for state, event in w.TRANSITIONS if event is w.SessionEvent.END}
    assert ending == set(w.SessionState) - {w.SessionState.ENDED} == {state for state, _ in w.TRANSITIONS}
