"""Request bodies. Unknown fields are refused; harmless ones are dropped; those that would change the meaning and are
not supported are refused by name unless they hold their neutral value."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import msgspec
from fastapi import Request
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, ValidationError

from fastdeploy.core.errors import InvalidField
from fastdeploy.core.sampling_params import MAX_INT32
from fastdeploy.http.openapi import described

# Bookkeeping of hosted services and hints: no effect on what is sampled.
IGNORED = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "parallel_tool_calls",
        "verbosity",
        "spaces_between_special_tokens",
        "stream_interval",
        "log_metrics",
        # which replica computes it: there is one behind this address
        "data_parallel_rank",
        "routed_dp_rank",
        # no reasoning parser runs here: the text is never split
        "include_reasoning",
        "separate_reasoning",
        "stream_reasoning",
    }
)
# field -> values that mean "not used".
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "suffix": (None, ""),
    "echo": (None, False),
    "logit_bias": (None, {}),
    "response_format": (None, {"type": "text"}),
    "structured_outputs": (None, {}),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "reasoning_effort": (None,),
    "web_search_options": (None,),
    "use_beam_search": (None, False),
    "length_penalty": (None, 1, 1.0),
    "early_stopping": (None, False),
    "truncate_prompt_tokens": (None,),
    "prompt_embeds": (None,),
    "allowed_token_ids": (None, []),
    "bad_words": (None, []),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "guided_decoding_backend": (None,),
    "logits_processors": (None, []),
    "return_routed_experts": (None, False),
    "multi_modal_data": (None, {}),
    "mm_processor_kwargs": (None, {}),
    "chat_template": (None,),
    "documents": (None, []),
    "kv_transfer_params": (None,),
    "lora_name": (None,),
    "lora_path": (None,),
    # Further fields of vLLM's requests,
    "vllm_xargs": (None, {}),
    "repetition_detection": (None,),
    "thinking_token_budget": (None,),
    "logprob_token_ids": (None, []),
    "flat_logprobs": (None, False),
    "media_io_kwargs": (None, {}),
    "structural_tag": (None,),
    "guided_whitespace_pattern": (None,),
    "enable_response_messages": (None, False),
    # and of SGLang's.
    "regex": (None,),
    "ebnf": (None,),
    "json_schema": (None,),
    "stop_regex": (None, []),
    "no_stop_trim": (None, False),
    "custom_logit_processor": (None,),
    "custom_params": (None, {}),
    "session_params": (None,),
    "sampling_seed": (None,),
    "lora_id": (None,),
    "rid": (None,),
    "extra_key": (None,),
    "input_ids": (None,),
    "input_embeds": (None,),
    "image_data": (None, []),
    "video_data": (None, []),
    "audio_data": (None, []),
    "routed_experts_start_len": (None, 0),
    "return_hidden_states": (None, False),
    "return_indexer_topk": (None, False),
    "return_sampling_mask": (None, False),
    "return_cached_tokens_details": (None, False),
    "return_prompt_token_ids": (None, False),
    "return_meta_info": (None, False),
    "bootstrap_host": (None,),
    "bootstrap_port": (None,),
    "bootstrap_room": (None,),
    "watermark": (None,),
}
MAX_STOPS = 64
MAX_STOP_CHARS = 256
MAX_STOP_CHARS_IN_ALL = 4096
# Of one prompt, and of one HTTP request with all of its prompts.
MAX_N = 1024
MAX_CHOICES = 4096
# In one body, those in strings included: an empty list costs 50 times what a number does.
MAX_BRACKETS = 1 << 19
MAX_MESSAGES = 65536
# Of one field, unless its type is Any. Each wrong entry costs some microseconds: all are looked at before the first is
# told.
MAX_ENTRIES = 65536
MAX_VERSION_CHARS = 256
# What msgpack can carry. SamplingParams.check knows the narrower ranges of its own fields.
Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: Literal[False] = False


class GenerationBody(Body):
    """Fields that completions and chat have in common. None is "absent" everywhere, as clients send explicit nulls.

    resumed_tokens: the last so many prompt ids are output of an earlier attempt. Penalties and stop strings count them
    as such, and ``text`` begins with theirs; max_tokens and min_tokens are those of what is still to come.
    first_choice: number of the first choice, where one of a group is resubmitted alone. The choices of further prompts
    count on from it.
    deadline_s, max_queue_s, retain_s: seconds; see AddRequest. retain_s needs a request_id.
    """

    deadline_s: float | None = Field(None, gt=0, le=31 * 86400)
    max_queue_s: float | None = Field(None, gt=0, le=31 * 86400)
    retain_s: float | None = Field(None, ge=0, le=86400)
    model: str | None = None
    request_id: str | None = Field(None, min_length=1, max_length=512)
    n: int | None = Field(None, ge=1, le=MAX_N)
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
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    logprobs_mode: Literal["raw", "temperature", "processed"] | None = None
    prompt_logprobs: Annotated[Int64, Field(strict=True)] | None = None
    resumed_tokens: int | None = Field(None, ge=0, le=MAX_INT32)
    first_choice: int | None = Field(None, ge=0, le=MAX_INT32 - MAX_CHOICES)
    priority: int | None = Field(None, ge=-MAX_INT32 - 1, le=MAX_INT32)
    cache_salt: str | None = Field(None, max_length=256)

    def stops(self) -> tuple[str, ...]:
        return stop_strings(self.stop, "stop")


def stop_strings(stop: str | list[str] | None, field: str) -> tuple[str, ...]:
    """The stop strings of a request; raises InvalidField for ``field`` where they are too many or too long."""
    stops = [stop] if isinstance(stop, str) else stop or []
    sizes = [len(text) for text in stops]
    if len(stops) > MAX_STOPS or not all(0 < size <= MAX_STOP_CHARS for size in sizes):
        raise InvalidField(field, f"expected at most {MAX_STOPS} strings of 1 to {MAX_STOP_CHARS} characters")
    if sum(sizes) > MAX_STOP_CHARS_IN_ALL:
        raise InvalidField(field, f"expected at most {MAX_STOP_CHARS_IN_ALL} characters in all, got {sum(sizes)}")
    return tuple(stops)


class CompletionBody(GenerationBody):
    """prompt: a string, token ids, or a list of either."""

    prompt: Annotated[Any, described(str | list[int] | list[str] | list[list[int]])]
    logprobs: Int64 | None = None


class TextPart(BaseModel):
    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """``content`` is text, or a list of text parts. Further fields go to the template."""

    model_config = ConfigDict(extra="allow")
    role: str
    content: Annotated[Any, described(str | list[TextPart] | None)] = None


class ChatBody(GenerationBody):
    """tools: rendered into the prompt by the chat template. No tool call is parsed from the answer, so that ``tools``
    needs tool_choice "none". chat_template: in place of the model's own; needs --trust-request-chat-template."""

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


