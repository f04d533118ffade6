"""What trainers and teachers read of the embedded model over HTTP equals the scorer's values to the bit."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

from e2e.server import Server
from fastdeploy.embedded import MODEL_DIR
from fastdeploy.rl.client import RolloutClient
from fastdeploy.rl.scoring import Scorer

IDS, TOP, TEMPERATURE = list(range(40, 60)), 256, 0.8
DRAW = {"temperature": TEMPERATURE, "top_p": 0.9, "top_k": 50, "min_p": 0.001}


@pytest.fixture(scope="module")
def scorer() -> Scorer:
    return Scorer(str(MODEL_DIR), dtype="bfloat16")


def equal(found: Any, told: Any) -> bool:
    return np.asarray(found, np.float32).tobytes() == np.asarray(told, np.float32).tobytes()


def array(envelope: dict[str, Any]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(envelope["data"]), envelope["dtype"]).reshape(envelope["shape"])


async def test_a_rollout_with_masks_has_a_ratio_of_exactly_1(live: Server, scorer):
    params = DRAW | {"max_tokens": 40, "ignore_eos": True, "seed": 7}
    async with RolloutClient(live.url) as client:
        rollout = await client.generate(IDS, params | {"return_sampling_mask": True})
        plain = await client.generate(IDS, params)
    assert rollout.token_ids == plain.token_ids and rollout.sampling_masks is not None
    assert max(map(len, rollout.sampling_masks)) > 1
    scored = scorer.logprobs([(IDS, rollout.token_ids)], TEMPERATURE, [rollout.sampling_masks])
    assert equal(scored.numpy(), rollout.logprobs)
    for mask in rollout.sampling_masks:
        assert len(mask) <= 50


def test_the_masks_of_all_frameworks_are_the_same(live: Server):
    sampling = DRAW | {"ignore_eos": True}
    body = {"token_ids": IDS, "sampling_params": sampling | {"max_tokens": 20, "seed": 7, "logprobs": 0}}
    masked = {"sampling_params": body["sampling_params"] | {"return_sampling_mask": True}}
    of_vllm = live.post("/inference/v1/generate", body | masked).ok()["choices"][0]
    skyrl = live.post("/skyrl/v1/generate", body | {"return_sample_support": True}).ok()["choices"][0]
    asked = sampling | {"max_new_tokens": 20, "sampling_seed": 7}
    sglang = live.post("/generate", {"input_ids": IDS, "sampling_params": asked, "return_sampling_mask": True}).ok()
    assert of_vllm["token_ids"] == skyrl["token_ids"] == sglang["output_ids"]
    assert of_vllm["sampling_mask"] == sglang["meta_info"]["output_token_sampling_mask"]
    support = array(skyrl["rollout_sample_support"])
    assert [sorted(row[row >= 0].tolist()) for row in support] == of_vllm["sampling_mask"]
    logprobs = [entry["logprob"] for entry in of_vllm["logprobs"]["content"]]
    assert equal(logprobs, sglang["meta_info"]["output_token_sampling_logprobs"])


def test_a_teachers_best_tokens_of_a_prompt_equal_the_scorers(live: Server, scorer):
    """In vLLM's form, and as SGLang's arrays."""
    ids, values = scorer.top_logprobs([(IDS[:1], IDS[1:])], TOP)
    own = scorer.logprobs([(IDS[:1], IDS[1:])]).numpy()
    reply = live.post("/v1/completions", {"prompt": IDS, "max_tokens": 1, "prompt_logprobs": TOP}).ok()
    first, *entries = reply["choices"][0]["prompt_logprobs"]
    assert first is None and len(entries) == len(IDS) - 1
    for entry, token, row, told, logprob in zip(entries, IDS[1:], ids, values, own, strict=True):
        assert equal([entry[str(i)]["logprob"] for i in row], told)
        assert equal(entry[str(token)]["logprob"], logprob) and entry[str(token)]["rank"] == 1 + (told > logprob).sum()
    flat = {"return_flat_raw_top_logprobs": True, "return_flat_raw_top_logprobs_b64": True}
    asked = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": TOP}
    body = {"input_ids": IDS, "sampling_params": {"max_new_tokens": 0}, **asked, **flat}
    meta = live.post("/generate", body).ok()["meta_info"]
    assert meta["input_top_logprobs_shape"] == [len(IDS) - 1, TOP] and meta["input_top_logprobs_null_prefix"] == 1
    assert base64.b64decode(meta["input_top_logprobs_idx_flat_b64"]) == ids.tobytes()
    assert base64.b64decode(meta["input_top_logprobs_val_flat_b64"]) == values.tobytes()
