"""Request bodies of OpenAI's routes, and what they ask of the engine."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field, create_model

from fastdeploy.client.choice import TextOptions
from fastdeploy.client.generation import GenerationRequest
from fastdeploy.core.errors import InvalidField
from fastdeploy.core.request_fields import MAX_REQUEST_ID_CHARS, REQUEST_ID, TIMING, RequestFields, part_id
from fastdeploy.core.sampling_params import MAX_INT32, SamplingParams
from fastdeploy.http.body import Body, Int64, body_fields, given_fields
from fastdeploy.http.context import ServingContext, engine_requests
from fastdeploy.http.openai.structured import ConstrainedBody
from fastdeploy.http.openapi import described
from fastdeploy.http.routed_experts import Asked, Form, form_of_server

# Fields of OpenAI, vLLM and SGLang that are not supported, each with the values that mean "not used".
EMPTY: tuple[Any, ...] = (None, False, "", [], {})
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys((
        "echo", "use_beam_search", "early_stopping", "flat_logprobs",
        "enable_response_messages", "return_hidden_states", "return_indexer_topk",
        "return_cached_tokens_details", "return_meta_info",
    ), (None, False)),
    **dict.fromkeys((
        "audio", "audio_data", "bootstrap_host", "bootstrap_port", "bootstrap_room",
        "custom_logit_processor", "custom_params", "documents", "ebnf", "extra_key", "functions",
        "image_data", "input_embeds", "json_schema", "kv_transfer_params", "logits_processors", "lora_id", "lora_name",
        "media_io_kwargs", "mm_processor_kwargs", "multi_modal_data", "prediction", "prompt_embeds",
        "regex", "repetition_detection", "rid", "sampling_seed", "session_params", "stop_regex",
        "structural_tag", "suffix", "truncate_prompt_tokens",
        "video_data", "vllm_xargs", "watermark",
    ), EMPTY),
    "web_search_options": (None,),  # {} asks for a search
    "best_of": (None, 1),
    "chat_template": (None,),
    "input_ids": (None,),
    "lora_path": (None, ""),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "function_call": (None, "none"),
    "modalities": (None, ["text"]),
    "length_penalty": (None, 1, 1.0),
}  # fmt: skip
# The position of the first row of routed experts, by our name, vLLM's and SGLang's.
FIRST_ROW = ("routed_experts_start", "routed_experts_prompt_start", "routed_experts_start_len")
MAX_MESSAGES = 65536
MAX_TOOLS = 1024


class StreamOptions(Body):
    """What a stream tells besides its tokens. include_usage: a last event without choices has the usage of the whole
    request. continuous_usage_stats: with include_usage, every event has the usage of its choice so far, as in vLLM."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


if TYPE_CHECKING:  # the type checker does not see the fields: code reads them through request_fields and given_fields

    class CoreFieldsBody(Body): ...

else:
    CoreFieldsBody = create_model(
        "CoreFieldsBody",
        __base__=Body,
        **body_fields(RequestFields),
        **body_fields(SamplingParams, without={"logprobs", "grammar", "logit_bias", "bad_words"}),
    )


class GenerationBody(CoreFieldsBody, ConstrainedBody):
    """Fields that completions and chat have in common. Those of RequestFields and SamplingParams are listed only where
    they differ here. None means "absent", since clients send explicit nulls. max_tokens: 0 with echo. seed -1 = none.
    top_k -1 = off. detokenize: false = the answer has no text, as in vLLM. routed_experts_prompt_start: vLLM's name of
    the first row, where the server returns the routing without being asked. return_routed_experts,
    routed_experts_start_len: SGLang's."""

    model: str | None = None
    request_id: str | None = Field(None, min_length=1, max_length=MAX_REQUEST_ID_CHARS, pattern=REQUEST_ID)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Int64 | None = None
    min_tokens: Int64 | None = None
    seed: Int64 | None = None
    top_k: int | None = Field(None, ge=-1, le=MAX_INT32)
    prompt_logprobs: Annotated[Int64, Field(strict=True)] | None = None
    stop: str | list[str] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None
    detokenize: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_prompt_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    routed_experts: bool | None = None
    routed_experts_start: Int64 | None = None
    routed_experts_prompt_start: Int64 | None = None
    return_routed_experts: bool | None = None
    routed_experts_start_len: Int64 | None = None

    def prompt_logprobs_wanted(self) -> int | None:
        """Return the ``prompt_logprobs`` that the engine computes."""
        return self.prompt_logprobs

    @cached_property
    def request_fields(self) -> RequestFields:
        """The checked settings of the request. Raises InvalidField."""
        fields = RequestFields(**given_fields(self, RequestFields))
        fields.check_fields()
        return fields


class CompletionBody(GenerationBody):
    """The body of a completion. prompt: a string, token ids, or a list of either. echo: the text and the logprobs of
    each choice begin with those of its prompt. Then max_tokens may be 0, to score the prompt alone."""

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
    """A message of a chat. ``content`` is text, or a list of text parts. The token ids are those of an assistant's
    turn: the next prompt begins with them. Further fields go to the template."""

    model_config = ConfigDict(extra="allow")
    role: str
    content: Annotated[Any, described(str | list[TextPart] | None)] = None
    prompt_token_ids: Annotated[Any, described(list[int])] = None
    generation_token_ids: Annotated[Any, described(list[int])] = None
    generation_log_probs: Annotated[Any, described(list[float])] = None


class FunctionName(Body):
    name: str


class NamedToolChoice(Body):
    """The function that the answer must call."""

    type: Literal["function"]
    function: FunctionName


