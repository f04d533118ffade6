"""vLLM's routes on a live server with the embedded model: the calls that SkyRL, TRL and AReaL make in a step."""

from __future__ import annotations

import threading
import urllib.request
from collections.abc import Iterator

import pytest

from e2e.server import PROMPT, LiveStream, Reply, Server, until


@pytest.fixture
def live(server) -> Iterator[Server]:
    """The shared server, awake, running and idle again after each test."""
    yield server
    server.post("/wake_up")
    server.post("/abort_requests", {"request_ids": []})
    server.post("/resume")


def generate(server, count: int, **more) -> dict:
    sampling = {"max_tokens": count, "temperature": 0, "ignore_eos": True, "logprobs": 0, **more.pop("sampling", {})}
    reply = server.post("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": sampling, **more})
    assert reply.status == 200, reply.body
    return reply.json["choices"][0]


class InFlight(threading.Thread):
    """One generation in a thread; ``choice`` is set at its end."""

    def __init__(self, server, count: int, **more):
        super().__init__(daemon=True)
        self._server, self._count, self._more = server, count, more
        self.choice = None
        self.start()

    def run(self) -> None:
        self.choice = generate(self._server, self._count, **self._more)

    def wait(self) -> dict:
        self.join(60)
        assert self.choice is not None, "it has no answer"
        return self.choice


def ok(reply: Reply) -> dict:
    assert reply.status == 200, (reply.status, reply.body)
    return reply.json


def counts(server) -> dict:
    return ok(server.get("/is_paused"))["counts"]


def test_tokens_in_tokens_out_equals_a_completion(live):
    alone = live.complete(PROMPT, max_tokens=30, ignore_eos=True, logprobs=0)
    choice = generate(live, 30)
    assert choice["token_ids"] == alone["token_ids"]
    told = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert told == alone["logprobs"]["token_logprobs"]
    assert choice["finish_reason"] == "length"


def test_keep_freezes_streams_and_holds_new_requests(live, alone):
    """SkyRL and TRL need this: nothing is aborted or refused, and no token changes."""
    before = live.metric("generation_tokens_total")
    stream = LiveStream(live, PROMPT, max_tokens=1500).wait_for_tokens(5)
    ok(live.post("/pause?mode=keep&clear_cache=false"))
    assert ok(live.get("/is_paused"))["is_paused"] is True
    frozen = live.metric("generation_tokens_total") - before
    until(lambda: len(stream.tokens) == frozen, 30, "the reader to have read what was made")
    late = InFlight(live, 20)
    until(lambda: counts(live)["queued"] == 1, 30, "the late one to be held")
    assert live.metric("generation_tokens_total") - before == frozen == len(stream.tokens) and late.choice is None
    ok(live.post("/resume"))
    assert stream.wait_end().finals == ["length"]
    assert stream.tokens == alone[:1500]
    assert late.wait()["token_ids"] == alone[:20]


def test_the_cache_can_be_reset_while_frozen_and_nothing_changes(live, alone):
    stream = LiveStream(live, PROMPT, max_tokens=1200).wait_for_tokens(5)
    ok(live.post("/pause?mode=keep&clear_cache=false"))
    reset = ok(live.post("/reset_prefix_cache", {"reset_running_requests": True}))
    assert (reset["success"], reset["requests_to_recompute"]) == (True, 1)
    ok(live.post("/resume"))
    assert stream.wait_end().tokens == alone[:1200]


def test_an_aborted_generation_is_a_complete_reply(live):
    """The abort names the client's id; an unknown id is reported as not found."""
    flight = InFlight(live, 3000, request_id="mine")
    until(lambda: counts(live)["running"] == 1, 30, "it to run")
    result = ok(live.post("/abort_requests", {"request_ids": ["mine", "other"]}))
    assert (result["aborted"], result["not_found"]) == (1, ["other"])
    choice = flight.wait()
    assert choice["finish_reason"] == "abort"
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"]) < 3000


def test_a_new_label_aborts_nothing(live):
    before = ok(live.get("/weight_info"))
    stream = LiveStream(live, PROMPT, max_tokens=1500).wait_for_tokens(5)
    ok(live.post("/update_weight_version", {"new_version": "relabelled", "abort_all_requests": True}))
    assert stream.wait_end().finals == ["length"] and len(stream.tokens) == 1500
    assert {span["version"] for span in stream.spans} == {before["weight_version"], "relabelled"}
    after = ok(live.get("/weight_info"))
    assert (after["weight_version"], after["weight_epoch"]) == ("relabelled", before["weight_epoch"])
    ok(live.post("/update_weight_version", {"new_version": before["weight_version"]}))


