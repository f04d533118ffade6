"""Bodies of FastDeploy's chats and completions, made native ones.

Such a body is checked against FastDeploy's types first, since its clients read the words of those errors. Fields that
neither FastDeploy nor this server knows are dropped, as there. Native fields stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fastdeploy.core.errors import FastDeployError, InvalidField
from fastdeploy.http.body import IGNORED
from fastdeploy.http.context import ServingContext
from fastdeploy.http.openai.protocol import UNSUPPORTED, ChatBody, CompletionBody

MAX_SEED = 922337203685477580
# Fields that change nothing here: other tools trace, and nothing drafts with a model.
NO_EFFECT = frozenset({"trace_context", "include_draft_logprobs"})
# Fields that are refused if they ask for something, and why.
REFUSED: Mapping[str, str] = {
    "disaggregate_info": "not supported: prompts and answers are computed by one engine",
    "mm_hashes": "not supported: this server reads text only",
    "video_fps": "not supported: this server reads text only",
    "collect_metrics": "not supported: /metrics has the metrics, and --trace FILE the times of each request",
    "structural_tag": "not supported: use guided_grammar, guided_json, or tools",
}
# What the message of a reply says of its tokens.
OF_TOKENS = frozenset({"prompt_token_ids", "completion_token_ids", "prompt_tokens", "completion_tokens"})
RAW_PROMPT = "raw_prompt"
TOKENS_PER_EVENT = "max_streaming_response_tokens"
NOTHING: tuple[Any, ...] = (None, False, [], {})
# What the values of metadata (of a chat) and suffix (of a completion) may set: fields without a default.
IN_METADATA = frozenset({
    "temperature", "top_p", "top_k", "min_p", "min_tokens", "max_tokens", "max_completion_tokens", "seed",
    "repetition_penalty", "presence_penalty", "frequency_penalty", "bad_words", "bad_words_token_ids",
    "reasoning_max_tokens", "response_max_tokens", "enable_thinking", "chat_template_kwargs", "logits_processors_args",
    TOKENS_PER_EVENT,
})  # fmt: skip
INVALID, MISSING = "invalid_value", "missing_required_parameter"


class Malformed(FastDeployError):
    """A body that breaks FastDeploy's types: the words are those of the type check, without the name of the field."""

    status = 400

    def __init__(self, field: str, message: str, code: str = INVALID):
        super().__init__(message, param=field)
        self.code = code


