"""POST /v1/update_weights on a live server: new tokens come from new weights; a failed update keeps the old ones."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from safetensors.numpy import save

from e2e.server import LONG, PROMPT, LiveStream, until
from fastdeploy.embedded import MODEL_DIR


def update(server, folder, **more):
    return server.post("/v1/update_weights", {"model_path": str(folder), **more})


def test_a_live_stream_continues_and_labels_each_token_with_its_version(to_update, alone, new_weights):
    """The version changes at one token. An update neither resumes nor aborts a request."""
    server, before = to_update, to_update.weights()["weight_epoch"]
    stream = LiveStream(server, PROMPT, max_tokens=LONG).wait_for_tokens(5)
    report = update(server, new_weights, version="step-7").result
    after = report["weight_epoch"]
    assert (report["version"], report["previous_weight_epoch"]) == ("step-7", before) and after > before
    assert report["requests_in_flight"] == 1
    until(lambda: any(s["weight_epoch"] == after for s in stream.spans), 30, "tokens of the new weights")
    end = len(stream.abort().tokens)
    at = next(i for i, s in enumerate(stream.spans) if s["weight_epoch"] == after)
    first = stream.spans[at]["start"]
    assert 0 < first < end and {s["weight_epoch"] for s in stream.spans[at:]} == {after}
    assert stream.tokens[: min(first, 2500)] == alone[:first]
    covered = [(s["start"], s["end"]) for s in stream.spans]
    assert covered[0][0] == 0 and covered[-1][1] == end
    assert all(a[1] == b[0] for a, b in zip(covered, covered[1:], strict=False))


@pytest.mark.parametrize("paused", [False, True])
def test_after_an_update_a_new_request_equals_a_fresh_server_on_the_new_weights(
    to_update, new_weights, on_new_weights, paused
):
    """The prefix cache is warm, and the call gives no version."""
    server, wanted = to_update, on_new_weights
    weight_epoch = server.weights()["weight_epoch"] + 1
    old = server.complete(PROMPT, max_tokens=40, ignore_eos=True, logprobs=0)
    assert server.complete(PROMPT, max_tokens=40, ignore_eos=True, logprobs=0) == old
    if paused:
        server.post("/v1/pause", {"mode": "keep"})
    copy = shutil.copytree(new_weights, new_weights.parent / f"copy-{paused}")
    report = update(server, copy).result
    shutil.rmtree(copy)  # as trainers do at once
    assert report["version"] == str(weight_epoch)
    if paused:
        assert server.get("/v1/is_paused").result["is_paused"], "an update does not resume the engine"
        server.post("/v1/resume")
    got = server.complete(PROMPT, max_tokens=40, ignore_eos=True, logprobs=0)
    assert got["token_ids"] == wanted["token_ids"] and got["logprobs"] == wanted["logprobs"]
    assert got["token_ids"] != old["token_ids"] or got["logprobs"] != old["logprobs"]
    span = {"version": str(weight_epoch), "weight_epoch": weight_epoch, "start": 0, "end": 40}
    assert got["weight_versions"] == [span]


def test_a_recomputed_request_continues_as_on_a_server_with_the_new_weights(to_update, new_weights):
    """The continuation equals that of a new request with the prompt and the tokens so far."""
    server = to_update
    stream = LiveStream(server, PROMPT, max_tokens=LONG).wait_for_tokens(5)
    server.post("/v1/pause", {"mode": "keep"})
    report = update(server, new_weights, kv="recompute").result
    assert report["tokens_to_recompute"] > 0
    server.post("/v1/resume")
    until(
        lambda: any(s["weight_epoch"] == report["weight_epoch"] for s in stream.spans), 30, "tokens of the new weights"
    )
    end = len(stream.wait_for_tokens(len(stream.tokens) + 300).abort().tokens)
    first = next(s["start"] for s in stream.spans if s["weight_epoch"] == report["weight_epoch"])
    rest = server.complete([*PROMPT, *stream.tokens[:first]], max_tokens=end - first, ignore_eos=True)
    assert stream.tokens[first:] == rest["token_ids"]


def test_a_refused_update_leaves_the_old_weights_serving_bit_for_bit(server, tmp_path):
    before = server.complete(PROMPT, max_tokens=20, ignore_eos=True, logprobs=0)
    half, foreign, pickled = (tmp_path / name for name in ("half", "foreign", "pickled"))
    for folder in (half, foreign, pickled):
        shutil.copytree(MODEL_DIR, folder)
    tensors = (half / "model.safetensors").read_bytes()
    (half / "model.safetensors").write_bytes(tensors[: len(tensors) // 2])
    (foreign / "model.safetensors").write_bytes(save({"model.norm.weight": np.ones(4, np.float32)}))
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    for folder in (half, foreign, pickled, tmp_path / "absent"):
        reply = update(server, folder)
        assert reply.status == 400 and reply.json["error"]["message"], folder
    assert update(server, MODEL_DIR, kv="perhaps").json["error"]["message"].startswith("kv")
    after = server.complete(PROMPT, max_tokens=20, ignore_eos=True, logprobs=0)
    assert after == before


def test_paths_outside_the_allowed_roots_are_refused(strict_server, new_weights):
    reply = update(strict_server, new_weights)
    assert reply.status == 400 and "model_path" in reply.json["error"]["message"]
    link = strict_server.model_root / "link"
    link.symlink_to(new_weights)
    assert update(strict_server, link).status == 400, "a link does not lead out of the roots"
