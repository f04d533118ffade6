"""Clients that keep the token ids of a conversation: the prompt of a turn begins with the ids that they send back."""

from __future__ import annotations

import pytest

from fastdeploy.core.request_fields import AddRequest
from fastdeploy.inter_communicator import messages as m
from support.fake_engine_server import reply_with
from support.http_calls import events

CHAT = "/v1/chat/completions"
USER, BOT, EOS = 262, 263, 261  # the tiny tokenizer's
PROMPT = [USER, *b"hi", BOT]
SAMPLED = [*b"hell", ord("o")]  # the tokenizer itself has one token for "hello"
NEW = [USER, *b"more", BOT]
TURNS = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "more"},
]
WITH_IDS = [TURNS[0], TURNS[1] | {"prompt_token_ids": PROMPT, "generation_token_ids": SAMPLED}, TURNS[2]]
# What NeMo-Gym's model server adds to each request.
GYM = {"logprobs": True, "top_logprobs": 0, "return_tokens_as_token_ids": True, "top_p": 1.0, "temperature": 1.0}


def prompt_of(stack) -> list[int]:
    return stack.engine.expect(AddRequest).prompt_token_ids


@pytest.mark.parametrize(
    "fields",
    [{"messages": WITH_IDS}, {"messages": TURNS, "required_prefix_token_ids": PROMPT + SAMPLED}],
    ids=["ids in the message", "required_prefix_token_ids"],
)
def test_nemo_gets_a_prompt_that_begins_with_its_ids_from_chat_and_from_tokenize(stack, fields):
    stack.script(reply_with([97]))
    assert stack.post(CHAT, **fields, **GYM).status_code == 200
    assert prompt_of(stack) == PROMPT + SAMPLED + NEW
    assert stack.post("/tokenize", **fields).json()["tokens"] == PROMPT + SAMPLED + NEW
    assert stack.post("/tokenize", messages=TURNS).json()["tokens"] != PROMPT + SAMPLED + NEW


def test_nemo_reads_the_ids_of_a_turn_in_the_message_and_sends_it_back_as_it_is(stack):
    stack.script(reply_with(SAMPLED))
    first = stack.post(CHAT, messages=TURNS[:1], **GYM).json()["choices"][0]
    message = first["message"]
    assert message["content"] == "hello" and message["prompt_token_ids"] == prompt_of(stack) == PROMPT
    assert (message["generation_token_ids"], message["generation_log_probs"]) == (SAMPLED, [-0.5] * 5)
    assert [entry["token"] for entry in first["logprobs"]["content"]] == [f"token_id:{token}" for token in SAMPLED]
    assert stack.post(CHAT, messages=[TURNS[0], message, TURNS[2]], **GYM).status_code == 200
    assert prompt_of(stack) == PROMPT + SAMPLED + NEW


def test_hud_sends_the_ids_of_the_prompt_and_of_the_answer_with_a_count_that_leaves_out_its_system_prompt(stack):
    stack.script(reply_with(SAMPLED))
    system = {"role": "system", "content": "s"}
    first = stack.post(CHAT, messages=[system, TURNS[0]], return_token_ids=True, logprobs=True).json()["choices"][0]
    ids = first["prompt_token_ids"] + first["token_ids"]
    assert stack.engine.expect(AddRequest)
    body = {"prompt_token_ids": ids, "continuation_from": 2, "return_token_ids": True, "logprobs": True}
    second = stack.post(CHAT, messages=[system, *TURNS], **body).json()["choices"][0]
    assert second["prompt_token_ids"] == prompt_of(stack) == ids + NEW


def test_the_message_of_a_client_that_did_not_ask_for_ids_has_none(stack):
    stack.script(reply_with(SAMPLED))
    message = stack.post(CHAT, messages=TURNS[:1], logprobs=True).json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "hello"}


def test_the_last_turn_with_ids_counts_and_later_messages_are_text(stack):
    stack.script(reply_with([97]))
    later = [*WITH_IDS, {"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}]
    assert stack.post(CHAT, messages=later).status_code == 200
    assert prompt_of(stack) == [*PROMPT, *SAMPLED, *NEW, *b"x", USER, *b"y", BOT]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": TURNS, "required_prefix_token_ids": "abc"}, "required_prefix_token_ids"),
        ({"messages": TURNS, "required_prefix_token_ids": [1.5]}, "required_prefix_token_ids"),
        ({"messages": TURNS, "required_prefix_token_ids": [272]}, "required_prefix_token_ids"),
        ({"messages": TURNS, "required_prefix_token_ids": [1] * 128}, "required_prefix_token_ids"),
        ({"messages": TURNS[:1], "required_prefix_token_ids": [1]}, "required_prefix_token_ids"),
        ({"messages": TURNS, "prompt_token_ids": "abc"}, "prompt_token_ids"),
        ({"messages": [TURNS[0], TURNS[1] | {"prompt_token_ids": [1]}]}, "messages.1.generation_token_ids"),
        ({"messages": [TURNS[0], TURNS[1] | {"prompt_token_ids": 1}]}, "messages.1.prompt_token_ids"),
        ({"messages": [*WITH_IDS, {"role": "user", "content": "x" * 128}]}, "messages"),
    ],
)
def test_wrong_ids_are_refused_by_name(module_stack, fields, param):
    for path in (CHAT, "/tokenize"):
        reply = module_stack.post(path, **fields)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


def test_a_prompt_that_grew_too_long_is_refused_in_the_words_that_nemo_takes_for_a_finished_turn(module_stack):
    reply = module_stack.post(CHAT, messages=TURNS, required_prefix_token_ids=[97] * 126, **GYM)
    assert reply.status_code == 400 and "context length" in reply.json()["error"]["message"]


