"""POST /v1/update_weights on a live server: new weights for new tokens; a failed update keeps the old weights."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from e2e.server import LiveStream
from fastdeploy.embedded import MODEL_DIR

PROMPT = list(range(40, 60))


def perturbed(folder, scale=0.02, seed=3):
    """Copy the embedded checkpoint with other weights; bfloat16 is changed as bits."""
    shutil.copytree(MODEL_DIR, folder)
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    data = bytearray(raw[8 + size :])
    rng = np.random.default_rng(seed)
    for name, info in header.items():
        if name == "__metadata__":
            continue
        begin, end = info["data_offsets"]
        kind = {"BF16": np.uint16, "F32": np.float32}[info["dtype"]]
        values = np.frombuffer(bytes(data[begin:end]), kind)
        wide = (values.astype(np.uint32) << 16).view(np.float32) if kind is np.uint16 else values
        wide = wide + rng.normal(0, scale, wide.shape).astype(np.float32)
        narrow = (wide.view(np.uint32) >> 16).astype(np.uint16) if kind is np.uint16 else wide
        data[begin:end] = narrow.tobytes()
    path.write_bytes(raw[: 8 + size] + bytes(data))
    return folder


@pytest.fixture(scope="module")
def new_weights(tmp_path_factory):
    return perturbed(tmp_path_factory.mktemp("weights") / "policy-1")


def update(server, folder, **more):
    return server.post("/v1/update_weights", {"model_path": str(folder), **more})


def test_a_live_stream_continues_and_labels_each_token_with_its_version(start_server, new_weights):
    """The version changes at one token; an update neither resumes nor aborts anything."""
    server = start_server()
    alone = server.complete(PROMPT, max_tokens=2500, ignore_eos=True)["token_ids"]
    stream = LiveStream(server, PROMPT, max_tokens=2500).wait_for_tokens(5)
    report = update(server, new_weights, version="step-7").result
    assert (report["version"], report["weight_epoch"], report["previous_weight_epoch"]) == ("step-7", 1, 0)
    assert report["requests_in_flight"] == 1
    stream.wait_end()
    assert stream.finals == ["length"] and len(stream.tokens) == 2500
    at = next(i for i, s in enumerate(stream.spans) if s["weight_epoch"] == 1)
    first = stream.spans[at]["start"]
    assert 0 < first < 2500 and {s["weight_epoch"] for s in stream.spans[at:]} == {1}
    assert stream.tokens[:first] == alone[:first]
    covered = [(s["start"], s["end"]) for s in stream.spans]
    assert covered[0][0] == 0 and covered[-1][1] == 2500
    assert all(a[1] == b[0] for a, b in zip(covered, covered[1:], strict=False))


@pytest.mark.parametrize("paused", [False, True])
def test_after_an_update_a_new_request_equals_a_fresh_server_on_the_new_weights(start_server, new_weights, paused):
    """With a warm prefix cache, and without a given version."""
    fresh = start_server("--model", str(new_weights))
    wanted = fresh.complete(PROMPT, max_tokens=40, ignore_eos=True, logprobs=0)
    fresh.stop()
    server = start_server()
    old = server.complete(PROMPT, max_tokens=40, ignore_eos=True, logprobs=0)
    assert server.complete(PROMPT, max_tokens=40, ignore_eos=True, logprobs=0) == {**old}
    if paused:
        server.post("/v1/pause", {"mode": "keep"})
    copy = shutil.copytree(new_weights, new_weights.parent / f"copy-{paused}")
    report = update(server, copy).result
    shutil.rmtree(copy)  # as trainers do, at once
    assert report["version"] == "1"
    if paused:
        assert server.get("/v1/is_paused").result["is_paused"], "an update never resumes"
        server.post("/v1/resume")
    got = server.complete(PROMPT, max_tokens=40, ignore_eos=True, logprobs=0)
    assert got["token_ids"] == wanted["token_ids"] and got["logprobs"] == wanted["logprobs"]
    assert got["token_ids"] != old["token_ids"] or got["logprobs"] != old["logprobs"]
    assert got["weight_versions"] == [{"version": "1", "weight_epoch": 1, "start": 0, "end": 40}]


def test_kept_and_recomputed_requests_differ_only_as_asked(start_server, new_weights):
    """kv=recompute: the continuation equals that of a fresh server given prompt and tokens so far."""
    server = start_server()
    stream = LiveStream(server, PROMPT, max_tokens=1500).wait_for_tokens(5)
    server.post("/v1/pause", {"mode": "keep"})
    report = update(server, new_weights, kv="recompute").result
    assert report["tokens_to_recompute"] > 0
    server.post("/v1/resume")
    stream.wait_end()
    first = next(s["start"] for s in stream.spans if s["weight_epoch"] == 1)
    rest = server.complete([*PROMPT, *stream.tokens[:first]], max_tokens=1500 - first, ignore_eos=True)
    assert stream.tokens[first:] == rest["token_ids"]


def test_a_refused_update_leaves_the_old_weights_serving_bit_for_bit(server, tmp_path):
    before = server.complete(PROMPT, max_tokens=20, ignore_eos=True, logprobs=0)
    half = tmp_path / "half"
    shutil.copytree(MODEL_DIR, half)
    tensors = (half / "model.safetensors").read_bytes()
    (half / "model.safetensors").write_bytes(tensors[: len(tensors) // 2])
    surplus = tmp_path / "surplus"
    shutil.copytree(MODEL_DIR, surplus)
    (surplus / "model.safetensors").unlink()
    save_file({"model.norm.weight": np.ones(4, np.float32)}, surplus / "model.safetensors")
    assert load_file(surplus / "model.safetensors")
    pickled = tmp_path / "pickled"
    shutil.copytree(MODEL_DIR, pickled)
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    for folder in (half, surplus, pickled, tmp_path / "absent"):
        reply = update(server, folder)
        assert reply.status == 400 and reply.json["error"]["message"], folder
    assert update(server, MODEL_DIR, kv="perhaps").json["error"]["message"].startswith("kv")
    after = server.complete(PROMPT, max_tokens=20, ignore_eos=True, logprobs=0)
    assert after == before


def test_paths_outside_the_allowed_roots_are_refused(start_server, tmp_path, new_weights):
    server = start_server("--model-root", str(tmp_path))
    reply = update(server, new_weights)
    assert reply.status == 400 and "model_path" in reply.json["error"]["message"]
    (tmp_path / "link").symlink_to(new_weights)
    assert update(server, tmp_path / "link").status == 400, "a link does not lead out of the roots"
