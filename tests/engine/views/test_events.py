"""Events: each change of a request, a pause or the weights is told once, and a step only to those who want steps."""

from __future__ import annotations

from typing import Any

import pytest

from fastdeploy.core.events import Event, EventKind
from fastdeploy.inter_communicator import messages as m
from support.fake_runner import FakeRunner
from support.harness import PROMPT, Harness

OF_REQUESTS = ("queued", "admitted", "frozen", "thawed", "preempted", "final")


class Record:
    """A sink that keeps all events."""

    def __init__(self, h: Harness, wants_steps: bool = False):
        self.wants_steps = wants_steps
        self.events: list[Event] = []
        h.engine.events.attach(self)

    def add(self, event: Event) -> None:
        self.events.append(event)

    def kinds(self, name: str) -> list[str]:
        """Return the kinds of the events of one request."""
        return [e.kind.value for e in self.events if e.name == name and e.kind.value in OF_REQUESTS]

    def fields(self, kind: EventKind, *names: str) -> list[Any]:
        """Return these fields of all events of a kind: a value, or a tuple of values."""
        rows = [tuple(e.fields[name] for name in names) for e in self.events if e.kind is kind]
        return [row[0] if len(row) == 1 else row for row in rows]


def test_each_choice_is_queued_admitted_and_final_once():
    h = Harness()
    record = Record(h)
    h.add("r", PROMPT, max_tokens=3, n=2, first_choice=4)
    h.run_out()
    assert record.kinds("r/4") == record.kinds("r/5") == ["queued", "admitted", "final"]
    assert record.fields(EventKind.QUEUED, "scope", "prompt_tokens", "max_tokens") == [("engine", 3, 3)] * 2
    assert record.fields(EventKind.FINAL, "reason", "output_tokens", "spans") == [
        ("length", 3, [("0", 0, 0, 0, 3)]),
        ("length", 3, [("0", 0, 0, 0, 3)]),
    ]


def test_a_request_that_ends_in_the_queue_is_final_too():
    h = Harness()
    record = Record(h)
    h.pause(mode="keep")
    h.add("r", PROMPT)
    h.run_rounds()
    h.ask(m.AbortArgs(abort_all=True))
    assert record.kinds("r/0") == ["queued", "final"]
    assert record.fields(EventKind.FINAL, "reason", "output_tokens", "spans") == [("abort", 0, [])]


def test_the_final_event_has_the_spans_that_the_client_gets_though_nobody_looked_before():
    h = Harness()
    h.add("r", PROMPT, max_tokens=12)
    h.run_rounds(3)
    h.update("w1", version="one")
    h.ask(m.SetVersionArgs("renamed"))
    record = Record(h)
    h.run_out()
    spans: list[list[Any]] = []
    for token in h.stream("r").spans:
        if spans and spans[-1][:2] == [token.version, token.weight_epoch]:
            spans[-1][4] = token.end
        else:
            spans.append([token.version, token.weight_epoch, token.adapter_epoch, token.start, token.end])
    assert record.fields(EventKind.FINAL, "spans") == [[tuple(span) for span in spans]] and len(spans) == 3


def test_preemption_for_memory_says_what_is_lost():
    h = Harness(FakeRunner(num_blocks=4, block_size=16, max_model_len=64))
    record = Record(h)
    for name in ("a", "b"):
        h.add(name, [*PROMPT, ord(name)], max_tokens=40)
    h.run_out()
    assert record.kinds("a/0") == ["queued", "admitted", "final"]
    assert record.kinds("b/0") == ["queued", "admitted", "preempted", "admitted", "final"]
    ((why, computed),) = record.fields(EventKind.PREEMPTED, "why", "computed")
    assert why == "memory" and computed == 32
    assert record.fields(EventKind.ADMITTED, "computed_before") == [0, 0, computed + 1 - 4]


@pytest.mark.parametrize(("act", "why"), [("update", "recompute"), ("clear", "cleared"), ("drain", "pause")])
def test_preemption_says_why(act, why):
    h = Harness(max_num_batched_tokens=4)
    record = Record(h)
    h.add("r", PROMPT * 4 if act == "drain" else PROMPT, max_tokens=20)
    h.run_rounds(2)
    if act == "update":
        h.update("w1", kv="recompute")
    else:
        h.pause(mode="wait" if act == "drain" else "keep", clear_cache=True)
    assert record.fields(EventKind.PREEMPTED, "why") == [why]