def test_ids_that_no_text_can_follow_are_refused(make_stack):
    stack = make_stack(trust_request_chat_template=True)
    template = "{% if messages | length == 2 %}{{ messages[1].tool_calls }}{% else %}none{% endif %}"
    turn = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    fields = {"messages": [TURNS[0], turn, TURNS[2]], "chat_template": template, "required_prefix_token_ids": [1]}
    reply = stack.post(CHAT, **fields)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "required_prefix_token_ids")


# ------------------------------------------------------------------ callers that send whole prompts of ids


MILES = {"messages": TURNS, "input_ids": [5, 6, 7], "logprobs": True, "return_meta_info": True, "no_stop_trim": False}


def test_miles_sends_input_ids_with_its_messages_and_reads_meta_info(stack):
    stack.script(reply_with(list(b"hey")))
    reply = stack.http.post(CHAT, json=MILES, headers={"X-SMG-Routing-Key": "s1"}).json()
    add = stack.engine.expect(AddRequest)
    assert (add.prompt_token_ids, add.session) == ([5, 6, 7], "s1")
    choice = reply["choices"][0]
    meta = choice["meta_info"]
    assert choice["message"]["content"] == "hey"
    assert meta["output_token_logprobs"] == [[-0.5, token, None] for token in b"hey"]
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (3, 3) and "cached_tokens" in meta
    assert meta["finish_reason"]["type"] in ("stop", "length") and isinstance(meta["weight_version"], str)


def test_the_content_for_miles_is_a_string_also_without_tokens(stack):
    stack.script(lambda add: [m.Output(request_id=add.request_id, choice=0, finish_reason="abort")])
    choice = stack.post(CHAT, **MILES).json()["choices"][0]
    assert choice["message"]["content"] == "" and choice["meta_info"]["output_token_logprobs"] == []


def test_no_stop_trim_keeps_the_stop_string(stack):
    for keeps, text in ((False, "h"), (True, "hey")):
        stack.script(reply_with(list(b"hey you")))
        body = MILES | {"stop": "ey", "no_stop_trim": keeps}
        assert stack.post(CHAT, **body).json()["choices"][0]["message"]["content"] == text


def test_miles_names_its_adapter_by_lora_path(stack):
    stack.script(reply_with([97]))
    stack.engine.adapters = [{"lora_name": "miles"}]
    stack.post(CHAT, **MILES | {"lora_path": "miles"})
    assert stack.engine.expect(AddRequest).adapter == "miles"


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"input_ids": "abc"}, "input_ids"), ({"input_ids": []}, "input_ids"), ({"stream": True}, "return_meta_info"),
     ({"lora_path": ["a"]}, "lora_path")],
)  # fmt: skip
def test_wrong_fields_of_miles_are_refused_by_name(module_stack, fields, param):
    reply = module_stack.post(CHAT, **MILES | fields)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


def test_rllm_streams_a_chat_and_finds_the_prompt_at_the_top_of_the_first_chunk(stack):
    stack.script(reply_with(list(b"hey")))
    body = {"messages": TURNS[:1], "logprobs": True, "return_token_ids": True, "stream": True}
    first, *others, _ = events(stack.post(CHAT, **body))
    assert first["prompt_token_ids"] == PROMPT
    assert not any("prompt_token_ids" in chunk for chunk in others)
    assert [token for chunk in (first, *others) for token in chunk["choices"][0]["token_ids"]] == list(b"hey")


def test_rllm_sends_later_turns_as_ids_with_fields_of_the_chat_left_over(stack):
    """The gateway turns the body of a chat to that of a completion, and leaves out only some fields."""
    stack.script(reply_with(list(b"hey")))
    body = {"prompt": [5, 6], "add_special_tokens": False, "logprobs": True, "return_token_ids": True,
            "max_completion_tokens": 7, "messages": TURNS, "tools": [{"type": "function"}], "top_logprobs": 2,
            "chat_template_kwargs": {"enable_thinking": False}, "parallel_tool_calls": True}  # fmt: skip
    choice = stack.post("/v1/completions", **body).json()["choices"][0]
    add = stack.engine.expect(AddRequest)
    assert (add.prompt_token_ids, add.sampling.max_tokens, add.sampling.logprobs) == ([5, 6], 7, 1)
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([5, 6], list(b"hey"))
    assert len(choice["logprobs"]["token_logprobs"]) == 3


@pytest.mark.parametrize("field", ["messages", "tools", "max_completion_tokens"])
def test_a_text_with_fields_of_a_chat_is_refused(module_stack, field):
    body = {"prompt": "hi", "messages": TURNS, "tools": [{"type": "function"}], "max_completion_tokens": 1}
    reply = module_stack.post("/v1/completions", prompt="hi", **{field: body[field]})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, field)


def test_agent_lightning_asks_for_logprobs_in_one_way_on_both_routes(stack):
    """Its proxy sets logprobs: true, and reads the prompt at the top, or in the choice of a completion."""
    added = {"temperature": 1.0, "return_token_ids": True, "logprobs": True}
    for path, body in ((CHAT, {"messages": TURNS[:1]}), ("/v1/completions", {"prompt": PROMPT})):
        stack.script(reply_with(list(b"hey")))
        reply = stack.post(path, **body, **added).json()
        choice = reply["choices"][0]
        assert (reply.get("prompt_token_ids") or choice["prompt_token_ids"]) == PROMPT
        assert choice["token_ids"] == list(b"hey") and choice["logprobs"] is not None
        assert reply["choices"][0]["finish_reason"] == "length" and reply["usage"]["completion_tokens"] == 3
