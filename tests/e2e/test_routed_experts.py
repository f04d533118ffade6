"""The routing of a real mixture of experts in the forms of all callers, and over attempts of the client."""

from __future__ import annotations

import asyncio
import base64
import io
import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from e2e.fleet_server import FleetServer
from e2e.server import SMALL, LiveStream, Server, until
from fastdeploy.rl.client import RolloutClient
from fastdeploy.testing.checkpoints import write_checkpoint
from support.specs import SPECS, prompt

SPEC = SPECS["qwen3_moe"]  # three layers: the second one is dense
LAYERS, EXPERTS, TOP_K = 3, SPEC.experts, 2
IDS, TOKENS = prompt(60, SPEC.vocab), 40
GREEDY = {"temperature": 0, "ignore_eos": True}
NATIVE = GREEDY | {"max_tokens": TOKENS, "routed_experts": True}


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = write_checkpoint(tmp_path_factory.mktemp("moe"), SPEC)
    with Server(*SMALL, "--model", str(folder), "--enable-return-routed-experts") as server:
        yield server


class RowsStream(LiveStream):
    """A stream that collects the rows of its events in our own form."""

    def __init__(self, server: Server, ids: list[int], **params: Any):
        self.rows: list[np.ndarray] = []
        super().__init__(server, ids, **params)

    def _take(self, event: dict[str, Any]) -> None:
        super()._take(event)
        self.rows += [of_described(choice["routed_experts"]) for choice in event["choices"] if choice["routed_experts"]]


@pytest.fixture(scope="module")
def alone(moe: Server) -> tuple[list[int], np.ndarray]:
    """Return the tokens of an undisturbed run, and the rows of prompt and answer in vLLM's form."""
    choice = vllm(moe)
    return choice["token_ids"], npy(choice["routed_experts"])


def vllm(moe: Server, ids: list[int] = IDS, **sampling: Any) -> dict[str, Any]:
    body = {"token_ids": ids, "sampling_params": GREEDY | {"max_tokens": TOKENS} | sampling}
    return moe.post("/inference/v1/generate", body).ok()["choices"][0]


def npy(text: str) -> np.ndarray:
    return np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)


def of_described(value: dict[str, Any]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(value["data"]), value["dtype"]).reshape(value["shape"])


def test_each_token_but_the_last_has_the_experts_of_each_layer(alone):
    tokens, rows = alone
    assert rows.shape == (len(IDS) + len(tokens) - 1, LAYERS, TOP_K) and rows.dtype == np.uint8
    assert not rows[:, 1].any(), "the dense layer"
    routed = rows[:, [0, 2]]
    assert routed.max() == EXPERTS - 1 and (routed[..., 0] != routed[..., 1]).all()


def test_the_forms_of_all_callers_have_the_same_rows(moe, alone):
    tokens, rows = alone
    asked = {"max_new_tokens": TOKENS, **GREEDY}
    sglang = moe.post("/generate", {"input_ids": IDS, "sampling_params": asked, "return_routed_experts": True}).ok()
    skyrl = moe.post(
        "/skyrl/v1/generate", {"token_ids": IDS, "sampling_params": GREEDY | {"max_tokens": TOKENS, "logprobs": 0}}
    ).ok()["choices"][0]
    native = moe.complete(IDS, **NATIVE)
    assert sglang["output_ids"] == skyrl["token_ids"] == native["token_ids"] == tokens
    flat = np.frombuffer(base64.b64decode(sglang["meta_info"]["routed_experts"]), np.int32)
    assert np.array_equal(flat.reshape(rows.shape), rows)
    assert np.array_equal(of_described(skyrl["routed_experts"]), rows)
    assert np.array_equal(of_described(native["routed_experts"]), rows[:, native["routed_experts"]["layers"]])


def test_a_cached_prompt_has_the_rows_of_its_computation(moe, alone):
    tokens, rows = alone
    turn = [*IDS, *tokens, *prompt(5, SPEC.vocab)]
    first = npy(vllm(moe, turn)["routed_experts"])
    body = {"prompt": turn, "return_routed_experts": True, "max_tokens": TOKENS, **GREEDY}
    again = moe.post("/v1/completions", body).ok()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > len(IDS)
    flat = np.frombuffer(base64.b64decode(again["choices"][0]["sgl_ext"]["routed_experts"]), np.int32)
    assert np.array_equal(first[: len(rows)], rows)
    assert np.array_equal(flat.reshape(first.shape), first)
    start = len(IDS) + len(tokens) - 1
    part = npy(vllm(moe, turn, routed_experts_prompt_start=start)["routed_experts"])
    assert np.array_equal(part, first[start:])


async def test_the_clients_rows_of_aborted_attempts_are_those_of_an_undisturbed_run(moe):
    params = NATIVE | {"max_tokens": 400, "seed": 3, "temperature": 1.0}
    prompts = [prompt(20 + k, SPEC.vocab) for k in range(3)]
    async with RolloutClient(moe.url) as client:
        undisturbed = await asyncio.gather(*(client.generate(ids, params) for ids in prompts))
        for _ in range(10):  # on a busy machine the aborts may come when all is done
            running = asyncio.gather(*(client.generate(ids, params) for ids in prompts))
            for _ in range(3):
                await asyncio.sleep(0.1)
                await asyncio.to_thread(moe.post, "/v1/abort_requests", {"abort_all": True})
            disturbed = await running
            if any(rollout.num_resumes for rollout in disturbed):
                break
    assert any(rollout.num_resumes for rollout in disturbed)
    for one, other in zip(undisturbed, disturbed, strict=True):
        assert one.token_ids == other.token_ids and one.routed_experts == other.routed_experts
        assert other.routed_experts.array().shape == (len(other.prompt_ids) + 399, 2, TOP_K)


def test_a_dense_model_has_no_routing_to_return():
    server = Server(*SMALL, "--enable-return-routed-experts")
    try:
        until(lambda: server.poll() is not None, 60, "the server ends")
        assert server.poll() != 0 and "enable-return-routed-experts" in server.log()
    finally:
        server.close()


@pytest.mark.slow
def test_the_rows_of_a_stream_in_a_fleet_are_those_of_a_run_alone_though_its_engine_is_killed(moe, tmp_path):
    long = NATIVE | {"max_tokens": 400}
    expected = moe.complete(IDS, **long)
    folder = write_checkpoint(tmp_path / "moe", SPEC)
    with FleetServer(2, *SMALL, "--model", str(folder), "--enable-return-routed-experts") as fleet:
        stream = RowsStream(fleet, IDS, **long).wait_for_tokens(1)
        [busy] = [name for name, replica in fleet.replicas().items() if replica["in_flight"]]
        engine = fleet.engine_of(busy)
        assert engine is not None and len(stream.tokens) < 400
        os.kill(engine, signal.SIGKILL)
        stream.wait_end(90)
    assert (stream.error, stream.finals, stream.tokens) == (None, ["length"], expected["token_ids"])
    assert np.array_equal(np.concatenate(stream.rows), of_described(expected["routed_experts"]))