class PauseBody(Body):
    mode: Literal["abort", "wait", "keep"] = "abort"
    clear_cache: bool | None = None
    admission: Literal["reject", "hold"] | None = None
    timeout_s: float = Field(60.0, ge=0, le=86400)
    on_timeout: Literal["keep", "abort", "cancel"] | None = None
    ttl_s: float | None = Field(None, gt=0)
    hold_id: str | None = Field(None, min_length=1)


class ResumeBody(Body):
    hold_id: str | None = Field(None, min_length=1)


class RenewBody(Body):
    hold_id: str = Field(min_length=1)
    ttl_s: float | None = Field(None, gt=0)


class AbortBody(Body):
    abort_all: bool = False
    req_ids: list[str] | None = None


Label = int | Annotated[str, Field(min_length=1, max_length=MAX_VERSION_CHARS)]


def _label(value: Any) -> str:
    """An integer becomes the label that it reads as."""
    label = str(value) if type(value) is int else value
    if not isinstance(label, str) or not 1 <= len(label) <= MAX_VERSION_CHARS:
        raise ValueError(f"expected an integer, or a string of 1 to {MAX_VERSION_CHARS} characters")
    return label


def _from_query(value: Any) -> Any:
    """A checksum table in a query is JSON."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value.encode())
    except InvalidField as error:
        raise ValueError("expected a JSON object: {tensor: sha256 hex}") from error


def _tag_list(value: Any) -> Any:
    """Tags come as a list, repeated in the query, or separated by commas."""
    parts = [value] if isinstance(value, str) else value
    if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        return parts
    return [tag for part in parts for tag in part.split(",") if tag]


Version = Annotated[str, PlainValidator(_label), described(Label)]
Checksums = Annotated[dict[str, str], BeforeValidator(_from_query)]
Tags = Annotated[list[Literal["weight", "kv_cache"]], BeforeValidator(_tag_list)]
Kv = Literal["keep", "recompute"]


class SourceBody(Body):
    """Where tensors are: exactly one of the two, or the HTTP body itself."""

    model_path: str | None = Field(None, min_length=1)
    shared_memory: str | None = Field(None, min_length=1)
    nbytes: int = Field(0, ge=0, le=2**63 - 1)
    checksums: Checksums = {}
    verify_checksum: bool = False

    @property
    def names_no_source(self) -> bool:
        return self.model_path is None and self.shared_memory is None

    def rest(self) -> dict[str, Any]:
        """All fields but those of the source."""
        return self.model_dump(exclude={"model_path", "shared_memory", "nbytes"})


class UpdateWeightsBody(SourceBody):
    version: Version | None = None
    expected_version: Version | None = None
    kv: Kv = "keep"
    partial: bool = False
    in_place: bool = False
    timeout_s: float | None = Field(None, gt=0, le=86400)


class BeginBody(Body):
    version: Version | None = None
    expected_version: Version | None = None
    kv: Kv = "keep"
    partial: bool = False
    in_place: bool = False
    lease_s: float = Field(300.0, gt=0, le=86400)
    timeout_s: float | None = Field(None, gt=0, le=86400)


class ChunkBody(SourceBody):
    session_id: str = Field(min_length=1)


class CommitBody(Body):
    session_id: str = Field(min_length=1)
    version: Version | None = None
    kv: Kv | None = None


class AbortUpdateBody(Body):
    session_id: str | None = Field(None, min_length=1)


class WeightInfoBody(Body):
    checksums: bool = False


class SleepBody(Body):
    tags: Tags = []
    mode: Literal["abort", "wait", "keep"] = "keep"
    discard: bool = False
    timeout_s: float = Field(60.0, ge=0, le=86400)


class WakeBody(Body):
    tags: Tags = []


class ResetBody(Body):
    version: Version | None = None


# Adapters come later: a control call must not act on the whole engine instead.
CONTROL_UNSUPPORTED: dict[str, tuple[Any, ...]] = {"lora_name": (None,)}
# Pydantic puts the branch of a union into the location of an error.
UNION_BRANCHES = frozenset({"str", "int", "list[str]"})
UNKNOWN_FIELD = "unknown field"
BodyType = TypeVar("BodyType", bound=BaseModel)


def parse_json(raw: bytes) -> dict[str, Any]:
    """The JSON object in ``raw``; no bytes are an empty object. Raises InvalidField("body", ...)."""
    if not raw.strip():
        return {}
    if raw.count(b"[") + raw.count(b"{") > MAX_BRACKETS:
        raise InvalidField("body", f"expected at most {MAX_BRACKETS} lists and objects")
    try:
        data = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidField("body", f"expected JSON: {error}") from error
    except RecursionError as error:
        raise InvalidField("body", "JSON nested too deeply") from error
    if not isinstance(data, dict):
        raise InvalidField("body", "expected a JSON object")
    return data


async def read_json(request: Request) -> dict[str, Any]:
    """The JSON object that is the body of ``request``. Unlike ``request.body()`` this keeps no bytes: a request may
    live for minutes after its body was parsed. Call once for a request."""
    return parse_json(b"".join([part async for part in request.stream()]))


def parse_body(
    data: dict[str, Any], kind: type[BodyType], unsupported: dict[str, tuple[Any, ...]] = UNSUPPORTED
) -> BodyType:
    """Check ``data`` against ``kind``, null being "absent"; raises InvalidField naming the first wrong field."""
    known = kind.model_fields
    kept = {}
    for field, value in data.items():
        if field in known:
            if value is not None:
                kept[field] = value
                if known[field].annotation is not Any:
                    _check_entries(field, value)
        elif field in unsupported:
            if not any(value == neutral and type(value) is type(neutral) for neutral in unsupported[field]):
                raise InvalidField(field, "not supported by this server")
        elif field not in IGNORED and kind.model_config.get("extra") == "forbid":
            raise InvalidField(field, UNKNOWN_FIELD)
    try:
        return kind.model_validate(kept)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"] if part not in UNION_BRANCHES) or "body"
        message = first["msg"].removeprefix("Value error, ")
        raise InvalidField(field, UNKNOWN_FIELD if first["type"] == "extra_forbidden" else message) from error


def _check_entries(field: str, value: Any) -> None:
    if isinstance(value, (list, dict)) and len(value) > MAX_ENTRIES:
        raise InvalidField(field, f"expected at most {MAX_ENTRIES} entries, got {len(value)}")
