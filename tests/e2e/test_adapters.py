"""Adapters of a real model over HTTP: every source gives the same adapter, on every API server."""

from __future__ import annotations

import base64
import json
import shutil
import uuid
from pathlib import Path
from urllib.parse import urlencode

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save

from e2e.server import PROMPT, LiveStream, in_background, until
from fastdeploy.embedded import MODEL_DIR

CONFIG = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "gate_proj", "down_proj"]}
COUNT = 24


@pytest.fixture(scope="module")
def tensors() -> bytes:
    """Return the file of a random adapter of the embedded model, strong enough to change its tokens."""
    rng, found = np.random.default_rng(7), {}
    with safe_open(MODEL_DIR / "model.safetensors", "np") as file:
        shapes = {name.removesuffix(".weight"): file.get_slice(name).get_shape() for name in list(file.keys())}
    for module in [name for name in shapes if name.rpartition(".")[2] in CONFIG["target_modules"]]:
        rows, columns = shapes[module]
        for part, shape in (("A", (CONFIG["r"], columns)), ("B", (rows, CONFIG["r"]))):
            values = rng.standard_normal(shape).astype(np.float32) * 0.1
            found[f"base_model.model.{module}.lora_{part}.weight"] = values
    return save(found)


@pytest.fixture
def folder(tmp_path, tensors) -> Path:
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "adapter_model.safetensors").write_bytes(tensors)
    return tmp_path


@pytest.fixture
def adapters(live):
    """Return the shared server, which knows no adapter after the test."""
    yield live
    live.post("/v1/abort_requests", {"abort_all": True}).ok()
    for known in live.get("/v1/adapters").result["adapters"]:
        live.post("/v1/adapters/unload", {"lora_name": known["lora_name"]}).ok()


def ids(server, model: str | None) -> list[int]:
    return server.complete(PROMPT, model=model, max_tokens=COUNT, ignore_eos=True)["token_ids"]


def uploaded(config: dict) -> str:
    return "/v1/adapters/load?" + urlencode({"lora_name": "upload", "config": json.dumps(config)})


def test_every_source_gives_the_same_adapter_on_every_api_server(adapters, folder, tensors):
    server, base = adapters, ids(adapters, None)
    segment = Path("/dev/shm") / f"adapter-{uuid.uuid4().hex}"
    segment.write_bytes(tensors)
    server.post("/v1/adapters/load", {"lora_name": "native", "lora_path": str(folder)}).ok()
    server.post("/skyrl/v1/load_lora_adapter", {"lora_name": "skyrl", "lora_path": str(folder)}).ok()
    server.post("/load_lora_adapter", {"lora_name": "sglang", "lora_path": str(folder)}).ok()
    assert server.post("/v1/load_lora_adapter", {"lora_name": "vllm", "lora_path": str(folder)}).status == 200
    shutil.rmtree(folder)  # as trainers do at once
    server.post(uploaded(CONFIG), tensors).ok()
    server.post("/v1/adapters/load", {"lora_name": "memory", "shared_memory": segment.name, "config": CONFIG}).ok()
    segment.unlink()
    encoded = base64.b64encode(tensors).decode()
    body = {"lora_name": "verl", "config_dict": CONFIG, "serialized_named_tensors": [encoded]}
    loaded = server.post("/load_lora_adapter_from_tensors", body).ok()["loaded_adapters"]
    assert loaded.keys() == {"native", "skyrl", "sglang", "vllm", "upload", "memory", "verl"}
    expected = ids(server, "native")
    assert expected != base
    for name in loaded:
        # Each call has a new connection, which any API server may get.
        assert [ids(server, name) for _ in range(2)] == [expected] * 2, name
    assert ids(server, None) == base


def test_an_adapter_that_cannot_be_served_is_a_400_that_names_the_field(adapters, tensors):
    for field, value in (("use_dora", True), ("modules_to_save", ["lm_head"]), ("bias", "all"), ("unheard_of", 1)):
        reply = adapters.post(uploaded({**CONFIG, field: value}), tensors)
        assert reply.status == 400 and field in reply.json["error"]["message"], reply.body
    reply = adapters.post(uploaded(CONFIG), tensors[:-4])
    assert reply.status == 400, reply.body
    assert adapters.get("/v1/adapters").result["adapters"] == []
    assert adapters.post("/v1/completions", {"model": "upload", "prompt": PROMPT}).status == 404


def test_a_kept_adapter_is_frozen_while_another_and_the_base_model_go_on(adapters, folder):
    server = adapters
    for name in ("a", "b"):
        server.post("/v1/adapters/load", {"lora_name": name, "lora_path": str(folder)}).ok()
    alone = {name: server.complete(PROMPT, model=name, max_tokens=400, ignore_eos=True) for name in ("a", "b", None)}
    before = server.metric("generation_tokens_total")
    streams = {name: LiveStream(server, PROMPT, model=name) for name in alone}
    for stream in streams.values():
        stream.wait_for_tokens(5)
    report = server.post("/v1/pause", {"lora_name": "a", "mode": "keep"}).result
    assert (report["lora_name"], report["is_paused"], report["counts"]["kept"]) == ("a", True, 1)
    server.post("/v1/pause", {"mode": "keep", "hold_id": "count"}).ok()  # all stand still, until every token is read
    made = server.metric("generation_tokens_total") - before
    until(lambda: sum(len(stream.tokens) for stream in streams.values()) == made, 30, "all tokens are read")
    frozen = len(streams["a"].tokens)
    server.post("/v1/resume", {"hold_id": "count"}).ok()
    held = in_background(ids, server, "a")
    for name in ("b", None):
        streams[name].wait_for_tokens(len(streams[name].tokens) + 50)
    assert ids(server, "b") == alone["b"]["token_ids"][:COUNT] and ids(server, None) == alone[None]["token_ids"][:COUNT]
    assert len(streams["a"].tokens) == frozen and not held.done()
    status = server.get("/v1/is_paused").result
    assert not status["is_paused"] and not status["rejecting_new_requests"] and server.get("/ready").status == 200
    assert [scope["lora_name"] for scope in status["scopes"]] == ["a"]
    assert server.get("/v1/is_paused?lora_name=a").result["counts"] == {"running": 0, "frozen": 1, "queued": 1}
    assert server.post("/v1/pause", {"lora_name": "nobody"}).status == 404
    assert server.post("/v1/resume", {"lora_name": "a"}).result["status"] == "running"
    assert held.result(60) == alone["a"]["token_ids"][:COUNT]
    for name, stream in streams.items():
        stream.wait_for_tokens(400)
        assert stream.tokens[:400] == alone[name]["token_ids"], name
    aborted = server.post("/v1/abort_requests", {"lora_name": "a"}).result["aborted"]
    assert len(aborted) == 1 and aborted[0]["output_token_count"] > 400
    streams["a"].wait_end(20)
    assert streams["a"].finals == ["abort"] and "abort" not in streams["b"].finals
