"""SGLang's generation and control routes over real HTTP, before a scripted engine."""

from __future__ import annotations

import base64

import httpx
import numpy as np
import pytest

from fastdeploy.client import generation as client_generation
from fastdeploy.core.outputs import Logprob
from fastdeploy.core.request_fields import AddRequest, part_id
from fastdeploy.inter_communicator import messages as m
from support.fake_engine_server import one_output, replace, reply_with
from support.http_calls import answer, events, refused, wait_until

HELLO = list(b"hey you")
LABEL = {"version": "step-7", "weight_epoch": 3, "boot_id": "boot-1"}
COUNTS = {"running": 2, "frozen": 1, "queued": 4}
# Parameters that slime's rollout sends with every top_p below 1.
KEEP = {"top_p": 0.9, "custom_params": {"return_top_p_token_ids": True}}
RAW_KEEP = {**KEEP, "logprobs_mode": "raw"}


def generate(stack, **body) -> httpx.Response:
    return stack.post("/generate", **body)


# ---------------------------------------------------------------------- shapes


def test_a_generation_has_the_shape_that_slime_and_areal_read(stack):
    stack.script(reply_with(HELLO, version="step-7"))
    sampling = {"max_new_tokens": 7, "temperature": 0.8}
    reply = generate(stack, input_ids=[1, 2, 3], sampling_params=sampling, return_logprob=True, rid="mine")
    assert int(reply.headers["content-length"]) == len(reply.content)
    body = reply.json()
    assert (body["text"], body["output_ids"]) == ("hey you", HELLO)
    meta = body["meta_info"]
    assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == ("mine", 3, 7, 2)
    assert meta["finish_reason"] == {"type": "length", "length": 7}
    assert meta["output_token_logprobs"] == [[-0.5, token, None] for token in HELLO]
    assert meta["input_token_logprobs"] == []
    assert meta["weight_version"] == "step-7"
    assert meta["weight_versions"] == [{"version": "step-7", "weight_epoch": 1, "start": 0, "end": 7}]
    add = stack.engine.expect(AddRequest)
    assert (add.request_id, add.prompt_token_ids, add.sampling.logprobs) == ("mine", [1, 2, 3], 0)


def test_a_prompt_can_be_text_and_logprobs_can_hold_the_text_of_each_token(stack):
    stack.script(reply_with(HELLO))
    asked = {"return_logprob": True, "top_logprobs_num": 2, "return_text_in_logprobs": True}
    meta = generate(stack, text="hello", **asked).json()["meta_info"]
    assert stack.engine.expect(AddRequest).prompt_token_ids == [259]
    assert [entry[2] for entry in meta["output_token_logprobs"]] == list("hey you")
    assert [len(entry) for entry in meta["output_top_logprobs"]] == [2] * 7


def test_without_return_logprob_none_are_computed_or_sent(stack):
    stack.script(reply_with(HELLO))
    meta = generate(stack, input_ids=[1]).json()["meta_info"]
    assert "output_token_logprobs" not in meta
    assert stack.engine.expect(AddRequest).sampling.logprobs is None


def test_sampling_parameters_have_sglangs_defaults(stack):
    stack.script(reply_with([97]))
    for params, expected in (({}, 126), ({"max_new_tokens": 9}, 9)):
        generate(stack, input_ids=[1, 2], sampling_params=params)
        sampling = stack.engine.expect(AddRequest).sampling
        assert (sampling.max_tokens, sampling.temperature, sampling.top_k) == (expected, 1.0, 0)
        assert sampling.logprobs_mode == "temperature"
    generate(stack, input_ids=[1], sampling_params={"max_new_tokens": 1, "logprobs_mode": "raw"})
    assert stack.engine.expect(AddRequest).sampling.logprobs_mode == "raw"


def test_the_default_of_max_new_tokens_is_128(stack):
    stack.engine.die()
    wait_until(lambda: stack.server.http.get("/health").status_code != 200)
    stack.restart_engine(script=reply_with([97]), max_model_len=1000)
    stack.server.wait_connected()
    for params, expected in ((None, 128), ({}, 128), ({"max_new_tokens": None}, 998)):
        generate(stack, input_ids=[1, 2], sampling_params=params)
        assert stack.engine.expect(AddRequest).sampling.max_tokens == expected


