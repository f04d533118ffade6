"""SGLang's adapter routes over real HTTP, before a scripted engine."""

from __future__ import annotations

import base64
import pickle
from pathlib import Path

import pytest

from fastdeploy.core.request_fields import AddRequest
from fastdeploy.core.weight_source import FolderSource
from fastdeploy.inter_communicator import messages as m
from support.fake_engine_server import reply_with
from support.http_calls import answer

LOAD, UNLOAD, FROM_TENSORS = "/load_lora_adapter", "/unload_lora_adapter", "/load_lora_adapter_from_tensors"
BODY = {"lora_name": "lora-v3", "lora_path": "/adapters/3"}
CONFIG = {"r": 8, "lora_alpha": 16}
SAFETENSORS = (2).to_bytes(8, "little") + b"{}" + b"data"
KNOWN = [{"lora_name": "lora-v3", "path": "/adapters/3"}]


def text_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def assert_refused(reply, *words: str, status: int = 400) -> None:
    """Assert an error in the shape of SGLang's LoRAUpdateOutput."""
    body = reply.json()
    assert (reply.status_code, body["success"], body["loaded_adapters"]) == (status, False, None), reply.text
    assert all(word in body["error_message"] for word in words), reply.text


def test_a_load_answers_with_the_loaded_adapters(stack):
    """AReaL sends exactly this body."""
    answer(stack, m.LoadAdapterArgs)
    stack.engine.adapters = KNOWN
    reply = stack.post(LOAD, **BODY)
    told = {"success": True, "error_message": "", "loaded_adapters": {"lora-v3": "/adapters/3"}}
    assert (reply.status_code, reply.json()) == (200, told)
    args = stack.engine.expect(m.LoadAdapterArgs).args
    assert args == m.LoadAdapterArgs("lora-v3", FolderSource("/adapters/3"), path="/adapters/3")


def test_upsert_replaces_and_pinned_changes_nothing(module_stack):
    answer(module_stack, m.LoadAdapterArgs)
    assert module_stack.post(LOAD, **BODY, pinned=True, upsert=True, lora_id=None).status_code == 200
    assert module_stack.engine.expect(m.LoadAdapterArgs).args.replace is True
    assert module_stack.post(LOAD, **BODY, upsert=False).status_code == 200
    assert module_stack.engine.expect(m.LoadAdapterArgs).args.replace is False


@pytest.mark.parametrize("code", ["adapter_loaded", "model_not_found", "weight_update_refused", "update_in_progress"])
def test_a_refusal_is_a_400_in_the_shape_of_a_success(module_stack, code):
    answer(module_stack, m.LoadAdapterArgs, failure=m.Failure(code, "told so"))
    answer(module_stack, m.UnloadAdapterArgs, failure=m.Failure(code, "told so"))
    assert_refused(module_stack.post(LOAD, **BODY), "told so")
    assert_refused(module_stack.post(UNLOAD, lora_name="a"), "told so")


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [(LOAD, {}, "lora_name"), (LOAD, {"lora_name": "a"}, "lora_path"), (UNLOAD, {}, "lora_name"),
     (LOAD, {"lora_name": "default", "lora_path": "/p"}, "lora_name"), (FROM_TENSORS, {}, "lora_name")],
)  # fmt: skip
def test_a_missing_field_is_named(module_stack, path, body, field):
    assert_refused(module_stack.post(path, **body), field)


def test_unload_answers_with_those_that_are_left(stack):
    answer(stack, m.UnloadAdapterArgs)
    reply = stack.post(UNLOAD, lora_name="lora-v3")
    assert reply.json() == {"success": True, "error_message": "", "loaded_adapters": {}}
    assert stack.engine.expect(m.UnloadAdapterArgs).args == m.UnloadAdapterArgs("lora-v3")


