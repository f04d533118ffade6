"""What a caller of the offline ``LLM`` asks for, as requests to the engine. The checks are those of the HTTP routes: a
prompt becomes the body of a completion, and a conversation the body of a chat."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from fastdeploy.client.generation import GenerationRequest
from fastdeploy.core.errors import InvalidField
from fastdeploy.core.offline_params import WHOLE_VOCABULARY, SamplingParams
from fastdeploy.core.request_fields import AddRequest, RequestFields
from fastdeploy.core.sampling_params import MAX_INT32
from fastdeploy.http.body import parse_body
from fastdeploy.http.context import ServingContext
from fastdeploy.http.dialects.fastdeploy.bodies import native
from fastdeploy.http.openai import chat_prompt, completion
from fastdeploy.http.openai.protocol import UNSUPPORTED, ChatBody, CompletionBody

EXPECTED = "expected a text, token ids, a dict with prompt, prompt_token_ids or messages, or a list of these"
PROMPT_KEYS = ("prompt", "prompt_token_ids", "messages")
FIELDS = frozenset(RequestFields.__struct_fields__) - {"n"}
Chat = Mapping[str, Any]  # fields of a chat beside its messages


class Prompt(NamedTuple):
    """One prompt: a text, token ids, or the messages of a conversation."""

    text: str | None = None
    ids: list[int] | None = None
    messages: list[Any] | None = None


class Prepared(NamedTuple):
    """A checked request of one prompt. shown: the prompt as the output tells it; None = the text of its token ids.
    chat: the body, if it is a conversation."""

    request: GenerationRequest
    shown: str | list[int] | None
    chat: ChatBody | None

    @property
    def add(self) -> AddRequest:
        return self.request.requests[0]


def prompts_of(given: Any) -> list[Prompt]:
    """Return the prompts in an argument of ``LLM.generate``. Raises InvalidField for "prompts"."""
    if isinstance(given, str | Mapping) or (_is_list(given) and len(given) and _is_id(given[0])):
        return [_prompt(given)]
    if not _is_list(given):
        raise InvalidField("prompts", EXPECTED)
    return [_prompt(one) for one in given]


def conversations_of(given: Any) -> list[Prompt]:
    """Return the conversations in an argument of ``LLM.chat``: one, or a list of several. Raises InvalidField for
    "messages"."""
    if not _is_list(given) or not len(given):
        raise InvalidField("messages", "expected a list of messages, or a list of such lists")
    several = given if _is_list(given[0]) else [given]
    return [Prompt(messages=_messages(one)) for one in several]


def per_prompt(field: str, value: Any, num_prompts: int) -> Sequence[Any]:
    """Return one value per prompt: ``value`` itself if it is a list, else copies of it. Raises InvalidField."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        return [value] * num_prompts
    if len(value) != num_prompts:
        raise InvalidField(field, f"got {len(value)} values for {num_prompts} prompts")
    return value


def fields_of(given: Mapping[str, Any], lora_name: Any, count: int) -> list[dict[str, Any]]:
    """Return the fields of a body that are not of its prompt or its sampling, for each of ``count`` prompts. given: of
    RequestFields, one value for all prompts or a list."""
    if unknown := sorted(given.keys() - FIELDS):
        raise InvalidField(unknown[0], "unknown field")
    own = {name: per_prompt(name, value, count) for name, value in given.items()}
    names = per_prompt("lora_name", lora_name, count)
    if not all(name is None or isinstance(name, str) for name in names):
        raise InvalidField("lora_name", "expected the name of an adapter, or a list of one per prompt")
    return [{name: values[i] for name, values in own.items()} | {"lora_name": names[i]} for i in range(count)]


def params_of(given: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int) -> Sequence[SamplingParams]:
    """Return one checked object per prompt. Raises InvalidField for "sampling_params"."""
    params = per_prompt("sampling_params", given or SamplingParams(), num_prompts)
    for one in params:
        if not isinstance(one, SamplingParams):
            got = type(one).__name__
            raise InvalidField("sampling_params", f"expected fastdeploy.SamplingParams, or a list, got {got}")
        one.check()
    return params


def tools_of(given: Any) -> list[Any] | None:
    """Return tools as a list of dicts. FastDeploy takes one tool too, and objects with ``model_dump``."""
    if not given:
        return None
    several = given if isinstance(given, Sequence) else [given]
    return [one.model_dump() if hasattr(one, "model_dump") else one for one in several]