def test_sampling_parameters_reach_the_engine(stack):
    stack.script(reply_with([97]))
    same = {"temperature": 0.5, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 0.2,
            "frequency_penalty": 0.3, "ignore_eos": True}  # fmt: skip
    own = {"max_new_tokens": 5, "min_new_tokens": 1, "top_k": -1, "stop_token_ids": [3], "sampling_seed": 7}
    harmless = {"spaces_between_special_tokens": False, "stream_interval": 4}
    extra = {"routed_dp_rank": 0, "log_metrics": False, "image_data": [None], "lora_path": None, "unheard_of": 1}
    reply = generate(stack, input_ids=[1], sampling_params=same | own | harmless, priority=2, cache_salt="s", **extra)
    assert reply.status_code == 200, reply.text
    add = stack.engine.expect(AddRequest)
    assert {name: getattr(add.sampling, name) for name in same} == same
    sampling = add.sampling
    assert (sampling.max_tokens, sampling.min_tokens, sampling.top_k, sampling.seed) == (5, 1, 0, 7)
    assert (sampling.stop_token_ids, add.priority, add.cache_salt) == ((3,), 2, "s")


@pytest.mark.parametrize(
    "field", ["image_data", "input_embeds", "return_routed_experts", "return_hidden_states",
              "session_params", "custom_logit_processor", "token_ids_logprob", "sampling_params.structural_tag",
              "sampling_params.custom_params"],
)  # fmt: skip
def test_a_field_that_would_change_the_data_is_refused_by_name(module_stack, field):
    """known failure 34"""
    parameter = field.removeprefix("sampling_params.")
    body = {field: ["x"]} if parameter == field else {"sampling_params": {parameter: {"a": "b"}}}
    refused(generate(module_stack, input_ids=[1], **body), field)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "input_ids"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [1, "2"]}, "input_ids"),
        ({"input_ids": [[1], [99999]]}, "input_ids[1]"),
        ({"text": 3}, "text"),
        ({"text": []}, "text"),
        ({"input_ids": [1], "sampling_params": {"temperature": -1}}, "temperature"),
        ({"input_ids": [1], "sampling_params": {"top_k": "many"}}, "sampling_params.top_k"),
        ({"input_ids": [1], "sampling_params": {"no_such": 1}}, "sampling_params.no_such"),
        ({"input_ids": [1], "sampling_params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens"),
        ({"input_ids": [[1], [2]], "sampling_params": [{}]}, "sampling_params"),
        ({"input_ids": [[1], [2]], "rid": ["a", "a"]}, "rid"),
        ({"input_ids": [1], "rid": 5}, "rid"),
        ({"input_ids": [1], "lora_path": 5}, "lora_path"),
        ({"input_ids": [1], "lora_path": "x" * 257}, "lora_path"),
        ({"input_ids": [1], "lora_path": [["a"]]}, "lora_path"),
        ({"input_ids": [[1], [2]], "lora_path": ["a"]}, "lora_path"),
        ({"input_ids": [1], "return_logprob": True, "logprob_start_len": 2}, "logprob_start_len"),
        ({"input_ids": [1], "return_logprob": "yes"}, "return_logprob"),
        ({"input_ids": [1], "stream": "perhaps"}, "stream"),
        ({"input_ids": [1], "return_logprob": False, "sampling_params": KEEP}, "return_logprob"),
        ({"input_ids": [1], "return_logprob": True, "sampling_params": RAW_KEEP}, "logprobs_mode"),
    ],
)
def test_a_malformed_request_is_refused_by_the_name_of_its_field(module_stack, body, field):
    refused(generate(module_stack, **body), field)


def int32(value: str) -> list[int]:
    """Decode an array of meta_info as slime does."""
    return np.frombuffer(base64.b64decode(value), np.int32).tolist()


def with_kept(rows: list[list[int]]):
    """Return a script with one token for each row, drawn from the ids of the row."""
    entries = [Logprob(-0.5, mask_ids=np.array(row, "<i4").tobytes()) for row in rows]

    def script(add: AddRequest) -> list[m.Output]:
        outputs = [replace(one_output(add, 0, [97], i), logprobs=[e]) for i, e in enumerate(entries)]
        return [*outputs[:-1], replace(outputs[-1], finish_reason="length")]

    return script


