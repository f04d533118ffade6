"""docs/fastdeploy.md has a verdict for each route and each field of FastDeploy, and the verdicts are true."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from fastdeploy.client.chat_format.formats import ChatFormat
from fastdeploy.core.config import ServeConfig
from fastdeploy.core.errors import FastDeployError
from fastdeploy.http.app import create_app
from fastdeploy.http.body import parse_body
from fastdeploy.http.context import ServingContext
from fastdeploy.http.dialects.fastdeploy import routes
from fastdeploy.http.dialects.fastdeploy.bodies import RAW_PROMPT, TOKENS_PER_EVENT, native
from fastdeploy.http.openai.protocol import UNSUPPORTED, ChatBody, CompletionBody
from support.fastdeploy_http_names import OF_BOTH, OF_CHATS, OF_COMPLETIONS, REPLY_FIELDS, ROUTES
from support.markdown import ROOT, names, tables

TABLES = tables(ROOT / "docs" / "fastdeploy.md")
VERDICTS = {"same", "differs", "no effect", "refused"}
CONTEXT = cast(ServingContext, SimpleNamespace(max_model_len=128, chat_format=ChatFormat()))
MESSAGES = [{"role": "user", "content": "a"}]
# A value of each field that asks for something.
VALUES: dict[str, Any] = {
    "messages": MESSAGES, "prompt": "a", "tools": [{"type": "function", "function": {"name": "f"}}], "model": "m",
    "logits_processors_args": {"thinking_budget": 3}, "bad_words": ["a"], "bad_words_token_ids": [1], "stop": "a",
    "stop_token_ids": [1], "response_format": {"type": "json_object"}, "guided_json": {"type": "object"},
    "guided_regex": "a", "guided_choice": ["a"], "guided_grammar": "a", "mm_hashes": ["a"], "user": "u",
    "prompt_token_ids": [1], "completion_token_ids": [1], "metadata": {"min_tokens": 1}, "suffix": {"min_tokens": 1},
    "chat_template_kwargs": {"a": 1}, "chat_template": "a", "reasoning_effort": "low", "structural_tag": "a",
    "stream_options": {"include_usage": True}, "disaggregate_info": {"a": 1}, "trace_context": "a", "request_id": "a",
    "video_fps": 2.0, "best_of": 2, "top_p": 0, "min_p": 0.5, "top_k": 2,
    "include_logprobs_decode_token": False,
}  # fmt: skip
VALUES |= dict.fromkeys(
    ("stream", "echo", "include_draft_logprobs", "temp_scaled_logprobs", "top_p_normalized_logprobs", "collect_metrics",
     "include_stop_str_in_output", "return_token_ids", "disable_chat_template"), True
)  # fmt: skip
BESIDE = {"top_logprobs": {"logprobs": True}, "stream_options": {"stream": True},
          "response_max_tokens": {"enable_thinking": False}}  # fmt: skip
CASES = [(kind, name) for kind, own in ((ChatBody, OF_CHATS), (CompletionBody, OF_COMPLETIONS))
         for name in (OF_BOTH + own).split()]  # fmt: skip


def verdicts(table: str) -> dict[str, str]:
    """Return the verdict of each name in a table."""
    return {name: row[1] for row in TABLES[table] for name in names(row[0])}


FIELDS = verdicts("fastdeploy request fields")


@pytest.mark.parametrize(
    ("table", "known"),
    [
        ("fastdeploy routes", {route.strip() for route in ROUTES.split(",")}),
        ("fastdeploy request fields", {*(OF_BOTH + OF_CHATS + OF_COMPLETIONS).split()}),
        ("fastdeploy reply fields", {*REPLY_FIELDS.split()}),
    ],
)
def test_each_name_has_one_verdict(table, known):
    assert verdicts(table).keys() == known
    assert sum(len(names(row[0])) for row in TABLES[table]) == len(known)
    assert {*verdicts(table).values()} <= VERDICTS


def test_a_route_is_there_and_refuses_if_the_table_says_so():
    paths = create_app(None, None, ServeConfig(model="m")).openapi()["paths"]
    for route, verdict in verdicts("fastdeploy routes").items():
        method, path = route.split()
        assert method.lower() in paths[path], route
        assert (path in routes.ABSENT | routes.NOT_HERE) == (verdict == "refused"), route


@pytest.mark.parametrize(("kind", "field"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_a_field_is_refused_if_the_table_says_so(kind, field):
    needed = {"messages": MESSAGES} if kind is ChatBody else {"prompt": "a"}
    logprobs = True if kind is ChatBody else 1
    value = logprobs if field == "logprobs" else VALUES.get(field, 1)
    data = needed | BESIDE.get(field, {}) | {field: value}
    try:
        body = native(CONTEXT, data, kind is ChatBody)
        for read_by_the_route in (RAW_PROMPT, TOKENS_PER_EVENT):
            body.pop(read_by_the_route, None)
        parse_body(body, kind, UNSUPPORTED)
    except FastDeployError as error:
        assert FIELDS[field] == "refused", error.message
        assert error.detail["param"] == field
    else:
        assert FIELDS[field] != "refused"
