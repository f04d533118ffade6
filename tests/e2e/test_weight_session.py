"""Weight sessions, sleep and reset in real processes. All sources give the same weights, and a failure changes none."""

from __future__ import annotations

import os
from pathlib import Path

from e2e.server import PROMPT, Reply, halves, until
from fastdeploy.embedded import MODEL_DIR


def outputs(server) -> tuple:
    got = server.complete(PROMPT, max_tokens=20, ignore_eos=True, logprobs=0)
    return got["token_ids"], got["logprobs"]["token_logprobs"]


def checksum(server) -> str:
    return server.weights(checksums=True)["checksum"]


def upload_in_two(server, folder: Path) -> Reply:
    session = server.post("/v1/weights/begin", {"version": "two"}).result["session_id"]
    for part in halves(folder):
        assert server.post(f"/v1/weights/chunk?session_id={session}", part).result
    return server.post("/v1/weights/commit", {"session_id": session})


def test_an_upload_whose_tensor_has_a_name_that_utf_8_cannot_hold_is_refused_and_the_engine_lives_on(server):
    boot = server.weights()["boot_id"]
    head = b'{"\\ud800":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    body = len(head).to_bytes(8, "little") + head + bytes(4)
    for _ in range(2):
        reply = server.post("/v1/update_weights", body)
        assert reply.status == 400 and reply.json["error"]["code"] == "weight_update_refused", reply.body
    assert server.weights()["boot_id"] == boot


def test_a_folder_an_upload_shared_memory_and_a_session_in_two_parts_give_the_same_weights(to_update, new_weights):
    """Each update starts from other weights, so that no old tensor can be left over. The last update restores the first
    weights, bit for bit."""
    server, path = to_update, "/v1/update_weights"
    start, first, sums = checksum(server), outputs(server), set()
    original, whole = ((folder / "model.safetensors").read_bytes() for folder in (MODEL_DIR, new_weights))
    segment = Path("/dev/shm") / f"fd-test-{os.getpid()}"
    segment.write_bytes(whole)
    try:
        for publish in (
            lambda: server.post(path, {"model_path": str(new_weights)}),
            lambda: server.post(path, whole),
            lambda: server.post(path, {"shared_memory": segment.name, "nbytes": len(whole)}),
            lambda: upload_in_two(server, new_weights),
        ):
            assert publish().result["status"] == "committed"
            sums.add(checksum(server))
            assert server.post(path, original).result
            assert checksum(server) == start
    finally:
        segment.unlink()
    assert len(sums) == 1 and sums != {start}
    assert outputs(server) == first


def test_the_old_weights_serve_on_after_a_trainer_died(to_update, new_weights):
    server = to_update
    before = outputs(server)
    session = server.post("/v1/weights/begin", {"lease_s": 1.5}).result["session_id"]
    assert server.post(f"/v1/weights/chunk?session_id={session}", halves(new_weights)[0]).result
    assert server.post("/v1/weights/begin").status == 409, "only one session may be open"
    until(lambda: server.weights()["session"] is None, 20, "the lease ends")
    late = server.post("/v1/weights/commit", {"session_id": session})
    assert (late.status, late.json["error"]["code"]) == (409, "session_expired")
    assert outputs(server) == before


def test_sleep_gives_memory_back_wake_up_brings_the_same_weights_and_reset_starts_over(to_update):
    server = to_update
    before, start = outputs(server), checksum(server)
    slept = server.post("/v1/sleep?tags=weight&tags=kv_cache").result
    assert slept["asleep"] == ["kv_cache", "weight"] and slept["freed_bytes"] > 0
    assert server.post("/v1/update_weights", {"model_path": str(MODEL_DIR)}).status == 409
    assert server.post("/v1/resume").result["still_held_by"] == ["sleep"]
    assert server.post("/v1/wakeup?tags=kv_cache").status == 409
    assert server.post("/v1/wakeup?tags=weight").result["asleep"] == ["kv_cache"]
    assert server.post("/v1/wakeup").result["asleep"] == [] and checksum(server) == start
    assert outputs(server) == before
    assert server.post("/v1/pause", {"mode": "keep"}).result
    assert server.post("/v1/weights/begin").result
    done = server.post("/v1/reset", {"version": "again"}).result
    assert len(done["released"]) == len(done["sessions_aborted"]) == 1 and done["version"] == "again"
    got = server.complete(PROMPT, max_tokens=2, ignore_eos=True)
    assert {span["version"] for span in got["weight_versions"]} == {"again"}