def test_the_ids_that_top_p_kept_have_the_shape_that_slime_reads(stack):
    rows = [[5, 97], [97], [1, 2, 97]]
    stack.script(with_kept(rows))
    body = {"input_ids": [1], "sampling_params": KEEP, "return_logprob": True}
    meta = generate(stack, **body).json()["meta_info"]
    assert int32(meta["top_p_token_ids"]) == [5, 97, 97, 1, 2, 97]
    assert int32(meta["top_p_token_offsets"]) == [0, 2, 3, 6]
    sampling = stack.engine.expect(AddRequest).sampling
    assert sampling.return_sampling_mask and sampling.logprobs_mode == "processed", "the logprobs are over these ids"
    *early, last, done = events(generate(stack, **body, stream=True))
    assert done == "[DONE]" and int32(last["meta_info"]["top_p_token_ids"]) == [5, 97, 97, 1, 2, 97]
    assert early and all("top_p_token_ids" not in event["meta_info"] for event in early), "only the last event has them"


def test_kept_ids_are_absent_if_no_id_was_excluded_and_empty_without_tokens(stack):
    stack.script(reply_with(HELLO))
    body = {"input_ids": [1], "sampling_params": KEEP, "return_logprob": True}
    assert "top_p_token_ids" not in generate(stack, **body).json()["meta_info"]
    stack.script(lambda add: [replace(one_output(add, 0, [], 0), finish_reason="abort")])
    meta = generate(stack, **body).json()["meta_info"]
    assert (int32(meta["top_p_token_ids"]), int32(meta["top_p_token_offsets"])) == ([], [0])


def test_kept_ids_are_bounded_by_their_bytes(stack, monkeypatch):
    monkeypatch.setattr(client_generation, "MAX_MASK_BYTES", 8)
    stack.script(with_kept([[5, 97], [97]]))
    refused(generate(stack, input_ids=[1], sampling_params=KEEP, return_logprob=True), "return_sampling_mask")
    stack.script(with_kept([[97], [97]]))
    assert generate(stack, input_ids=[1], sampling_params=KEEP, return_logprob=True).status_code == 200


# ---------------------------------------------------------------------- ends


def test_the_finish_reason_of_a_stop_says_what_matched(stack):
    stack.script(lambda add: [replace(reply_with([97, 98], "stop")(add)[-1], stop_reason=98)])
    assert generate(stack, input_ids=[1]).json()["meta_info"]["finish_reason"] == {"type": "stop", "matched": 98}
    stack.script(reply_with(list(b"abYZq")))
    for trimmed, text in ((False, "ab"), (True, "abYZ")):
        body = {"stop": "YZ", "no_stop_trim": trimmed}
        reply = generate(stack, input_ids=[1], sampling_params=body).json()
        assert (reply["text"], reply["output_ids"]) == (text, list(b"abYZ"))
        assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": "YZ"}


def test_an_abort_returns_200_with_every_token_and_its_logprob(stack):
    stack.script(reply_with(HELLO, finish_reason="abort"))
    reply = generate(stack, input_ids=[1], return_logprob=True)
    meta = reply.json()["meta_info"]
    assert reply.status_code == 200 and meta["finish_reason"]["type"] == "abort"
    assert [entry[1] for entry in meta["output_token_logprobs"]] == reply.json()["output_ids"] == HELLO


@pytest.mark.parametrize("message", ["Abort before prefill: a pause", "queue_timeout", ""])
def test_an_abort_before_the_first_token_has_all_fields_and_its_own_message(stack, message):
    """AReaL recognises the case by the message."""
    answer(stack, m.PauseStatusArgs, {"version": "step-9", "is_paused": False})
    stack.script(lambda add: [m.Output(add.request_id, 0, finish_reason="abort", message=message)])
    for body in (generate(stack, input_ids=[1], return_logprob=True).json(),
                 events(generate(stack, input_ids=[1], return_logprob=True, stream=True))[-2]):  # fmt: skip
        meta = body["meta_info"]
        assert meta["finish_reason"]["message"].startswith("Abort before prefill")
        assert (body["text"], body["output_ids"], meta["output_token_logprobs"]) == ("", [], [])
        assert (meta["completion_tokens"], meta["weight_version"], meta["weight_versions"]) == (0, "step-9", [])


