"""SGLang's routes on a live server with the embedded model: the calls that slime, AReaL and verl make in a step."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.server import PROMPT, Server, until


@pytest.fixture
def resumed(server) -> Iterator[Server]:
    """The shared server, resumed again after each test."""
    yield server
    server.post("/abort_request", {"abort_all": True})
    server.post("/continue_generation")


def generate(server, count: int, **more):
    sampling = {"max_new_tokens": count, "temperature": 0, "ignore_eos": True, **more.pop("sampling", {})}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True, **more}
    reply = server.post("/generate", body)
    assert reply.status == 200, reply.body
    return reply.json


class InFlight(threading.Thread):
    """One /generate call in a thread; ``reply`` is set at its end."""

    def __init__(self, server, count: int, rid: str):
        super().__init__(daemon=True)
        self._server, self._count, self._rid = server, count, rid
        self.reply = None
        self.start()

    def run(self) -> None:
        self.reply = generate(self._server, self._count, rid=self._rid)

    def wait(self):
        self.join(60)
        assert self.reply is not None, f"{self._rid} has no answer"
        return self.reply


def load(server) -> int:
    return server.get("/v1/loads?include=core").json["loads"][0]["num_total_reqs"]


def running(server, count: int) -> None:
    until(lambda: server.get("/v1/loads").json["loads"][0]["num_running_reqs"] == count, 30, f"{count} running")


def ok(reply):
    assert reply.status == 200 and "content-length" in reply.headers, (reply.status, reply.body)
    return reply.json


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
    told = {mode: reply["meta_info"]["output_token_logprobs"] for mode, reply in by_mode.items()}
    assert default["meta_info"]["output_token_logprobs"] == told["temperature"] != told["raw"]


def test_an_abort_pause_ends_running_requests_holds_new_ones_and_the_load_falls_to_0(resumed):
    """slime: pause, flush, update, continue. AReaL: submits again during the pause."""
    server = resumed
    runs = [InFlight(server, 3000, f"run-{i}") for i in range(2)]
    running(server, 2)
    assert ok(server.post("/pause_generation", {}))["status"] == "ok"
    for run in runs:
        body = run.wait()
        meta = body["meta_info"]
        assert meta["finish_reason"]["type"] == "abort" and 0 < meta["completion_tokens"] < 3000
        assert [t[1] for t in meta["output_token_logprobs"]] == body["output_ids"]
    assert load(server) == 0
    held = InFlight(server, 4, "held")
    until(lambda: load(server) == 1, 30, "the request is held")
    assert ok(server.get("/flush_cache"))["success"] and held.reply is None
    assert ok(server.post("/continue_generation", {}))["status"] == "ok"
    assert held.wait()["meta_info"]["completion_tokens"] == 4


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_frozen_request_continues_with_the_same_tokens_even_after_a_flush(resumed, alone, mode):
    server = resumed
    run = InFlight(server, 1200, f"frozen-{mode}")
    running(server, 1)
    ok(server.post("/pause_generation", {"mode": mode}))
    assert run.reply is None and load(server) == 1
    assert ok(server.get("/flush_cache"))["success"] is True
    ok(server.post("/continue_generation"))
    assert run.wait()["output_ids"] == alone[:1200]


def test_a_request_is_aborted_by_the_clients_id(resumed):
    server = resumed
    run = InFlight(server, 3000, "mine")
    running(server, 1)
    aborted = ok(server.post("/abort_request", {"rid": "mine"}))["aborted"]
    assert [a["request_id"] for a in aborted] == ["mine"]
    assert run.wait()["meta_info"]["finish_reason"]["type"] == "abort"
    assert ok(server.post("/abort_request", {"rid": "mine"}))["not_found"] == ["mine"]


def test_an_update_from_a_folder_aborts_no_request_unless_asked_to(to_update, new_weights):
    server = to_update
    run = InFlight(server, 3000, "survivor")
    running(server, 1)
    body = {"model_path": str(new_weights), "weight_version": "7"}
    report = ok(server.post("/update_weights_from_disk", body))
    assert report["success"] is True and report["num_paused_requests"] == 0
    spans = run.wait()["meta_info"]["weight_versions"]
    assert [span["version"] for span in spans] == [spans[0]["version"], "7"] and spans[-1]["end"] == 3000
    assert server.get("/get_weight_version").json["weight_version"] == "7"
    run = InFlight(server, 3000, "asked for it")
    running(server, 1)
    ok(server.post("/update_weights_from_disk", {**body, "weight_version": "8", "abort_all_requests": True}))
    meta = run.wait()["meta_info"]
    assert meta["finish_reason"]["type"] == "abort" and [s["version"] for s in meta["weight_versions"]] == ["7"]
    assert generate(server, 2)["meta_info"]["weight_version"] == "8", "nothing stays paused"
    reply = server.post("/update_weights_from_disk", {"model_path": "/nowhere", "abort_all_requests": True})
    assert reply.status == 400 and reply.json["success"] is False and reply.json["num_paused_requests"] == 0
    assert generate(server, 2)["meta_info"]["weight_version"] == "8"


def halves(folder: Path) -> list[str]:
    """Return the checkpoint as two safetensors files in base64."""
    raw = (folder / "model.safetensors").read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header, data = json.loads(raw[8 : 8 + size]), raw[8 + size :]
    names = [name for name in header if name != "__metadata__"]
    parts = []
    for chosen in (names[: len(names) // 2], names[len(names) // 2 :]):
        new, blob = {}, b""
        for name in chosen:
            begin, end = header[name]["data_offsets"]
            new[name] = {**header[name], "data_offsets": [len(blob), len(blob) + end - begin]}
            blob += data[begin:end]
        text = json.dumps(new).encode()
        parts.append(base64.b64encode(len(text).to_bytes(8, "little") + text + blob).decode())
    return parts


def test_tensors_arrive_in_buckets_and_are_one_commit(to_update, new_weights, on_new_weights):
    """With two API servers, each call may reach another one: the session belongs to the engine."""
    server, start = to_update, to_update.weights()["weight_epoch"]
    before = generate(server, 12)
    ok(server.post("/begin_weight_update", {"selector": "all"}))
    for part in halves(new_weights):
        body = {"serialized_named_tensors": [part], "load_format": "flattened_bucket", "weight_version": "2"}
        ok(server.post("/update_weights_from_tensor", body))
        assert generate(server, 12)["output_ids"] == before["output_ids"], "nothing changes before the end"
    ok(server.post("/end_weight_update", {}))
    after = generate(server, 12)
    assert after["meta_info"]["weight_versions"] == [{"version": "2", "weight_epoch": start + 1, "start": 0, "end": 12}]
    assert after["output_ids"] == on_new_weights["token_ids"][:12]
    body = {"serialized_named_tensors": halves(new_weights), "weight_version": "3"}
    ok(server.post("/update_weights_from_tensor", body))
    assert generate(server, 12)["meta_info"]["weight_versions"][0]["weight_epoch"] == start + 2


def test_memory_is_released_and_resumed_in_steps(to_update, new_weights):
    """verl: release all, resume the weights, update, resume the KV cache."""
    server = to_update
    before = generate(server, 12)["output_ids"]
    assert ok(server.post("/release_memory_occupation", {"tags": ["kv_cache", "weights"]}))["freed_bytes"] > 0
    assert server.post("/resume_memory_occupation", {"tags": ["kv_cache"]}).status == 409
    ok(server.post("/resume_memory_occupation", {"tags": ["weights"]}))
    ok(server.post("/update_weights_from_disk", {"model_path": str(new_weights), "weight_version": "1"}))
    ok(server.post("/resume_memory_occupation", {"tags": ["kv_cache"]}))
    after = generate(server, 12)
    assert after["meta_info"]["weight_version"] == "1" and after["output_ids"] != before