class ChatBody(GenerationBody):
    """The body of a chat. tools: the chat template renders them into the prompt. tool_choice: none = calls stay text.
    parallel_tool_calls: false = the answer ends behind its first call. reasoning_effort: a variable of the chat
    template; "none" turns thinking off. include_reasoning: false = leave it out. separate_reasoning: false = it is
    content. chat_template: used instead of the model's template; needs --trust-request-chat-template.

    input_ids: the prompt; the messages are checked, and not rendered. required_prefix_token_ids: the prompt begins with
    them, and they end with the last turn of the assistant; HUD's agents name them prompt_token_ids, and count the
    messages before the new ones in continuation_from. completion_token_ids: the beginning of the answer, with which the
    prompt ends. lora_path: the name of an adapter. return_meta_info: choices
    have SGLang's meta_info; not for streams."""

    tools: list[dict[str, Any]] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Annotated[Any, described(Literal["none", "auto", "required"] | NamedToolChoice)] = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    chat_template: str | None = Field(None, min_length=1)
    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: Int64 | None = None
    logprobs: bool | None = None
    top_logprobs: Int64 | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    input_ids: Annotated[Any, described(list[int])] = None
    required_prefix_token_ids: Annotated[Any, described(list[int])] = None
    prompt_token_ids: Annotated[Any, described(list[int])] = None
    completion_token_ids: Annotated[Any, described(list[int])] = None
    continuation_from: Int64 | None = None
    lora_path: str | None = None
    return_meta_info: bool | None = None


class ChatTokensBody(ChatBody):
    """A chat whose prompt is ``tokens``. The messages that they stand for are checked, and not rendered."""

    tokens: Annotated[Any, described(list[int])]


# ------------------------------------------------------------------ what a body asks of the engine


def sampling_of(
    context: ServingContext,
    body: GenerationBody,
    prompt_tokens: int,
    logprobs: int | None,
    limit: tuple[str, int | None],
    constraints: Mapping[str, Any],
) -> SamplingParams:
    """Return the checked parameters for one prompt. constraints: see ``structured.constraints``. limit: (name of the
    field, its value) of max_tokens. None = the rest of the context."""
    field, max_tokens = limit
    if max_tokens is not None and max_tokens < 1:
        raise InvalidField(field, f"expected an integer >= 1, got {max_tokens}")
    given = given_fields(body, SamplingParams)
    given |= {"logprobs": logprobs, "prompt_logprobs": body.prompt_logprobs_wanted(), **constraints}
    if (routing := routing_asked(context, body)) is not None:
        given |= routing.sampling(context, prompt_tokens)
    return context.sampling(given, prompt_tokens, max_tokens)


def routing_asked(context: ServingContext, body: GenerationBody) -> Asked | None:
    """Return how the reply to ``body`` has the routing of tokens; None = not at all."""
    if body.routed_experts:
        form, field = Form.NATIVE, "routed_experts"
    elif body.return_routed_experts:
        form, field = Form.SGLANG, "return_routed_experts"
    elif (wanted := form_of_server(context)) and False not in (body.routed_experts, body.return_routed_experts):
        form, field = wanted, "routed_experts"
    else:
        return None
    start_field = next((name for name in FIRST_ROW if getattr(body, name) is not None), FIRST_ROW[0])
    return Asked(form, field, start_field, getattr(body, start_field) or 0)


def text_options(context: ServingContext, body: GenerationBody, prompt_only: bool = False) -> TextOptions:
    """Return the checked options of the choices. prompt_only: see TextOptions."""
    stops = context.stop_strings(body.stop, "stop")
    if stops and body.detokenize is False:
        raise InvalidField("stop", "expected no stop strings with detokenize false: they are looked for in the text")
    return TextOptions(
        stops=stops,
        include_stop=bool(body.include_stop_str_in_output or body.no_stop_trim),
        skip_special_tokens=body.skip_special_tokens is not False,
        min_tokens=body.min_tokens or 0,
        prompt_only=prompt_only,
        detokenize=body.detokenize is not False,
    )


def generation_request(
    body: GenerationBody,
    id_prefix: str,
    prompts: Sequence[list[int]],
    sampling: Sequence[SamplingParams],
    text: TextOptions,
    arrival: float,
    adapter: str,
) -> GenerationRequest:
    """Return the engine requests that ``body`` asks for. arrival: time.time() before its prompts were tokenised.
    adapter: see :meth:`ServingContext.adapter`.

    The request_id is that of the body, or a new one that begins with ``id_prefix``. X-Request-Id is not used, because
    it names a trace, and a trace may have many requests. Raises InvalidField."""
    fields = body.request_fields
    if fields.resumed_tokens and len(prompts) > 1:
        raise InvalidField("resumed_tokens", "expected a single prompt")
    if fields.resumed_tokens >= len(prompts[0]):
        limit = len(prompts[0]) - 1
        raise InvalidField("resumed_tokens", f"expected at most {limit}, one less than the prompt has")
    if fields.retain_s and not body.request_id:
        raise InvalidField("request_id", "expected one with retain_s: clients ask for the retained result by this id")
    request_id = body.request_id or f"{id_prefix}-{uuid.uuid4().hex}"
    several = len(prompts) > 1
    ids = [part_id(request_id, i) for i in range(len(prompts))] if several else [request_id]
    group = request_id if several else ""
    retained_as = fingerprint(body) if fields.retain_s else ""
    adapters = [adapter] * len(prompts)
    requests = engine_requests(ids, prompts, sampling, adapters, fields, group, arrival, retained_as)
    return GenerationRequest(requests, [text] * len(prompts), bool(body.stream))


def fingerprint(body: GenerationBody) -> str:
    """Return a hash of ``body`` without the fields that say how and when its answer is delivered."""
    fields = body.model_dump(exclude={"stream", "stream_options", "request_id", *TIMING}, exclude_none=True)
    return hashlib.sha256(msgspec.json.encode(fields, order="deterministic")).hexdigest()