@pytest.mark.parametrize(
    "tensors",
    [{"serialized_named_tensors": [text_of(SAFETENSORS)] * 2}, {"serialized_tensors": text_of(SAFETENSORS)}],
    ids=["one per rank", "older clients"],
)
def test_tensors_reach_the_engine_as_a_file_with_their_config(module_stack, tensors):
    received = []

    def load(call: m.Call) -> m.Reply:
        received.append((call.args, Path(call.args.source.path).read_bytes()))
        return m.Reply(call.call_id, {})

    module_stack.engine.replies[m.LoadAdapterArgs] = load
    reply = module_stack.post(FROM_TENSORS, lora_name="a", config_dict=CONFIG, **tensors, upsert=True)
    assert reply.status_code == 200, reply.text
    args, content = received[0]
    assert content == SAFETENSORS and not Path(args.source.path).exists()
    assert (args.lora_name, args.config, args.path, args.replace) == ("a", CONFIG, "__tensor__", True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"serialized_named_tensors": [text_of(pickle.dumps([1]))]}, ("serialized_named_tensors", "pickle")),
        ({"serialized_tensors": text_of(b"PK\x03\x04zip"), "serialized_named_tensors": []}, ("serialized_tensors",)),
        ({"serialized_named_tensors": []}, ("serialized_named_tensors",)),
        ({"serialized_named_tensors": [text_of(SAFETENSORS), text_of(SAFETENSORS + b"x")]}, ("one safetensors",)),
        ({"serialized_named_tensors": ["***"]}, ("serialized_named_tensors",)),
        ({"config_dict": None}, ("config_dict",)),
        ({"config_dict": [1]}, ("config_dict",)),
        ({"config_dict": {"r": 2**70}}, ("config_dict",)),
        ({"lora_name": "tiny"}, ("lora_name",)),
        ({"lora_name": 5}, ("lora_name",)),
        ({"load_format": "dtensor"}, ("load_format",)),
        ({"added_tokens_config": {"<x>": 1}}, ("added_tokens_config",)),
        ({"expected_checksums": {"a": "00"}}, ("expected_checksums",)),
    ],
)
def test_an_upload_that_cannot_be_honoured_is_refused_by_name(module_stack, change, words):
    answer(module_stack, m.LoadAdapterArgs)  # the engine would accept it
    body = {"lora_name": "a", "config_dict": CONFIG, "serialized_named_tensors": [text_of(SAFETENSORS)]}
    assert_refused(module_stack.post(FROM_TENSORS, **body | change), *words)


def test_lora_path_names_the_adapter_of_each_prompt(stack):
    stack.script(reply_with([97]))
    stack.engine.adapters = [{"lora_name": "a"}, {"lora_name": "b"}]
    cases = [("a", ["a", "a"]), (["a", None], ["a", ""]), (["b", "a"], ["b", "a"]), (None, ["", ""]), ("", ["", ""])]
    for lora_path, expected in cases:
        assert stack.post("/generate", input_ids=[[1], [2]], lora_path=lora_path).status_code == 200
        assert [stack.engine.expect(AddRequest).adapter for _ in expected] == expected
    assert stack.post("/generate", input_ids=[1], lora_path=["a"]).status_code == 200
    assert stack.engine.expect(AddRequest).adapter == "a"


def test_an_adapter_in_the_model_wins_over_lora_path(stack):
    """As in SGLang. Routers add the base model's name, which leaves lora_path in force."""
    stack.script(reply_with([97]))
    stack.engine.adapters = [{"lora_name": "a"}, {"lora_name": "b"}]
    for model, expected in (("tiny:a", "a"), ("a", "a"), ("tiny", "b"), ("default", "b"), (None, "b")):
        assert stack.post("/generate", input_ids=[1], model=model, lora_path="b").status_code == 200
        assert stack.engine.expect(AddRequest).adapter == expected


def test_an_unknown_adapter_is_a_404_and_never_the_base(module_stack):
    reply = module_stack.post("/generate", input_ids=[[1], [2]], lora_path=[None, "nobody"])
    assert reply.status_code == 404 and "'nobody'" in reply.json()["error"]["message"]


def test_a_choice_without_tokens_has_the_label_of_its_adapter(stack):
    labels = {"engine": "base-1", "adapter:a": "policy-7"}
    stack.engine.replies[m.PauseStatusArgs] = lambda call: m.Reply(call.call_id, {"version": labels[call.args.scope]})
    stack.engine.adapters = [{"lora_name": "a"}]
    stack.script(lambda request: [m.Output(request.request_id, 0, finish_reason="abort")])
    replies = stack.post("/generate", input_ids=[[1], [2]], lora_path=["a", None]).json()
    assert [reply["meta_info"]["weight_version"] for reply in replies] == ["policy-7", "base-1"]


def test_server_info_says_that_adapters_are_on(stack):
    answer(stack, m.WeightInfoArgs, {"version": "v1"})
    info = stack.http.get("/server_info").json()
    assert (info["enable_lora"], info["max_loaded_loras"]) == (True, None)
