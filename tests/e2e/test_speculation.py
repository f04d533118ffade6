"""The embedded model over HTTP, with drafts and without: clients get the same."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from fastdeploy.client.tokenizer import load_tokenizer
from fastdeploy.embedded import MODEL_DIR
from fastdeploy.worker.model_runner import ModelRunner
from support.drafters import Memory, adversary
from support.engine_stack import engine_stack
from support.http_calls import events
from support.http_stack import Server

TEXT = "12+34="
PLAIN = {"prompt": TEXT, "max_tokens": 60, "seed": 5, "temperature": 1.0, "return_token_ids": True}
CHAT = {"messages": [{"role": "user", "content": "(7*8)+5"}], "max_tokens": 60, "seed": 6, "return_token_ids": True}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("/v1/completions", {"temperature": 0, "logprobs": 3, "ignore_eos": True}),
    "n choices": ("/v1/completions", {"n": 3, "logprobs": 0}),
    "several prompts": ("/v1/completions", {"prompt": [TEXT, "5*5=", TEXT], "logprobs": 1}),
    "a stop string": ("/v1/completions", {"stop": ["3", "=1"], "ignore_eos": True, "logprobs": 0}),
    "a stop string that is included": (
        "/v1/completions", {"stop": ["2"], "include_stop_str_in_output": True, "min_tokens": 5, "ignore_eos": True}),
    "stop ids": ("/v1/completions", {"stop_token_ids": [3, 4], "min_tokens": 7, "logprobs": 0}),
    "penalties": ("/v1/completions", {"repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.3,
                                      "ignore_eos": True, "logprobs": 2}),
    "a part of the distribution": ("/v1/completions", {
        "top_k": 7, "top_p": 0.9, "min_p": 0.01, "ignore_eos": True, "logprobs": 2, "logprobs_mode": "processed"}),
    "sampling masks": ("/v1/completions", {
        "top_p": 0.9, "ignore_eos": True, "return_sampling_mask": True, "return_sampling_mask_logprobs": True}),
    "logprobs of given ids": ("/v1/completions", {"logprob_token_ids": [4, 40], "ignore_eos": True}),
    "logprobs of the prompt": ("/v1/completions", {"prompt_logprobs": 1, "echo": True, "logprobs": 1}),
    "a chat": ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2, "n": 2}),
}  # fmt: skip


def body_of(name: str) -> tuple[str, dict[str, Any]]:
    path, fields = BODIES[name]
    return path, fields if "messages" in fields else PLAIN | fields


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[Server, Server]]:
    """Return a server without drafts, and one that drafts what the other has made, or something else."""
    tokenizer, memory = load_tokenizer(str(MODEL_DIR)), Memory()
    with contextlib.ExitStack() as stack:
        made = []
        for drafter in (memory, adversary(memory.coming, 61, most=12)):
            runner = ModelRunner(str(MODEL_DIR), num_blocks=256, standby_weights="off")
            made.append(stack.enter_context(engine_stack(str(MODEL_DIR), tokenizer, runner, drafter)))
        yield made[0], made[1]


def shown(reply: dict[str, Any]) -> dict[str, Any]:
    """Return a reply without what names the request, and without prefix hits, which depend on when others came."""
    usage = {name: count for name, count in reply["usage"].items() if name != "prompt_tokens_details"}
    own = {"id", "created", "system_fingerprint"}
    return {key: value for key, value in reply.items() if key not in own} | {"usage": usage}


def steps_and_tokens(server: Server) -> tuple[float, float, float]:
    """Return the tokens that were sampled, the drafts that were verified and those that were right."""
    lines = dict(line.split(" ") for line in server.http.get("/metrics").text.split("\n") if line.count(" ") == 1)
    names = ("generation_tokens_total", "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total")
    return tuple(float(lines[f"fastdeploy:{name}"]) for name in names)


@pytest.mark.parametrize("name", BODIES)
def test_a_reply_is_the_same_with_drafts(servers, name):
    path, body = body_of(name)
    without, with_drafts = (shown(server.post(path, **body).json()) for server in servers)
    assert with_drafts == without


@pytest.mark.parametrize("name", [name for name, (_, fields) in BODIES.items() if "echo" not in fields])
def test_a_stream_has_the_same_tokens_with_drafts(servers, name):
    path, body = body_of(name)
    whole = shown(servers[0].post(path, **body).json())["choices"]
    for server in servers:
        got = events(server.post(path, **body, stream=True, stream_options={"include_usage": True}))
        assert got.pop() == "[DONE]" and got.pop()["usage"] is not None
        joined = [{"text": "", "token_ids": [], "token_logprobs": [], "finish_reason": None} for _ in whole]
        for event in got:
            [part] = event["choices"]
            add(joined[part["index"]], part)
        assert joined == [add({"text": "", "token_ids": [], "token_logprobs": [], "finish_reason": None}, one)
                          for one in whole]  # fmt: skip


def add(joined: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    """Add an event, or a whole choice, to what was seen of a choice. All its lists have one entry for each token."""
    message = part.get("delta") or part.get("message") or {}
    joined["text"] += part.get("text") or message.get("content") or ""
    joined["token_ids"] += part["token_ids"]
    joined["finish_reason"] = part["finish_reason"]
    logprobs = part.get("logprobs") or {}
    found = logprobs.get("token_logprobs") or [entry["logprob"] for entry in logprobs.get("content") or []]
    assert not logprobs or len(found) == len(part["token_ids"])
    spans = part["weight_versions"]
    assert sum(span["end"] - span["start"] for span in spans) == len(part["token_ids"])
    joined["token_logprobs"] += found
    return joined


def test_drafts_are_counted_and_no_token_twice(servers):
    tokens, drafted, accepted = [], [], []
    for server in servers:
        before = steps_and_tokens(server)
        usage = server.post("/v1/completions", **PLAIN | {"max_tokens": 50, "ignore_eos": True}).json()["usage"]
        made = [b - a for a, b in zip(before, steps_and_tokens(server), strict=True)]
        assert made[0] == usage["completion_tokens"] == 50
        tokens.append(made[0])
        drafted.append(made[1])
        accepted.append(made[2])
    assert drafted[0] == accepted[0] == 0 < accepted[1] < drafted[1]