def test_max_new_tokens_0_scores_the_prompt_and_returns_no_token(stack):
    """SGLang's clients send max_new_tokens 0 to get the logprobs of a prompt alone."""
    stack.script(lambda add: [one_output(add, 0, [97], 0), m.Output(add.request_id, 0, finish_reason="length")])
    sampling = {"max_new_tokens": 0, "temperature": 0}
    body = generate(stack, input_ids=[1, 2], sampling_params=sampling, return_logprob=True).json()
    meta = body["meta_info"]
    assert (body["text"], body["output_ids"], meta["output_token_logprobs"]) == ("", [], [])
    assert meta["finish_reason"] == {"type": "length", "length": 0} and meta["weight_versions"] == []
    assert stack.engine.expect(AddRequest).sampling.max_tokens == 1


def test_prompt_logprobs_start_at_logprob_start_len(stack):
    """The first token has a null logprob. Each entry has as many top tokens as asked for."""
    prompt = [5, 6, 7, 8]

    def script(add: AddRequest) -> list[m.Output]:
        entries = [Logprob.of(-float(t), ((t, -float(t)), (1, -9.0))) for t in prompt[1:]]
        return [replace(out, prompt_logprobs=entries) for out in reply_with([97])(add)]

    stack.script(script)
    asked = {"input_ids": prompt, "return_logprob": True, "top_logprobs_num": 2}
    meta = generate(stack, **asked, logprob_start_len=0).json()["meta_info"]
    assert meta["input_token_logprobs"] == [[None, 5, None], [-6.0, 6, None], [-7.0, 7, None], [-8.0, 8, None]]
    assert meta["input_top_logprobs"][:2] == [None, [[-6.0, 6, None], [-9.0, 1, None]]]
    assert stack.engine.expect(AddRequest).sampling.prompt_logprobs == 2
    meta = generate(stack, **asked, logprob_start_len=2).json()["meta_info"]
    assert meta["input_token_logprobs"] == [[-7.0, 7, None], [-8.0, 8, None]]
    stack.script(reply_with([97]))
    generate(stack, **asked)
    stack.engine.expect(AddRequest)
    assert stack.engine.expect(AddRequest).sampling.prompt_logprobs is None


# ---------------------------------------------------------------------- streams


def test_every_event_of_a_stream_holds_everything_so_far(stack):
    stack.script(reply_with(list(b"abcd"), step=2, version="v2"))
    streamed = events(generate(stack, input_ids=[1], stream=True, return_logprob=True))
    assert streamed.pop() == "[DONE]"
    assert [event["text"] for event in streamed] == ["ab", "abcd"]
    assert [event["output_ids"] for event in streamed] == [[97, 98], [97, 98, 99, 100]]
    metas = [event["meta_info"] for event in streamed]
    assert [meta["finish_reason"] for meta in metas] == [None, {"type": "length", "length": 4}]
    assert [len(meta["output_token_logprobs"]) for meta in metas] == [2, 4]
    assert [meta["weight_versions"][-1]["end"] for meta in metas] == [2, 4]
    assert "index" not in streamed[0]


def test_a_late_reader_gets_events_whose_text_and_ids_agree(stack):
    """Outputs of three steps wait before the first read. The finish_reason is sent once."""

    def at_once(request: AddRequest) -> list[m.Output]:
        outputs = reply_with(list(b"abcd"))(request)
        stack.engine.send(m.Outputs(outputs[1:]))
        return outputs[:1]

    stack.engine.taken = lambda: True
    stack.script(at_once)
    streamed = events(generate(stack, input_ids=[1], stream=True, return_logprob=True))[:-1]
    for event in streamed:
        assert event["text"].encode() == bytes(event["output_ids"])
        assert len(event["meta_info"]["output_token_logprobs"]) == len(event["output_ids"])
    assert [bool(event["meta_info"]["finish_reason"]) for event in streamed] == [False] * (len(streamed) - 1) + [True]
    assert streamed[-1]["text"] == "abcd"


