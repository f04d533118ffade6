"""What an engine tells each client of the work of the others."""

from __future__ import annotations

from fastdeploy.engine.common_engine import TELL_S
from fastdeploy.inter_communicator import messages as m
from support.fake_runner import FakeRunner
from support.harness import Harness


def engine(**settings) -> Harness:
    h = Harness(FakeRunner(num_blocks=64, max_model_len=100), heartbeat_s=1.0, **settings)
    h.connect("b")
    return h


def beat(h: Harness, client: str) -> m.Load:
    """Return the load of the next heartbeat."""
    h.now += 1.0
    h.run_rounds()
    return h.sent(m.Heartbeat, client)[-1].load


def test_a_client_is_told_the_work_of_the_others_until_it_ends():
    h = engine(max_num_seqs=1)
    h.add("long", [1] * 4, max_tokens=30)
    h.run_rounds(2)
    h.add("a1", [2] * 10, n=2, expected_cached=7)
    h.add("b1", [3] * 20, client="b")
    h.run_rounds()
    assert beat(h, "b") == m.Load(choices=3, prompt_tokens=3, context=24)
    assert beat(h, "a") == m.Load(choices=1, prompt_tokens=20, context=20)
    h.send(m.CancelRequest("a1", choice=0))
    assert beat(h, "b").choices == 2, "the running request, and the other choice"
    h.send(m.CancelRequest("b1"), "b")
    assert beat(h, "a") == m.Load(), "its prompt need not be computed"
    h.run_out()
    assert beat(h, "a") == beat(h, "b") == m.Load()


def test_outputs_tell_the_load_too_and_a_begun_request_has_no_prompt_to_compute():
    h = engine()
    h.add("a1", [1] * 8, max_tokens=20)
    h.run_rounds(2)
    h.add("b1", [2] * 8, client="b", max_tokens=20)
    h.run_rounds(3)
    assert h.sent(m.Outputs, "b")[-1].load == m.Load(choices=1, context=8)


def test_the_requests_of_a_client_that_has_gone_count_as_work_of_others():
    h = engine()
    h.add("a1", [1] * 8, max_tokens=50, retain_s=60.0, fingerprint="f")
    h.run_rounds(2)
    h.transport.gone.add("a")
    h.run_rounds(2)
    assert beat(h, "b").choices == 1
    h.run_out()
    assert beat(h, "b") == m.Load()


def test_gateways_of_one_fleet_are_told_each_change_soon_and_others_are_not():
    h = engine()
    h.send(m.Hello(1, gateway="here"), "g")
    h.now += 1.0
    h.run_rounds()
    before = {client: len(h.sent(m.Heartbeat, client)) for client in "bg"}
    h.add("a1", [1] * 8, max_tokens=50)
    h.run_rounds(2)
    h.now += TELL_S
    h.run_rounds()
    assert [beat.load for beat in h.sent(m.Heartbeat, "g")[before["g"] :]] == [m.Load(1, 8, 8), m.Load(1, 0, 8)]
    assert len(h.sent(m.Heartbeat, "b")) == before["b"]
    h.run_out()
    assert h.engine._idle_time() <= TELL_S, "the last change is told by an engine that has nothing to do"
