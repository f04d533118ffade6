"""Control, health and error routes over real HTTP."""

from __future__ import annotations

import threading

import pytest

from fastdeploy.core.request_fields import AddRequest
from fastdeploy.inter_communicator import messages as m
from support.fake_engine_server import reply_with
from support.http_calls import answer, in_thread, wait_until

# Each wrong value of one field of a completion.
BAD_VALUES = [
    ("temperature", -1), ("temperature", "hot"), ("top_p", 0), ("top_k", -2), ("max_tokens", 0),
    ("min_tokens", 17), ("n", 0), ("logprobs", 1025), ("stop", [""]), ("stop", 3), ("stop", "x" * 257),
    ("cache_salt", "x" * 257), ("stop_token_ids", [-1]), ("seed", -2), ("tepmerature", 1), ("best_of", 2),
    ("echo", 2), ("suffix", "x"), ("logit_bias", {"1": 101}), ("bad_words", ["x" * 16385]), ("allowed_token_ids", []),
    ("prompt_logprobs", 1025), ("prompt_logprobs", True),
    ("logprobs_mode", "cooked"), ("resumed_tokens", -1), ("first_choice", -1), ("use_beam_search", True),
    ("return_routed_experts", True), ("top_k", 2**31), ("priority", 2**31), ("priority", -(10**30)),
    ("stop_token_ids", [1, 10**30]), ("max_tokens", 10**30), ("min_tokens", 10**30), ("seed", 10**30),
    ("logprobs", 10**30), ("n", 1025),
]  # fmt: skip
ERROR_CASES = [
    *(({"prompt": "a", field: value}, field) for field, value in BAD_VALUES),
    ({"prompt": "a", "stream_options": {"what": 1}}, "stream_options.what"), ({"prompt": []}, "prompt"),
    ({"prompt": ""}, "prompt"), ({}, "prompt"), ({"prompt": [1, 272]}, "prompt"), ({"prompt": [1, -1]}, "prompt"),
    ({"prompt": [[1], [1, 5000]]}, "prompt[1]"), ({"prompt": [1, "a"]}, "prompt"), ({"prompt": [1, True]}, "prompt"),
    ({"prompt": [1, 2], "resumed_tokens": 2}, "resumed_tokens"),
    ({"prompt": [[1, 2], [1, 2]], "resumed_tokens": 1}, "resumed_tokens"), ({"prompt": [10**30]}, "prompt"),
    ({"prompt": [[1]] * 5, "n": 1000}, "n"), ({"prompt": [[1]] * 4097}, "prompt"),
]  # fmt: skip
CHAT = {"messages": [{"role": "user", "content": "a"}]}
CHAT_ERROR_CASES = [
    ({"messages": []}, "messages"), ({}, "messages"), ({"messages": [{"content": "a"}]}, "messages.0.role"),
    ({"messages": [{"role": "evil", "content": "a"}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages.0.content.0"),
    (CHAT | {"tools": [{"type": "function"}]}, "tools"),
    (CHAT | {"tools": [{"type": "function"}], "tool_choice": "auto"}, "tools"),
    (CHAT | {"tools": [{"type": "function"}], "tool_choice": "required"}, "tools"),
    (CHAT | {"tools": ["search"], "tool_choice": "none"}, "tools.0"),
    (CHAT | {"chat_template": "{{ messages }}"}, "chat_template"),
    (CHAT | {"response_format": {"type": "xml"}}, "response_format.type"),
    (CHAT | {"top_logprobs": 2}, "top_logprobs"), (CHAT | {"max_completion_tokens": 0}, "max_completion_tokens"),
    (CHAT | {"max_completion_tokens": 10**30}, "max_completion_tokens"),
    (CHAT | {"logprobs": True, "top_logprobs": 10**30}, "top_logprobs"),
    *(
        (CHAT | {"chat_template_kwargs": {"mood": "x", key: "x"}}, f"chat_template_kwargs.{key}")
        for key in ("chat_template", "documents", "tools", "messages", "add_generation_prompt", "conversation",
                    "continue_final_message", "tokenize", "padding", "return_dict", "return_whatever")
    ),
]  # fmt: skip
HARMLESS = {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "parallel_tool_calls": True}
NEUTRAL = {
    "best_of": 1,
    "echo": False,
    "suffix": None,
    "logit_bias": {},
    "bad_words": [],
    "tools": [],
    "stop": None,
    "seed": None,
}


def assert_error(reply, status: int, code: str, param: str | None = None) -> None:
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert (error["code"], error["param"]) == (code, param)
    assert {"message", "type", "code", "param"} <= error.keys()
    assert int(reply.headers["content-length"]) == len(reply.content)
    assert reply.headers["content-type"] == "application/json"


@pytest.mark.parametrize(("body", "field"), ERROR_CASES, ids=lambda case: str(case)[:60])
def test_a_bad_completion_request_is_a_400_that_names_the_field(module_stack, body, field):
    reply = module_stack.post("/v1/completions", **body)
    assert_error(reply, 400, "invalid_field", field)
    assert reply.json()["error"]["message"].startswith(f"{field}: ")


@pytest.mark.parametrize(("body", "field"), CHAT_ERROR_CASES, ids=lambda case: str(case)[:60])
def test_a_bad_chat_request_is_a_400_that_names_the_field(module_stack, body, field):
    assert_error(module_stack.post("/v1/chat/completions", **body), 400, "invalid_field", field)


def test_harmless_fields_and_neutral_values_are_accepted(module_stack):
    module_stack.script(reply_with([97]))
    assert module_stack.post("/v1/completions", prompt="a", **HARMLESS, **NEUTRAL).status_code == 200
    assert module_stack.post("/v1/chat/completions", **CHAT, response_format={"type": "text"}).status_code == 200


def test_a_native_call_that_fails_has_fastdeploys_envelope_beside_the_error(module_stack):
    for reply in (module_stack.post("/v1/pause", mode="gently"), module_stack.post("/v1/update_weights")):
        assert reply.status_code == 400
        envelope, error = reply.json(), reply.json()["error"]
        assert (envelope["status"], envelope["result"]) == ("error", None)
        assert envelope["error_message"] == error["message"] and envelope["request_id"].startswith("control-")


def test_bodies_other_than_json_objects_and_unknown_paths_get_json_errors(module_stack):
    assert_error(module_stack.http.post("/v1/completions", content=b"{"), 400, "invalid_field", "body")
    assert_error(module_stack.http.post("/v1/completions", content=b"[1]"), 400, "invalid_field", "body")
    for path in ("/v1/completions", "/v1/pause"):
        reply = module_stack.http.post(path, content=b'{"prompt": ' + b"[" * 50000 + b"]" * 50000 + b"}")
        assert_error(reply, 400, "invalid_field", "body")
        assert "nested" in reply.json()["error"]["message"]
    assert_error(module_stack.http.get("/nope"), 404, "not_found")
    assert_error(module_stack.http.get("/v1/pause"), 405, "method_not_allowed")


def test_a_model_that_is_not_served_is_a_404_and_no_model_means_the_served_one(module_stack, model_dir):
    module_stack.script(reply_with([97]))
    assert_error(module_stack.post("/v1/completions", prompt="a", model="other"), 404, "model_not_found", "model")
    for model in ("tiny", model_dir, None):
        assert module_stack.post("/v1/completions", prompt="a", model=model).json()["model"] == "tiny"


def test_a_folder_without_a_tokenizer_serves_token_ids_only(make_stack):
    stack = make_stack(with_tokenizer=False)
    stack.script(reply_with([5, 6]))
    reply = stack.post("/v1/completions", prompt=[1], return_token_ids=True, logprobs=0).json()
    assert reply["choices"][0]["token_ids"] == [5, 6] and reply["choices"][0]["text"] == ""
    assert reply["choices"][0]["logprobs"]["tokens"] == ["token_id:5", "token_id:6"]
    assert_error(stack.post("/v1/completions", prompt="a"), 400, "invalid_field", "prompt")
    assert_error(stack.post("/v1/completions", prompt=[1], stop="a"), 400, "invalid_field", "stop")
    assert_error(stack.post("/v1/chat/completions", **CHAT), 400, "invalid_field", "messages")


def test_template_variables_reach_the_template(stack, tokenizer):
    stack.script(reply_with([97]))
    assert stack.post("/v1/chat/completions", **CHAT, chat_template_kwargs={"mood": "!"}).status_code == 200
    prompt = stack.engine.expect(AddRequest).prompt_token_ids
    assert tokenizer.decode(prompt, skip_special_tokens=False) == "<user>a!<bot>"


def test_tools_are_rendered_unless_their_calls_would_have_to_be_parsed(stack, tokenizer):
    """Rendering and tokenising generate no answer to parse, so they take tools with any tool_choice."""
    stack.script(reply_with([97]))
    search = {"type": "function", "function": {"name": "search", "parameters": {}}}
    body = CHAT | {"tools": [search], "tool_choice": "none", "structured_outputs": None}
    assert stack.post("/v1/chat/completions", **body).status_code == 200
    prompt = stack.engine.expect(AddRequest).prompt_token_ids
    assert tokenizer.decode(prompt, skip_special_tokens=False) == "<tools:search><user>a<bot>"
    for choice in ("none", "auto", None, {"type": "function", "function": {"name": "search"}}):
        body["tool_choice"] = choice
        assert stack.post("/v1/chat/completions/render", **body).json()["token_ids"] == prompt
        assert stack.post("/tokenize", **body).json()["tokens"] == prompt
    assert stack.post("/v1/chat/completions", **CHAT, tools=[], tool_choice="auto").status_code == 200


def test_arguments_of_earlier_tool_calls_reach_the_template_as_objects(make_stack, tokenizer):
    stack = make_stack(trust_request_chat_template=True)
    template = "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments.q }};{% endfor %}{% endfor %}"
    calls = [
        {"type": "function", "function": {"name": "f", "arguments": a}} for a in ('{"q": "x"}', {"q": "y"}, "no {")
    ]
    messages = [{"role": "assistant", "content": None, "tool_calls": calls}]
    reply = stack.post("/v1/chat/completions/render", messages=messages, chat_template=template)
    assert tokenizer.decode(reply.json()["token_ids"]) == "x;y;;"


def test_a_template_of_a_trusted_client_replaces_that_of_the_model(make_stack, tokenizer):
    stack = make_stack(trust_request_chat_template=True)
    stack.script(reply_with([97]))
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    assert stack.post("/v1/chat/completions", **CHAT, chat_template=template).status_code == 200
    assert tokenizer.decode(stack.engine.expect(AddRequest).prompt_token_ids) == "[a]"
    reply = stack.post("/v1/chat/completions", **CHAT, chat_template="{% for %}")
    assert_error(reply, 400, "invalid_field", "chat_template")


def test_templates_run_in_another_thread_and_their_errors_name_the_field(module_stack, tokenizer, monkeypatch):
    threads = []

    def fail(*args, **kwargs):
        threads.append(threading.current_thread())
        raise ZeroDivisionError

    monkeypatch.setattr(tokenizer._hf, "apply_chat_template", fail)
    assert_error(module_stack.post("/v1/chat/completions", **CHAT), 400, "invalid_field", "messages")
    reply = module_stack.post("/v1/chat/completions", **CHAT, chat_template_kwargs={"mood": 1})
    assert_error(reply, 400, "invalid_field", "chat_template_kwargs")
    assert module_stack.server._thread not in threads


def test_a_text_that_no_context_can_hold_is_refused_without_tokenising(module_stack, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "encode_now", None)
    assert_error(module_stack.post("/v1/completions", prompt="a " * 5000), 400, "context_length_exceeded", "prompt")


def test_more_choices_than_the_queue_of_the_engine_holds_are_a_400(stack):
    stack.script(reply_with([97]))
    stack.server.client.model_info["max_waiting"] = 2
    assert_error(stack.post("/v1/completions", prompt="a", n=3), 400, "invalid_field", "n")
    assert_error(stack.post("/v1/chat/completions", **CHAT, n=3), 400, "invalid_field", "n")
    assert stack.post("/v1/completions", prompt="a", n=2).status_code == 200


def test_pause_takes_a_body_a_query_or_nothing(module_stack):
    answer(module_stack, m.PauseArgs, {"state": "paused"})
    full = {"mode": "wait", "clear_cache": True, "admission": "hold", "timeout_s": 5.0, "on_timeout": "cancel",
            "ttl_s": 9.0, "hold_id": "mine"}  # fmt: skip
    query = {name: str(value).lower() for name, value in full.items()}
    for path, fields in (
        ("/v1/pause", {"json": full}),
        ("/v1/pause", {"params": query}),
        ("/v1/pause/", {"params": {"mode": "keep"}, "json": full}),
    ):
        reply = module_stack.http.post(path, **fields).json()
        assert reply["status"] == "success" and reply["error_message"] is None and reply["request_id"]
        assert reply["result"] == {"state": "paused"}
        assert module_stack.engine.expect(m.PauseArgs).args == m.PauseArgs(**full)
    module_stack.http.post("/v1/pause")
    assert module_stack.engine.expect(m.PauseArgs).args == m.PauseArgs()
    assert module_stack.post("/v1/pause", **dict.fromkeys(full)).status_code == 200
    assert module_stack.engine.expect(m.PauseArgs).args == m.PauseArgs()


@pytest.mark.parametrize(
    ("field", "value"),
    [("mode", "stop"), ("admission", "x"), ("timeout_s", -1), ("on_timeout", "x"), ("ttl_s", 0), ("hold_id", ""),
     ("clear_cache", "maybe"), ("lora_name", ""), ("lora_name", 1), ("tiemout", 1)],
)  # fmt: skip
def test_a_bad_pause_is_a_400_that_names_the_field(module_stack, field, value):
    assert_error(module_stack.post("/v1/pause", **{field: value}), 400, "invalid_field", field)


@pytest.mark.parametrize(
    "path", ["sleep", "wakeup", "reset", "update_weights", "weights/begin", "weights/commit", "weights/abort"]
)
def test_a_call_that_concerns_the_whole_engine_is_refused_for_an_adapter(module_stack, path):
    reply = module_stack.post(f"/v1/{path}", lora_name="a", model_path="/x")
    assert_error(reply, 400, "invalid_field", "lora_name")
    assert_error(module_stack.http.post(f"/v1/{path}?lora_name=a"), 400, "invalid_field", "lora_name")


@pytest.mark.parametrize(
    ("path", "fields", "args"),
    [("pause", {"mode": "keep"}, m.PauseArgs("keep", scope="adapter:a")),
     ("resume", {}, m.ResumeArgs(scope="adapter:a")),
     ("resume", {"hold_id": "h"}, m.ResumeArgs("h", scope="adapter:a")),
     ("renew", {"hold_id": "h", "ttl_s": 2.0}, m.RenewArgs("h", 2.0, scope="adapter:a")),
     ("is_paused", {}, m.PauseStatusArgs("adapter:a")),
     ("abort_requests", {}, m.AbortArgs(lora_name="a"))],
)  # fmt: skip
def test_a_call_names_its_adapter_in_the_body_or_in_the_query(module_stack, path, fields, args):
    answer(module_stack, type(args), {"lora_name": "a"})
    method = "GET" if path == "is_paused" else "POST"
    for sent in ({"json": {"lora_name": "a", **fields}}, {"params": {"lora_name": "a", **fields}}):
        reply = module_stack.http.request(method, f"/v1/{path}", **sent)
        assert reply.json()["result"] == {"lora_name": "a"}
        assert module_stack.engine.expect(type(args)).args == args


def test_a_call_for_an_unknown_adapter_is_a_404(module_stack):
    unknown = m.Failure("model_not_found", "lora_name: there is no adapter 'b'", {"param": "lora_name"})
    answer(module_stack, m.PauseArgs, failure=unknown)
    assert_error(module_stack.post("/v1/pause", lora_name="b"), 404, "model_not_found", "lora_name")


def test_resume_and_is_paused(module_stack):
    answer(module_stack, m.ResumeArgs, {"state": "running"})
    assert module_stack.post("/v1/resume", hold_id="h").json()["result"] == {"state": "running"}
    assert module_stack.engine.expect(m.ResumeArgs).args.hold_id == "h"
    assert module_stack.http.post("/v1/resume/").status_code == 200
    answer(module_stack, m.PauseStatusArgs, {"is_paused": False})
    for path in ("/v1/is_paused", "/v1/is_paused/"):
        reply = module_stack.http.request("GET", path, json={"lora_name": None})
        assert reply.json()["result"]["is_paused"] is False
        assert module_stack.engine.expect(m.PauseStatusArgs).args == m.PauseStatusArgs()


def test_abort_requests_needs_ids_or_all_or_an_adapter(module_stack):
    answer(module_stack, m.AbortArgs, {"aborted": [], "not_found": ["x"]})
    assert_error(module_stack.http.post("/v1/abort_requests"), 400, "invalid_field", "req_ids")
    assert module_stack.post("/v1/abort_requests", req_ids=["x"]).json()["result"]["not_found"] == ["x"]
    assert module_stack.engine.expect(m.AbortArgs).args == m.AbortArgs(request_ids=["x"])
    module_stack.post("/v1/abort_requests", abort_all=True)
    assert module_stack.engine.expect(m.AbortArgs).args == m.AbortArgs(abort_all=True)
    for params in ({"req_ids": ["x", "y"]}, {"req_ids": "x"}):
        module_stack.http.post("/v1/abort_requests", params=params, json={"abort_all": None})
        assert module_stack.engine.expect(m.AbortArgs).args == m.AbortArgs(request_ids=list(params["req_ids"]))
    one_of = {"abort_all": True, "req_ids": ["x"], "lora_name": "a"}
    for left_out in (*one_of, None):
        both = module_stack.post("/v1/abort_requests", **one_of | ({left_out: None} if left_out else {}))
        assert_error(both, 400, "invalid_field", "req_ids")
        assert all(field in both.json()["error"]["message"] for field in one_of)


def test_a_failed_pause_is_answered_with_its_status_and_the_report(stack):
    answer(stack, m.PauseArgs, {"state": "running"}, m.Failure("pause_timeout", "still running", {}))
    reply = stack.post("/v1/pause", mode="wait")
    assert_error(reply, 504, "pause_timeout")
    assert reply.json()["error"]["report"] == {"state": "running"}


def test_an_open_pause_is_answered_when_the_engine_dies(stack):
    stack.engine.replies[m.PauseArgs] = lambda call: None
    reply = in_thread(stack.post, "/v1/pause", timeout_s=600)
    stack.engine.expect(m.PauseArgs)
    stack.engine.die()
    assert_error(reply.result(30), 503, "engine_dead")
    stack.restart_engine()


def test_a_stalled_engine_is_a_504(make_stack):
    stack = make_stack(stall_s=0.2)
    stack.engine.replies[m.MetricsArgs] = lambda call: None
    stack.engine.beating = False
    assert_error(stack.http.get("/metrics"), 504, "engine_stalled")
    stack.engine.beating = True


def test_health_and_ready_while_paused_rejecting_dead_and_restarted(stack):
    def statuses() -> tuple[int, int]:
        assert stack.http.get("/liveness").status_code == stack.http.get("/health").status_code, "for prime-rl's probes"
        return tuple(stack.http.get(path).status_code for path in ("/health", "/ready"))

    assert statuses() == (200, 200)
    stack.engine.status |= {"is_paused": True, "rejecting_new_requests": True, "admission": "hold"}
    assert statuses() == (200, 200), "a router must not evict a server that only holds requests"
    stack.engine.status |= {"admission": "reject"}
    assert statuses() == (200, 503)
    boot = stack.http.get("/health").json()["boot_id"]
    stack.engine.die()
    wait_until(lambda: stack.http.get("/health").status_code == 503)
    assert statuses() == (503, 503)
    assert_error(stack.http.get("/v1/models"), 503, "engine_dead")
    stack.restart_engine(boot_id="boot-2")
    stack.server.wait_connected()
    assert stack.http.get("/health").json()["boot_id"] == "boot-2" != boot


def test_models_metrics_and_version(module_stack):
    model = module_stack.http.get("/v1/models").json()["data"][0]
    assert (model["id"], model["max_model_len"]) == ("tiny", 128)
    metrics = module_stack.http.get("/metrics/")
    assert "\nfastdeploy:" in metrics.text and metrics.headers["content-type"].startswith("text/plain")
    assert module_stack.http.get("/version").json()["version"]


def test_connections_stay_open_for_longer_than_two_seconds(module_stack):
    assert module_stack.server._server.config.timeout_keep_alive > 2
