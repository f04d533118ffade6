"""The prompt of a chat: messages to text by the chat template, and text to token ids."""

from __future__ import annotations

import time
from typing import Any

from fastdeploy.client.generation import GenerationRequest
from fastdeploy.client.tokenizer import Tokenizer
from fastdeploy.client.turns import KnownTurn, extend
from fastdeploy.core.errors import InvalidField
from fastdeploy.http.context import ServingContext
from fastdeploy.http.openai.chat_tools import answer_format, answer_limits, template_message, template_variables
from fastdeploy.http.openai.known_turns import TURN_FIELDS, end_ids, extended, given_turn
from fastdeploy.http.openai.protocol import (
    ChatBody,
    ChatMessage,
    ChatTokensBody,
    generation_request,
    sampling_of,
    text_options,
)


async def prepare(context: ServingContext, body: ChatBody, known: KnownTurn | None = None) -> GenerationRequest:
    """Check ``body``, and make its prompt. Raises InvalidField or ModelNotFound. known: a turn that the messages begin
    with. Its ids begin the prompt, unless the chat template does not allow it."""
    arrived = time.time()
    adapter = context.adapter(body.model) or context.adapter(body.lora_path)
    await context.client.require_engine()
    tokenizer = context.require_tokenizer("messages")
    context.check_choices(1, body.request_fields.n)
    if body.chat_template is not None and not context.config.trust_request_chat_template:
        raise InvalidField("chat_template", "refused: this server was started without --trust-request-chat-template")
    if body.return_meta_info and body.stream:
        raise InvalidField("return_meta_info", "expected false with stream")
    answer = answer_format(context, body)
    messages = [_message(context, i, message) for i, message in enumerate(body.messages)]
    if isinstance(body, ChatTokensBody):
        ids = context.check_prompt(body.tokens, "tokens", "a list of token ids")
    elif body.input_ids is not None:
        ids = context.check_prompt(body.input_ids, "input_ids", "a list of token ids")
    else:
        ids = await _rendered(context, tokenizer, body, messages, known)
    if body.completion_token_ids:
        begun = context.check_prompt(body.completion_token_ids, "completion_token_ids", "a list of token ids")
        ids = context.check_prompt([*ids, *begun], "completion_token_ids")
    limit = ("max_completion_tokens", body.max_completion_tokens)
    if body.max_completion_tokens is None:
        limit = ("max_tokens", body.max_tokens)
    limits = await answer_limits(context, body, answer, ids)
    sampling = sampling_of(context, body, len(ids), _logprobs_asked(body), limit, limits)
    context.check_reply([sampling], [ids], body.request_fields.n)
    text = answer.text_options(context, text_options(context, body))
    return generation_request(body, "chatcmpl", [ids], [sampling], text, arrived, adapter)


async def _rendered(
    context: ServingContext,
    tokenizer: Tokenizer,
    body: ChatBody,
    messages: list[dict[str, Any]],
    known: KnownTurn | None,
) -> list[int]:
    """Apply the chat template and tokenise: only the text after the last turn whose token ids are given or known."""
    continue_final = bool(body.continue_final_message)
    context.check_length(sum(len(message["content"]) for message in messages), "messages")
    opens_turn = not continue_final if body.add_generation_prompt is None else body.add_generation_prompt
    template: dict[str, Any] = {
        "add_generation_prompt": opens_turn,
        "continue_final_message": continue_final,
        "variables": template_variables(body),
        "tools": body.tools or None,
        "template": body.chat_template,
    }
    ids = None
    if given := given_turn(context, body):
        ids = await extended(context, tokenizer, body, messages, given, template)
    elif known is not None:
        ids = await extend(tokenizer, messages, known, end_ids(context, body), **template)
    if ids is None:
        text = await tokenizer.chat_text(messages, **template)
        ids = await context.encode(text, "messages", bool(body.add_special_tokens))
    return context.check_prompt(ids, "messages")


def _logprobs_asked(body: ChatBody) -> int | None:
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise InvalidField("top_logprobs", "needs logprobs: true")
    return None


def _message(context: ServingContext, i: int, message: ChatMessage) -> dict[str, Any]:
    """Return the message with its content as one string. Text parts are joined, and other parts are refused."""
    content = message.content
    if isinstance(content, list):
        for k, part in enumerate(content):
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise InvalidField(f"messages.{i}.content.{k}", "only text parts are supported by this server")
        content = "".join(part["text"] for part in content)
    elif content is not None and not isinstance(content, str):
        raise InvalidField(f"messages.{i}.content", "expected a string or a list of text parts")
    fields = message.model_dump(exclude_none=True, exclude={*TURN_FIELDS})
    return template_message(context, {**fields, "content": content or ""})
