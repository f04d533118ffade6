"""The ids that each token was drawn from, and log probabilities of many tokens, in the form of each framework."""

from __future__ import annotations

import base64
import struct

import httpx
import numpy as np
import pytest

from fastdeploy.client import generation
from fastdeploy.core.outputs import Logprob
from fastdeploy.core.request_fields import AddRequest
from fastdeploy.inter_communicator import messages as m
from support.fake_engine_server import one_output, replace
from support.http_calls import events, refused

MASKS = [[5, 97], [97], [1, 2, 97]]
MASK_LOGPROBS = [[-1.5, -0.25], [0.0], [-2.0, -3.0, -0.5]]
TOP = [[(97, -0.25), (5, -1.5)], [(97, 0.0)], [(97, -0.5), (1, -2.0), (2, -3.0)]]
CUT = {"temperature": 0.7, "top_k": 3}


def masked(add: AddRequest) -> list[m.Output]:
    """Answer with three tokens, each with what the request asks for."""
    asked, outputs = add.sampling, []
    for i, (ids, values) in enumerate(zip(MASKS, MASK_LOGPROBS, strict=True)):
        entry = Logprob.of(values[-1], TOP[i] if asked.logprobs else [(7, -4.0)] if asked.logprob_token_ids else [])
        mask = struct.pack(f"<{len(ids)}i", *ids) if asked.return_sampling_mask else b""
        of_mask = struct.pack(f"<{len(ids)}f", *values) if asked.return_sampling_mask_logprobs else b""
        entry = replace(entry, mask_ids=mask, mask_logprobs=of_mask)
        outputs.append(replace(one_output(add, 0, [97], i), logprobs=[entry]))
    return [*outputs[:-1], replace(outputs[-1], finish_reason="length")]


def post(stack, path: str, **body) -> httpx.Response:
    stack.script(masked)
    return stack.http.post(path, json=body)


def array(value: str, kind: str) -> list:
    return np.frombuffer(base64.b64decode(value), kind).tolist()


# ---------------------------------------------------------------------- vLLM


def vllm(stack, sampling: dict, **body) -> httpx.Response:
    return post(stack, "/inference/v1/generate", token_ids=[1, 2], sampling_params=sampling, **body)


def test_prime_rl_reads_masks_that_the_server_was_started_for(make_stack):
    """vLLM's clients cannot ask for masks: --return-sampling-mask is a flag of the server."""
    stack = make_stack(return_sampling_mask=True, return_sampling_mask_logprobs=True)
    choice = vllm(stack, CUT | {"logprobs": 0}).json()["choices"][0]
    assert choice["sampling_mask"] == MASKS and choice["sampling_mask_logprobs"] == MASK_LOGPROBS
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == [-0.25, 0.0, -0.5]
    assert stack.engine.expect(AddRequest).sampling.logprobs_mode == "processed"
    for sampling in ({"temperature": 0}, {"temperature": 1.0}):  # an evaluation beside the training
        assert "sampling_mask" not in vllm(stack, sampling).json()["choices"][0]


def test_masks_of_a_stream_are_those_of_the_tokens_of_each_event(stack):
    sampling = CUT | {"return_sampling_mask": True, "return_sampling_mask_logprobs": True}
    choices = [e["choices"][0] for e in events(vllm(stack, sampling, stream=True)) if isinstance(e, dict)]
    assert [row for choice in choices for row in choice["sampling_mask"]] == MASKS
    assert [row for choice in choices for row in choice["sampling_mask_logprobs"]] == MASK_LOGPROBS
    assert all(len(choice["sampling_mask"]) == len(choice["token_ids"]) for choice in choices)


@pytest.mark.parametrize(("path", "prompt"), [("/v1/completions", {"prompt": [1]}),
                         ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]})])  # fmt: skip
def test_openai_routes_return_masks_too(stack, path, prompt):
    choice = post(stack, path, **prompt, **CUT, return_sampling_mask=True).json()["choices"][0]
    assert choice["sampling_mask"] == MASKS and "sampling_mask_logprobs" not in choice and choice["logprobs"] is None


@pytest.mark.parametrize(("sampling", "field"), [
    ({"return_sampling_mask": True}, "return_sampling_mask"),
    (CUT | {"return_sampling_mask_logprobs": True}, "return_sampling_mask_logprobs"),
    (CUT | {"return_sampling_mask": True, "logprobs_mode": "raw"}, "return_sampling_mask"),
])  # fmt: skip
def test_a_mask_that_cannot_be_told_is_refused(module_stack, sampling, field):
    """Without top_k, top_p and min_p any token can be drawn. vLLM and SGLang refuse this too."""
    refused(vllm(module_stack, sampling), field)


