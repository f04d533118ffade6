"""The reply of a pause waits until every client has received all outputs, or is dropped."""

from __future__ import annotations

import pytest

from engine.fleet_calls import lead
from engine.pause_calls import LONG, busy, call_pause
from fastdeploy.core.process import host_id
from fastdeploy.engine.pauses import pause as p
from fastdeploy.inter_communicator import messages as m
from support.fake_runner import expected_tokens
from support.harness import Harness

# --------------------------------------------------------------------------- the fence


def test_the_reply_waits_until_every_client_has_acknowledged_every_output():
    h = busy()
    h.connect("b")
    h.transport.mute.add("b")
    call = call_pause(h, mode="keep")
    h.run_rounds(5)
    assert h.reply(call) is None and h.status()["phase"] == "draining"
    h.send(m.FenceAck(h.sent(m.Fence, "b")[-1].fence_id - 1), "b")
    h.run_rounds()
    assert h.reply(call) is None, "the acknowledgement of an earlier fence does not count"
    h.acknowledge("b")
    assert h.reply(call).failure is None


def test_the_fence_is_sent_after_the_last_output():
    h = busy()
    call_pause(h, mode="abort")
    sent = h.transport.sent["a"]
    last = max(i for i, x in enumerate(sent) if isinstance(x, m.Outputs))
    assert [i for i, x in enumerate(sent) if isinstance(x, m.Fence)][-1] > last


def test_a_client_that_never_acknowledges_is_dropped_after_a_time():
    h = busy()
    h.connect("b")
    h.add("of_b", [7], client="b", max_tokens=LONG)
    h.transport.mute.add("b")
    call = call_pause(h, mode="keep")
    h.now += p.FENCE_TIMEOUT_S - 0.1
    h.run_rounds()
    assert h.reply(call) is None
    h.now += 0.2
    h.run_rounds()
    assert h.reply(call).failure is None
    assert isinstance(h.transport.sent["b"][-1], m.Goodbye) and not h.engine.lifecycle.requests.get("of_b")
    h.add("again", [7], client="b")
    h.run_rounds()
    assert isinstance(h.transport.sent["b"][-1], m.Goodbye), "the client must say Hello again"


def test_repeated_pauses_give_a_mute_client_no_more_time():
    h = busy()
    h.connect("b")
    h.transport.mute.add("b")
    calls = []
    for _ in range(4):
        calls.append(call_pause(h, mode="keep"))
        h.now += 2.0
    h.run_rounds()
    assert all(h.reply(call).failure is None for call in calls)


def test_dropping_a_mute_client_drops_no_client_that_answers():
    """An output sent behind the fence needs another fence, which has a timeout of its own."""
    h = busy()
    h.connect("b")
    h.transport.mute.add("b")
    call = call_pause(h, mode="keep")
    h.now += p.FENCE_TIMEOUT_S - 0.1
    h.ask(m.AbortArgs(["r0"]))
    h.now += 0.2
    h.transport.mute.add("a")  # the acknowledgement of the next fence is still on its way
    h.run_rounds(2)
    assert "a" in h.engine.delivery.clients and h.reply(call) is None
    h.acknowledge()
    assert h.reply(call).failure is None and h.status()["is_paused"]


# --------------------------------------------------------------------------- slow clients


@pytest.fixture
def slow() -> Harness:
    """Return a busy harness whose client "b", in the running process 22, acknowledges no fence."""
    h = busy()
    h.connect("b", pid=22)
    h.add("of_b", [7], client="b", max_tokens=LONG)
    h.transport.mute.add("b")
    h.running_pids.add(22)
    return h


def test_a_slow_client_keeps_its_requests_and_the_report_names_it(slow):
    call = call_pause(slow, mode="keep", timeout_s=60.0)
    for _ in range(8):
        slow.now += p.FENCE_TIMEOUT_S
        slow.run_rounds()
        assert slow.reply(call) is None and "b" in slow.engine.delivery.clients
    slow.acknowledge("b")
    report = slow.reply(call).result
    assert report["is_paused"] and report["slow_api_servers"] == [22] and report["dropped_api_servers"] == []
    slow.resume()
    slow.transport.mute.clear()
    slow.run_out()
    assert slow.stream("of_b", client="b").tokens == expected_tokens([7], LONG)


