"""Requests that name an adapter in ``model``, with the openai package where it fits, before a scripted engine."""

from __future__ import annotations

import openai
import pytest

from fastdeploy.core.outputs import Span
from fastdeploy.core.request_fields import AddRequest
from fastdeploy.inter_communicator import messages as m
from support.fake_engine_server import reply_with
from support.http_calls import events

CHAT = {"messages": [{"role": "user", "content": "hello"}]}
# Three tokens of an adapter, which was reloaded after the second.
SPANS = [Span("v1", 4, 0, 2, adapter="a", adapter_epoch=1), Span("v2", 4, 2, 3, adapter="a", adapter_epoch=2)]
SHOWN = [
    {"version": "v1", "weight_epoch": 4, "start": 0, "end": 2, "lora_name": "a", "adapter_epoch": 1},
    {"version": "v2", "weight_epoch": 4, "start": 2, "end": 3, "lora_name": "a", "adapter_epoch": 2},
]


def reloaded(request: AddRequest) -> list[m.Output]:
    return [
        m.Output(request.request_id, 0, [97, 98], spans=SPANS[:1]),
        m.Output(request.request_id, 0, [99], spans=SPANS[1:], finish_reason="length"),
    ]


@pytest.fixture
def server(stack):
    stack.engine.adapters = [{"lora_name": name, "path": f"/adapters/{name}"} for name in ("a", "policy@7", "x:y")]
    stack.script(reloaded)
    return stack


@pytest.fixture
def client(server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.server.url + "/v1", api_key="none", max_retries=0)


def test_the_openai_package_lists_adapters_and_completes_with_one(server, client):
    assert [(model.id, model.root) for model in client.models.list()][1:] == [
        ("a", "/adapters/a"), ("policy@7", "/adapters/policy@7"), ("x:y", "/adapters/x:y"),
    ]  # fmt: skip
    reply = client.completions.create(model="a", prompt="hello")
    assert (reply.model, reply.choices[0].text) == ("a", "abc")
    assert server.engine.expect(AddRequest).adapter == "a"
    chat = client.chat.completions.create(model="a", **CHAT)
    assert (chat.model, chat.choices[0].message.content) == ("a", "abc")


def test_every_chunk_of_a_stream_names_the_adapter_and_its_epoch(client):
    chunks = list(client.completions.create(model="a", prompt="hello", stream=True))
    assert {chunk.model for chunk in chunks} == {"a"}
    assert [chunk.choices[0].weight_versions for chunk in chunks] == [SHOWN[:1], SHOWN[1:]]


def test_the_spans_of_a_whole_reply_name_the_adapter_and_its_epoch(server):
    choice = server.post("/v1/completions", model="a", prompt="hello").json()["choices"][0]
    assert choice["weight_versions"] == SHOWN
    assert (choice["min_weight_version"], choice["max_weight_version"]) == ("v1", "v2")
    generate = {"token_ids": [1], "sampling_params": {"max_tokens": 3}}
    reply = server.post("/inference/v1/generate", model="a", **generate).json()
    assert reply["choices"][0]["weight_versions"] == SHOWN


@pytest.mark.parametrize(
    ("model", "adapter"),
    [(None, ""), ("", ""), ("tiny", ""), ("default", ""), ("unknown", ""), ("tiny:", ""), ("a", "a"),
     ("policy@7", "policy@7"), ("tiny:a", "a"), ("default:a", "a"), ("x:y", "x:y"), ("tiny:x:y", "x:y")],
)  # fmt: skip
def test_a_model_is_the_base_or_an_adapter(server, model, adapter):
    server.script(reply_with([97]))
    for path, body in (("/v1/completions", {"prompt": "hello"}), ("/v1/chat/completions", CHAT)):
        reply = server.post(path, model=model, **body)
        assert (reply.status_code, reply.json()["model"]) == (200, adapter or "tiny"), reply.text
        assert server.engine.expect(AddRequest).adapter == adapter


def test_the_folder_of_the_base_model_names_it(server, model_dir):
    for model, adapter in ((model_dir, ""), (f"{model_dir}:a", "a")):
        server.post("/v1/completions", model=model, prompt="hello")
        assert server.engine.expect(AddRequest).adapter == adapter


def test_the_base_shows_no_adapter_in_its_spans(server):
    server.script(reply_with([97]))
    choice = server.post("/v1/completions", prompt="hello").json()["choices"][0]
    assert choice["weight_versions"] == [{"version": "v1", "weight_epoch": 1, "start": 0, "end": 1}]


def test_an_unknown_name_is_a_404_and_never_the_base(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="nobody", prompt="hello")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="nobody", **CHAT, stream=True)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/inference/v1/generate", "/generate"])
def test_a_name_of_megabytes_is_a_short_404(server, path):
    body = {"prompt": "a", "token_ids": [1], "input_ids": [1], "sampling_params": {}, **CHAT}
    fields = {"/v1/completions": ("prompt",), "/v1/chat/completions": ("messages",), "/generate": ("input_ids",),
              "/inference/v1/generate": ("token_ids", "sampling_params")}  # fmt: skip
    reply = server.post(path, model="x" * 10_000_000, **{field: body[field] for field in fields[path]})
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")
    assert len(reply.text) < 3000 and server.engine.seen.empty()


def test_every_prompt_of_a_request_has_the_adapter(server):
    server.script(reply_with([97]))
    assert len(server.post("/v1/completions", model="a", prompt=["x", "y"]).json()["choices"]) == 2
    assert [server.engine.expect(AddRequest).adapter for _ in range(2)] == ["a", "a"]


def test_the_same_request_id_for_another_adapter_is_another_body(server):
    """A retained result of one adapter must not answer a request for another adapter."""
    fingerprints = set()
    for model in ("a", "policy@7", "tiny"):
        server.post("/v1/completions", model=model, prompt="hello", request_id="r", retain_s=5)
        fingerprints.add(server.engine.expect(AddRequest).fingerprint)
    assert len(fingerprints) == 3


def test_a_failing_stream_of_an_adapter_keeps_its_shape(server):
    server.script(lambda request: [m.Output(request.request_id, 0, [97], spans=SPANS[:1], finish_reason="abort")])
    *chunks, done = events(server.post("/v1/completions", model="a", prompt="hello", stream=True))
    assert done == "[DONE]" and chunks[-1]["choices"][0]["finish_reason"] == "abort"
    assert chunks[-1]["model"] == "a"