def test_a_stream_shows_no_text_that_a_stop_string_may_take_back(stack):
    stack.script(reply_with(list(b"abYZ")))
    streamed = events(generate(stack, input_ids=[1], stream=True, sampling_params={"stop": ["YZ"]}))
    assert [event["text"] for event in streamed[:-1]] == ["a", "ab", "ab", "ab"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_disconnects_cancels_its_request(stack, stream):
    body = {"input_ids": [1], "stream": stream, "rid": "gone"}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(stack.server.url + "/generate", json=body, timeout=httpx.Timeout(20, read=0.3))
    assert stack.engine.expect(m.CancelRequest) == m.CancelRequest("gone", None, "abort")


# ---------------------------------------------------------------------- batches


def test_a_batch_answers_a_list_with_parameters_of_each_prompt(stack):
    stack.script(lambda add: reply_with([add.prompt_token_ids[0], 89, 90])(add))
    sampling = [{"max_new_tokens": 2, "stop": "YZ"}, {"max_new_tokens": 3, "no_stop_trim": True, "stop": "Z"}]
    replies = generate(stack, input_ids=[[97], [98]], sampling_params=sampling, rid=["x", "y"]).json()
    assert [(r["text"], r["meta_info"]["id"]) for r in replies] == [("a", "x"), ("bYZ", "y")]
    adds = [stack.engine.expect(AddRequest) for _ in replies]
    assert [(a.request_id, a.group, a.sampling.max_tokens) for a in adds] == [("x", "", 2), ("y", "", 3)]


def test_one_rid_of_a_batch_becomes_one_for_each_prompt_and_aborts_them_all(stack):
    stack.script(reply_with([97]))
    replies = generate(stack, text=["a", "b"], rid="job", return_logprob=[True, False]).json()
    assert [r["meta_info"]["id"] for r in replies] == ["job_0", "job_1"]
    assert ["output_token_logprobs" in r["meta_info"] for r in replies] == [True, False]
    adds = stack.engine.requests.values()
    assert [(a.request_id, a.group) for a in adds] == [(part_id("job", i), "job") for i in range(2)]
    reply = generate(stack, text="a", rid=part_id("job", 0))
    assert reply.status_code == 400 and "rid" in reply.text, "no client can take the id of a prompt of another one"
    assert len(generate(stack, input_ids=[[1]]).json()) == 1, "a batch of one answers a list"


def test_n_samples_answer_a_list_and_number_their_events(stack):
    stack.script(reply_with(list(b"ab")))
    replies = generate(stack, input_ids=[1], sampling_params={"n": 2}, rid="one").json()
    assert [r["text"] for r in replies] == ["ab", "ab"]
    assert stack.engine.expect(AddRequest).n == 2
    streamed = events(generate(stack, input_ids=[1], sampling_params={"n": 2}, stream=True))[:-1]
    assert sorted((c["index"], c["text"]) for c in streamed) == [(0, "a"), (0, "ab"), (1, "a"), (1, "ab")]


# ---------------------------------------------------------------------- pause, resume, abort


@pytest.mark.parametrize(
    ("body", "mode", "clear_cache"),
    [({}, "abort", None), ({"mode": "abort"}, "abort", True), ({"mode": "retract"}, "keep", True),
     ({"mode": "in_place"}, "keep", False)],
)  # fmt: skip
def test_a_pause_holds_new_requests_and_never_escalates_to_abort(stack, body, mode, clear_cache):
    answer(stack, m.PauseArgs, {"status": "paused", "state": "paused"})
    reply = stack.post("/pause_generation", **body)
    assert reply.status_code == 200 and reply.json()["status"] == "ok" and "content-length" in reply.headers
    args = stack.engine.expect(m.PauseArgs).args
    assert (args.mode, args.clear_cache, args.admission) == (mode, clear_cache, "hold")
    assert (args.on_timeout, args.placed_by, args.hold_id) == ("keep", "sglang", None)


def test_the_default_mode_of_a_pause_is_configurable(make_stack):
    stack = make_stack(sglang_pause_mode="keep")
    answer(stack, m.PauseArgs, {})
    stack.http.post("/pause_generation")
    assert stack.engine.expect(m.PauseArgs).args.mode == "keep"
    refused(stack.post("/pause_generation", mode="freeze"), "mode")


def test_continue_releases_the_anonymous_holds(stack):
    answer(stack, m.ResumeArgs, {"released": ["anonymous-1"], "still_held_by": []})
    reply = stack.post("/continue_generation", torch_empty_cache=False)
    assert reply.json()["status"] == "ok" and reply.json()["message"]
    assert stack.engine.expect(m.ResumeArgs).args == m.ResumeArgs()


def test_an_abort_lists_the_aborted_and_the_unknown_ids(stack):
    """known failure 11: the ids are those of the client"""
    hit = {"aborted": [{"request_id": "a", "output_token_count": 3}], "not_found": ["b"]}
    answer(stack, m.AbortArgs, hit)
    for body, args in (
        ({"rid": "a"}, m.AbortArgs(request_ids=["a"])),
        ({"rid": ["a", "b"]}, m.AbortArgs(request_ids=["a", "b"])),
        ({"rid": "", "abort_all": True}, m.AbortArgs(abort_all=True)),
    ):
        reply = stack.post("/abort_request", **body)
        assert reply.status_code == 200 and reply.json()["not_found"] == ["b"]
        assert stack.engine.expect(m.AbortArgs).args == args
    for body in ({}, {"rid": ""}, {"rid": []}, {"abort_all": False}):
        refused(stack.post("/abort_request", **body), "rid")


@pytest.mark.parametrize("paused", [True, False])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_flush_is_never_refused_and_reaches_frozen_requests(stack, method, paused):
    """known failure 29"""
    answer(stack, m.PauseStatusArgs, {"is_paused": paused})
    answer(stack, m.ResetCacheArgs, {"success": True, "requests_to_recompute": 2})
    reply = stack.http.request(method, "/flush_cache", params={"reset_connector": "true"})
    assert reply.status_code == 200 and reply.json()["requests_to_recompute"] == 2
    assert stack.engine.expect(m.ResetCacheArgs).args.running is paused


def test_the_load_counts_frozen_and_held_requests(stack):
    answer(stack, m.PauseStatusArgs, {"is_paused": True, "counts": COUNTS})
    load = stack.http.get("/v1/loads?include=core").json()["loads"]
    assert load == [{"dp_rank": 0, "num_running_reqs": 3, "num_waiting_reqs": 4, "num_reqs": 7, "num_total_reqs": 7}]
    assert stack.http.get("/get_load").json() == load


# ---------------------------------------------------------------------- memory and information


@pytest.mark.parametrize(
    ("body", "tags"),
    [({}, ()), ({"tags": None}, ()), ({"tags": ["weights"]}, ("weight",)),
     ({"tags": ["kv_cache", "weights", "cuda_graph"]}, ("kv_cache", "weight"))],
)  # fmt: skip
def test_memory_is_released_and_resumed_by_sglangs_names(stack, body, tags):
    answer(stack, m.SleepArgs, {"asleep": ["weight"], "freed_bytes": 10})
    answer(stack, m.WakeArgs, {"asleep": []})
    assert stack.post("/release_memory_occupation", **body).json()["freed_bytes"] == 10
    assert stack.engine.expect(m.SleepArgs).args.tags == tags
    assert stack.post("/resume_memory_occupation", **body).status_code == 200
    assert stack.engine.expect(m.WakeArgs).args.tags == tags


def test_a_wake_up_in_the_wrong_order_is_a_409_and_cuda_graphs_are_ignored(stack):
    answer(stack, m.WakeArgs, failure=m.Failure("wrong_order", "kv_cache does not sleep"))
    reply = stack.post("/resume_memory_occupation", tags=["kv_cache"])
    assert reply.status_code == 409 and reply.json()["error"]["code"] == "wrong_order"
    assert stack.post("/release_memory_occupation", tags=["cuda_graph"]).status_code == 200
    refused(stack.post("/release_memory_occupation", tags=["disk"]), "tags")


def test_information_routes_tell_the_weights_and_the_shape_of_the_deployment(stack):
    answer(stack, m.WeightInfoArgs, {**LABEL, "session": None, "asleep": []})
    assert stack.http.get("/get_weight_version").json()["weight_version"] == "step-7"
    for path in ("/model_info", "/get_model_info"):
        info = stack.http.get(path).json()
        assert info["weight_version"] == "step-7" and info["is_generation"] is True
    info = stack.http.get("/get_server_info").json()
    assert [info[size] for size in ("tp_size", "pp_size", "ep_size", "dp_size", "num_gpus")] == [1] * 5
    assert stack.server.url == f"http://{info['host']}:{info['port']}"
    assert info["served_model_name"] == "tiny" and info["sglang_pause_mode"] == "abort"
    slime = {"enable_memory_saver": False, "enable_return_routed_experts": False, "disaggregation_mode": "null"}
    assert slime.items() <= info.items(), "slime's SGLangEngine.init compares these with its own settings"
    assert stack.http.get("/health_generate").status_code == 200
