"""Each caller of adapters against the real engine on a fake runner: the calls that its client makes, and the tokens
that it gets."""

from __future__ import annotations

import base64
import json
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest

from support.engine_stack import engine_stack, tokens_of
from support.fake_runner import write_adapter
from support.http_calls import OCTETS, events, wait_until

PROMPT = [1, 2, 3]
VLLM_LOAD, VLLM_UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture(scope="module")
def server(model_dir, tokenizer):
    with engine_stack(model_dir, tokenizer, model_roots=("/",)) as server:
        yield server


@pytest.fixture
def adapter(tmp_path):
    """Make the PEFT folder of an adapter whose content is the number k, and return its path."""

    def make(k: int) -> str:
        return write_adapter(tmp_path / f"lora-{k}", f"a{k}")

    return make


@pytest.fixture(autouse=True)
def no_adapter_is_left(server):
    yield
    for known in server.http.get("/v1/adapters").json()["result"]["adapters"]:
        server.post("/v1/adapters/unload", lora_name=known["lora_name"])


def complete(server, model: str | None, count: int = 6, **fields) -> httpx.Response:
    body = {"prompt": PROMPT, "max_tokens": count, "ignore_eos": True, "return_token_ids": True, "temperature": 0}
    return server.post("/v1/completions", model=model, **body | fields)


def ids(server, model: str | None, **fields) -> list[int]:
    reply = complete(server, model, **fields)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["token_ids"]


def test_trl_publishes_every_policy_under_a_new_name(server, adapter):
    for version in (1, 2, 3):
        body = {"lora_name": f"policy-v{version}", "lora_path": adapter(version), "load_inplace": False}
        reply = server.post(VLLM_LOAD, **body)
        assert (reply.status_code, reply.text) == (
            200, f"Success: LoRA adapter 'policy-v{version}' added successfully.",
        )  # fmt: skip
        server.post(VLLM_UNLOAD, lora_name=f"policy-v{version - 2}")  # a missing name is no error for TRL
    assert ids(server, "policy-v3") == tokens_of(PROMPT, 6, adapter=3)
    assert ids(server, "policy-v2") == tokens_of(PROMPT, 6, adapter=2)
    assert complete(server, "policy-v1").status_code == 404
    assert ids(server, None) == tokens_of(PROMPT, 6)
    config = server.http.get("/server_info?config_format=json").json()["vllm_config"]
    assert config["lora_config"]["max_loras"] >= 4 + 2 and config["lora_config"]["max_lora_rank"] == 64


def epoch_of(server, name: str) -> int:
    """Return the adapter_epoch of a name. The tests before have unloaded other adapters, so no name begins at 1."""
    adapters = server.http.get("/v1/adapters").json()["result"]["adapters"]
    return next(adapter["adapter_epoch"] for adapter in adapters if adapter["lora_name"] == name)


def trl_sync(server, root: Path, version: int, content: int) -> httpx.Response:
    """Make the calls of one sync of TRL's AsyncGRPOTrainer with max_staleness 1. Return the reply to the load."""
    folder = write_adapter(root / ".vllm_lora" / f"trl-policy-v{version}", f"a{content}")
    server.http.post("/pause", params={"mode": "keep"}).raise_for_status()
    body = {"lora_name": f"trl-policy-v{version}", "lora_path": folder, "load_inplace": False}
    reply = server.post(VLLM_LOAD, **body)
    if reply.status_code == 200:
        server.http.post("/resume").raise_for_status()
        server.post(VLLM_UNLOAD, lora_name=f"trl-policy-v{version - 2}")
    return reply


def test_a_trl_trainer_that_was_restarted_loads_the_names_of_the_run_before(server, tmp_path):
    for version in (1, 2, 3, 4):
        assert trl_sync(server, tmp_path / "run", version, version).status_code == 200
    server.http.post("/pause", params={"mode": "keep"})  # and dies
    for version in (1, 2, 3, 4):
        reply = trl_sync(server, tmp_path / "run", version, 4 + version)
        assert reply.status_code == 200, reply.text
        assert ids(server, f"trl-policy-v{version}") == tokens_of(PROMPT, 6, adapter=4 + version)
    assert not server.http.get("/is_paused").json()["holds"], "nor that of the trainer that died"


