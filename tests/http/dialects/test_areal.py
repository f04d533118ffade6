"""AReaL's private vLLM routes over real HTTP, before a scripted engine."""

from __future__ import annotations

import pytest

from fastdeploy.core.outputs import Logprob
from fastdeploy.core.weight_source import FolderSource
from fastdeploy.inter_communicator import messages as m
from support.fake_engine_server import one_output, replace, reply_with
from support.http_calls import answer, refused

# The body that AReaL's VLLMBackend.build_generation_request makes of its defaults.
PAYLOAD = {"top_p": 1.0, "top_k": 100_000_000, "max_tokens": 9, "temperature": 1.0, "stop_token_ids": [],
           "stream": False, "ignore_eos": False, "skip_special_tokens": True, "frequency_penalty": 0.0, "logprobs": 0,
           "return_tokens_as_token_ids": True, "use_beam_search": False, "prompt": [1, 2]}  # fmt: skip


def ids_of(choice: dict) -> list[int]:
    return [int(token.split(":")[1]) for token in choice["logprobs"]["tokens"]]


def test_a_completion_returns_token_ids_and_needs_no_model(stack):
    stack.script(reply_with([97, 98]))
    choice = stack.post("/v1/completions", **PAYLOAD).json()["choices"][0]
    assert (ids_of(choice), choice["logprobs"]["token_logprobs"]) == ([97, 98], [-0.5, -0.5])


def test_the_logprobs_of_given_tokens_are_where_compute_logp_reads_them(stack):
    """The body is that of VLLMBackend.build_score_request. AReaL takes the first entry of each token."""
    entries = [Logprob.of(-1.5, ((9, -0.25),)), Logprob.of(-0.5, ((3, -0.5),))]
    stack.script(lambda add: [replace(output, prompt_logprobs=entries) for output in reply_with([97])(add)])
    score = {
        "prompt": [1, 2, 3],
        "max_tokens": 1,
        "temperature": 0.0,
        "logprobs": 1,
        "prompt_logprobs": 1,
        "echo": True,
    }
    given = stack.post("/v1/completions", **score).json()["choices"][0]["prompt_logprobs"][-2:]
    assert [next(iter(of_token.values()))["logprob"] for of_token in given] == [-1.5, -0.5]


def test_an_abort_before_the_first_token_has_empty_arrays(stack):
    stack.script(lambda request: [replace(one_output(request, 0, [], 0), finish_reason="abort")])
    choice = stack.post("/v1/completions", **PAYLOAD).json()["choices"][0]
    assert choice["finish_reason"] == "abort"
    assert (choice["logprobs"]["tokens"], choice["logprobs"]["token_logprobs"]) == ([], [])


@pytest.mark.parametrize("mode", ["abort", "keep"])
def test_pause_and_continue(make_stack, mode):
    stack = make_stack(areal_pause_mode=mode)
    answer(stack, m.PauseArgs, {"state": "paused"})
    answer(stack, m.ResumeArgs, {"state": "running"})
    assert stack.post("/areal_pause_generation").json()["success"] is True
    args = stack.engine.expect(m.PauseArgs).args
    assert (args.mode, args.admission, args.on_timeout, args.placed_by) == (mode, "hold", "keep", "areal")
    assert stack.post("/areal_continue_generation").json()["success"] is True
    assert stack.engine.expect(m.ResumeArgs).args == m.ResumeArgs()


def test_an_update_is_one_commit_that_neither_pauses_nor_resumes(stack):
    answer(stack, m.UpdateWeightsArgs, {"version": "4"})
    reply = stack.post("/areal_update_weights", model_path="/ckpt").json()
    assert (reply["success"], reply["report"]) == (True, {"version": "4"})
    assert stack.engine.seen.get(timeout=30).args == m.UpdateWeightsArgs(FolderSource("/ckpt"), kv="recompute")
    assert stack.engine.seen.empty()


def test_a_refused_update_has_the_shape_that_areal_reads(stack):
    answer(stack, m.UpdateWeightsArgs, failure=m.Failure("weight_update_refused", "no such folder"))
    reply = stack.post("/areal_update_weights", model_path="/nowhere")
    assert reply.status_code == 400
    assert (reply.json()["success"], reply.json()["message"]) == (False, "no such folder")
    assert reply.json()["error"]["code"] == "weight_update_refused"
    refused(stack.post("/areal_update_weights"), "model_path")
    refused(stack.post("/areal_update_weights", model_path="/x", abort_all_requests=True), "abort_all_requests")


@pytest.mark.parametrize(
    "path", ["init_weights_update_group", "set_update_weight_meta", "update_weights_xccl",
             "set_update_weight_meta_lora", "update_weights_lora_xccl"],
)  # fmt: skip
def test_a_route_of_a_missing_feature_is_refused_with_the_alternative(module_stack, path):
    reply = module_stack.post(f"/areal_{path}", group_name="g")
    refused(reply, f"areal_{path}", "/areal_update_weights")
    assert reply.json()["success"] is False
