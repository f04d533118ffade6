"""Native adapter routes over real HTTP: the calls that reach the engine, and the replies."""

from __future__ import annotations

import json
from pathlib import Path

import openai
import pytest

from fastdeploy.core.weight_source import FileSource, FolderSource, SharedMemorySource
from fastdeploy.inter_communicator import messages as m
from support.http_calls import OCTETS, answer, refused

LOAD, UNLOAD = "/v1/adapters/load", "/v1/adapters/unload"
CONFIG = {"peft_type": "LORA", "r": 8, "target_modules": ["q_proj"]}
KNOWN = {"lora_name": "a", "lora_int_id": 1, "adapter_epoch": 2, "version": "v", "path": "/adapters/a"}


@pytest.mark.parametrize(
    ("body", "args"),
    [
        ({"lora_path": "/p"}, m.LoadAdapterArgs("a", FolderSource("/p"), path="/p")),
        (
            {"lora_path": "/p", "version": 7, "kv": "recompute", "replace": False, "timeout_s": 5},
            m.LoadAdapterArgs("a", FolderSource("/p"), None, "/p", "7", "recompute", False, 5.0),
        ),
        (
            {"shared_memory": "s", "nbytes": 9, "config": CONFIG},
            m.LoadAdapterArgs("a", SharedMemorySource("s", 9), CONFIG),
        ),
    ],
)
def test_a_load_becomes_a_call_of_the_engine_and_the_reply_has_its_report(module_stack, body, args):
    answer(module_stack, m.LoadAdapterArgs, {"lora_name": "a", "adapter_epoch": 1})
    reply = module_stack.post(LOAD, lora_name="a", **body)
    assert reply.status_code == 200, reply.text
    assert reply.json()["result"] == {"lora_name": "a", "adapter_epoch": 1} and reply.json()["status"] == "success"
    assert module_stack.engine.expect(m.LoadAdapterArgs).args == args


def test_an_uploaded_adapter_is_one_safetensors_file_with_its_config_in_the_query(module_stack):
    received = []

    def load(call: m.Call) -> m.Reply:
        received.append((call.args, Path(call.args.source.path).read_bytes()))
        return m.Reply(call.call_id, {"lora_name": "a"})

    module_stack.engine.replies[m.LoadAdapterArgs] = load
    query = {"lora_name": "a", "config": json.dumps(CONFIG), "version": "v1"}
    reply = module_stack.http.post(LOAD, params=query, content=b"tensors", headers=OCTETS)
    assert reply.status_code == 200, reply.text
    args, content = received[0]
    assert content == b"tensors" and isinstance(args.source, FileSource)
    assert (args.lora_name, args.config, args.version, args.path) == ("a", CONFIG, "v1", "")
    assert not Path(args.source.path).exists(), "the API server removes the file after the call"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"lora_path": "/p"}, "lora_name"),
        ({"lora_name": "", "lora_path": "/p"}, "lora_name"),
        ({"lora_name": 5, "lora_path": "/p"}, "lora_name"),
        ({"lora_name": "x" * 257, "lora_path": "/p"}, "lora_name"),
        ({"lora_name": "tiny", "lora_path": "/p"}, "lora_name"),
        ({"lora_name": "default", "lora_path": "/p"}, "lora_name"),
        ({"lora_name": "unknown", "lora_path": "/p"}, "lora_name"),
        ({"lora_name": "tiny:a", "lora_path": "/p"}, "lora_name"),
        ({"lora_name": "a"}, "lora_path"),
        ({"lora_name": "a", "lora_path": ""}, "lora_path"),
        ({"lora_name": "a", "lora_path": "/p", "shared_memory": "s"}, "lora_path"),
        ({"lora_name": "a", "lora_path": "/p", "config": CONFIG}, "config"),
        ({"lora_name": "a", "shared_memory": "s"}, "config"),
        ({"lora_name": "a", "shared_memory": "s", "config": [1]}, "config"),
        ({"lora_name": "a", "shared_memory": "s", "config": "[1]"}, "config"),
        ({"lora_name": "a", "shared_memory": "s", "config": {"r": 2**70}}, "config"),
        ({"lora_name": "a", "lora_path": "/p", "kv": "drop"}, "kv"),
        ({"lora_name": "a", "lora_path": "/p", "load_inplace": True}, "load_inplace"),
    ],
)
def test_a_malformed_load_is_refused_by_the_name_of_its_field(module_stack, body, field):
    answer(module_stack, m.LoadAdapterArgs)  # the engine would accept it
    refused(module_stack.post(LOAD, **body), field)


