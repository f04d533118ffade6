"""Access to routes by keys and ports."""

from __future__ import annotations

import http.client

import httpx
import openai
import pytest
from fastapi import APIRouter
from fastapi.routing import iter_route_contexts

from fastdeploy.core.config import ServeConfig
from fastdeploy.http.app import create_app
from fastdeploy.http.guards.keys import NO_KEYS, Keys
from fastdeploy.http.guards.route_access import AccessPolicy, RouteAccess, RouteTable, bearer_key
from fastdeploy.inter_communicator import messages as m
from support.fake_engine_server import reply_with
from support.http_calls import OCTETS, answer, route_table

DATA, CONTROL = b"data-key-1", b"control-key-1"
BOTH = Keys((b"data-key-0", DATA), (CONTROL, b"control-key-2"))
ONLY_DATA, ONLY_CONTROL = Keys(data=(DATA,)), Keys(control=(CONTROL,))
OPEN_ROUTE, DATA_ROUTE, CONTROL_ROUTE = "/health", "/v1/completions", "/v1/pause"


# The class of every route, so that none gets another one by accident.
OPEN_PATHS = (
    "/docs", "/health", "/health_generate", "/liveness", "/metrics", "/openapi.json", "/ping", "/ready", "/ui",
    "/ui/page.css", "/ui/page.js", "/ui/server.js", "/ui/timeline.js", "/version",
)  # fmt: skip
WATCH_PATHS = ("/ui/events",)
DATA_PATHS = (
    "/config-info", "/detokenize", "/finish_session", "/generate", "/get_load", "/get_model_info", "/get_server_info",
    "/get_weight_version", "/get_world_size", "/inference/v1/generate", "/is_paused", "/is_sleeping",
    "/load", "/v1/embeddings", "/v1/reward",
    "/model_info", "/server_info", "/sessions/{session}/v1/chat/completions", "/sessions/{session}/v1/completions",
    "/sessions/{session}/v1/messages", "/sessions/{session}/v1/messages/count_tokens", "/sessions/{session}/v1/models",
    "/sessions/{session}/v1/models/{model_id:text}", "/skyrl/v1/generate", "/tokenize", "/v1/adapters",
    "/v1/chat/completions",
    "/v1/chat/completions/render", "/v1/chat/completions/tokens", "/v1/completions", "/v1/is_paused", "/v1/loads",
    "/v1/models", "/v1/models/{model_id:text}", "/v1/replicas", "/v1/replicas/targets", "/v1/sessions",
    "/v1/sessions/{session}", "/v1/sessions/{session}/abort", "/weight_info",
)  # fmt: skip
CONTROL_PATHS = (
    "/check_redundant", "/clear_load_weight", "/controller/reset_scheduler", "/controller/scheduler",
    "/get_per_expert_tokens_stats", "/rearrange_experts", "/update_model_weight",
    "/abort_request", "/abort_requests", "/areal_continue_generation", "/areal_init_weights_update_group",
    "/areal_pause_generation", "/areal_set_update_weight_meta", "/areal_set_update_weight_meta_lora",
    "/areal_update_weights", "/areal_update_weights_lora", "/areal_update_weights_lora_xccl",
    "/areal_update_weights_xccl", "/begin_weight_update", "/collective_rpc", "/continue_generation",
    "/destroy_weights_update_group", "/end_weight_update", "/fetch_weights", "/finish_weight_update",
    "/flush_cache", "/inference/v1/abort_requests", "/init_weight_transfer_engine",
    "/init_weights_update_group", "/load_lora_adapter", "/load_lora_adapter_from_tensors", "/pause",
    "/pause_generation", "/post_process_weights", "/pull_weights", "/release_memory_occupation",
    "/reset_prefix_cache", "/resume", "/resume_memory_occupation", "/skyrl/v1/abort_lora_requests",
    "/skyrl/v1/load_lora_adapter", "/sleep", "/start_profile", "/start_weight_update", "/stop_profile",
    "/unload_lora_adapter", "/update_weight_version", "/update_weights", "/update_weights_from_disk",
    "/update_weights_from_distributed", "/update_weights_from_ipc", "/update_weights_from_tensor",
    "/v1/abort_requests", "/v1/adapters/export", "/v1/adapters/load", "/v1/adapters/unload",
    "/v1/load_lora_adapter", "/v1/pause", "/v1/renew", "/v1/replicas/add", "/v1/replicas/drain",
    "/v1/replicas/remove", "/v1/replicas/roll", "/v1/replicas/send", "/v1/replicas/spool", "/v1/replicas/undrain",
    "/v1/reset", "/v1/resume",
    "/v1/sleep", "/v1/unload_lora_adapter", "/v1/update_weights", "/v1/wakeup", "/v1/weights",
    "/v1/weights/abort", "/v1/weights/begin", "/v1/weights/chunk", "/v1/weights/commit", "/v1/weights/export",
    "/wake_up",
    "/weight_checker", "/weights_checker",
)  # fmt: skip
CLASSES: dict[str, RouteAccess] = (
    dict.fromkeys(OPEN_PATHS, RouteAccess.OPEN)
    | dict.fromkeys(DATA_PATHS, RouteAccess.DATA)
    | dict.fromkeys(WATCH_PATHS, RouteAccess.WATCH)
    | dict.fromkeys(CONTROL_PATHS, RouteAccess.CONTROL)
)


