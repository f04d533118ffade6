"""vLLM's routes on a live server with the embedded model: the calls that SkyRL, TRL and AReaL make in a step."""

from __future__ import annotations

from e2e.server import LONG, PROMPT, LiveStream, in_background, until


def generate(server, count: int, **more) -> dict:
    sampling = {"max_tokens": count, "temperature": 0, "ignore_eos": True, "logprobs": 0, **more.pop("sampling", {})}
    body = {"token_ids": PROMPT, "sampling_params": sampling, **more}
    return server.post("/inference/v1/generate", body).ok()["choices"][0]


def counts(server) -> dict:
    return server.get("/is_paused").ok()["counts"]


def test_generation_from_token_ids_equals_a_completion(live):
    alone = live.complete(PROMPT, max_tokens=30, ignore_eos=True, logprobs=0)
    choice = generate(live, 30)
    assert choice["token_ids"] == alone["token_ids"]
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert logprobs == alone["logprobs"]["token_logprobs"]
    assert choice["finish_reason"] == "length"


def test_keep_freezes_streams_and_holds_new_requests(live, alone):
    """SkyRL and TRL rely on this behaviour: nothing is aborted or refused, and no token changes."""
    before = live.metric("generation_tokens_total")
    stream = LiveStream(live, PROMPT, max_tokens=LONG).wait_for_tokens(5)
    live.post("/pause?mode=keep&clear_cache=false").ok()
    assert live.get("/is_paused").ok()["is_paused"] is True
    frozen = live.metric("generation_tokens_total") - before
    until(lambda: len(stream.tokens) == frozen, 30, "the reader has all tokens")
    late = in_background(generate, live, 20)
    until(lambda: counts(live)["queued"] == 1, 30, "the late request is held")
    assert live.metric("generation_tokens_total") - before == frozen == len(stream.tokens) and not late.done()
    live.post("/resume").ok()
    assert late.result(60)["token_ids"] == alone[:20]
    tokens = stream.wait_for_tokens(frozen + 500).abort().tokens
    assert tokens[:2500] == alone[: len(tokens)]


def test_the_cache_can_be_reset_while_frozen_and_nothing_changes(live, alone):
    stream = LiveStream(live, PROMPT, max_tokens=LONG).wait_for_tokens(5)
    live.post("/pause?mode=keep&clear_cache=false").ok()
    reset = live.post("/reset_prefix_cache", {"reset_running_requests": True}).ok()
    assert (reset["success"], reset["requests_to_recompute"]) == (True, 1)
    frozen = len(stream.tokens)
    live.post("/resume").ok()
    tokens = stream.wait_for_tokens(frozen + 500).abort().tokens
    assert tokens[:2500] == alone[: len(tokens)]


def test_an_aborted_generation_is_a_complete_reply(live):
    """The abort names the client's id; an unknown id is reported as not found."""
    flight = in_background(generate, live, 3000, request_id="mine")
    until(lambda: counts(live)["running"] == 1, 30, "the request runs")
    result = live.post("/abort_requests", {"request_ids": ["mine", "other"]}).ok()
    assert (result["aborted"], result["not_found"]) == (1, ["other"])
    choice = flight.result(60)
    assert choice["finish_reason"] == "abort"
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"]) < 3000


def test_a_new_label_aborts_nothing(live):
    before = live.get("/weight_info").ok()
    stream = LiveStream(live, PROMPT, max_tokens=LONG).wait_for_tokens(5)
    live.post("/update_weight_version", {"new_version": "relabelled", "abort_all_requests": True}).ok()
    until(lambda: any(s["version"] == "relabelled" for s in stream.spans), 30, "tokens with the new label")
    stream.abort()
    assert {span["version"] for span in stream.spans} == {before["weight_version"], "relabelled"}
    after = live.get("/weight_info").ok()
    assert (after["weight_version"], after["weight_epoch"]) == ("relabelled", before["weight_epoch"])
    live.post("/update_weight_version", {"new_version": before["weight_version"]}).ok()