def test_a_trl_trainer_with_the_names_of_another_is_refused_until_a_reset(server, tmp_path):
    for version in (1, 2):
        assert trl_sync(server, tmp_path / "one", version, version).status_code == 200
    reply = trl_sync(server, tmp_path / "two", 1, 9)
    assert reply.status_code == 400 and reply.json()["error"]["code"] == "adapter_loaded"
    assert "/v1/reset" in reply.json()["error"]["message"], "the remedy"
    server.http.post("/resume")
    assert ids(server, "trl-policy-v1") == tokens_of(PROMPT, 6, adapter=1)
    done = server.post("/v1/reset").json()["result"]
    assert sorted(done["adapters_unloaded"]) == ["trl-policy-v1", "trl-policy-v2"]
    assert complete(server, "trl-policy-v1").status_code == 404
    assert trl_sync(server, tmp_path / "two", 1, 9).status_code == 200
    assert ids(server, "trl-policy-v1") == tokens_of(PROMPT, 6, adapter=9)


def test_prime_rl_replaces_one_name_in_each_step(server, adapter):
    epochs = []
    for step in (1, 2, 3):
        reply = server.post("/load_lora_adapter", lora_name="r8-a16", lora_path=adapter(step))
        assert reply.status_code == 200, reply.text
        assert ids(server, "r8-a16", cache_salt=str(step)) == tokens_of(PROMPT, 6, adapter=step)
        epochs.append(epoch_of(server, "r8-a16"))
    assert epochs == [epochs[0], epochs[0] + 1, epochs[0] + 2]


@pytest.mark.parametrize("there", ["nothing", "an empty folder", "a config"])
def test_a_folder_without_an_adapter_is_a_404_on_every_route_but_that_of_trl(server, tmp_path, there):
    """prime-rl waits for its file system after a 404. TRL takes a 404 for a server without the route."""
    folder = tmp_path / "late"
    if there != "nothing":
        folder.mkdir()
    if there == "a config":
        (folder / "adapter_config.json").write_text("{}")
    statuses = {}
    for path in ("/v1/adapters/load", "/skyrl/v1/load_lora_adapter", "/load_lora_adapter",
                 "/areal_update_weights_lora", VLLM_LOAD):  # fmt: skip
        field = "lora_model_path" if path.startswith("/areal") else "lora_path"
        reply = server.post(path, lora_name="a", **{field: str(folder)})
        error = reply.json()["error"]
        assert (error["code"], error["param"]) == ("adapter_folder_not_found", "lora_path"), reply.text
        statuses[path] = reply.status_code
    assert statuses.pop(VLLM_LOAD) == 400
    assert set(statuses.values()) == {404}
    write_adapter(folder, "a5")
    assert server.post("/load_lora_adapter", lora_name="a", lora_path=str(folder)).status_code == 200


def test_vllm_refuses_a_loaded_name_unless_it_is_loaded_in_place(server, adapter):
    load = {"lora_name": "a", "lora_path": adapter(1)}
    assert server.post(VLLM_LOAD, **load).status_code == 200
    reply = server.post(VLLM_LOAD, **load | {"lora_path": adapter(2)})
    assert (reply.status_code, reply.json()["error"]["type"]) == (400, "InvalidUserInput")
    assert ids(server, "a") == tokens_of(PROMPT, 6, adapter=1)
    before = epoch_of(server, "a")
    assert server.post(VLLM_LOAD, **load | {"lora_path": adapter(2), "load_inplace": True}).status_code == 200
    choice = complete(server, "a").json()["choices"][0]
    assert choice["token_ids"] == tokens_of(PROMPT, 6, adapter=2)
    [span] = choice["weight_versions"]
    assert (span["lora_name"], span["adapter_epoch"], span["version"]) == ("a", before + 1, str(before + 1))


def test_vllm_answers_404_for_an_unknown_name(server):
    reply = server.post(VLLM_UNLOAD, lora_name="a")
    assert (reply.status_code, reply.json()["error"]["type"]) == (404, "NotFoundError")