def test_sleep_and_wake_by_tag_leave_the_weights_as_they_were(live):
    alone = generate(live, 20)["token_ids"]
    for _ in range(2):  # again is no error
        assert ok(live.post("/sleep?level=1&mode=keep"))["asleep"] == ["kv_cache", "weight"]
    assert ok(live.get("/is_sleeping"))["is_sleeping"] is True
    late = InFlight(live, 20)
    assert live.post("/wake_up?tags=kv_cache").status == 409  # after the weights
    assert ok(live.post("/wake_up?tags=weights"))["asleep"] == ["kv_cache"]
    for _ in range(2):
        assert ok(live.post("/wake_up"))["asleep"] == []
    assert late.wait()["token_ids"] == alone


def test_skyrls_colocated_step_discards_the_weights_and_publishes_new_ones(to_update, new_weights):
    server, start = to_update, to_update.weights()["weight_epoch"]
    old = generate(server, 20)["token_ids"]
    before = ok(server.post("/weight_checker", {"action": "checksum"}))["checksums"]
    ok(server.post("/sleep?level=2"))
    ok(server.post("/wake_up?tags=weights"))
    ok(
        server.post(
            "/collective_rpc", {"method": "skyrl_start_weight_update", "kwargs": {"is_checkpoint_format": True}}
        )
    )
    update = {"update_info": {"model_path": str(new_weights)}}
    ok(server.post("/collective_rpc", {"method": "update_weights_disk", "kwargs": update}))
    ok(server.post("/collective_rpc", {"method": "skyrl_finish_weight_update"}))
    ok(server.post("/wake_up?tags=kv_cache"))
    ok(server.post("/resume"))
    new = generate(server, 20)
    assert new["token_ids"] != old and new["weight_versions"][0]["weight_epoch"] > start
    compared = ok(server.post("/weight_checker", {"action": "compare", "baseline": before}))
    assert compared["match"] is False


def test_trls_update_cycle_freezes_requests_replaces_weights_and_resumes(to_update, new_weights):
    """Pause with cleared caches, upload in one chunk, resume: later tokens come from the new weights."""
    server = to_update
    stream = LiveStream(server, PROMPT, max_tokens=2000).wait_for_tokens(5)
    ok(server.post("/pause?mode=keep"))
    frozen = len(stream.tokens)
    ok(server.post("/start_weight_update", {"is_checkpoint_format": True}))
    assert server.post("/start_weight_update").status == 409  # another trainer
    ok(upload(server, (new_weights / "model.safetensors").read_bytes()))
    assert ok(server.post("/finish_weight_update", {"weight_version": 7}))["weight_version"] == "7"
    assert ok(server.get("/is_paused"))["is_paused"] is True and len(stream.tokens) == frozen
    ok(server.post("/resume"))
    assert stream.wait_end().finals == ["length"] and len(stream.tokens) == 2000
    switch = next(span["start"] for span in stream.spans if span["version"] == "7")
    assert switch == frozen
    assert all(span["version"] == "7" for span in stream.spans if span["start"] >= switch)
    assert server.post("/finish_weight_update").status == 409


def test_a_half_sent_update_leaves_the_old_weights(live, new_weights):
    """TRL finishes an update also if its sending failed."""
    before = ok(live.post("/weight_checker", {"action": "checksum"}))["checksums"]
    ok(live.post("/start_weight_update"))
    assert live.post("/finish_weight_update").status == 400
    same = ok(live.post("/weight_checker", {"action": "compare", "baseline": before}))
    assert same["match"] is True
    assert ok(live.get("/weight_info"))["session"] is None


def test_areals_step_aborts_updates_and_continues(to_update, new_weights):
    server, start = to_update, to_update.weights()["weight_epoch"]
    flight = InFlight(server, 3000)
    until(lambda: counts(server)["running"] == 1, 30, "it to run")
    assert ok(server.post("/areal_pause_generation", {}))["success"] is True
    assert flight.wait()["finish_reason"] == "abort"
    assert ok(server.post("/areal_update_weights", {"model_path": str(new_weights)}))["success"] is True
    assert ok(server.get("/is_paused"))["is_paused"] is True
    assert ok(server.post("/areal_continue_generation", {}))["success"] is True
    assert generate(server, 5)["weight_versions"][0]["weight_epoch"] > start


def upload(server, data: bytes) -> Reply:
    request = urllib.request.Request(
        server.url + "/update_weights", data=data, headers={"Content-Type": "application/octet-stream"}
    )
    with urllib.request.urlopen(request, timeout=60) as r:
        return Reply(r.status, dict(r.headers), r.read())
