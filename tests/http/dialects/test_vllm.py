"""vLLM's generation, control and information routes over real HTTP, before a scripted engine."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from fastdeploy.core.request_fields import AddRequest
from fastdeploy.inter_communicator import messages as m
from support.fake_engine_server import one_output, replace, reply_with
from support.http_calls import answer, events, refused

HELLO = list(b"hey you")
LABEL = {"version": "step-7", "weight_epoch": 3, "boot_id": "boot-1", "session": None, "asleep": []}


def generate(stack, token_ids=(1, 2, 3), headers=None, **body) -> httpx.Response:
    return stack.http.post("/inference/v1/generate", json={"token_ids": list(token_ids), **body}, headers=headers)


# ---------------------------------------------------------------------- generate


def test_a_generation_has_the_shape_that_skyrl_and_trl_read(stack):
    stack.script(reply_with(HELLO, version="step-7"))
    sampling = {"max_tokens": 7, "temperature": 0.8, "logprobs": 2, "output_kind": 2, "n": 1}
    reply = generate(stack, sampling_params=sampling, model="tiny", request_id="mine", priority=1, cache_salt="s")
    assert int(reply.headers["content-length"]) == len(reply.content)
    body = reply.json()
    assert body["request_id"] == "mine"
    assert body["prompt_logprobs"] is None
    (choice,) = body["choices"]
    assert (choice["index"], choice["token_ids"], choice["finish_reason"]) == (0, HELLO, "length")
    content = choice["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == [-0.5] * 7
    assert [entry["token"] for entry in content] == [f"token_id:{token}" for token in HELLO]
    assert [[top["token"] for top in entry["top_logprobs"]] for entry in content] == [["token_id:0", "token_id:1"]] * 7
    assert choice["weight_versions"] == [{"version": "step-7", "weight_epoch": 1, "start": 0, "end": 7}]
    assert "prompt_token_ids" not in choice and "text" not in choice
    assert body["usage"]["completion_tokens"] == 7
    add = stack.engine.expect(AddRequest)
    assert (add.request_id, add.prompt_token_ids, add.priority, add.cache_salt) == ("mine", [1, 2, 3], 1, "s")
    assert (add.sampling.max_tokens, add.sampling.temperature, add.sampling.logprobs) == (7, 0.8, 2)


def test_every_sampling_parameter_reaches_the_engine(stack):
    stack.script(reply_with([97]))
    same = {"temperature": 0.5, "top_p": 0.9, "top_k": 4, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 1,
            "presence_penalty": 0.2, "frequency_penalty": 0.3, "ignore_eos": True, "seed": 7,
            "max_tokens": 5}  # fmt: skip
    harmless = {"skip_special_tokens": False, "detokenize": True, "output_kind": 0,
                "spaces_between_special_tokens": True, "routed_experts_prompt_start": 3}  # fmt: skip
    neutral = {"stop": None, "bad_words": [], "logit_bias": None, "structured_outputs": None, "extra_args": None,
               "truncate_prompt_tokens": None, "unheard_of": None}  # fmt: skip
    reply = generate(stack, sampling_params={**same, **harmless, **neutral, "stop_token_ids": [3]}, features=None)
    assert reply.status_code == 200, reply.text
    sampling = stack.engine.expect(AddRequest).sampling
    assert {name: getattr(sampling, name) for name in same} == same
    assert sampling.stop_token_ids == (3,)


def test_without_max_tokens_the_context_is_the_limit(stack):
    """As in vLLM's route. The default of its SamplingParams is 16."""
    stack.script(reply_with([97]))
    for params in ({}, {"max_tokens": None}):
        generate(stack, sampling_params=params)
        assert stack.engine.expect(AddRequest).sampling.max_tokens == 125


def test_logprobs_are_null_unless_asked_for(stack):
    stack.script(reply_with([97]))
    assert generate(stack, sampling_params={}).json()["choices"][0]["logprobs"] is None
    assert stack.engine.expect(AddRequest).sampling.logprobs is None


def test_n_samples_are_n_choices(stack):
    stack.script(reply_with([97, 98]))
    choices = generate(stack, sampling_params={"n": 3, "logprobs": 0}).json()["choices"]
    assert [(c["index"], c["token_ids"], len(c["logprobs"]["content"])) for c in choices] == [
        (i, [97, 98], 2) for i in range(3)
    ]