def test_the_bytes_of_masks_are_bounded(stack, monkeypatch):
    monkeypatch.setattr(generation, "MAX_MASK_BYTES", 23)
    refused(vllm(stack, CUT | {"return_sampling_mask": True}), "return_sampling_mask")
    monkeypatch.setattr(generation, "MAX_MASK_BYTES", 24)
    assert vllm(stack, CUT | {"return_sampling_mask": True}).status_code == 200


@pytest.mark.parametrize("logprobs", [None, 0, 1])
def test_vllms_clients_ask_for_the_logprobs_of_given_tokens(stack, logprobs):
    """As in vLLM, the ids replace the best tokens."""
    choice = vllm(stack, {"logprob_token_ids": [7], "logprobs": logprobs}).json()["choices"][0]
    sampling = stack.engine.expect(AddRequest).sampling
    assert (sampling.logprob_token_ids, sampling.logprobs) == ((7,), 0)
    tops = [[(top["token"], top["logprob"]) for top in e["top_logprobs"]] for e in choice["logprobs"]["content"]]
    assert tops == [[("token_id:7", -4.0)]] * 3
    refused(vllm(stack, {"logprob_token_ids": [2**20]}), "logprob_token_ids")


# ---------------------------------------------------------------------- SGLang


def sglang(stack, sampling: dict, **body) -> httpx.Response:
    return post(stack, "/generate", input_ids=[1, 2], sampling_params=sampling, **body)


def test_miles_reads_masks_and_the_logprobs_over_them(stack):
    meta = sglang(stack, CUT, return_sampling_mask=True).json()["meta_info"]
    assert meta["output_token_sampling_mask"] == MASKS and meta["output_token_sampling_mask_length"] == 3
    assert meta["output_token_sampling_logprobs"] == [-0.25, 0.0, -0.5] and "output_token_logprobs" not in meta
    asked = {"return_sampling_mask": True, "return_logprob": True}
    meta = sglang(stack, CUT, **asked, sampling_logprobs_mode="support").json()["meta_info"]
    assert meta["output_token_sampling_logprobs"] == MASK_LOGPROBS and len(meta["output_token_logprobs"]) == 3
    meta = sglang(stack, CUT, **asked, return_sampling_mask_logprobs=True).json()["meta_info"]
    assert meta["output_token_sampling_mask_logprobs"] == MASK_LOGPROBS
    assert meta["output_token_sampling_logprobs"] == [-0.25, 0.0, -0.5]


def test_miles_reads_masks_of_a_chat_in_its_meta_info(stack):
    body = {"messages": [{"role": "user", "content": "a"}], **CUT, "return_meta_info": True}
    meta = post(stack, "/v1/chat/completions", **body, return_sampling_mask=True).json()["choices"][0]["meta_info"]
    assert meta["output_token_sampling_mask"] == MASKS and meta["output_token_sampling_mask_length"] == 3
    assert meta["output_token_sampling_logprobs"] == [-0.25, 0.0, -0.5]
    meta = post(stack, "/v1/chat/completions", **body).json()["choices"][0]["meta_info"]
    assert "output_token_sampling_mask" not in meta


def test_each_event_of_sglangs_stream_repeats_the_masks_so_far(stack):
    *shown, done = events(sglang(stack, CUT, return_sampling_mask=True, stream=True))
    masks = [event["meta_info"]["output_token_sampling_mask"] for event in shown]
    assert masks[-1] == MASKS and all(mask == MASKS[: len(mask)] for mask in masks) and done == "[DONE]"


@pytest.mark.parametrize(("body", "field"), [
    ({"return_sampling_mask": True}, "return_sampling_mask"),
    ({"return_sampling_mask": "yes"}, "return_sampling_mask"),
    ({"return_sampling_mask_logprobs": True}, "return_sampling_mask_logprobs"),
    ({"return_logprob": True, "token_ids_logprob": ["a"]}, "token_ids_logprob"),
    ({"return_logprob": True, "token_ids_logprob": [7], "top_logprobs_num": 2}, "top_logprobs_num"),
    ({"return_flat_raw_output_top_logprobs_b64": True}, "return_flat_raw_output_top_logprobs_b64"),
])  # fmt: skip
def test_fields_of_sglang_that_do_not_fit_together_are_refused(module_stack, body, field):
    refused(sglang(module_stack, {}, **body), field)


