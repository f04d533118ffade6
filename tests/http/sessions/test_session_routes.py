"""The routes of sessions: whose a session is, what a wrong request gets, and the shapes of Anthropic's messages."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest

from fastdeploy.core.outputs import Logprob, Span
from fastdeploy.core.request_fields import AddRequest
from fastdeploy.http.guards.keys import Keys
from fastdeploy.http.sessions.messages import BlockEvents, blocks_of
from fastdeploy.http.sessions.messages_body import MessagesBody, chat_of
from fastdeploy.http.sessions.store import SessionStore
from fastdeploy.inter_communicator import messages as m

EOS = 261
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}


def answers(text: str = "ok", reason: str = "length") -> Any:
    """Return a script that answers each choice with ``text``, one token for each byte, and <eos> for "stop"."""

    def script(add: AddRequest) -> list[m.Output]:
        ids = [*text.encode(), *([EOS] if reason == "stop" else [])]
        entries = [Logprob(-0.5) for _ in ids] if add.sampling.logprobs is not None else []
        spans = [Span("v1", 1, 0, len(ids))]
        return [m.Output(add.request_id, k, ids, entries, spans, reason) for k in range(add.n)]

    return script


@pytest.fixture
def stack(make_stack):
    made = make_stack()
    made.script(answers())
    return made


def test_a_request_of_a_session_survives_aborts_and_has_log_probabilities_that_the_client_does_not_get(stack):
    reply = stack.post("/sessions/s/v1/chat/completions", **CHAT).json()
    assert reply["choices"][0]["logprobs"] is None
    add = stack.engine.expect(AddRequest)
    assert add.survives_aborts and add.sampling.logprobs == 0 and add.sampling.seed is not None and add.session
    stack.post("/v1/chat/completions", **CHAT)
    add = stack.engine.expect(AddRequest)
    assert not add.survives_aborts and add.sampling.logprobs is None and not add.session


def test_a_row_says_what_the_turn_was(stack):
    stack.post("/sessions/s/v1/chat/completions", **CHAT, request_id="mine")
    (row,) = stack.http.get("/v1/sessions/s").json()["rows"]
    (turn,) = row["turns"]
    assert row["token_ids"][turn["start"] :] == list(b"ok") and row["logprobs"][turn["start"] :] == [-0.5, -0.5]
    assert turn["weight_versions"] == [{"version": "v1", "weight_epoch": 1, "start": turn["start"], "end": turn["end"]}]
    said = {name: turn[name] for name in ("request_id", "finish_reason", "message", "model", "boot_id", "begins_anew")}
    message = {"role": "assistant", "content": "ok"}
    assert said == {
        "request_id": "mine",
        "finish_reason": "length",
        "message": message,
        "model": "tiny",
        "boot_id": "boot-1",
        "begins_anew": "first turn",
    }
    assert turn["began"] <= turn["ended"]


def test_choices_and_streams_are_turns_too(stack):
    stack.post("/sessions/s/v1/chat/completions", **CHAT, n=2)
    stack.post("/sessions/s/v1/chat/completions", **CHAT, stream=True)
    stack.post("/sessions/s/v1/completions", prompt=[1, 2], max_tokens=4)
    rows = stack.http.get("/v1/sessions/s").json()["rows"]
    assert [row["turns"][-1]["choice"] for row in rows] == [0, 1, 0, 0] and rows[-1]["turns"][0]["text"] == "ok"
    assert [row["shared_prefix"] and row["shared_prefix"]["leaf"] for row in rows[:3]] == [None, 0, 0]


def test_a_completion_of_token_ids_may_have_what_is_left_over_of_a_chat(stack):
    reply = stack.post("/sessions/s/v1/completions", prompt=[1, 2], max_completion_tokens=3, messages=CHAT["messages"])
    assert reply.status_code == 200, reply.text
    assert stack.engine.expect(AddRequest).sampling.max_tokens == 3


@pytest.mark.parametrize("field", ["session", "session_id"])
def test_a_session_in_the_body_does_not_replace_the_one_of_the_path(stack, field):
    stack.post("/sessions/s/v1/chat/completions", **CHAT, **{field: "other"})
    assert stack.engine.expect(AddRequest).session not in ("other", "")
    assert len(stack.http.get("/v1/sessions/s").json()["rows"]) == 1


def test_a_session_belongs_to_the_key_that_made_it(make_stack):
    stack = make_stack(keys=Keys(data=(b"a", b"b")))
    stack.script(answers())
    keys = {name: {"Authorization": f"Bearer {name}"} for name in "ab"}
    url = "/sessions/s/v1/chat/completions"
    assert stack.http.post(url, json=CHAT).status_code == 401
    assert stack.http.post(url, json=CHAT, headers=keys["a"]).status_code == 200
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/abort")):
        reply = stack.http.request(method, f"/v1/sessions/s{path}", headers=keys["b"])
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "unknown_session")
    assert stack.http.get("/v1/sessions", headers=keys["b"]).json()["data"] == []
    assert len(stack.http.get("/v1/sessions/s", headers=keys["a"]).json()["rows"]) == 1
    assert len(stack.http.get("/v1/sessions/s", headers={"X-Api-Key": "a"}).json()["rows"]) == 1


def test_without_keys_the_key_of_a_client_does_not_matter(stack):
    stack.http.post("/sessions/s/v1/chat/completions", json=CHAT, headers={"Authorization": "Bearer EMPTY"})
    assert len(stack.http.get("/v1/sessions/s").json()["rows"]) == 1


@pytest.mark.parametrize("name", ["a%20b", "x" * 257, "%E2%9C%93", "a,b"])
def test_a_wrong_name_is_a_400_that_names_it(stack, name):
    for reply in (
        stack.post(f"/sessions/{name}/v1/chat/completions", **CHAT),
        stack.post(f"/sessions/{name}/v1/messages", **CHAT),
        stack.http.get(f"/v1/sessions/{name}"),
    ):
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "session")


@pytest.mark.parametrize("route", ["chat/completions", "completions"])
def test_a_result_is_not_retained_besides(stack, route):
    reply = stack.post(f"/sessions/s/v1/{route}", **CHAT if "chat" in route else {"prompt": [1]}, retain_s=5)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "retain_s")


def test_an_end_aborts_what_runs_and_forgets_the_session(stack):
    stack.engine.replies[m.AbortArgs] = lambda call: m.Reply(call.call_id, {"aborted": [], "not_found": []})
    stack.post("/sessions/s/v1/chat/completions", **CHAT)
    uid = stack.engine.expect(AddRequest).session
    assert stack.post("/v1/sessions/s/abort").json()["aborted"] == []
    assert stack.http.delete("/v1/sessions/s").json()["deleted"]
    assert stack.engine.expect(m.AbortArgs).args == m.AbortArgs(session=uid)
    assert stack.http.get("/v1/sessions/s").status_code == 404


def test_a_turn_whose_session_is_gone_at_its_end_is_logged(stack, monkeypatch, caplog):
    async def gone(*args: Any) -> bool:
        return False

    monkeypatch.setattr(SessionStore, "add", gone)
    assert stack.post("/sessions/s/v1/chat/completions", **CHAT, request_id="lost").status_code == 200
    assert "the turn of request lost in s#" in caplog.text


# ------------------------------------------------------------------ Anthropic


@pytest.fixture
def client(stack):
    return anthropic.Anthropic(base_url=f"{stack.server.url}/sessions/s", api_key="k", max_retries=0)


ASK: dict[str, Any] = {"model": "tiny", "max_tokens": 4, "messages": CHAT["messages"]}


def test_a_message_and_its_events_say_the_same(client):
    whole = client.messages.create(**ASK)
    with client.messages.stream(**ASK) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert whole.content[0].text == streamed.content[0].text == "ok"
    assert whole.stop_reason == streamed.stop_reason == "max_tokens"
    assert whole.usage.output_tokens == streamed.usage.output_tokens == 2
    assert [kind for kind in kinds if kind != "text"] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


def test_a_stop_sequence_is_named(client, stack):
    stack.script(answers("ab#cd"))
    message = client.messages.create(**ASK, stop_sequences=["#"])
    assert (message.content[0].text, message.stop_reason, message.stop_sequence) == ("ab", "stop_sequence", "#")


def test_a_tool_is_called_and_its_result_continues_the_turn(make_stack):
    stack = make_stack(tool_call_parser="hermes")
    client = anthropic.Anthropic(base_url=f"{stack.server.url}/sessions/s", api_key="k", max_retries=0)
    text = 'so<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    stack.script(answers(text, "stop"))
    ask = {**ASK, "max_tokens": 100, "tools": [{"name": "add", "input_schema": {"type": "object"}}]}
    whole = client.messages.create(**ask)
    with client.messages.stream(**ask) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        said, called = message.content
        assert said.text == "so" and (called.type, called.name, called.input) == ("tool_use", "add", {"a": 1})
        assert message.stop_reason == "tool_use"
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": whole.content[1].id, "content": "2"}]}
    stack.script(answers("2"))
    history = [*ASK["messages"], {"role": "assistant", "content": whole.content}, result]
    client.messages.create(**{**ask, "messages": history})
    rows = stack.http.get("/v1/sessions/s").json()["rows"]
    last = rows[-1]["turns"]
    assert [turn["continues"] for turn in last] == [None, 1] and len(last[0]["message"]["tool_calls"]) == 1
    assert rows[-1]["token_ids"][last[0]["start"] : last[0]["end"]] == [*text.encode(), EOS]


def test_count_tokens_counts_the_prompt_and_makes_no_turn(client, stack):
    count = client.messages.count_tokens(model="tiny", messages=ASK["messages"]).input_tokens
    assert count == client.messages.create(**ASK).usage.input_tokens
    assert len(stack.http.get("/v1/sessions/s").json()["rows"]) == 1


def test_an_answer_that_was_begun_by_the_client_is_recognised_as_one_message(client, stack):
    stack.script(answers(" cd"))
    history = [*ASK["messages"], {"role": "assistant", "content": "ab"}]
    client.messages.create(**{**ASK, "messages": history})
    history[-1] = {"role": "assistant", "content": "ab cd"}
    client.messages.create(**{**ASK, "messages": [*history, {"role": "user", "content": "e"}]})
    [row] = stack.http.get("/v1/sessions/s").json()["rows"]
    assert [turn["continues"] for turn in row["turns"]] == [None, 0]


def test_the_schema_of_an_answer_is_followed(client, stack):
    schema = {"type": "object", "properties": {"total": {"type": "integer"}}}
    client.messages.create(**ASK, output_config={"format": {"type": "json_schema", "schema": schema}})
    assert '"total"' in stack.engine.expect(AddRequest).sampling.grammar


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"mcp_servers": [{"type": "url", "url": "http://a", "name": "a"}]}, "mcp_servers"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "bot", "content": "a"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages.0.content"),
        ({"tool_choice": {"type": "every"}}, "tool_choice.type"),
        ({"system": [1]}, "system"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"tools": [{"name": "web_search", "type": "web_search_20250305"}]}, "tools.0.type"),
        ({"tools": [{"name": "f", "input_schema": {"required": 1}}]}, "tools.0.input_schema.required"),
        ({"tools": [{"name": "a b"}]}, "tools.0.name"),
        ({"tools": [{"name": "f"}], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages.0.content.0.tool_use_id"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "messages.0.content.0.name"),
    ],
)
def test_a_wrong_field_is_a_400_that_names_it(make_stack, change, param):
    stack = make_stack(tool_call_parser="hermes")
    reply = stack.http.post("/sessions/s/v1/messages", json={**ASK, **change})
    body = reply.json()
    assert (reply.status_code, body["type"], body["error"]["param"]) == (400, "error", param)


def test_tools_and_their_results_become_those_of_a_chat():
    body = MessagesBody(
        model="tiny",
        max_tokens=9,
        system=[{"type": "text", "text": "sys", "cache_control": {"type": "ephemeral"}}],
        messages=[
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": ""},
                    {"type": "text", "text": "wait"},
                    {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "2"}]},
                    {"type": "text", "text": "so?"},
                ],
            },
        ],
        tools=[{"name": "add", "description": "adds", "input_schema": {"type": "object"}}],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        thinking={"type": "disabled"},
    )
    chat = chat_of(body)
    call = {"id": "t1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
    assert chat["messages"] == [
        {"role": "system", "content": "sys"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "wait", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t1", "content": "2"},
        {"role": "user", "content": "so?"},
    ]
    function = {"name": "add", "description": "adds", "parameters": {"type": "object"}}
    assert chat["tools"] == [{"type": "function", "function": function}]
    assert (chat["tool_choice"], chat["parallel_tool_calls"]) == ("required", False)
    assert chat["chat_template_kwargs"] == {"enable_thinking": False, "thinking": False}


def test_reasoning_text_and_calls_are_blocks_whole_and_as_events():
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    blocks = blocks_of({"reasoning_content": "hm", "content": "so", "tool_calls": [call]})
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use"] and blocks[2]["input"] == {"a": 1}
    made = BlockEvents()
    deltas: list[dict[str, Any]] = [{"reasoning_content": "h"}, {"reasoning_content": "m"}, {"content": "so"}]
    deltas += [{"tool_calls": [{"index": 0, **call}, {"index": 1, **call, "id": "c2"}]}]
    events = [event for delta in deltas for event in made.of(delta)] + made.end()
    starts = [(e["index"], e["content_block"]["type"]) for e in events if e["type"] == "content_block_start"]
    assert starts == [(0, "thinking"), (1, "text"), (2, "tool_use"), (3, "tool_use")]
    assert [e["index"] for e in events if e["type"] == "content_block_stop"] == [0, 1, 2, 3]
    parts = [e["delta"]["partial_json"] for e in events if e.get("delta", {}).get("type") == "input_json_delta"]
    assert [json.loads(part) for part in parts] == [{"a": 1}] * 2 and made.end() == []