@pytest.mark.parametrize("mode", ["keep", "abort"])
def test_a_slow_client_does_not_hold_a_pause_beyond_its_timeout(slow, mode):
    call = call_pause(slow, mode=mode, timeout_s=12.0)
    slow.now += 11.9
    slow.run_rounds()
    assert slow.reply(call) is None
    slow.now += 0.2
    slow.run_rounds(2)
    report = slow.reply(call).result
    assert report["is_paused"] and report["slow_api_servers"] == report["dropped_api_servers"] == [22]
    assert isinstance(slow.transport.sent["b"][-1], m.Goodbye)


def test_a_later_pause_with_a_longer_timeout_does_not_delay_an_earlier_one(slow):
    first = call_pause(slow, mode="keep", timeout_s=12.0)
    call_pause(slow, mode="keep", timeout_s=600.0)
    slow.now += 12.1
    slow.run_rounds(2)
    assert slow.reply(first).result["dropped_api_servers"] == [22]


def test_a_slow_client_has_the_timeout_of_a_fence_even_if_that_of_the_pause_is_shorter(slow):
    call = call_pause(slow, mode="keep", timeout_s=0.5)
    slow.now += p.FENCE_TIMEOUT_S - 0.1
    slow.run_rounds()
    assert slow.reply(call) is None and "b" in slow.engine.delivery.clients
    slow.now += 0.2
    slow.run_rounds(2)
    assert slow.reply(call).result["dropped_api_servers"] == [22]


def test_a_pause_stops_waiting_for_a_slow_client_that_dies(slow):
    call = call_pause(slow, mode="keep", timeout_s=600.0)
    slow.now += p.FENCE_TIMEOUT_S
    slow.run_rounds()
    slow.running_pids.clear()
    slow.now += p.FENCE_TIMEOUT_S
    slow.run_rounds(2)
    assert slow.reply(call).result["dropped_api_servers"] == [22]


def test_the_process_of_a_client_on_another_machine_is_not_looked_up():
    h = busy()
    h.send(m.Hello(22, host="another machine"), "b")
    h.run_rounds()
    h.transport.mute.add("b")
    h.running_pids.add(22)  # another process, which runs here under the same number
    call = call_pause(h, mode="keep", timeout_s=600.0)
    h.now += p.FENCE_TIMEOUT_S
    h.run_rounds(2)
    report = h.reply(call).result
    assert report["is_paused"] and report["dropped_api_servers"] == [22] and report["slow_api_servers"] == []


def test_a_client_that_names_this_machine_is_looked_up(slow):
    slow.send(m.Hello(22, host=host_id()), "b")
    call = call_pause(slow, mode="keep", timeout_s=600.0)
    slow.now += p.FENCE_TIMEOUT_S
    slow.run_rounds(2)
    assert slow.reply(call) is None and "b" in slow.engine.delivery.clients


# --------------------------------------------------------------------------- gateways


def test_the_patience_with_gateways_that_follow_is_not_that_with_the_one_that_leads():
    """Both processes are stopped. The one that leads may be for a moment, and has the members of the fleet."""
    h = busy()
    for gateway, pid in (("leads", 21), ("follows", 22)):
        h.send(m.Hello(pid, host=host_id(), gateway=gateway), gateway)
        h.run_rounds()
    assert lead(h, client="leads", gateway="leads", patience_s=0.1).failure is None
    h.transport.mute |= {"leads", "follows"}
    call = h.call(m.PauseArgs("keep"), "leads")
    h.run_rounds()
    h.now += 0.2
    h.run_rounds()
    assert "follows" not in h.engine.delivery.clients and "leads" in h.engine.delivery.clients
    h.acknowledge("leads")
    assert h.reply(call, "leads").result["dropped_api_servers"] == [22]
    h.call(m.PauseArgs("keep"), "leads")
    h.run_rounds()
    h.now += p.FENCE_TIMEOUT_S + 0.1
    h.run_rounds(2)
    assert "leads" not in h.engine.delivery.clients


def test_a_gateway_that_leads_has_no_more_time_after_one_that_follows_was_dropped():
    h = busy()
    for gateway, pid in (("leads", 21), ("follows", 22)):
        h.send(m.Hello(pid, host=host_id(), gateway=gateway), gateway)
        h.run_rounds()
    patience_s = p.FENCE_TIMEOUT_S / 2
    assert lead(h, client="leads", gateway="leads", patience_s=patience_s).failure is None
    h.transport.mute |= {"leads", "follows"}
    h.call(m.PauseArgs("keep"), "leads")
    h.run_rounds()
    h.now += patience_s + 0.1
    h.run_rounds()
    assert "follows" not in h.engine.delivery.clients and "leads" in h.engine.delivery.clients
    h.now += patience_s
    h.run_rounds(2)
    assert "leads" not in h.engine.delivery.clients
