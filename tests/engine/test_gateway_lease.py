"""A gateway leads the engine: nobody else changes its state, and one gateway follows the other in order."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine.fleet_calls import GATEWAY, lead, led, load_prepared
from engine.test_state_machine import explore
from engine.weight_calls import assert_serves
from fastdeploy.core.errors import NotLeader
from fastdeploy.core.served_weights import adapter_scope
from fastdeploy.core.weight_source import FolderSource
from fastdeploy.engine.gateway_lease import GatewayLease
from fastdeploy.inter_communicator import messages as m
from support.harness import PROMPT, Harness

W1 = FolderSource("/w1")
CHANGES = [
    m.PauseArgs("keep"),
    m.ResumeArgs(),
    m.RenewArgs("x"),
    m.UpdateWeightsArgs(W1),
    m.BeginUpdateArgs(),
    m.UpdatePartArgs(None, W1, placed_by="native"),
    m.CheckUpdateArgs(),
    m.CommitUpdateArgs("s"),
    m.AbortUpdateArgs(),
    m.LoadAdapterArgs("a", W1),
    m.LookUpAdapterArgs("a"),
    m.EndLoadArgs("a", commit=True),
    m.UnloadAdapterArgs("a"),
    m.SetVersionArgs("v"),
    m.ResetArgs(),
    m.ResetCacheArgs(),
    m.SleepArgs(),
    m.WakeArgs(),
    m.AbortArgs(abort_all=True),
    m.AbortArgs(lora_name="a"),
    m.AbortArgs(["r"], abort_all=True),
]
READS = [
    m.PauseStatusArgs(),
    m.WeightInfoArgs(),
    m.ModelInfoArgs(),
    m.MetricsArgs(),
    m.EventsArgs(),
    m.AdaptersArgs(),
    m.FleetStateArgs(),
    m.AbortArgs(["nobody"]),
]


def refusal(h: Harness, args: m.Args, client: str = "a") -> m.Failure:
    reply = h.ask(args, client)
    assert reply.failure is not None and reply.failure.code == "not_leader", reply
    return reply.failure


# ---------------------------------------------------------------------- which calls


def test_every_call_says_who_may_make_it_and_every_call_that_needs_the_leader_is_tried_here():
    calls = {call for call in m.Args.__subclasses__() if not call.gateways_only}  # engines take the others
    assert {call for call in calls if call.leader_only and not call.reads} == {type(args) for args in CHANGES}
    assert all(args.needs_leader() for args in CHANGES) and not any(args.needs_leader() for args in READS)


@pytest.mark.parametrize("args", CHANGES, ids=repr)
def test_a_call_that_changes_the_state_is_refused_unless_its_connection_leads(args):
    h = led()
    before = h.ask(m.FleetStateArgs()).result
    failure = refusal(h, args)
    assert failure.detail == {"fleet": "fleet-1", "controller": "gw-1", "term": 1, "lease_left_s": 10.0}
    assert "'gw-1'" in failure.message and "'fleet-1'" in failure.message
    assert h.ask(m.FleetStateArgs()).result == before
    for client, harness in ((GATEWAY, led()), ("a", Harness())):  # the leader, and an engine without a fleet
        call = harness.call(args, client)
        harness.run_rounds(4)
        reply = harness.reply(call, client)
        assert reply is not None and (reply.failure is None or reply.failure.code != "not_leader")


@pytest.mark.parametrize("args", READS, ids=repr)
def test_a_call_that_reads_is_free(args):
    assert led().ask(args).failure is None


@pytest.mark.parametrize(("client", "computed"), [("a", 1), (GATEWAY, 0)])
def test_a_pause_that_is_refused_does_not_stop_the_step_in_flight(client, computed):
    h = led()
    h.add("r", PROMPT, max_tokens=50)
    h.run_rounds(3)
    before = len(h.runner.plans)
    h.runner.in_step = lambda: h.call(m.PauseArgs("keep"), client)
    h.run_rounds()
    assert len(h.runner.plans) == before + computed


def test_requests_and_their_cancels_are_free():
    h = led()
    h.add("r", PROMPT, max_tokens=50)
    h.run_rounds(3)
    h.send(m.CancelRequest("r"))
    h.run_rounds()
    assert h.stream("r").tokens and not len(h.engine.lifecycle.requests)
    assert_serves(h, 0)


def test_an_upload_that_names_its_session_comes_from_any_connection():
    h = led()
    session = h.ask(m.BeginUpdateArgs(), GATEWAY).result["session_id"]
    assert h.ask(m.CheckUpdateArgs(session)).failure is None
    assert h.ask(m.UpdatePartArgs(session, W1), rounds=2).failure is None
    refusal(h, m.UpdatePartArgs(None, W1, placed_by="native"))
    refusal(h, m.CommitUpdateArgs(session))
    assert h.ask(m.CommitUpdateArgs(session), GATEWAY, rounds=2).failure is None
    assert_serves(h, 1)


def test_an_api_server_aborts_its_own_requests_by_their_ids_and_no_others():
    h = led()
    for client, name in (("a", "mine"), (GATEWAY, "theirs")):
        h.add(name, PROMPT, client, max_tokens=50)
    h.run_rounds(3)
    result = h.ask(m.AbortArgs(["mine", "theirs"])).result
    assert [entry["request_id"] for entry in result["aborted"]] == ["mine"] and result["not_found"] == ["theirs"]
    assert h.stream("mine").reason == "abort" and h.stream("theirs", client=GATEWAY).reason is None
    h.add("mine", PROMPT, max_tokens=50)
    h.run_rounds()
    aborted = h.ask(m.AbortArgs(["mine", "theirs"]), GATEWAY).result["aborted"]
    assert [entry["request_id"] for entry in aborted] == ["mine", "theirs"], "the leader aborts any request"


# ---------------------------------------------------------------------- terms and leases


def test_a_lease_that_runs_refuses_another_controller_and_is_renewed_by_its_own():
    h = led()
    h.now += 9.0
    assert lead(h).failure is None, "renewed"
    h.now += 9.0
    failure = lead(h, 2, "gw-2", "h").failure
    assert (failure.code, failure.detail["term"], failure.detail["lease_left_s"]) == ("not_leader", 1, 1.0)
    refusal(h, m.PauseArgs("keep"), "h")
    assert h.ask(m.PauseArgs("keep"), GATEWAY, rounds=9).failure is None


def test_after_the_lease_nobody_else_changes_the_state_until_another_controller_leads():
    h = led()
    h.now += 11.0
    refusal(h, m.PauseArgs("keep"))
    assert h.ask(m.SetVersionArgs("late"), GATEWAY).failure is None, "nobody has followed the leader"
    assert lead(h, 2, "gw-2", "h").failure is None
    assert refusal(h, m.PauseArgs("keep"), GATEWAY).detail["controller"] == "gw-2"
    assert lead(h).failure.detail["term"] == 2, "the old leader has come back with its old term"
    assert h.ask(m.PauseArgs("keep"), "h", rounds=9).failure is None
    assert lead(h, 3).failure.code == "not_leader", "the lease of its successor runs"
    h.now += 11.0
    assert lead(h, 3).failure is None and refusal(h, m.ResumeArgs(), "h").detail["term"] == 3


def test_a_hold_stands_under_the_next_leader_though_its_call_was_to_release_it_at_a_time_out():
    h = led()
    h.add("r", PROMPT, max_tokens=50)
    h.run_rounds(3)
    h.call(m.PauseArgs("wait", hold_id="x", timeout_s=20.0, on_timeout="cancel"), GATEWAY)
    h.run_rounds()
    h.now += 11.0
    assert [hold["id"] for hold in lead(h, 2, "gw-2", "h").result["holds"]] == ["x"]
    h.now += 9.0
    h.run_rounds(3)
    status = h.ask(m.PauseStatusArgs()).result
    assert status["is_paused"] and [hold["id"] for hold in status["holds"]] == ["x"]


def test_a_leader_whose_connection_has_ended_is_followed_at_once_by_a_higher_term():
    h = led()
    h.transport.gone.add(GATEWAY)
    h.now += 2.0  # a heartbeat finds that the connection has ended
    h.run_rounds(2)
    refusal(h, m.PauseArgs("keep"))
    assert "taken" in lead(h, 1, "gw-2", "h").failure.message, "a term belongs to one controller"
    assert lead(h, 2, "gw-2", "h").failure is None


def test_a_term_that_has_ended_is_not_taken_by_another_controller():
    h = led()
    h.now += 100.0
    assert lead(h, 1, "gw-2", "h").failure.code == "not_leader"


def test_a_controller_takes_its_leadership_along_to_a_new_connection():
    h = led()
    assert lead(h, client="new").failure is None
    refusal(h, m.ResumeArgs(), GATEWAY)
    assert h.ask(m.ResumeArgs(), "new").failure is None


def test_a_higher_term_of_the_same_controller_needs_no_wait():
    h = led()
    assert lead(h, 5).failure is None and lead(h, 4).failure.detail["term"] == 5


@pytest.mark.parametrize(
    ("args", "param"),
    [
        (m.LeadArgs("", "c", 1, 1.0), "fleet"),
        (m.LeadArgs("f" * 257, "c", 1, 1.0), "fleet"),
        (m.LeadArgs("f", "", 1, 1.0), "controller"),
        (m.LeadArgs("f", "\ud800", 1, 1.0), "controller"),
        (m.LeadArgs("f", "c", 0, 1.0), "term"),
        (m.LeadArgs("f", "c", 2**53, 1.0), "term"),
        (m.LeadArgs("f", "c", 1, 0.0), "lease_s"),
        (m.LeadArgs("f", "c", 1, float("nan")), "lease_s"),
    ],
)
def test_a_bad_field_is_named_and_nobody_leads(args, param):
    h = Harness()
    h.assert_refused(args, param)
    assert h.ask(m.FleetStateArgs()).result["term"] == 0 and h.ask(m.ResumeArgs()).failure is None


# ---------------------------------------------------------------------- the state of the fleet


def test_the_state_of_a_new_engine_belongs_to_no_fleet():
    state = Harness().ask(m.FleetStateArgs()).result
    assert (state["fleet"], state["controller"], state["term"]) == ("", "", 0)
    assert (state["boot_id"], state["version"], state["weight_epoch"]) == ("boot", "0", 0)
    assert state["holds"] == state["adapters"] == state["asleep"] == state["prepared_loads"] == []
    assert (state["phase"], state["is_paused"], state["rejecting_new_requests"]) == ("running", False, False)
    assert (state["running"], state["waiting"], state["session"]) == (0, 0, None)


def test_the_state_shows_holds_of_all_scopes_adapters_sessions_and_load():
    h = Harness(max_num_seqs=2)
    h.load_adapter("a", 1, version="one")
    for i in range(5):
        h.add(f"r{i}", PROMPT, max_tokens=50)
    h.run_rounds(3)
    h.pause(hold_id="p", scope=adapter_scope("a"), mode="keep", ttl_s=9.0)
    h.pause(hold_id="q", mode="keep")
    session = h.ask(m.BeginUpdateArgs()).result["session_id"]
    state = lead(h).result
    assert (state["fleet"], state["controller"], state["term"]) == ("fleet-1", "gw-1", 1)
    holds = {(hold["scope"], hold["id"], hold["named"], hold["ttl_left_s"]) for hold in state["holds"]}
    assert holds == {("adapter:a", "p", True, 9.0), ("engine", "q", True, None)}
    assert [(a["lora_name"], a["adapter_epoch"], a["version"]) for a in state["adapters"]] == [("a", 1, "one")]
    assert state["session"]["session_id"] == session and state["fingerprint"] == h.runner.fingerprint
    assert (state["running"], state["waiting"], state["max_num_seqs"]) == (2, 3, 2) and state["is_paused"]
    assert state["available_gpu_block_num"] == h.engine.kv.num_free < h.runner.info.num_blocks
    assert state == h.ask(m.FleetStateArgs()).result


def test_an_engine_takes_the_adapter_epochs_of_its_fleet_for_used():
    h = Harness()
    assert lead(h, client="a", past_adapter_epoch=6).result["past_adapter_epoch"] == 6
    assert lead(h, client="a", past_adapter_epoch=4).result["past_adapter_epoch"] == 6, "a number never comes back"
    h.assert_refused(m.LeadArgs("fleet-1", "gw-1", 1, 5.0, -1), "past_adapter_epoch")
    load_prepared(h, "a", 1)
    assert h.ask(m.EndLoadArgs("a", True, 2)).result["adapter_epoch"] == 2, "that of a fleet's adapter may be lower"
    assert h.load_adapter("a", 2).result["adapter_epoch"] == 3
    assert h.load_adapter("b", 3).result["adapter_epoch"] == 7


# ---------------------------------------------------------------------- every order


class LeadershipMachine(RuleBasedStateMachine):
    """Gateways that lead, die and come back. Every answer is compared with the rules of messages.LeadArgs."""

    def __init__(self):
        super().__init__()
        self.now, self.clients = 100.0, {"x", "y", "z"}
        self.gateway_lease = GatewayLease(lambda: self.now, self.clients)
        self.leader: tuple[str, str, int, float] | None = None  # client, controller, term, end of the lease

    @rule(
        client=st.sampled_from("xyz"),
        controller=st.sampled_from("ABC"),
        term=st.integers(1, 4),
        lease_s=st.integers(1, 9),
    )
    def lead(self, client, controller, term, lease_s):
        self.clients.add(client)
        allowed = self.leader is None
        if self.leader is not None:
            leads, holder, in_force, ends = self.leader
            free = leads not in self.clients or self.now >= ends
            allowed = term >= in_force if controller == holder else term > in_force and free
        try:
            self.gateway_lease.lead(m.LeadArgs("f", controller, term, float(lease_s)), client)
        except NotLeader:
            assert not allowed
        else:
            assert allowed
            self.leader = client, controller, term, self.now + lease_s

    @rule(client=st.sampled_from("xyz"))
    def a_client_dies(self, client):
        self.clients.discard(client)

    @rule(seconds=st.sampled_from([0.5, 3.0, 10.0]))
    def time_passes(self, seconds):
        self.now += seconds

    @invariant()
    def one_connection_changes_the_state(self):
        allowed = set()
        for client in "xyz":
            with contextlib.suppress(NotLeader):
                self.gateway_lease.check(m.PauseArgs(), client)
                allowed.add(client)
        assert allowed == (set("xyz") if self.leader is None else {self.leader[0]})


def test_in_every_order_of_gateways_one_connection_leads(caplog):
    explore(LeadershipMachine, caplog, examples=50, steps=20)