TABLE = route_table(create_app(None, None, ServeConfig(model="m")))


def bearer(key: bytes) -> dict[str, str]:
    return {"authorization": f"Bearer {key.decode()}"}


def code(path: str, key=None, keys=NO_KEYS, host="127.0.0.1", port=8180, is_upload=False, **settings) -> str | None:
    """Return the code of the refusal, or None."""
    policy = AccessPolicy.of(ServeConfig(model="m", host=host, **settings), keys, TABLE)
    error = policy.refusal(path, port, key, is_upload)
    return error and error.code


def test_every_route_of_the_app_has_the_class_that_this_table_says():
    app = create_app(None, None, ServeConfig(model="m"))
    assert {context.path for context in iter_route_contexts(app.routes)} == CLASSES.keys()
    assert TABLE.classes == CLASSES


def test_a_route_without_a_class_is_a_control_route_and_a_path_has_one_class():
    router = APIRouter()

    @router.get("/open")
    @RouteAccess.OPEN
    async def is_open(): ...

    @router.post("/new")
    async def new(): ...

    assert RouteTable(router.routes).classes == {"/open": RouteAccess.OPEN, "/new": RouteAccess.CONTROL}
    router.post("/open")(new)
    with pytest.raises(AssertionError, match="/open has two classes"):
        RouteTable(router.routes)


def test_an_unknown_path_needs_a_control_key_and_is_then_a_404():
    assert code("/v1/new", keys=BOTH) == "invalid_api_key"
    assert code("/v1/new", DATA, BOTH) == "not_found"
    assert code("/v1/new", CONTROL, BOTH) is None
    assert code("/v1/new", host="0.0.0.0") == "not_found"
    assert code("/v1/new", control_port=9000) == "not_found"


@pytest.mark.parametrize(
    ("keys", "key", "data_route", "control_route"),
    [
        *((NO_KEYS, key, None, None) for key in (None, b"any")),
        *((BOTH, key, "invalid_api_key", "invalid_api_key") for key in (None, b"wrong", b"", DATA[:-1])),
        *((BOTH, key, None, "forbidden") for key in (DATA, b"data-key-0")),
        *((BOTH, key, None, None) for key in (CONTROL, b"control-key-2")),
        (ONLY_CONTROL, None, None, "invalid_api_key"),
        (ONLY_CONTROL, CONTROL, None, None),
        (ONLY_DATA, None, "invalid_api_key", "invalid_api_key"),
        (ONLY_DATA, DATA, None, None),
    ],
)
def test_on_loopback_only_configured_keys_are_required(keys, key, data_route, control_route):
    assert code(OPEN_ROUTE, key, keys) is None
    assert code(DATA_ROUTE, key, keys) == data_route
    assert code(CONTROL_ROUTE, key, keys) == control_route


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "rollout-7", ""])
def test_an_exposed_server_needs_a_control_key_for_control(host):
    assert code(DATA_ROUTE, host=host) is None
    for keys, key in ((NO_KEYS, None), (ONLY_DATA, None), (ONLY_DATA, DATA)):
        assert code(CONTROL_ROUTE, key, keys, host) == "forbidden"
    assert code(CONTROL_ROUTE, CONTROL, ONLY_CONTROL, host) is None
    assert code(CONTROL_ROUTE, None, ONLY_CONTROL, host) == "invalid_api_key"