@pytest.mark.parametrize("ids", [[], [97, 98]], ids=["before the first token", "after two"])
def test_an_aborted_request_is_a_200_with_aligned_arrays(stack, ids):
    stack.script(lambda request: [replace(one_output(request, 0, ids, 0), finish_reason="abort", message="paused")])
    reply = generate(stack, sampling_params={"logprobs": 0})
    assert reply.status_code == 200
    choice = reply.json()["choices"][0]
    assert (choice["finish_reason"], choice["token_ids"]) == ("abort", ids)
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == [-0.5] * len(ids)


def test_a_stream_adds_tokens_and_ends_with_done(stack):
    stack.script(reply_with(HELLO, version="step-7", step=3))
    reply = generate(stack, stream=True, sampling_params={"logprobs": 0}, request_id="s")
    *streamed, done = events(reply)
    assert done == "[DONE]"
    assert {event["request_id"] for event in streamed} == {"s"}
    choices = [event["choices"][0] for event in streamed]
    assert sum((choice["token_ids"] for choice in choices), []) == HELLO
    assert [len(choice["logprobs"]["content"]) for choice in choices] == [3, 3, 1]
    assert [choice["finish_reason"] for choice in choices] == [None, None, "length"]
    assert [span["start"] for choice in choices for span in choice["weight_versions"]] == [0, 3, 6]


@pytest.mark.parametrize("session", ["0", "7", "trajectory-1"])
def test_session_id_0_is_valid(stack, session):
    """known failure 32"""
    stack.script(reply_with(HELLO))
    reply = generate(stack, sampling_params={}, headers={"X-Session-ID": session})
    assert reply.json()["choices"][0]["token_ids"] == HELLO
    for how in ({"params": {"session_id": session}}, {"json": {"session_id": session}}):
        reply = stack.http.post("/finish_session", **how)
        assert (reply.status_code, str(reply.json()["session_id"])) == (200, session)
    refused(stack.http.post("/finish_session"), "session_id")


@pytest.mark.parametrize(
    ("field", "value"),
    [("features", {"mm_hashes": {"image": ["x"]}}), ("kv_transfer_params", {"a": 1}), ("unheard_of", 1),
     ("return_routed_experts", True), ("token_ids", []), ("token_ids", ["a"]), ("token_ids", [10**6])],
)  # fmt: skip
def test_a_field_that_would_change_the_data_is_refused_by_name(module_stack, field, value):
    """known failure 34"""
    name = "prompt" if value == [10**6] else field
    refused(module_stack.post("/inference/v1/generate", **({"token_ids": [1]} | {field: value})), name)


@pytest.mark.parametrize(
    ("field", "value"),
    [("best_of", 2), ("allowed_token_ids", []), ("extra_args", {"a": 1}), ("unheard_of", 1), ("top_p", 2),
     ("max_tokens", 0)],
)  # fmt: skip
def test_a_sampling_parameter_that_cannot_be_honoured_is_refused_by_name(module_stack, field, value):
    refused(generate(module_stack, sampling_params={field: value}), field)


@pytest.mark.parametrize("field", ["prompt", "model", "stream", "token_ids"])
def test_a_field_of_the_request_inside_sampling_params_is_refused(module_stack, field):
    refused(generate(module_stack, sampling_params={field: "x"}), f"sampling_params.{field}")


def test_another_model_is_a_404_and_a_missing_one_the_default(stack):
    stack.script(reply_with(HELLO))
    assert generate(stack, model="my-adapter").status_code == 404
    assert generate(stack).status_code == 200


# ---------------------------------------------------------------------- pause, resume, abort


@pytest.mark.parametrize(
    ("query", "mode", "clear_cache"),
    [("", "wait", True), ("?mode=keep", "keep", True), ("?mode=keep&clear_cache=false", "keep", False),
     ("?mode=abort&clear_cache=True", "abort", True), ("?mode=wait&clear_cache=0", "wait", False),
     ("?wait_for_inflight_requests=true", "wait", True)],
)  # fmt: skip
def test_a_pause_holds_new_requests_and_never_escalates_to_abort(make_stack, query, mode, clear_cache):
    """By default the caches are cleared, those of frozen requests too. TRL relies on this default of vLLM."""
    stack = make_stack(vllm_pause_mode="wait")
    answer(stack, m.PauseArgs, {"state": "paused"})
    reply = stack.http.post("/pause" + query)
    assert reply.json() == {"status": "paused", "report": {"state": "paused"}}
    args = stack.engine.expect(m.PauseArgs).args
    assert (args.mode, args.clear_cache) == (mode, clear_cache)
    assert (args.admission, args.on_timeout, args.placed_by, args.hold_id) == ("hold", "keep", "vllm", None)


