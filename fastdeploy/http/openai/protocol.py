"""Request bodies of OpenAI's routes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec.inspect
from pydantic import BaseModel, ConfigDict, Field, create_model

from fastdeploy.core.errors import InvalidField
from fastdeploy.core.request_fields import MAX_REQUEST_ID_CHARS, REQUEST_ID, RequestFields
from fastdeploy.core.sampling_params import MAX_INT32
from fastdeploy.http.body import Body, Int64
from fastdeploy.http.openapi import described

# Fields of OpenAI, vLLM and SGLang that are not supported, each with the values that mean "not used".
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys((
        "echo", "use_beam_search", "early_stopping", "return_routed_experts", "flat_logprobs",
        "enable_response_messages", "no_stop_trim", "return_hidden_states", "return_indexer_topk",
        "return_sampling_mask", "return_cached_tokens_details", "return_prompt_token_ids",
        "return_meta_info",
    ), (None, False)),
    **dict.fromkeys((
        "logit_bias", "structured_outputs", "multi_modal_data", "mm_processor_kwargs", "vllm_xargs",
        "media_io_kwargs", "custom_params",
    ), (None, {})),
    **dict.fromkeys((
        "tools", "functions", "allowed_token_ids", "bad_words", "logits_processors", "documents",
        "logprob_token_ids", "stop_regex", "image_data", "video_data", "audio_data",
    ), (None, [])),
    **dict.fromkeys((
        "audio", "prediction", "reasoning_effort", "web_search_options", "truncate_prompt_tokens",
        "prompt_embeds", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
        "guided_decoding_backend", "chat_template", "kv_transfer_params", "lora_name", "lora_path",
        "repetition_detection", "thinking_token_budget", "structural_tag", "guided_whitespace_pattern",
        "regex", "ebnf", "json_schema", "custom_logit_processor", "session_params", "sampling_seed",
        "lora_id", "rid", "extra_key", "input_ids", "input_embeds", "bootstrap_host", "bootstrap_port",
        "bootstrap_room", "watermark",
    ), (None,)),
    "best_of": (None, 1),
    "suffix": (None, ""),
    "response_format": (None, {"type": "text"}),
    "tool_choice": (None, "none", "auto"),
    "function_call": (None, "none"),
    "modalities": (None, ["text"]),
    "length_penalty": (None, 1, 1.0),
    "routed_experts_start_len": (None, 0),
}  # fmt: skip
MAX_STOPS = 64
MAX_STOP_CHARS = 256
MAX_STOP_CHARS_IN_ALL = 4096
MAX_CHOICES = 4096  # of all prompts of one HTTP request
MAX_MESSAGES = 65536


class StreamOptions(Body):
    """include_usage: a last event without choices has the usage of the whole request. continuous_usage_stats: with
    include_usage, every event has the usage of its choice so far, as in vLLM."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


LIMITS = ("gt", "ge", "lt", "le", "min_length", "max_length")
PYTHON_TYPES: dict[type, type] = {
    msgspec.inspect.IntType: int,
    msgspec.inspect.FloatType: float,
    msgspec.inspect.StrType: str,
    msgspec.inspect.BoolType: bool,
}


def optional_field(kind: msgspec.inspect.Type) -> tuple[Any, Any]:
    """Return a field for pydantic's create_model with the type and limits of ``kind``, which may be absent or null."""
    if isinstance(kind, msgspec.inspect.UnionType):
        kind = next(choice for choice in kind.types if not isinstance(choice, msgspec.inspect.NoneType))
    limits = {name: limit for name in LIMITS if (limit := getattr(kind, name, None)) is not None}
    return PYTHON_TYPES[type(kind)] | None, Field(None, **limits)


if TYPE_CHECKING:  # the type checker does not see the fields: code reads them through GenerationBody.request_fields

    class RequestFieldsBody(Body): ...

else:
    info = msgspec.inspect.type_info(RequestFields)
    RequestFieldsBody = create_model(
        "RequestFieldsBody", __base__=Body, **{field.name: optional_field(field.type) for field in info.fields}
    )


class GenerationBody(RequestFieldsBody):
    """Fields that completions and chat have in common, beside those of RequestFields (core/request_fields.py). None
    means "absent", since clients send explicit nulls. detokenize: false = the answer has no text, as in vLLM."""

    model: str | None = None
    request_id: str | None = Field(None, min_length=1, max_length=MAX_REQUEST_ID_CHARS, pattern=REQUEST_ID)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Int64 | None = None
    min_tokens: Int64 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(None, ge=-1, le=MAX_INT32)
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: Int64 | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = Field(None, max_length=1024)
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    detokenize: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    logprobs_mode: Literal["raw", "temperature", "processed"] | None = None
    prompt_logprobs: Annotated[Int64, Field(strict=True)] | None = None

    def prompt_logprobs_wanted(self) -> int | None:
        """Return the ``prompt_logprobs`` that the engine computes."""
        return self.prompt_logprobs

    def request_fields(self) -> RequestFields:
        given = {name: getattr(self, name) for name in RequestFields.__struct_fields__}
        return RequestFields(**{name: value for name, value in given.items() if value is not None})


def stop_strings(stop: str | list[str] | None, field: str) -> tuple[str, ...]:
    """Return the stop strings of a request. Raises InvalidField for ``field`` if they are too many or too long."""
    stops = [stop] if isinstance(stop, str) else stop or []
    sizes = [len(text) for text in stops]
    if len(stops) > MAX_STOPS or not all(0 < size <= MAX_STOP_CHARS for size in sizes):
        raise InvalidField(field, f"expected at most {MAX_STOPS} strings of 1 to {MAX_STOP_CHARS} characters")
    if sum(sizes) > MAX_STOP_CHARS_IN_ALL:
        raise InvalidField(field, f"expected at most {MAX_STOP_CHARS_IN_ALL} characters in all, got {sum(sizes)}")
    return tuple(stops)


class CompletionBody(GenerationBody):
    """prompt: a string, token ids, or a list of either. echo: the text and the logprobs of each choice begin with those
    of its prompt. Then max_tokens may be 0, to score the prompt alone."""

    prompt: Annotated[Any, described(str | list[int] | list[str] | list[list[int]])]
    logprobs: Int64 | None = None
    echo: bool | None = None

    @property
    def prompt_only(self) -> bool:
        """Whether the client asked for no token."""
        return bool(self.echo) and self.max_tokens == 0

    def prompt_logprobs_wanted(self) -> int | None:
        return self.logprobs if self.echo and self.prompt_logprobs is None else self.prompt_logprobs


class TextPart(BaseModel):
    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """``content`` is text, or a list of text parts. Further fields go to the template."""

    model_config = ConfigDict(extra="allow")
    role: str
    content: Annotated[Any, described(str | list[TextPart] | None)] = None


class ChatBody(GenerationBody):
    """The body of a chat. tools: the chat template renders them into the prompt. No tool call is parsed from the
    answer, so ``tools`` needs tool_choice "none". chat_template: used instead of the model's template; needs
    --trust-request-chat-template."""

    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    chat_template: str | None = Field(None, min_length=1)
    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: Int64 | None = None
    logprobs: bool | None = None
    top_logprobs: Int64 | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ChatTokensBody(ChatBody):
    """A chat whose prompt is ``tokens``. The messages that they stand for are checked, and not rendered."""

    tokens: Annotated[Any, described(list[int])]