def test_sleep_and_wake_by_tag_leave_the_weights_as_they_were(live):
    alone = generate(live, 20)["token_ids"]
    for _ in range(2):  # a repeated call is no error
        assert live.post("/sleep?level=1&mode=keep").ok()["asleep"] == ["kv_cache", "weight"]
    assert live.get("/is_sleeping").ok()["is_sleeping"] is True
    late = in_background(generate, live, 20)
    assert live.post("/wake_up?tags=kv_cache").status == 409  # after the weights
    assert live.post("/wake_up?tags=weights").ok()["asleep"] == ["kv_cache"]
    for _ in range(2):
        assert live.post("/wake_up").ok()["asleep"] == []
    assert late.result(60)["token_ids"] == alone


def test_skyrls_colocated_step_discards_the_weights_and_publishes_new_ones(to_update, new_weights):
    server, start = to_update, to_update.weights()["weight_epoch"]
    old = generate(server, 20)["token_ids"]
    before = server.post("/weight_checker", {"action": "checksum"}).ok()["checksums"]
    server.post("/sleep?level=2").ok()
    server.post("/wake_up?tags=weights").ok()
    for method, kwargs in (
        ("skyrl_start_weight_update", {"is_checkpoint_format": True}),
        ("update_weights_disk", {"update_info": {"model_path": str(new_weights)}}),
        ("skyrl_finish_weight_update", {}),
    ):
        server.post("/collective_rpc", {"method": method, "kwargs": kwargs}).ok()
    server.post("/wake_up?tags=kv_cache").ok()
    server.post("/resume").ok()
    new = generate(server, 20)
    assert new["token_ids"] != old and new["weight_versions"][0]["weight_epoch"] > start
    assert server.post("/weight_checker", {"action": "compare", "baseline": before}).ok()["match"] is False


def test_trls_update_freezes_requests_replaces_weights_and_resumes(to_update, new_weights):
    """Pause with cleared caches, upload in one chunk, resume: later tokens come from the new weights."""
    server = to_update
    before = server.metric("generation_tokens_total")
    stream = LiveStream(server, PROMPT, max_tokens=LONG).wait_for_tokens(5)
    server.post("/pause?mode=keep").ok()
    made = server.metric("generation_tokens_total")
    server.post("/start_weight_update", {"is_checkpoint_format": True}).ok()
    assert server.post("/start_weight_update").status == 409  # another trainer
    server.post("/update_weights", (new_weights / "model.safetensors").read_bytes()).ok()
    assert server.post("/finish_weight_update", {"weight_version": 7}).ok()["weight_version"] == "7"
    assert server.get("/is_paused").ok()["is_paused"] is True
    assert server.metric("generation_tokens_total") == made
    frozen = int(made - before)
    until(lambda: len(stream.tokens) == frozen, 30, "the reader has all tokens")
    server.post("/resume").ok()
    stream.wait_for_tokens(frozen + 100).abort()
    switch = next(span["start"] for span in stream.spans if span["version"] == "7")
    assert switch == frozen
    assert all(span["version"] == "7" for span in stream.spans if span["start"] >= switch)
    assert server.post("/finish_weight_update").status == 409


def test_a_half_sent_update_leaves_the_old_weights(live, new_weights):
    """TRL finishes an update even if sending it failed."""
    before = live.post("/weight_checker", {"action": "checksum"}).ok()["checksums"]
    live.post("/start_weight_update").ok()
    assert live.post("/finish_weight_update").status == 400
    assert live.post("/weight_checker", {"action": "compare", "baseline": before}).ok()["match"] is True
    assert live.get("/weight_info").ok()["session"] is None


def test_areals_step_aborts_updates_and_continues(to_update, new_weights):
    server, start = to_update, to_update.weights()["weight_epoch"]
    flight = in_background(generate, server, 3000)
    until(lambda: counts(server)["running"] == 1, 30, "the request runs")
    assert server.post("/areal_pause_generation", {}).ok()["success"] is True
    assert flight.result(60)["finish_reason"] == "abort"
    assert server.post("/areal_update_weights", {"model_path": str(new_weights)}).ok()["success"] is True
    assert server.get("/is_paused").ok()["is_paused"] is True
    assert server.post("/areal_continue_generation", {}).ok()["success"] is True
    assert generate(server, 5)["weight_versions"][0]["weight_epoch"] > start