def test_the_fields_of_a_pause_may_be_a_body_and_the_path_end_in_a_slash(stack):
    answer(stack, m.PauseArgs, {})
    assert stack.http.post("/pause/", json={"mode": "keep", "clear_cache": False}).status_code == 200
    args = stack.engine.expect(m.PauseArgs).args
    assert (args.mode, args.clear_cache) == ("keep", False)


@pytest.mark.parametrize("path", ["/pause?mode=freeze", "/pause?clear_cache=maybe", "/pause?lora_name=a"])
def test_a_wrong_pause_is_refused_by_name(module_stack, path):
    refused(module_stack.http.post(path), path.split("?")[1].split("=")[0])


def test_resume_and_is_paused(stack):
    answer(stack, m.ResumeArgs, {"state": "running", "still_held_by": []})
    assert stack.http.post("/resume").json()["status"] == "resumed"
    assert stack.engine.expect(m.ResumeArgs).args.hold_id is None
    assert stack.http.post("/resume", json={}).status_code == 200
    assert stack.http.get("/is_paused").json()["is_paused"] is False
    answer(stack, m.ResumeArgs, failure=m.Failure("resume_refused", "no whole weights"))
    reply = stack.http.post("/resume")
    assert (reply.status_code, reply.json()["error"]["code"]) == (409, "resume_refused")


def test_abort_requests_takes_the_clients_ids_and_says_what_it_did_not_find(stack):
    """known failure 11"""
    done = {"aborted": [{"request_id": "a", "output_token_count": 2}], "not_found": ["b"]}
    answer(stack, m.AbortArgs, done)
    reply = stack.post("/abort_requests", request_ids=["a", "b"]).json()
    assert (reply["status"], reply["aborted"], reply["not_found"]) == ("aborted", 1, ["b"])
    assert stack.engine.expect(m.AbortArgs).args == m.AbortArgs(request_ids=["a", "b"])
    assert stack.post("/inference/v1/abort_requests", request_ids=["a", "b"]).json() == done
    assert stack.engine.expect(m.AbortArgs).args == m.AbortArgs(request_ids=["a", "b"])


@pytest.mark.parametrize("how", [{"json": {"request_ids": []}}, {"json": {}}, {}])
def test_an_abort_without_ids_aborts_every_request(stack, how):
    answer(stack, m.AbortArgs, {"aborted": [], "not_found": []})
    assert stack.http.post("/abort_requests", **how).json()["aborted"] == 0
    assert stack.engine.expect(m.AbortArgs).args == m.AbortArgs(abort_all=True)


def test_an_abort_with_a_misspelled_field_is_refused(module_stack):
    refused(module_stack.post("/abort_requests", request_id="a"), "request_id")
    refused(module_stack.post("/abort_requests", request_ids="a"), "request_ids")
    refused(module_stack.post("/inference/v1/abort_requests"), "request_ids")


# ---------------------------------------------------------------------- caches and memory


@pytest.mark.parametrize(
    ("how", "running"),
    [({}, False), ({"json": {"reset_running_requests": True}}, True),
     ({"params": {"reset_running_requests": "True"}}, True), ({"params": {"reset_running_requests": "false"}}, False)],
)  # fmt: skip
def test_the_prefix_cache_is_reset_in_every_state(stack, how, running):
    """known failure 29"""
    stack.engine.status["is_paused"] = True
    answer(stack, m.ResetCacheArgs, {"success": True, "requests_to_recompute": 2})
    reply = stack.http.post("/reset_prefix_cache", **how)
    assert reply.json() == {"success": True, "requests_to_recompute": 2}
    assert stack.engine.expect(m.ResetCacheArgs).args.running is running