def test_the_openai_package_lists_completes_and_streams(server, adapter):
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    path = adapter(4)
    server.post(VLLM_LOAD, lora_name="a", lora_path=path)
    base, card = client.models.list()
    assert (base.id, card.id, card.root, card.parent) == ("tiny", "a", path, "tiny")
    asked = {"model": "a", "prompt": PROMPT, "max_tokens": 5, "extra_body": {"ignore_eos": True}}
    whole = client.completions.create(**asked, temperature=0)
    chunks = list(client.completions.create(**asked, temperature=0, stream=True))
    assert {whole.model} | {chunk.model for chunk in chunks} == {"a"}
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    for chunk in chunks:
        assert {span["lora_name"] for span in chunk.choices[0].weight_versions} <= {"a"}
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(**asked | {"model": "b"})
    assert caught.value.code == "model_not_found"


def test_skyrl_reloads_one_name_and_keeps_its_number(server, adapter):
    numbers, epochs = set(), []
    for k in (1, 2):
        reply = server.post("/skyrl/v1/load_lora_adapter", lora_name="skyrl-lora", lora_path=adapter(k)).json()
        assert (reply["status"], reply["lora_name"]) == ("ok", "skyrl-lora")
        epochs.append(reply["adapter_epoch"])
        numbers.add(reply["lora_int_id"])
        body = {"model": "skyrl-lora", "token_ids": PROMPT, "sampling_params": {"max_tokens": 6, "ignore_eos": True}}
        choice = server.post("/inference/v1/generate", **body).json()["choices"][0]
        assert choice["token_ids"] == tokens_of(PROMPT, 6, adapter=k)
    assert len(numbers) == 1 and epochs[1] == epochs[0] + 1
    assert server.post("/v1/unload_lora_adapter", lora_name="skyrl-lora").status_code == 200


def test_the_first_sync_of_a_skyrl_tenant_aborts_an_adapter_that_was_never_loaded(server, adapter):
    """The calls of SkyRL's pull request 1657: the abort comes before the first load. An error there would be retried
    for ever, and the tenant's samplers would wait for its end."""
    for name in ("never-loaded", "unloaded"):
        reply = server.post("/skyrl/v1/abort_lora_requests", lora_name=name)
        assert reply.status_code == 200, reply.text
        assert reply.json() == {"status": "ok", "aborted": [], "count": 0, "requests": []}
        native = server.post("/v1/abort_requests", lora_name=name).json()["result"]
        assert native == {"aborted": [], "not_found": [name]}, "as for an id that no request has"
        assert server.post("/skyrl/v1/load_lora_adapter", lora_name=name, lora_path=adapter(1)).status_code == 200
        assert ids(server, name) == tokens_of(PROMPT, 6, adapter=1)
        server.post(VLLM_UNLOAD, lora_name=name)
        assert server.post("/skyrl/v1/abort_lora_requests", lora_name=name).json()["count"] == 0


def test_skyrl_aborts_the_requests_of_one_adapter_and_no_others(server, adapter):
    for k, name in enumerate(("meow", "woof"), 1):
        server.post("/skyrl/v1/load_lora_adapter", lora_name=name, lora_path=adapter(k))
    server.post("/v1/pause", mode="keep", lora_name="meow")  # so that its requests are there at the abort
    with ThreadPoolExecutor(2) as pool:
        meow = pool.submit(complete, server, "meow", 50, request_id="m")
        wait_until(lambda: server.http.get("/v1/is_paused?lora_name=meow").json()["result"]["counts"]["queued"])
        assert ids(server, "woof", count=50) == tokens_of(PROMPT, 50, adapter=2)
        reply = server.post("/skyrl/v1/abort_lora_requests", lora_name="meow").json()
        assert (reply["aborted"], reply["count"]) == (["m"], 1)
        choice = meow.result(20).json()["choices"][0]
    assert (choice["finish_reason"], choice["token_ids"]) == ("abort", [])
    server.post("/v1/resume", lora_name="meow")
    assert ids(server, "meow") == tokens_of(PROMPT, 6, adapter=1)