async def prepare(
    context: ServingContext, prompt: Prompt, params: SamplingParams, fields: Mapping[str, Any], chat: Chat
) -> Prepared:
    """Check and tokenise one prompt. fields: see ``fields_of``. Raises InvalidField or ModelNotFound."""
    params.check()
    data = {**_sampling_fields(context, params), **fields, "request_id": uuid.uuid4().hex}
    if name := data.pop("lora_name"):
        data["model"] = f"{context.config.served_model_name}:{name}"
    seed = {"seed": data.pop("seed", None)}  # FastDeploy's largest one is smaller than ours
    if prompt.messages is not None:
        data |= _chat_logprobs(data) | dict(chat) | {"messages": prompt.messages}
        body = parse_body(native(context, data, is_chat=True) | seed, ChatBody, UNSUPPORTED)
        return Prepared(_seeded(await chat_prompt.prepare(context, body)), None, body)
    shown = prompt.text if prompt.ids is None else prompt.ids
    if data.get("response_max_tokens") is not None:
        raise InvalidField("response_max_tokens", "expected a conversation; use max_tokens")
    try:
        data |= {"prompt": shown}
        of_text = parse_body(native(context, data, is_chat=False) | seed, CompletionBody, UNSUPPORTED)
        request = await completion.prepare(context, of_text, None)
    except InvalidField as error:
        if type(error) is InvalidField and error.field == "prompt":
            raise InvalidField("prompts", str(error).removeprefix("prompt: ")) from error
        raise
    return Prepared(_seeded(request), shown, None)


def _sampling_fields(context: ServingContext, params: SamplingParams) -> dict[str, Any]:
    """Return the fields of a body for ``params``."""
    fields = {name: list(value) if isinstance(value, tuple) else value for name, value in params.shared().items()}
    plain = ("n", "best_of", "logprobs", "prompt_logprobs", "reasoning_max_tokens", "response_max_tokens",
             "include_stop_str_in_output", "skip_special_tokens", "detokenize", "temp_scaled_logprobs",
             "top_p_normalized_logprobs")  # fmt: skip
    fields |= {name: getattr(params, name) for name in plain if getattr(params, name) is not None}
    for name in ("logprobs", "prompt_logprobs"):
        if fields.get(name) == WHOLE_VOCABULARY:
            fields[name] = context.vocab_size
    if params.logit_bias is not None:
        fields["logit_bias"] = {str(token): value for token, value in params.logit_bias.items()}
    if (args := params.processors_args()) is not None:
        fields["logits_processors_args"] = args
    for name in ("stop", "bad_words", "bad_words_token_ids"):
        if value := getattr(params, name):
            fields[name] = value if isinstance(value, str) else list(value)
    if params.guided_decoding is not None and (asked := params.guided_decoding.asked()):
        fields["structured_outputs"] = asked
    return fields


def _chat_logprobs(fields: dict[str, Any]) -> dict[str, Any]:
    """Return how the body of a chat asks for log probabilities of its answer."""
    top = fields.get("logprobs")
    return {} if top is None else {"logprobs": True, "top_logprobs": top}


def _seeded(request: GenerationRequest) -> GenerationRequest:
    """Add a seed if there is none, so that the output can tell it."""
    [add] = request.requests
    return request._replace(requests=[msgspec.structs.replace(add, sampling=add.sampling.seeded())])


def _prompt(given: Any) -> Prompt:
    if isinstance(given, str):
        return Prompt(text=given)
    if isinstance(given, Mapping):
        return _of_dict(given)
    ids = list(given.tolist() if hasattr(given, "tolist") else given) if _is_list(given) else []
    if not ids or not all(_is_id(token) and 0 <= token <= MAX_INT32 for token in ids):
        raise InvalidField("prompts", EXPECTED)
    return Prompt(ids=ids)


def _of_dict(given: Mapping[str, Any]) -> Prompt:
    """Return the prompt of a dict. FastDeploy takes any field of a request in it; here those of a prompt."""
    found = {name: value for name, value in given.items() if value is not None}
    if others := sorted(found.keys() - set(PROMPT_KEYS) - {"request_id"}):
        known = "prompt, prompt_token_ids and messages are; sampling parameters are given beside it"
        raise InvalidField(f"prompts.{others[0]}", f"not supported: {known}")
    if "prompt_token_ids" in found:
        return _prompt(found["prompt_token_ids"])
    if "messages" in found:
        return Prompt(messages=_messages(found["messages"]))
    if "prompt" not in found:
        raise InvalidField("prompts", f"expected one of {', '.join(PROMPT_KEYS)} in a dict")
    return _prompt(found["prompt"])


def _messages(given: Any) -> list[Any]:
    if not _is_list(given) or not all(isinstance(one, Mapping) for one in given):
        raise InvalidField("messages", "expected a list of messages, each a dict with role and content")
    return [dict(one) for one in given]


def _is_list(value: Any) -> bool:
    """Whether ``value`` is a sequence other than a text, or an array."""
    return (isinstance(value, Sequence) and not isinstance(value, str | bytes)) or hasattr(value, "tolist")


def _is_id(value: Any) -> bool:
    return type(value) is int or (hasattr(value, "dtype") and getattr(value, "ndim", 1) == 0)
