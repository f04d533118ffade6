"""Requests that survive aborts: those of sessions. To them, an abort of all requests is a pause at most."""

from __future__ import annotations

import pytest

from fastdeploy.inter_communicator import messages as m
from support.fake_runner import FakeRunner, expected_tokens
from support.harness import Harness

LENGTH = 12


def both_kinds() -> Harness:
    """Return a harness that runs "plain" and "session"."""
    h = Harness(FakeRunner(num_blocks=128))
    h.add("plain", [1, 2, 3], max_tokens=LENGTH)
    h.add("session", [4, 5, 6], max_tokens=LENGTH, session="s", survives_aborts=True)
    h.run_rounds(4)
    return h


def assert_complete(h: Harness, request_id: str, prompt: list[int]) -> None:
    stream = h.stream(request_id)
    assert stream.tokens == expected_tokens(prompt, LENGTH) and stream.reason == "length" and len(stream.finals) == 1


@pytest.mark.parametrize("clear_cache", [False, True])
def test_it_is_frozen_by_a_pause_of_mode_abort_and_goes_on_after_the_resume(clear_cache):
    h = both_kinds()
    report = h.pause(mode="abort", clear_cache=clear_cache).result
    assert report["aborted_ids"] == ["plain"] and report["counts"]["kept"] == 1 and report["is_paused"]
    before = len(h.stream("session").tokens)
    h.run_rounds(5)
    assert 0 < len(h.stream("session").tokens) == before < LENGTH
    h.resume()
    h.run_out()
    assert_complete(h, "session", [4, 5, 6])
    assert h.stream("plain").reason == "abort"


def test_it_may_arrive_during_a_pause_that_rejects_and_runs_after_the_resume():
    h = Harness()
    h.pause(mode="abort")
    h.add("plain", [1, 2, 3])
    h.add("session", [4, 5, 6], max_tokens=LENGTH, session="s", survives_aborts=True)
    h.run_rounds(3)
    assert h.rejected("plain") and not h.rejected("session") and not h.stream("session").tokens
    h.resume()
    h.run_out()
    assert_complete(h, "session", [4, 5, 6])


@pytest.mark.parametrize("args", [m.AbortArgs(abort_all=True), m.ResetArgs()])
def test_an_abort_of_all_and_a_reset_let_it_go_on(args):
    h = both_kinds()
    h.ask(args)
    assert h.stream("plain").reason == "abort"
    h.run_out()
    assert_complete(h, "session", [4, 5, 6])


@pytest.mark.parametrize("paused", [False, True])
@pytest.mark.parametrize("args", [m.AbortArgs(session="s"), m.AbortArgs(request_ids=["session"])])
def test_an_abort_that_names_its_session_or_its_id_ends_it(args, paused):
    h = both_kinds()
    if paused:
        h.pause(mode="abort")
    aborted = h.ask(args).result["aborted"]
    assert [entry["request_id"] for entry in aborted] == ["session"]
    assert h.stream("session").reason == "abort" and h.stream("session").tokens
    assert (h.stream("plain").reason == "abort") == paused


def test_an_abort_of_a_session_without_requests_ends_nothing():
    h = both_kinds()
    assert h.ask(m.AbortArgs(session="other")).result == {"aborted": [], "not_found": []}


def test_its_deadline_ends_it_also_during_a_pause():
    h = Harness()
    h.add("session", [4, 5, 6], max_tokens=LENGTH, survives_aborts=True, deadline_s=5.0)
    h.run_rounds(3)
    h.pause(mode="abort")
    h.now += 6.0
    h.run_rounds()
    assert h.stream("session").reason == "abort" and h.stream("session").finals[0].stop_reason == "deadline"


@pytest.mark.parametrize("paused", [False, True])
def test_of_an_adapter_it_ends_on_the_weights_that_it_has_when_a_reset_unloads_the_adapter(paused):
    h = Harness(FakeRunner(num_blocks=128))
    h.load_adapter("a", 3)
    h.add("session", [4, 5, 6], max_tokens=LENGTH, adapter="a", survives_aborts=True)
    h.run_rounds(4)
    if paused:
        h.pause(mode="abort", scope="adapter:a")
        h.run_rounds(3)
        assert h.stream("session").reason is None
    h.ask(m.ResetArgs())
    h.run_out()
    stream = h.stream("session")
    assert (stream.reason, len(stream.tokens)) == ("length", LENGTH)
    assert {span.adapter for span in stream.spans} == {"a"}