def test_areal_loads_by_sglangs_and_by_vllms_routes(server, adapter):
    reply = server.post("/load_lora_adapter", lora_name="lora-v1", lora_path=adapter(1)).json()
    assert reply["success"] and reply["loaded_adapters"].keys() == {"lora-v1"}
    reply = server.post("/areal_update_weights_lora", lora_name="lora-v2", lora_model_path=adapter(2), lora_int_id=1)
    assert reply.json()["success"], reply.text
    sampling = {"max_new_tokens": 6, "ignore_eos": True, "temperature": 0}
    for k in (1, 2):
        body = {"input_ids": PROMPT, "sampling_params": sampling, "lora_path": f"lora-v{k}", "image_data": None}
        reply = server.post("/generate", **body, return_logprob=True).json()
        assert [token for _, token, _ in reply["meta_info"]["output_token_logprobs"]] == tokens_of(PROMPT, 6, adapter=k)
        payload = {"return_tokens_as_token_ids": True, "logprobs": 0, "use_beam_search": False}
        choice = complete(server, f"lora-v{k}", **payload).json()["choices"][0]
        named = [int(token.split(":")[1]) for token in choice["logprobs"]["tokens"]]
        assert named == tokens_of(PROMPT, 6, adapter=k)


def test_sglang_names_adapters_by_lora_path_and_by_base_colon_adapter(server, adapter):
    for k, name in enumerate(("x", "y"), 1):
        server.post("/load_lora_adapter", lora_name=name, lora_path=adapter(k), pinned=True)
    sampling = {"max_new_tokens": 6, "ignore_eos": True, "temperature": 0}
    batch = {"input_ids": [PROMPT] * 3, "sampling_params": sampling, "lora_path": ["y", None, "x"]}
    replies = server.post("/generate", **batch).json()
    assert [r["output_ids"] for r in replies] == [tokens_of(PROMPT, 6, adapter=k) for k in (2, 0, 1)]
    last = events(server.post("/generate", input_ids=PROMPT, sampling_params=sampling, lora_path="x", stream=True))[-2]
    assert last["output_ids"] == tokens_of(PROMPT, 6, adapter=1)
    assert last["meta_info"]["weight_versions"][0]["lora_name"] == "x"
    assert ids(server, "tiny:y") == tokens_of(PROMPT, 6, adapter=2)
    assert server.post("/generate", input_ids=PROMPT, lora_path="z").status_code == 404


def test_sglang_refuses_a_loaded_name_with_upsert_false(server, adapter):
    assert server.post("/load_lora_adapter", lora_name="x", lora_path=adapter(1)).json()["success"]
    reply = server.post("/load_lora_adapter", lora_name="x", lora_path=adapter(2), upsert=False)
    assert reply.status_code == 400 and not reply.json()["success"] and "'x'" in reply.json()["error_message"]
    reply = server.post("/load_lora_adapter", lora_name="x", lora_path=adapter(2), upsert=True)
    assert reply.json()["success"] and ids(server, "x") == tokens_of(PROMPT, 6, adapter=2)
    for status, success in ((200, True), (400, False)):
        reply = server.post("/unload_lora_adapter", lora_name="x")
        assert (reply.status_code, reply.json()["success"]) == (status, success)


def test_verl_unloads_a_listed_adapter_and_loads_the_next_one(server, adapter, monkeypatch):
    """verl sends tensors. The fake runner's tensors are no safetensors file, so the check of the first bytes is off."""
    monkeypatch.setattr("fastdeploy.http.dialects.sglang.routes.require_safetensors", lambda data, field: None)
    for k in (1, 2):
        if any(model["id"] == "verl_lora" for model in server.http.get("/v1/models").json()["data"]):
            assert server.post("/unload_lora_adapter", lora_name="verl_lora").json()["success"]
        tensors = base64.b64encode(f"a{k}".encode()).decode()
        body = {"lora_name": "verl_lora", "config_dict": {"r": 8}, "serialized_named_tensors": [tensors]}
        reply = server.post("/load_lora_adapter_from_tensors", **body)
        assert reply.json()["loaded_adapters"] == {"verl_lora": "__tensor__"}, reply.text
        sampling = {"max_new_tokens": 6, "ignore_eos": True}
        reply = server.post("/generate", input_ids=PROMPT, sampling_params=sampling, lora_path="verl_lora").json()
        assert reply["output_ids"] == tokens_of(PROMPT, 6, adapter=k)