def test_an_upload_is_refused_before_its_body_is_read(module_stack):
    """The config is checked first: a trainer learns of its mistake without sending gigabytes."""
    refused(module_stack.http.post(LOAD, params={"lora_name": "a"}, content=b"x", headers=OCTETS), "config")
    query = {"lora_name": "a", "config": "{}", "lora_path": "/p"}
    refused(module_stack.http.post(LOAD, params=query, content=b"x", headers=OCTETS), "lora_path")


def test_an_upload_has_the_limit_of_uploads(make_stack):
    stack = make_stack(max_body_mb=1, max_upload_mb=2)
    answer(stack, m.LoadAdapterArgs, {"lora_name": "a"})
    query = {"lora_name": "a", "config": "{}"}
    for megabytes, status in ((1.5, 200), (2.5, 413)):
        content = b"x" * int(megabytes * 2**20)
        assert stack.http.post(LOAD, params=query, content=content, headers=OCTETS).status_code == status


@pytest.mark.parametrize("code", ["update_in_progress", "weight_update_refused", "invalid_field", "staging_timeout"])
def test_a_refusal_of_the_engine_is_the_answer(module_stack, code):
    failure = m.Failure(code, "use_dora: not supported", {"param": "use_dora"})
    answer(module_stack, m.LoadAdapterArgs, failure=failure)
    reply = module_stack.post(LOAD, lora_name="a", lora_path="/p")
    error = reply.json()["error"]
    assert reply.status_code >= 400 and (error["code"], error["param"]) == (code, "use_dora")


def test_unload_takes_its_name_from_the_body_or_the_query(module_stack):
    answer(module_stack, m.UnloadAdapterArgs, {"lora_name": "a", "requests_in_flight": 2})
    for reply in (module_stack.post(UNLOAD, lora_name="a"), module_stack.http.post(f"{UNLOAD}?lora_name=a")):
        assert reply.json()["result"] == {"lora_name": "a", "requests_in_flight": 2}
        assert module_stack.engine.expect(m.UnloadAdapterArgs).args == m.UnloadAdapterArgs("a")
    refused(module_stack.post(UNLOAD), "lora_name")
    answer(module_stack, m.UnloadAdapterArgs, failure=m.Failure("model_not_found", "there is no adapter 'b'"))
    assert module_stack.post(UNLOAD, lora_name="b").status_code == 404


def test_the_known_adapters_are_listed(stack):
    assert stack.http.get("/v1/adapters").json()["result"] == {"adapters": []}
    stack.engine.adapters = [KNOWN]
    assert stack.http.get("/v1/adapters").json()["result"] == {"adapters": [KNOWN]}


def test_a_model_is_found_by_each_of_its_names(stack, model_dir):
    stack.engine.adapters = [KNOWN, KNOWN | {"lora_name": "team/b"}]
    base, *cards = stack.http.get("/v1/models").json()["data"]
    for name in ("tiny", "default", model_dir, "tiny/"):
        assert stack.http.get(f"/v1/models/{name}").json() == base
    for name, card in (("a", cards[0]), ("tiny:a", cards[0]), ("team/b", cards[1]), ("team%2Fb", cards[1])):
        assert stack.http.get(f"/v1/models/{name}").json() == card
    stack.engine.adapters += [KNOWN | {"lora_name": name} for name in ("a\n", "a\nb")]
    assert [stack.http.get(f"/v1/models/{name}").json()["id"] for name in ("a%0A", "a%0Ab")] == ["a\n", "a\nb"]
    client = openai.OpenAI(base_url=stack.server.url + "/v1", api_key="none", max_retries=0)
    assert client.models.retrieve("team/b").id == "team/b"
    for name in ("c", "team", "team/b/c", "x" * 5000, "tiny%0A", "team/b%0A"):
        reply = stack.http.get(f"/v1/models/{name}")
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")


def test_every_adapter_has_a_card_beside_the_base_model(stack, model_dir):
    stack.engine.adapters = [KNOWN, KNOWN | {"lora_name": "b", "path": ""}]
    base, *cards = stack.http.get("/v1/models").json()["data"]
    assert (base["id"], base["root"], base["parent"], base["max_model_len"]) == ("tiny", model_dir, None, 128)
    assert [(c["id"], c["root"], c["parent"]) for c in cards] == [("a", "/adapters/a", "tiny"), ("b", None, "tiny")]