def test_sglangs_clients_ask_for_the_logprobs_of_given_tokens(stack):
    meta = sglang(stack, {}, return_logprob=True, token_ids_logprob=[7]).json()["meta_info"]
    assert meta["output_token_ids_logprobs"] == [[[-4.0, 7, None]]] * 3
    assert stack.engine.expect(AddRequest).sampling.logprob_token_ids == (7,)


def test_miles_reads_the_best_tokens_as_flat_arrays(stack):
    asked = {"return_logprob": True, "top_logprobs_num": 3, "return_flat_raw_output_top_logprobs": True}
    meta = sglang(stack, {}, **asked, return_flat_raw_output_top_logprobs_b64=True).json()["meta_info"]
    assert meta["output_top_logprobs_shape"] == [3, 3] and meta["output_top_logprobs_null_prefix"] == 0
    assert array(meta["output_top_logprobs_idx_flat_b64"], "<i4") == [97, 5, -1, 97, -1, -1, 97, 1, 2]
    values = array(meta["output_top_logprobs_val_flat_b64"], "<f4")
    assert values == [-0.25, -1.5, -9999.0, 0.0, -9999.0, -9999.0, -0.5, -2.0, -3.0]
    assert meta["output_top_logprobs_val_flat_b64_dtype"] == "float32"
    assert meta["output_top_logprobs_idx_flat_b64_dtype"] == "int32"
    assert meta["output_top_logprobs_temperature_scaled"] is True and "output_top_logprobs" not in meta
    lists = sglang(stack, {}, **asked).json()["meta_info"]
    assert lists["output_top_logprobs_val_flat"] == values and lists["output_top_logprobs_idx_flat"][:2] == [97, 5]


# ---------------------------------------------------------------------- SkyRL


def skyrl(stack, sampling: dict, **body) -> httpx.Response:
    return post(stack, "/skyrl/v1/generate", token_ids=[1, 2], sampling_params=sampling, **body)


@pytest.mark.parametrize("stream", [False, True])
def test_skyrl_reads_the_sample_support_as_an_array(stack, stream):
    asked = {"return_sample_support": True, "return_sample_support_logprobs": True, "stream": stream}
    reply = skyrl(stack, CUT, **asked)
    bodies = [e for e in events(reply) if isinstance(e, dict)] if stream else [reply.json()]
    supports = [body["choices"][0]["rollout_sample_support"] for body in bodies]
    assert all(list(s) == ["data", "shape", "dtype"] and s["dtype"] == "int32" for s in supports)
    assert [s["shape"] for s in supports] == ([[1, 3]] * 3 if stream else [[3, 3]])
    rows = [97, 5, -1, 97, -1, -1, 97, 1, 2]
    assert [i for s in supports for i in array(s["data"], "<i4")] == rows, "best first, trailing -1"
    logprobs = [body["choices"][0]["rollout_sample_support_logprobs"] for body in bodies]
    inf = float("inf")
    assert [v for s in logprobs for v in array(s["data"], "<f4")] == [-0.25, -1.5, -inf, 0, -inf, -inf, -0.5, -2, -3]
    sampling = stack.engine.expect(AddRequest).sampling
    assert (sampling.logprobs, sampling.logprobs_mode) == (3, "processed")


def test_skyrl_reads_the_head_of_a_distribution_that_is_not_cut(stack):
    choice = skyrl(stack, {"top_k": -1, "logprobs": 4}, return_sample_support=True).json()["choices"][0]
    assert choice["rollout_sample_support"]["shape"] == [3, 4]
    assert choice["rollout_sample_support_logprobs"] is None and choice["routed_experts"] is None
    assert skyrl(stack, {}).json()["choices"][0]["rollout_sample_support"] is None


@pytest.mark.parametrize("sampling", [{}, {"top_k": 1}, {"top_k": -1}, {"top_k": 3, "temperature": 0}, {"top_p": 0.9}])
def test_a_sample_support_without_a_bound_is_refused_as_by_skyrl(module_stack, sampling):
    refused(skyrl(module_stack, sampling, return_sample_support=True), "return_sample_support")
    refused(skyrl(module_stack, CUT, return_sample_support_logprobs=True), "return_sample_support_logprobs")