def test_a_native_caller_loads_in_place_from_a_folder_an_upload_and_shared_memory(server, adapter):
    config = {"r": 8}
    segment = Path("/dev/shm") / f"adapter-{uuid.uuid4().hex}"
    segment.write_bytes(b"a3 and the rest of a larger segment")
    query = {"lora_name": "n", "config": json.dumps(config), "version": "two"}
    calls = [
        lambda: server.post("/v1/adapters/load", lora_name="n", lora_path=adapter(1)),
        lambda: server.http.post("/v1/adapters/load", params=query, content=b"a2", headers=OCTETS),
        lambda: server.post(
            "/v1/adapters/load", lora_name="n", shared_memory=segment.name, nbytes=2, config=config, kv="recompute"
        ),
    ]
    try:
        reports = []
        for content, call in enumerate(calls, 1):
            reports.append(call().json()["result"])
            assert (reports[-1]["lora_name"], reports[-1]["replaced"]) == ("n", content > 1)
            assert ids(server, "n") == tokens_of(PROMPT, 6, adapter=content)
    finally:
        segment.unlink()
    first, last = reports[0]["adapter_epoch"], epoch_of(server, "n")
    [known] = server.http.get("/v1/adapters").json()["result"]["adapters"]
    assert (known["lora_name"], known["version"], last) == ("n", str(last), first + 2)


def test_a_bad_adapter_is_a_400_and_the_old_one_serves_on(server, adapter, tmp_path):
    server.post("/v1/adapters/load", lora_name="a", lora_path=adapter(1))
    bad = write_adapter(tmp_path / "bad", "no tensors")
    reply = server.post("/v1/adapters/load", lora_name="a", lora_path=bad)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "weight_update_refused")
    assert ids(server, "a") == tokens_of(PROMPT, 6, adapter=1)


def test_skyrls_tinker_server_samples_from_a_checkpoint_that_nobody_loaded(model_dir, tokenizer, tmp_path):
    root = tmp_path / "loras"
    write_adapter(root / "m1_step-3", "a3")
    (tmp_path / "outside").mkdir()
    sampling = {"n": 2, "seed": 7, "max_tokens": 6, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "ignore_eos": True}
    body = sampling | {"prompt": PROMPT, "logprobs": True, "stream": False, "return_token_ids": True}
    with engine_stack(model_dir, tokenizer, adapter_root=str(root)) as server:

        def sample(model: str, **fields) -> httpx.Response:
            headers = {"X-Session-ID": "s-0", "Authorization": "Bearer EMPTY"}
            return server.http.post("/v1/completions", json=body | fields | {"model": model}, headers=headers)

        reply = sample("m1_step-3", prompt_logprobs=0).json()
        assert reply["model"] == "m1_step-3"
        for choice in reply["choices"]:
            assert choice["token_ids"] == tokens_of(PROMPT, 6, adapter=3)
            assert len(choice["logprobs"]["token_logprobs"]) == 6
        assert len(reply["choices"][0]["prompt_logprobs"]) == len(PROMPT)
        assert [known["lora_name"] for known in server.http.get("/v1/adapters").json()["result"]["adapters"]]
        for name in ("m1_step-4", "../outside", "..", "/etc", "m1_step-3/../m1_step-3"):
            reply = sample(name)
            assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found"), reply.text
        assert sample("tiny").json()["choices"][0]["token_ids"] == tokens_of(PROMPT, 6)


def test_a_retained_reply_belongs_to_its_adapter(server, adapter):
    server.post("/v1/adapters/load", lora_name="a", lora_path=adapter(1))
    asked = {"request_id": "kept", "retain_s": 60}
    first = complete(server, "a", **asked).json()["choices"][0]
    assert complete(server, "a", **asked).json()["choices"][0]["token_ids"] == first["token_ids"]
    assert complete(server, None, **asked).status_code == 409, "the same id with another model is another request"


def test_a_folder_outside_of_the_roots_is_a_400(model_dir, tokenizer, adapter, tmp_path):
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    with engine_stack(model_dir, tokenizer, model_roots=(str(allowed),)) as server:
        for path in ("/v1/adapters/load", VLLM_LOAD, "/skyrl/v1/load_lora_adapter", "/load_lora_adapter"):
            assert server.post(path, lora_name="a", lora_path=adapter(1)).status_code == 400
        inside = write_adapter(allowed / "a", "a1")
        assert server.post(VLLM_LOAD, lora_name="a", lora_path=inside).status_code == 200