class _Fields(BaseModel):
    """The types and limits of FastDeploy's fields."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())
    model: str | None = None
    stream: bool | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = None
    seed: int | None = Field(None, ge=0, le=MAX_SEED)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    bad_words_token_ids: list[int] | None = None
    logits_processors_args: dict[str, Any] | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    include_logprobs_decode_token: bool | None = None
    temp_scaled_logprobs: bool | None = None
    top_p_normalized_logprobs: bool | None = None
    max_streaming_response_tokens: int | None = None
    request_id: str | None = None
    response_format: dict[str, Any] | None = None


class _Completion(_Fields):
    prompt: list[int] | list[list[int]] | str | list[str] | None = None
    prompt_token_ids: list[int] | list[list[int]] | None = None
    suffix: dict[str, Any] | None = None
    logprobs: int | None = None
    echo: bool | None = None


class _Chat(_Fields):
    messages: list[Any] | list[int]
    max_completion_tokens: int | None = None
    prompt_token_ids: list[int] | None = None
    completion_token_ids: list[int] | None = None
    metadata: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    reasoning_max_tokens: int | None = None
    response_max_tokens: int | None = None
    disable_chat_template: bool | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def native(context: ServingContext, data: dict[str, Any], is_chat: bool) -> dict[str, Any]:
    """Return the native fields that ``data`` asks for; ``RAW_PROMPT``, a text that is the prompt as it is; and
    ``TOKENS_PER_EVENT``. Raises Malformed or InvalidField."""
    _check(data, _Chat if is_chat else _Completion)
    body = {name: value for name, value in data.items() if value is not None and name not in NO_EFFECT}
    for name in ("metadata", "suffix"):
        if isinstance(values := body.get(name), dict):
            del body[name]
            body = {key: value for key, value in values.items() if key in IN_METADATA and value is not None} | body
    _check(body, _Chat if is_chat else _Completion)
    for name, why in REFUSED.items():
        if body.pop(name, None) not in NOTHING:
            raise InvalidField(name, why)
    _limits(context, body)
    _sampling(body)
    _logprobs(body)
    _stream(body)
    (_chat if is_chat else _completion)(body)
    if context.chat_format.reasoning is None:  # such a model does not reason: no limit can matter
        body.pop("reasoning_max_tokens", None)
    known = (
        (ChatBody if is_chat else CompletionBody).model_fields.keys()
        | UNSUPPORTED.keys()
        | IGNORED
        | {RAW_PROMPT, TOKENS_PER_EVENT}
    )
    return {name: value for name, value in body.items() if name in known}


def _check(data: dict[str, Any], kind: type[_Fields]) -> None:
    try:
        kind.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        field = str(first["loc"][-1]) if first["loc"] else "body"
        raise Malformed(field, first["msg"], MISSING if field == "messages" else INVALID) from error


def _limits(context: ServingContext, body: dict[str, Any]) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        if (limit := body.get(name)) is not None and limit < 1:
            raise Malformed(name, f"max_tokens can be defined [1, {context.max_model_len}), but now it's {limit}.")
    stop = body.get("stop")
    if stop is not None:
        body["stop"] = [text for text in ([stop] if isinstance(stop, str) else stop) if text]


def _sampling(body: dict[str, Any]) -> None:
    """Write top_p 0, which leaves the best token alone, in native fields."""
    if body.get("top_p") == 0:
        del body["top_p"]
        if body.get("temperature") != 0:
            body["top_k"] = 1


def _logprobs(body: dict[str, Any]) -> None:
    """Translate what FastDeploy's logprobs are of: the logits / temperature, and the nucleus alone."""
    scaled, normalized = body.pop("temp_scaled_logprobs", False), body.pop("top_p_normalized_logprobs", False)
    if body.pop("include_logprobs_decode_token", True) is False:
        body["return_tokens_as_token_ids"] = True
    asked = body.get("logprobs")
    if not (scaled or normalized) or asked is None or asked is False:  # 0 asks for those of the drawn tokens
        return
    if body.get("temperature") == 0:  # the best token is drawn from a distribution of itself alone
        body |= {"temperature": 1.0, "top_k": 1, "logprobs_mode": "processed"}
    elif normalized:
        if not scaled and body.get("temperature", 1.0) != 1 and body.get("top_k") != 1:
            why = "expected temp_scaled_logprobs: true, or temperature 1: the nucleus is that of the draw"
            raise InvalidField("top_p_normalized_logprobs", why)
        body["logprobs_mode"] = "processed"
    else:
        body["logprobs_mode"] = "temperature"


def _stream(body: dict[str, Any]) -> None:
    if isinstance(options := body.get("stream_options"), dict):
        if not body.get("stream"):
            raise Malformed("stream_options", "Value error, Stream options can only be defined when `stream=True`.")
        body["stream_options"] = {"include_usage": True} | options


def _completion(body: dict[str, Any]) -> None:
    if body.get("prompt_token_ids") is not None:
        body["prompt"] = body.pop("prompt_token_ids")
    if "prompt" not in body:
        raise Malformed("prompt", "Field required")


def _chat(body: dict[str, Any]) -> None:
    body["messages"] = [_message(i, message) for i, message in enumerate(body["messages"])]
    if ids := body.pop("prompt_token_ids", None):
        body["input_ids"] = ids
        body["messages"] = body["messages"] or [{"role": "user", "content": ""}]
    elif body.pop("disable_chat_template", False) and body["messages"]:
        content = body["messages"][0].get("content") if isinstance(body["messages"][0], dict) else None
        if not isinstance(content, str):
            raise InvalidField("messages.0.content", "expected a string with disable_chat_template")
        body[RAW_PROMPT] = content
    thinks = body.pop("enable_thinking", None)
    if thinks is not None:
        body["chat_template_kwargs"] = {"enable_thinking": thinks} | body.get("chat_template_kwargs", {})
    thinks = body.get("chat_template_kwargs", {}).get("enable_thinking")
    if (limit := body.pop("response_max_tokens", None)) is not None:
        if thinks is not False:
            why = "expected enable_thinking: false with it; use max_tokens and reasoning_max_tokens"
            raise InvalidField("response_max_tokens", why)
        if limit < 1:
            raise InvalidField("response_max_tokens", f"expected an integer >= 1, got {limit}")
        name = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
        body[name] = min(limit, body.get(name, limit))


def _message(i: int, message: Any) -> Any:
    """Drop what a reply's message says of its tokens, since the template renders all turns here. Raises InvalidField
    for a user's message without content, which would be rendered as an empty one."""
    if not isinstance(message, dict) or "generation_token_ids" in message:
        return message
    if message.get("role") in ("user", "system") and message.get("content") is None:
        raise InvalidField(f"messages.{i}.content", "expected a string or a list of text parts")
    return {name: value for name, value in message.items() if name not in OF_TOKENS}