def test_a_pause_of_an_adapter_freezes_its_requests_and_a_pause_of_the_engine_none():
    h = Harness()
    h.load_adapter("alice", 1)
    record = Record(h)
    h.add("r", PROMPT, max_tokens=40, adapter="alice")
    h.run_rounds(4)
    h.pause(mode="keep", hold_id="whole")
    h.resume("whole")
    h.pause(mode="keep", scope="adapter:alice")
    h.ask(m.ResumeArgs(scope="adapter:alice"))
    assert record.kinds("r/0") == ["queued", "admitted", "frozen", "thawed"]
    phases = [(e.name, e.fields["phase"], e.fields["gate"]) for e in record.events if e.kind is EventKind.PHASE]
    closed = [("draining", "closed"), ("paused", "closed"), ("running", "open")]
    assert phases == [(scope, *state) for scope in ("engine", "adapter:alice") for state in closed]


def test_a_drain_tells_when_the_gate_closes_though_the_phase_stays():
    h = Harness()
    record = Record(h)
    h.add("r", PROMPT, max_tokens=40)
    h.run_rounds(2)
    h.call(m.PauseArgs(mode="wait"))
    h.run_rounds()
    h.pause(mode="keep")
    assert record.fields(EventKind.PHASE, "phase", "gate") == [
        ("draining", "started_only"),
        ("draining", "closed"),
        ("paused", "closed"),
    ]


def test_holds_are_told_with_their_owner_and_why_they_ended():
    h = Harness()
    record = Record(h)
    h.add("r", PROMPT, max_tokens=40)
    h.pause(mode="keep", hold_id="a", placed_by="trainer")
    h.pause(mode="keep", hold_id="b", ttl_s=5.0)
    h.resume("a")
    h.now += 6
    h.run_rounds()
    h.call(m.PauseArgs(mode="wait", hold_id="c", timeout_s=1.0, on_timeout="cancel"))
    h.run_rounds(2)
    h.now += 2
    h.run_rounds()
    assert record.fields(EventKind.HELD, "hold_id", "mode", "placed_by")[0] == ("a", "keep", "trainer")
    assert record.fields(EventKind.RELEASED, "hold_id", "why") == [("a", "resume"), ("b", "ttl"), ("c", "cancel")]


def test_an_update_tells_its_session_and_its_commit():
    h = Harness()
    record = Record(h)
    h.update("w1", version="one")
    session = [e for e in record.events if e.kind is EventKind.SESSION]
    assert len({e.name for e in session}) == 1
    assert [(e.fields["event"], e.fields["state"]) for e in session] == [
        ("begin", "open"),
        ("commit", "committing"),
        ("checked", "ready"),
        ("swap", "ended"),
    ]
    fields = ("version", "weight_epoch", "adapter_epoch", "kv")
    assert record.fields(EventKind.COMMITTED, *fields) == [("one", 1, 0, "keep")]


def test_a_session_that_fails_ends_without_a_commit():
    h = Harness()
    record = Record(h)
    h.update("refused-bad")
    assert record.fields(EventKind.SESSION, "event")[-1] == "end" and not record.fields(EventKind.COMMITTED, "kv")


def test_a_loaded_adapter_is_a_commit_of_its_scope():
    h = Harness()
    record = Record(h)
    h.load_adapter("alice", 1, version="v1")
    h.load_adapter("alice", 2, version="v2", replace=True, kv="recompute")
    commits = [e for e in record.events if e.kind is EventKind.COMMITTED]
    assert [e.name for e in commits] == ["adapter:alice"] * 2
    assert record.fields(EventKind.COMMITTED, "version", "adapter_epoch", "kv") == [
        ("v1", 1, "keep"),
        ("v2", 2, "recompute"),
    ]


def test_only_a_sink_that_wants_steps_gets_them_with_every_chunk_and_token():
    h = Harness(max_num_batched_tokens=4)
    steps, others = Record(h, wants_steps=True), Record(h)
    h.add("r", PROMPT * 3, max_tokens=3)
    h.run_out()
    rows = steps.fields(EventKind.STEP, "plan", "requests", "sampled")
    assert [[c.count for c in plan.chunks] for plan, _, _ in rows] == [[4], [4], [1], [1], [1]]
    assert all([r.name for r in requests] == ["r/0"] for _, requests, _ in rows)
    assert [token for _, _, sampled in rows for new in sampled for token in new.token_ids] == h.stream("r").tokens
    assert not others.fields(EventKind.STEP) and len(others.events) == len(steps.events) - len(rows)


def test_a_sink_that_was_detached_gets_no_more():
    h = Harness()
    record = Record(h, wants_steps=True)
    assert h.engine.events.watched and h.engine.events.watched_steps
    h.engine.events.detach(record)
    assert not h.engine.events.watched and not h.engine.events.watched_steps
    h.add("r", PROMPT)
    h.run_out()
    assert record.events == []