@pytest.mark.parametrize(
    ("how", "expected"),
    [({}, (("weight", "kv_cache"), "keep", False)),
     ({"params": {"level": "2"}}, (("weight", "kv_cache"), "keep", True)),
     ({"params": {"level": "2", "tags": ["kv_cache"]}}, (("kv_cache",), "keep", False)),
     ({"params": {"tags": ["weights", "kv_cache"], "mode": "wait"}}, (("weight", "kv_cache"), "wait", False)),
     ({"params": {"tags": "weights,kv_cache"}}, (("weight", "kv_cache"), "keep", False)),
     ({"json": {"level": 2, "tags": ["weights"]}}, (("weight",), "keep", True))],
)  # fmt: skip
def test_sleep_takes_every_form_its_clients_send(make_stack, how, expected):
    stack = make_stack(vllm_pause_mode="keep")
    answer(stack, m.WeightInfoArgs, LABEL)
    answer(stack, m.SleepArgs, {"asleep": ["kv_cache"], "freed_bytes": 5})
    assert stack.http.post("/sleep", **how).json()["freed_bytes"] == 5
    args = stack.engine.expect(m.SleepArgs).args
    assert (args.tags, args.mode, args.discard) == expected


def test_to_sleep_while_asleep_and_to_wake_while_awake_are_no_errors(stack):
    answer(stack, m.WeightInfoArgs, LABEL | {"asleep": ["kv_cache", "weight"]})
    assert stack.http.post("/sleep").json() == {"status": "sleeping", "asleep": ["kv_cache", "weight"]}
    assert stack.http.get("/is_sleeping").json()["is_sleeping"] is True
    answer(stack, m.WeightInfoArgs, LABEL)
    assert stack.http.post("/wake_up").json() == {"status": "awake", "asleep": []}
    assert stack.http.get("/is_sleeping").json()["is_sleeping"] is False
    assert {type(call.args) for call in stack.engine.seen.queue} == {m.WeightInfoArgs}


def test_two_calls_to_sleep_at_the_same_time_are_no_error(stack):
    """The engine refuses to let sleep what sleeps."""
    asleep: list[str] = []

    def tell(call: m.Call) -> m.Reply:
        time.sleep(0.2)  # the other call comes meanwhile
        return m.Reply(call.call_id, LABEL | {"asleep": list(asleep)})

    def fall_asleep(call: m.Call) -> m.Reply:
        failure = m.Failure("wrong_order", "kv_cache sleeps already") if asleep else None
        asleep.extend(call.args.tags)
        return m.Reply(call.call_id, {"asleep": asleep}, failure)

    stack.engine.replies |= {m.WeightInfoArgs: tell, m.SleepArgs: fall_asleep}
    with ThreadPoolExecutor(2) as threads:
        replies = list(threads.map(stack.http.post, ["/sleep"] * 2))
    assert [reply.status_code for reply in replies] == [200, 200]


def test_a_wake_up_skips_tags_that_do_not_sleep(stack):
    answer(stack, m.WeightInfoArgs, LABEL | {"asleep": ["kv_cache", "weight"]})
    answer(stack, m.WakeArgs, {"asleep": ["kv_cache"]})
    assert stack.http.post("/wake_up?tags=weights").json()["asleep"] == ["kv_cache"]
    assert stack.engine.expect(m.WakeArgs).args.tags == ("weight",)
    answer(stack, m.WeightInfoArgs, LABEL | {"asleep": ["kv_cache"]})
    stack.http.post("/wake_up", params={"tags": ["weights", "kv_cache"]})
    assert stack.engine.expect(m.WakeArgs).args.tags == ("kv_cache",)


@pytest.mark.parametrize("path", ["/sleep?tags=cuda", "/wake_up?tags=cuda", "/sleep?level=3", "/sleep?level=x"])
def test_memory_that_does_not_exist_is_refused_by_name(module_stack, path):
    answer(module_stack, m.WeightInfoArgs, LABEL)
    refused(module_stack.http.post(path), path.split("?")[1].split("=")[0])


# ---------------------------------------------------------------------- information


def test_get_world_size_takes_a_get_with_a_body(module_stack):
    reply = module_stack.http.request("GET", "/get_world_size", json={})
    assert reply.json() == {"world_size": 1}
    assert int(reply.headers["content-length"]) == len(reply.content)


