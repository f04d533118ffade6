"""Viewers of /ui: events are kept while somebody asks for them, in bounded memory, and without any text."""

from __future__ import annotations

import msgspec

from fastdeploy.core.events import EventKind
from fastdeploy.engine.views.viewers import IDLE_S, MAX_EVENTS, MAX_REQUESTS
from fastdeploy.inter_communicator import messages as m
from support.harness import Harness, one_running


def look(h: Harness, after: int = 0, requests: bool = False) -> dict:
    reply = h.ask(m.EventsArgs(after, requests))
    assert reply.failure is None
    return reply.result


def add_events(h: Harness, count: int) -> None:
    for i in range(count):
        h.engine.events.add(EventKind.FROZEN, f"r/{i}")


def test_nothing_is_attached_before_the_first_call():
    h = one_running()
    h.pause(mode="keep")
    assert not h.engine.events.watched
    assert h.engine.viewers.next_deadline() is None, "the loop wakes up for no viewer"


def test_the_log_is_watched_until_nobody_has_asked_for_some_seconds():
    h = Harness()
    look(h)
    assert h.engine.events.watched and not h.engine.events.watched_steps
    for _ in range(3):
        h.now += IDLE_S - 0.5
        look(h)
        assert h.engine.events.watched
    assert h.engine.viewers.next_deadline() == h.now + IDLE_S, "the loop wakes up by itself"
    h.now += IDLE_S
    h.run_rounds()
    assert not h.engine.events.watched and h.engine.viewers.next_deadline() is None
    look(h)
    assert h.engine.events.watched


def test_a_call_gets_the_events_after_the_last_one():
    h = Harness()
    first = look(h)["next"]
    add_events(h, 3)
    reply = look(h, first)
    names = [event.name for event in reply["events"] if event.name.startswith("r/")]
    assert names == ["r/0", "r/1", "r/2"] and reply["lost"] == 0
    assert look(h, reply["next"])["events"] == []
    assert look(h, reply["next"] + 1000)["events"] == [], "of an engine that counts from 0 again"


def test_a_viewer_that_asks_too_late_is_told_how_much_is_lost_and_gets_all_requests():
    h = one_running()
    first = look(h)["next"]
    add_events(h, 10_000)
    assert len(h.engine.viewers._ring) == MAX_EVENTS
    reply = look(h, first)
    assert len(reply["events"]) == MAX_EVENTS and reply["lost"] >= 10_000 - MAX_EVENTS
    assert [request["name"] for request in reply["requests"]] == ["r/0"]


def test_events_that_nobody_fetched_are_dropped_with_the_last_viewer():
    h = Harness()
    first = look(h)["next"]
    add_events(h, 5)
    h.now += IDLE_S
    h.run_rounds()
    assert len(h.engine.viewers._ring) == 0
    reply = look(h, first)
    assert reply["events"] == [] and reply["lost"] >= 5, "a viewer that comes back knows that it missed them"


def test_the_state_shows_holds_counts_kv_session_and_adapters():
    h = one_running(max_tokens=30)
    h.add("other", [9, 9, 9], max_tokens=30)
    h.load_adapter("math", 1)
    h.pause(mode="keep", hold_id="trainer", ttl_s=60.0)
    h.ask(m.BeginUpdateArgs(version="v7", lease_s=30.0))
    state = look(h)["state"]
    assert (state["phase"], state["is_paused"], state["rejecting_new_requests"]) == ("paused", True, True)
    assert [(hold["id"], hold["ttl_left_s"]) for hold in state["holds"]] == [("trainer", 60.0)]
    assert state["counts"]["running"] == 0 and state["counts"]["frozen"] + state["counts"]["waiting"] == 2
    assert 0 < state["kv"]["used"] <= state["kv"]["total"]
    assert (state["session"]["state"], state["session"]["version"]) == ("open", "v7")
    assert [adapter["lora_name"] for adapter in state["adapters"]] == ["math"]
    assert state["tokens"] == h.metric("generation_tokens_total") > 0
    assert (state["boot_id"], state["asleep"]) == ("boot", [])


def test_the_requests_are_those_in_the_engine_and_not_too_many():
    h = one_running(max_tokens=30, max_num_seqs=1)
    for i in range(MAX_REQUESTS + 5):
        h.add(f"w{i}", [i, 7], max_tokens=2)
    h.pause(mode="keep")
    reply = look(h, requests=True)
    states = [request["state"] for request in reply["requests"]]
    assert states == ["frozen"] + ["waiting"] * (MAX_REQUESTS - 1)
    assert reply["requests"][0]["output_tokens"] == reply["state"]["progress"]["r/0"] > 0
    assert "requests" not in look(h)


def test_no_token_of_a_prompt_or_of_an_output_is_in_a_reply():
    h = Harness()
    look(h)
    prompt = [77123, 77124, 77125]
    h.add("r", prompt, max_tokens=4)
    h.run_rounds(2)
    reply = look(h, requests=True)
    tokens = {*prompt, *h.stream("r").tokens}
    assert tokens.isdisjoint(numbers(msgspec.to_builtins(reply["events"]))), reply["events"]
    assert {77123, 77124, 77125}.isdisjoint(numbers(msgspec.to_builtins(reply)))
    h.run_out()
    assert {77123, 77124, 77125}.isdisjoint(numbers(msgspec.to_builtins(look(h))))


def numbers(value: object) -> set[int]:
    """Return all integers above 1000 in a value."""
    if isinstance(value, dict):
        return numbers([*value, *value.values()])
    if isinstance(value, list):
        return set().union(*map(numbers, value))
    return {value} if isinstance(value, int) and value > 1000 else set()
