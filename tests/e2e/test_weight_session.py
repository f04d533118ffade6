"""Weight sessions, sleep and reset in real processes: all sources give the same weights; a failure changes none."""

from __future__ import annotations

import json
import os
from pathlib import Path

import httpx
import numpy as np
import pytest

from e2e.server import PROMPT, until
from fastdeploy.embedded import MODEL_DIR

OCTETS = {"content-type": "application/octet-stream"}


def read_tensors() -> tuple[dict[str, dict], bytes]:
    """Return header entries and data of the embedded checkpoint."""
    raw = (MODEL_DIR / "model.safetensors").read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    header.pop("__metadata__", None)
    return header, raw[8 + size :]


def blob(names: list[str], scale: float = 0.0) -> bytes:
    """Return a safetensors file of these tensors of the embedded model, slightly changed."""
    header, data = read_tensors()
    rng = np.random.default_rng(5)
    entries, parts, at = {}, [], 0
    for name in header:  # the same numbers for a tensor, whatever the other tensors are
        begin, end = header[name]["data_offsets"]
        kind = {"BF16": np.uint16, "F32": np.float32}[header[name]["dtype"]]
        values = np.frombuffer(data[begin:end], kind)
        wide = (values.astype(np.uint32) << 16).view(np.float32) if kind is np.uint16 else values
        wide = wide + rng.normal(0, 1, wide.shape).astype(np.float32) * np.float32(scale)
        if name in names:
            part = ((wide.view(np.uint32) >> 16).astype(np.uint16) if kind is np.uint16 else wide).tobytes()
            entries[name] = {**header[name], "data_offsets": [at, at + len(part)]}
            parts.append(part)
            at += len(part)
    head = json.dumps(entries).encode()
    return len(head).to_bytes(8, "little") + head + b"".join(parts)


@pytest.fixture(scope="module")
def names() -> list[str]:
    return list(read_tensors()[0])


@pytest.fixture
def http(to_update):
    with httpx.Client(base_url=to_update.url, timeout=60) as client:
        yield client


def post(http: httpx.Client, path: str, **more) -> dict:
    reply = http.post(path, **more)
    assert reply.status_code == 200, reply.text
    return reply.json()["result"]


def checksum(http: httpx.Client) -> str:
    reply = http.get("/v1/weights", params={"checksums": True})
    return reply.json()["result"]["checksum"]


def outputs(server) -> tuple:
    got = server.complete(PROMPT, max_tokens=20, ignore_eos=True, logprobs=0)
    return got["token_ids"], got["logprobs"]["token_logprobs"]


def upload_in_two(http: httpx.Client, names: list[str], scale: float) -> dict:
    session = post(http, "/v1/weights/begin", json={"version": "two"})["session_id"]
    for part in (names[::2], names[1::2]):
        post(http, "/v1/weights/chunk", params={"session_id": session}, content=blob(part, scale), headers=OCTETS)
    return post(http, "/v1/weights/commit", json={"session_id": session})


def test_an_upload_whose_tensor_has_a_name_that_utf_8_cannot_hold_is_refused_and_the_engine_lives_on(server, http):
    boot = server.get("/v1/weights").result["boot_id"]
    head = b'{"\\ud800":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    body = len(head).to_bytes(8, "little") + head + bytes(4)
    for _ in range(2):
        reply = http.post("/v1/update_weights", content=body, headers=OCTETS)
        assert reply.status_code == 400 and reply.json()["error"]["code"] == "weight_update_refused", reply.text
    assert server.get("/v1/weights").result["boot_id"] == boot


def test_a_folder_an_upload_shared_memory_and_a_session_in_two_parts_give_the_same_weights(
    server, http, names, tmp_path
):
    """Each update starts from other weights, so that none can be left over; the last one restores the first, bit for
    bit."""
    start, first = checksum(http), outputs(server)
    whole, sums = blob(names, 0.02), set()
    for name in ("config.json", "generation_config.json"):
        if (MODEL_DIR / name).exists():
            (tmp_path / name).write_bytes((MODEL_DIR / name).read_bytes())
    (tmp_path / "model.safetensors").write_bytes(whole)
    segment = Path("/dev/shm") / f"fd-test-{os.getpid()}"
    segment.write_bytes(whole)
    try:
        for publish in (
            lambda: post(http, "/v1/update_weights", json={"model_path": str(tmp_path)}),
            lambda: post(http, "/v1/update_weights", content=whole, headers=OCTETS),
            lambda: post(http, "/v1/update_weights", json={"shared_memory": segment.name, "nbytes": len(whole)}),
            lambda: upload_in_two(http, names, 0.02),
        ):
            assert publish()["status"] == "committed"
            sums.add(checksum(http))
            post(http, "/v1/update_weights", content=blob(names), headers=OCTETS)
            assert checksum(http) == start
    finally:
        segment.unlink()
    assert len(sums) == 1 and sums != {start}
    assert outputs(server) == first
    assert not list(Path("/dev/shm").glob("fastdeploy-upload-*"))


def test_the_old_weights_serve_on_after_a_trainer_died(server, http, names):
    before = outputs(server)
    session = post(http, "/v1/weights/begin", json={"lease_s": 1.5})["session_id"]
    post(http, "/v1/weights/chunk", params={"session_id": session}, content=blob(names, 0.02), headers=OCTETS)
    assert http.post("/v1/weights/begin").status_code == 409, "one at a time"
    until(lambda: http.get("/v1/weights").json()["result"]["session"] is None, 20, "the lease ends")
    late = http.post("/v1/weights/commit", json={"session_id": session})
    assert (late.status_code, late.json()["error"]["code"]) == (409, "session_expired")
    assert outputs(server) == before


def test_sleep_gives_memory_back_wake_up_brings_the_same_weights_and_reset_starts_over(server, http):
    before, start = outputs(server), checksum(http)
    slept = post(http, "/v1/sleep?tags=weight&tags=kv_cache")
    assert slept["asleep"] == ["kv_cache", "weight"] and slept["freed_bytes"] > 0
    assert http.post("/v1/update_weights", json={"model_path": str(MODEL_DIR)}).status_code == 409
    assert post(http, "/v1/resume")["still_held_by"] == ["sleep"]
    assert http.post("/v1/wakeup?tags=kv_cache").status_code == 409
    assert post(http, "/v1/wakeup?tags=weight")["asleep"] == ["kv_cache"]
    assert post(http, "/v1/wakeup")["asleep"] == [] and checksum(http) == start
    assert outputs(server) == before
    post(http, "/v1/pause", json={"mode": "keep"})
    post(http, "/v1/weights/begin")
    done = post(http, "/v1/reset", json={"version": "again"})
    assert len(done["released"]) == len(done["sessions_aborted"]) == 1 and done["version"] == "again"
    got = server.complete(PROMPT, max_tokens=2, ignore_eos=True)
    assert {span["version"] for span in got["weight_versions"]} == {"again"}