def test_server_info_has_what_trl_and_sglangs_clients_read(stack):
    answer(stack, m.WeightInfoArgs, LABEL)
    info = stack.http.get("/server_info", params={"config_format": "json"}).json()
    config = info["vllm_config"]
    assert config["model_config"]["dtype"] == "torch.float32"
    assert config["model_config"]["max_model_len"] == 128
    assert config["weight_transfer_config"] is None
    assert config["parallel_config"]["data_parallel_size"] == 1
    assert (info["tp_size"], info["weight_version"], info["world_size"]) == (1, "step-7", 1)
    assert isinstance(stack.http.get("/server_info").json()["vllm_config"], str)


@pytest.mark.parametrize("version", ["step-8", 8])
def test_a_new_version_is_a_label_and_aborts_nothing(stack, version):
    """known failure 26"""
    answer(stack, m.SetVersionArgs)
    reply = stack.post("/update_weight_version", new_version=version, abort_all_requests=True).json()
    assert (reply["success"], reply["new_version"], reply["weight_version"]) == (True, str(version), str(version))
    calls = [call.args for call in list(stack.engine.seen.queue) if isinstance(call, m.Call)]
    assert calls == [m.SetVersionArgs(str(version))]
    reply = stack.post("/update_weight_version")
    refused(reply, "new_version")
    assert reply.json()["success"] is False


def test_weight_info(stack):
    answer(stack, m.WeightInfoArgs, LABEL)
    info = stack.http.get("/weight_info").json()
    assert (info["weight_version"], info["weight_epoch"]) == ("step-7", 3)


def test_the_weight_checker_tells_checksums_and_compares_them(stack):
    sums = {"a": "11", "b": "22"}
    answer(stack, m.WeightInfoArgs, LABEL | {"checksums": sums, "checksum": "33"})
    assert stack.post("/weight_checker", action="checksum").json()["checksums"] == sums
    assert stack.engine.expect(m.WeightInfoArgs).args.checksums is True
    same = stack.post("/weight_checker", action="compare", baseline=sums).json()
    assert same == {"match": True, "mismatches": []}
    other = stack.post("/weight_checker", action="compare", baseline={"a": "11", "b": "0", "c": "1"}).json()
    assert other == {"match": False, "mismatches": ["b", "c"]}
    refused(stack.post("/weight_checker", action="reset"), "action")
    refused(stack.post("/weight_checker", action="compare"), "baseline")


# ---------------------------------------------------------------------- text


def test_tokenize_and_detokenize(module_stack):
    reply = module_stack.post("/tokenize", model="tiny", prompt="hello", add_special_tokens=False).json()
    assert (reply["tokens"], reply["count"], reply["max_model_len"]) == ([259], 1, 128)
    assert module_stack.post("/detokenize", model="tiny", tokens=HELLO).json() == {"prompt": "hey you"}
    assert module_stack.post("/detokenize", tokens=[]).json() == {"prompt": ""}
    refused(module_stack.post("/tokenize"), "prompt")
    refused(module_stack.post("/detokenize", tokens=[10**6]), "tokens")
    refused(module_stack.post("/detokenize", tokens=["a"]), "tokens")
    assert module_stack.post("/detokenize", tokens=[97] * 128).status_code == 200
    for tokens in (129, 70000):
        error = module_stack.post("/detokenize", tokens=[97] * tokens).json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", "tokens")


def test_an_adapter_has_the_tokenizer_of_the_base_model(module_stack):
    for model in ("tiny", "an-adapter"):
        assert module_stack.post("/tokenize", model=model, prompt="hello").json()["tokens"] == [259]
        assert module_stack.post("/detokenize", model=model, tokens=HELLO).json() == {"prompt": "hey you"}
        chat = {"model": model, "messages": [{"role": "user", "content": "hello"}]}
        assert module_stack.post("/v1/chat/completions/render", **chat).json()["model"] == model


def test_render_and_tokenize_return_the_prompt_of_a_chat(stack):
    stack.script(reply_with(HELLO))
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
    stack.post("/v1/chat/completions", **chat)
    expected = stack.engine.expect(AddRequest).prompt_token_ids
    rendered = stack.post("/v1/chat/completions/render", **chat, max_tokens=1, temperature=0.5).json()
    assert (rendered["token_ids"], rendered["features"]) == (expected, None)
    assert rendered["sampling_params"] == {"max_tokens": 1, "temperature": 0.5}
    assert stack.post("/tokenize", **chat).json()["tokens"] == expected
    assert stack.engine.seen.empty()
    images = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    refused(stack.post("/v1/chat/completions/render", messages=images), "messages")
