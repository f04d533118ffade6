"""SGLang's routes on a live server with the embedded model: the calls that slime, AReaL and verl make in a step."""

from __future__ import annotations

import base64

import pytest

from e2e.server import LONG, PROMPT, halves, in_background, until


def generate(server, count: int, **more):
    sampling = {"max_new_tokens": count, "temperature": 0, "ignore_eos": True, **more.pop("sampling", {})}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True, **more}
    return server.post("/generate", body).ok()


def load(server, of: str = "num_total_reqs") -> int:
    return server.get("/v1/loads?include=core").ok()["loads"][0][of]


def running(server, count: int) -> None:
    until(lambda: load(server, "num_running_reqs") == count, 30, f"{count} running")


def test_a_generation_equals_the_native_one_and_its_logprobs_are_after_the_temperature(server):
    native = server.complete(PROMPT, max_tokens=12, ignore_eos=True, logprobs=0)
    mine = generate(server, 12)
    assert mine["output_ids"] == native["token_ids"] and mine["text"] == native["text"]
    triples = mine["meta_info"]["output_token_logprobs"]
    assert [t[0] for t in triples] == native["logprobs"]["token_logprobs"]
    hot = {"temperature": 2.0, "sampling_seed": 3}
    by_mode = {mode: generate(server, 12, sampling={**hot, "logprobs_mode": mode}) for mode in ("raw", "temperature")}
    default = generate(server, 12, sampling=hot)
    assert by_mode["raw"]["output_ids"] == by_mode["temperature"]["output_ids"] == default["output_ids"]
    logprobs = {mode: reply["meta_info"]["output_token_logprobs"] for mode, reply in by_mode.items()}
    assert default["meta_info"]["output_token_logprobs"] == logprobs["temperature"] != logprobs["raw"]


def test_an_abort_pause_ends_running_requests_holds_new_ones_and_the_load_falls_to_0(live):
    """slime pauses, flushes, updates and continues. AReaL submits requests again during the pause."""
    runs = [in_background(generate, live, 3000, rid=f"run-{i}") for i in range(2)]
    running(live, 2)
    assert live.post("/pause_generation", {}).ok()["status"] == "ok"
    for run in runs:
        body = run.result(60)
        meta = body["meta_info"]
        assert meta["finish_reason"]["type"] == "abort" and 0 < meta["completion_tokens"] < 3000
        assert [t[1] for t in meta["output_token_logprobs"]] == body["output_ids"]
    assert load(live) == 0
    held = in_background(generate, live, 4, rid="held")
    until(lambda: load(live) == 1, 30, "the request is held")
    assert live.get("/flush_cache").ok()["success"] and not held.done()
    assert live.post("/continue_generation", {}).ok()["status"] == "ok"
    assert held.result(60)["meta_info"]["completion_tokens"] == 4


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_frozen_request_continues_with_the_same_tokens_even_after_a_flush(live, alone, mode):
    run = in_background(generate, live, LONG, rid=f"frozen-{mode}")
    running(live, 1)
    live.post("/pause_generation", {"mode": mode}).ok()
    assert not run.done() and load(live) == 1
    assert live.get("/flush_cache").ok()["success"] is True
    made = live.metric("generation_tokens_total")
    live.post("/continue_generation").ok()
    until(lambda: live.metric("generation_tokens_total") > made + 300, 30, "more tokens")
    live.post("/abort_request", {"rid": f"frozen-{mode}"}).ok()
    ids = run.result(60)["output_ids"]
    assert len(ids) > 300 and ids[:2500] == alone[: len(ids)]


def test_a_request_is_aborted_by_the_clients_id(live):
    run = in_background(generate, live, 3000, rid="mine")
    running(live, 1)
    aborted = live.post("/abort_request", {"rid": "mine"}).ok()["aborted"]
    assert [a["request_id"] for a in aborted] == ["mine"]
    assert run.result(60)["meta_info"]["finish_reason"]["type"] == "abort"
    assert live.post("/abort_request", {"rid": "mine"}).ok()["not_found"] == ["mine"]


def test_an_update_from_a_folder_aborts_no_request_unless_asked_to(to_update, new_weights):
    server = to_update
    run = in_background(generate, server, 3000, rid="survivor")
    running(server, 1)
    body = {"model_path": str(new_weights), "weight_version": "7"}
    report = server.post("/update_weights_from_disk", body).ok()
    assert report["success"] is True and report["num_paused_requests"] == 0
    spans = run.result(60)["meta_info"]["weight_versions"]
    assert [span["version"] for span in spans] == [spans[0]["version"], "7"] and spans[-1]["end"] == 3000
    assert server.get("/get_weight_version").json["weight_version"] == "7"
    run = in_background(generate, server, 3000, rid="asked for it")
    running(server, 1)
    server.post("/update_weights_from_disk", {**body, "weight_version": "8", "abort_all_requests": True}).ok()
    meta = run.result(60)["meta_info"]
    assert meta["finish_reason"]["type"] == "abort" and [s["version"] for s in meta["weight_versions"]] == ["7"]
    assert generate(server, 2)["meta_info"]["weight_version"] == "8", "nothing stays paused"
    reply = server.post("/update_weights_from_disk", {"model_path": "/nowhere", "abort_all_requests": True})
    assert reply.status == 400 and reply.json["success"] is False and reply.json["num_paused_requests"] == 0
    assert generate(server, 2)["meta_info"]["weight_version"] == "8"


def test_tensors_arrive_in_buckets_and_are_one_commit(to_update, new_weights, on_new_weights):
    """Each call may reach another one of the two API servers, since the session belongs to the engine."""
    server, start = to_update, to_update.weights()["weight_epoch"]
    before = generate(server, 12)
    server.post("/begin_weight_update", {"selector": "all"}).ok()
    parts = [base64.b64encode(part).decode() for part in halves(new_weights)]
    for part in parts:
        body = {"serialized_named_tensors": [part], "load_format": "flattened_bucket", "weight_version": "2"}
        server.post("/update_weights_from_tensor", body).ok()
        assert generate(server, 12)["output_ids"] == before["output_ids"], "nothing changes before the end"
    server.post("/end_weight_update", {}).ok()
    after = generate(server, 12)
    assert after["meta_info"]["weight_versions"] == [{"version": "2", "weight_epoch": start + 1, "start": 0, "end": 12}]
    assert after["output_ids"] == on_new_weights["token_ids"][:12]
    body = {"serialized_named_tensors": parts, "weight_version": "3"}
    server.post("/update_weights_from_tensor", body).ok()
    assert generate(server, 12)["meta_info"]["weight_versions"][0]["weight_epoch"] == start + 2


def test_memory_is_released_and_resumed_in_steps(to_update, new_weights):
    """verl releases all memory, resumes the weights, updates them, and resumes the KV cache."""
    server = to_update
    before = generate(server, 12)["output_ids"]
    assert server.post("/release_memory_occupation", {"tags": ["kv_cache", "weights"]}).ok()["freed_bytes"] > 0
    assert server.post("/resume_memory_occupation", {"tags": ["kv_cache"]}).status == 409
    server.post("/resume_memory_occupation", {"tags": ["weights"]}).ok()
    server.post("/update_weights_from_disk", {"model_path": str(new_weights), "weight_version": "1"}).ok()
    server.post("/resume_memory_occupation", {"tags": ["kv_cache"]}).ok()
    after = generate(server, 12)
    assert after["meta_info"]["weight_version"] == "1" and after["output_ids"] != before