def test_insecure_control_answers_without_a_key_but_refuses_uploads():
    insecure = {"host": "0.0.0.0", "insecure_control": True, "model_roots": ("/checkpoints",)}
    assert code(CONTROL_ROUTE, **insecure) is None
    assert code("/v1/update_weights", **insecure) is None, "from a folder"
    assert code("/v1/update_weights", is_upload=True, **insecure) == "forbidden"
    assert code("/v1/update_weights", CONTROL, ONLY_CONTROL, is_upload=True, **insecure) is None
    assert code(CONTROL_ROUTE, None, ONLY_DATA, **insecure) == "invalid_api_key", "an API key opens only data routes"
    assert code("/v1/update_weights", is_upload=True) is None, "on loopback"


def test_only_the_control_port_answers_control_routes_and_it_answers_all_routes():
    for port, expected in ((8180, "forbidden"), (9000, None)):
        assert code(CONTROL_ROUTE, port=port, control_port=9000) == expected
        assert code(CONTROL_ROUTE, CONTROL, BOTH, port=port, control_port=9000) == expected
        assert code(DATA_ROUTE, DATA, BOTH, port=port, control_port=9000) is None
        assert code(OPEN_ROUTE, port=port, control_port=9000) is None
    assert code(CONTROL_ROUTE, DATA, BOTH, port=9000, control_port=9000) == "forbidden"


def test_with_a_metrics_port_metrics_are_answered_there_only_and_nothing_else_but_health():
    for port, expected in ((8180, "not_found"), (9000, "not_found"), (9001, None)):
        assert code("/metrics", port=port, metrics_port=9001, control_port=9000) == expected
    for path in (DATA_ROUTE, CONTROL_ROUTE, "/ui", "/docs"):
        assert code(path, CONTROL, BOTH, port=9001, metrics_port=9001, control_port=9000) == "not_found"
        assert code(path, CONTROL, BOTH, port=9000, metrics_port=9001, control_port=9000) is None
    for path in ("/health", "/ready", "/liveness", "/version"):
        assert code(path, port=9001, metrics_port=9001) is None
        assert code(path, port=8180, metrics_port=9001) is None
    assert code("/metrics", port=8180, metrics_port=8180) is None, "the same port: there is no second one"


def test_a_server_with_a_metrics_port_answers_metrics_on_it(make_stack):
    server = make_stack(metrics_port=0).server
    assert server.http.get("/metrics").status_code == 404
    with httpx.Client(base_url=server.urls["metrics_port"], timeout=30) as metrics:
        assert "http_requests_total" in metrics.get("/metrics").text
        assert metrics.post("/v1/completions", json={"prompt": [97]}).status_code == 404


@pytest.mark.parametrize(
    ("values", "key"),
    [([b"Bearer abc"], b"abc"), ([b"bearer   abc "], b"abc"), ([], None), ([b"Basic abc"], None), ([b"abc"], None),
     ([b"Bearer"], b""), ([b"Bearer abc", b"Bearer abd"], None)],
)  # fmt: skip
def test_the_key_is_the_bearer_token_of_a_single_authorization_header(values, key):
    assert bearer_key([(b"host", b"x"), *((b"authorization", value) for value in values)]) == key


@pytest.fixture(scope="module")
def guarded(make_module_stack):
    """A stack with keys of both kinds and a control port."""
    stack = make_module_stack(keys=BOTH, control_port=0)
    stack.script(reply_with([97]))
    answer(stack, m.PauseArgs, {"paused": True})
    return stack


def test_missing_and_wrong_keys_are_a_401_in_openais_format(guarded):
    for headers in ({}, bearer(b"wrong"), {"authorization": "Basic " + DATA.decode()}):
        reply = guarded.http.post("/v1/completions", json={"prompt": [97]}, headers=headers)
        assert reply.status_code == 401 and reply.headers["www-authenticate"] == "Bearer"
        error = reply.json()["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
        assert "wrong" not in error["message"]


@pytest.mark.parametrize("path", ["/v1/pause", "/v1/pause/", "/v1/%70ause", "/pause", "/v1/update_weights"])
def test_an_api_key_opens_no_control_route_in_any_spelling_of_its_path(guarded, path):
    url = guarded.server.control_url + path
    assert httpx.post(url, json={}, timeout=30).status_code == 401
    reply = httpx.post(url, json={}, headers=bearer(DATA), timeout=30)
    assert reply.status_code == 403 and "control key" in reply.json()["error"]["message"]
    assert guarded.http.head("/flush_cache", headers=bearer(DATA)).status_code == 403


def test_a_route_with_a_parameter_has_the_class_of_the_route(guarded):
    for path in ("/v1/models/tiny", "/v1/models/a/b", "/v1/models//v1/pause"):
        assert (code(path, DATA, BOTH), code(path, None, BOTH)) == (None, "invalid_api_key")
        assert guarded.http.get(path).status_code == 401
        assert code(path, host="0.0.0.0") is None, "no control route"
    assert code("/v1/modelsx", DATA, BOTH) == "not_found"


def test_open_routes_need_no_key(guarded):
    for path in ("/health", "/liveness", "/ready", "/version", "/metrics", "/health_generate"):
        assert guarded.http.get(path).status_code == 200


def test_control_routes_are_answered_on_the_control_port_which_answers_all_routes(guarded):
    reply = guarded.http.post("/v1/pause", headers=bearer(CONTROL))
    port = guarded.server.control_url.rpartition(":")[2]
    assert reply.status_code == 403 and port in reply.json()["error"]["message"]
    with httpx.Client(base_url=guarded.server.control_url, headers=bearer(CONTROL), timeout=30) as control:
        assert control.post("/v1/pause").json()["result"] == {"paused": True}
        assert control.post("/v1/completions", json={"prompt": [97]}).status_code == 200
        assert control.get("/health").status_code == 200
    assert guarded.http.get("/v1/nothing", headers=bearer(CONTROL)).status_code == 404
    assert guarded.http.get("/v1/is_paused", headers=bearer(CONTROL)).status_code == 200


def test_server_info_contains_no_key(guarded):
    answer(guarded, m.WeightInfoArgs, {"version": "v", "weight_epoch": 1})
    for path in ("/server_info", "/get_server_info"):
        reply = guarded.http.get(path, headers=bearer(DATA))
        assert reply.status_code == 200
        assert not any(key.decode() in reply.text for key in (*BOTH.data, *BOTH.control))


def test_the_openai_package_sends_its_api_key(guarded):
    base_url = guarded.server.url + "/v1"
    with openai.OpenAI(base_url=base_url, api_key=DATA.decode(), max_retries=0) as client:
        assert client.completions.create(model="tiny", prompt=[97], max_tokens=1).choices[0].finish_reason == "length"
        assert client.models.list().data[0].id == "tiny"
    with openai.OpenAI(base_url=base_url, api_key="wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError) as info:
            client.completions.create(model="tiny", prompt=[97], stream=True)
        assert info.value.code == "invalid_api_key"
    client = openai.OpenAI(base_url=guarded.server.control_url, api_key=DATA.decode(), max_retries=0)
    with client, pytest.raises(openai.PermissionDeniedError):
        client.post("/pause", cast_to=object)


def test_a_request_without_a_key_is_refused_before_its_body_is_read(guarded):
    connection = http.client.HTTPConnection("127.0.0.1", guarded.http.base_url.port, timeout=20)
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("content-length", "1000000")
    connection.endheaders()
    reply = connection.getresponse()
    assert reply.status == 401 and reply.read()
    assert reply.headers["connection"] == "close", "the client need not send the body"
    connection.close()


@pytest.mark.parametrize(
    ("path", "headers"),
    [("/v1/update_weights", OCTETS), ("/v1/weights/chunk?session_id=s", OCTETS), ("/update_weights_from_tensor", {}),
     ("/v1/adapters/load?lora_name=a&config={}", OCTETS), ("/load_lora_adapter_from_tensors", {})],
)  # fmt: skip
def test_an_upload_to_an_exposed_server_needs_the_control_key(make_stack, path, headers):
    stack = make_stack(host="0.0.0.0", insecure_control=True, model_roots=("/",))
    for kind in (m.UpdateWeightsArgs, m.ResumeArgs):
        answer(stack, kind, {"weight_epoch": 1})
    for content in (b"tensors", iter([b"tensors"])):
        reply = stack.http.post(path, content=content, headers=headers)
        assert reply.status_code == 403 and "control key" in reply.json()["error"]["message"]
    assert stack.http.post("/resume", headers=OCTETS).status_code == 200, "aiohttp sends this type without a body"
    assert stack.post("/v1/update_weights", model_path="/checkpoints/1").status_code == 200


def test_an_exposed_server_without_a_key_names_the_flags_to_set(make_stack):
    stack = make_stack(host="0.0.0.0")
    stack.script(reply_with([97]))
    for path in ("/v1/pause", "/pause_generation", "/sleep", "/flush_cache"):
        reply = stack.post(path)
        assert reply.status_code == 403
        for name in ("--control-key", "FASTDEPLOY_CONTROL_KEY", "--insecure-control"):
            assert name in reply.json()["error"]["message"]
    assert stack.post("/v1/completions", prompt=[97]).status_code == 200
    assert not any(isinstance(message, m.Call) for message in stack.engine.seen.queue)
