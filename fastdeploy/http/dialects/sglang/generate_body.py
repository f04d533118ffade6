"""The body of SGLang's /generate: one prompt or many, each with its own parameters."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import Field, create_model

from fastdeploy.client.choice import TextOptions
from fastdeploy.core.errors import InvalidField
from fastdeploy.core.request_fields import MAX_N, MAX_REQUEST_ID_CHARS, PART, RequestFields
from fastdeploy.core.sampling_params import MAX_INT32, MAX_LOGPROBS, NO_SEED, SEED_BITS, SamplingParams
from fastdeploy.core.served_weights import MAX_LORA_NAME_CHARS
from fastdeploy.http.body import Body, Int64, LaxBody, body_fields, given_fields, parse_body
from fastdeploy.http.context import ServingContext
from fastdeploy.http.openai.protocol import UNSUPPORTED
from fastdeploy.http.openai.structured import biases, builder, checked
from fastdeploy.http.openapi import described
from fastdeploy.http.routed_experts import Asked, Form

# These fields change what is computed or returned. They are refused unless they are empty.
UNSUPPORTED_HERE = (
    "input_embeds", "image_data", "video_data", "audio_data", "session_params", "lora_id",
    "custom_logit_processor", "positional_embed_overrides", "token_indices_to_pool",
    "multi_item_delimiter_indices", "return_hidden_states", "return_indexer_topk", "return_entropy",
    "require_reasoning", "max_thinking_tokens", "watermark",
    *sorted({*RequestFields.__struct_fields__} - {"n", "priority", "cache_salt", "session", "stale_ok"}),
)  # fmt: skip
# SGLang's names of sampling parameters.
NAMES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}
# SGLang's fields for grammars, with the kinds of ``structured.builder``.
KINDS = {"json_schema": "json", "regex": "regex", "ebnf": "grammar"}
DEFAULT_MAX_NEW_TOKENS = 128
GREEDY_BELOW = 1e-6


class CustomParams(Body):
    """Parameters of slime. return_top_p_token_ids: return the ids that each token was drawn from. slime sends the field
    with every top_p below 1, to renormalise over the same ids in training. The field needs return_logprob."""

    return_top_p_token_ids: bool = False


# Fields of SamplingParams that SGLang has outside of its sampling_params, under other names.
OUTSIDE = {"logprobs", "prompt_logprobs", "logprob_token_ids", "return_sampling_mask", "return_sampling_mask_logprobs",
           "routed_experts", "routed_experts_start", "grammar", "logit_bias", "bad_words"}  # fmt: skip

if TYPE_CHECKING:  # the type checker does not see the fields: code reads them through given_fields

    class CoreFieldsBody(Body): ...

else:
    own = body_fields(SamplingParams, without=OUTSIDE, names=NAMES)
    CoreFieldsBody = create_model("CoreFieldsBody", __base__=Body, **own)


class SamplingBody(CoreFieldsBody):
    """The fields of SamplingParams under SGLang's names, and those that differ here. top_k -1 = off. sampling_seed: any
    integer; -1 = none. max_new_tokens: 0 = only the prompt is computed."""

    max_new_tokens: Int64 | None = None
    min_new_tokens: Int64 = 0
    top_k: int = Field(-1, ge=-1, le=MAX_INT32)
    sampling_seed: Int64 | None = None
    logprobs_mode: str | None = None
    n: int = Field(1, ge=1, le=MAX_N)
    beam_width: int = Field(1, ge=1, le=1)
    stop: str | list[str] = []
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    logit_bias: dict[str, float] | None = None
    json_schema: Any = None
    regex: str | None = None
    ebnf: str | None = None
    custom_params: CustomParams = CustomParams()


class GenerateBody(LaxBody):
    """The fields of the body that are read. Other fields are dropped, as in SGLang. Fields of type Any may be lists
    with one entry per prompt. SGLang has no field ``model``, but routers add it. lora_path: the name of an adapter;
    null or "" = the base model. An adapter that ``model`` names wins, as on SGLang's other routes."""

    model: str | None = None
    lora_path: Annotated[Any, described(str | list[str | None])] = None
    rid: Annotated[Any, described(str | list[str])] = None
    text: Annotated[Any, described(str | list[str])] = None
    input_ids: Annotated[Any, described(list[int] | list[list[int]])] = None
    sampling_params: Annotated[Any, described(SamplingBody | list[SamplingBody])] = None
    return_logprob: Annotated[Any, described(bool | list[bool])] = None
    logprob_start_len: Annotated[Any, described(int | list[int])] = None
    top_logprobs_num: Annotated[Any, described(int | list[int])] = None
    token_ids_logprob: Annotated[Any, described(list[int] | list[list[int]])] = None
    return_flat_raw_top_logprobs: bool = False
    return_flat_raw_top_logprobs_b64: bool = False
    return_flat_raw_output_top_logprobs: bool = False
    return_flat_raw_output_top_logprobs_b64: bool = False
    return_sampling_mask: Annotated[Any, described(bool | list[bool])] = None
    return_sampling_mask_logprobs: bool = False
    sampling_logprobs_mode: Literal["selected", "support"] = "selected"
    return_routed_experts: bool = False
    routed_experts_start_len: Int64 = 0
    return_text_in_logprobs: bool = False
    return_prompt_token_ids: bool = False
    stream: bool = False
    priority: int = Field(0, ge=-MAX_INT32 - 1, le=MAX_INT32)
    cache_salt: str | None = Field(None, max_length=256)
    extra_key: str | None = Field(None, max_length=256)
    session: str = Field("", max_length=256)
    stale_ok: bool = False
    logprobs_mode: str | None = None


class LogprobOptions(NamedTuple):
    """The log probabilities that one prompt asks for. start: the first prompt token whose log probability is returned,
    or -1. top: how many of the best tokens are returned with each token. ids: the tokens that are returned instead.
    top_p_ids: return the ids that each token was drawn from, for slime. mask: return them as SGLang does, with the
    logprob of the token ("selected") or of all ids ("support"). flat_input, flat_output: the best tokens as a flat
    array ("list", "base64"), not as lists of triples. temperature_scaled: logprobs are of logits / temperature."""

    wanted: bool = False
    start: int = -1
    top: int = 0
    ids: tuple[int, ...] = ()
    top_p_ids: bool = False
    mask: str = ""
    mask_logprobs: bool = False
    flat_input: str = ""
    flat_output: str = ""
    temperature_scaled: bool = False

    @property
    def listed(self) -> int:
        """Tokens that are listed with each token of the output, in triples."""
        return len(self.ids) or (0 if self.flat_output else self.top)


class Prompt(NamedTuple):
    """One prompt with its parameters. rid: as the reply shows it. adapter: "" = the base model."""

    rid: str
    adapter: str
    ids: list[int]
    sampling: SamplingParams
    text: TextOptions
    logprobs: LogprobOptions


class Prompts(NamedTuple):
    """The prompts of one body. batch: the reply is a list, also for one prompt. group: the rid that the prompts of a
    batch share, or ""."""

    prompts: list[Prompt]
    n: int
    batch: bool
    group: str


def parse_generate(data: dict[str, Any]) -> GenerateBody:
    """Read the body. Raises InvalidField for a field that this server cannot honour."""
    for field in UNSUPPORTED_HERE:
        if not is_empty(data.get(field)):
            raise InvalidField(field, "not supported by this server")
    return parse_body(data, GenerateBody, {})


def is_empty(value: Any) -> bool:
    """Return whether ``value`` is None, False, 0, an empty string, list or object, or a list of only such values."""
    return not value or (isinstance(value, list) and all(is_empty(item) for item in value))


async def read_prompts(context: ServingContext, body: GenerateBody) -> Prompts:
    """Check all fields and tokenise the prompts. Raises InvalidField."""
    inputs, field, batch = _inputs(body)
    context.check_choices(len(inputs), 1)
    params = [_sampling_body(p) for p in per_prompt("sampling_params", body.sampling_params, inputs)]
    n = params[0].n
    if any(p.n != n for p in params):
        raise InvalidField("sampling_params.n", "expected the same number for all prompts of a batch")
    context.check_choices(len(inputs), n)
    rids, group = _rids(body.rid, len(inputs) if batch else None)
    options = _logprob_options(body, inputs, params)
    adapters = _adapters(context, body, inputs)
    prompts, is_text = [], field == "text"
    for i, value in enumerate(inputs):
        name = f"{field}[{i}]" if batch else field
        if is_text and isinstance(value, str):
            value = await context.encode(value, name)
        ids = context.check_prompt(value, name, "a string" if is_text else "token ids")
        sampling = await _sampling(context, params[i], body, len(ids), options[i])
        text = _text_options(context, params[i])
        prompts.append(Prompt(rids[i], adapters[i], ids, sampling, text, options[i]))
    context.check_reply([p.sampling for p in prompts], [p.ids for p in prompts], n, "top_logprobs_num")
    return Prompts(prompts, n, batch, group)


def _inputs(body: GenerateBody) -> tuple[list[Any], str, bool]:
    """Return the prompts, the name of their field, and whether they are a batch. input_ids override text, as in
    SGLang."""
    if body.input_ids is not None:
        ids = body.input_ids
        batch = isinstance(ids, list) and bool(ids) and isinstance(ids[0], list)
        return (ids if batch else [ids]), "input_ids", batch
    if body.text is None:
        raise InvalidField("input_ids", "expected input_ids or text")
    batch = isinstance(body.text, list)
    if body.text == []:
        raise InvalidField("text", "expected at least one prompt")
    return (body.text if batch else [body.text]), "text", batch


def per_prompt(field: str, value: Any, inputs: list[Any]) -> list[Any]:
    """Return one value for each prompt. A list has one entry per prompt; any other value is that of every prompt."""
    if not isinstance(value, list):
        return [value] * len(inputs)
    if len(value) != len(inputs):
        raise InvalidField(field, f"expected one entry per prompt ({len(inputs)}), got {len(value)}")
    return value


def _rids(rid: Any, batch: int | None) -> tuple[list[str], str]:
    """Return the id that the reply shows for each prompt, and the id of the batch, if its prompts have none of their
    own. batch: number of prompts, or None for a single prompt that is no batch."""
    if isinstance(rid, list) and batch is not None:
        if len(rid) != batch or len(set(map(str, rid))) != batch:
            raise InvalidField("rid", f"expected {batch} different ids, one per prompt")
        return [_rid(r) for r in rid], ""
    name = _rid(uuid.uuid4().hex if rid is None else rid)
    return ([name], "") if batch is None else ([f"{name}_{i}" for i in range(batch)], name)


def _rid(value: Any) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_REQUEST_ID_CHARS or PART in value:
        raise InvalidField("rid", f"expected a string of 1 to {MAX_REQUEST_ID_CHARS} characters without {PART}")
    return value


def _adapters(context: ServingContext, body: GenerateBody, inputs: list[Any]) -> list[str]:
    """Return the name of each prompt's adapter; "" = the base model."""
    if adapter := context.adapter(body.model):
        return [adapter] * len(inputs)
    names = [name or "" for name in per_prompt("lora_path", body.lora_path, inputs)]
    if not all(isinstance(name, str) and len(name) <= MAX_LORA_NAME_CHARS for name in names):
        expected = f"the name of an adapter (at most {MAX_LORA_NAME_CHARS} characters), or a list of one per prompt"
        raise InvalidField("lora_path", f"expected {expected}")
    return names


def _sampling_body(params: Any) -> SamplingBody:
    params = {} if params is None else params
    if not isinstance(params, dict):
        raise InvalidField("sampling_params", "expected an object, or a list of one object per prompt")
    try:
        body = parse_body(params, SamplingBody, UNSUPPORTED)
    except InvalidField as error:
        raise InvalidField(f"sampling_params.{error.field}", error.message.removeprefix(f"{error.field}: ")) from error
    if "max_new_tokens" not in params:
        body.max_new_tokens = DEFAULT_MAX_NEW_TOKENS
    return body


def _logprob_options(body: GenerateBody, inputs: list[Any], params: list[SamplingBody]) -> list[LogprobOptions]:
    wanted = per_prompt("return_logprob", body.return_logprob, inputs)
    starts = per_prompt("logprob_start_len", body.logprob_start_len, inputs)
    tops = per_prompt("top_logprobs_num", body.top_logprobs_num, inputs)
    masks = per_prompt("return_sampling_mask", body.return_sampling_mask, inputs)
    kinds = (("return_logprob", wanted, bool), ("logprob_start_len", starts, int), ("top_logprobs_num", tops, int),
             ("return_sampling_mask", masks, bool))  # fmt: skip
    for field, values, kind in kinds:
        if any(value is not None and type(value) is not kind for value in values):
            raise InvalidField(field, f"expected {kind.__name__}, or a list of one per prompt")
    if any(top is not None and not 0 <= top <= MAX_LOGPROBS for top in tops):
        raise InvalidField("top_logprobs_num", f"expected an integer from 0 to {MAX_LOGPROBS}")
    flat_input, flat_output = _flat_forms(body)
    return [
        _options_of(body, params[i], bool(wanted[i]), bool(masks[i]))._replace(
            start=-1 if starts[i] is None or not wanted[i] else starts[i],
            top=(tops[i] or 0) if wanted[i] else 0,
            ids=ids,
            flat_input=flat_input,
            flat_output=flat_output,
        )
        for i, ids in enumerate(_asked_ids(body, inputs, tops))
    ]


def _options_of(body: GenerateBody, params: SamplingBody, wanted: bool, mask: bool) -> LogprobOptions:
    """Return the options of one prompt about its logprobs as a whole."""
    of_slime = params.custom_params.return_top_p_token_ids
    if of_slime and not wanted:
        raise InvalidField("return_logprob", "expected true with sampling_params.custom_params.return_top_p_token_ids")
    if body.return_sampling_mask_logprobs and not mask:
        raise InvalidField("return_sampling_mask_logprobs", "expected return_sampling_mask with it")
    mode = params.logprobs_mode or body.logprobs_mode or "temperature"
    return LogprobOptions(
        wanted=wanted,
        top_p_ids=of_slime,
        mask=body.sampling_logprobs_mode if mask else "",
        mask_logprobs=mask and (body.return_sampling_mask_logprobs or body.sampling_logprobs_mode == "support"),
        temperature_scaled=mode == "temperature" and not (mask or of_slime),
    )


def _asked_ids(body: GenerateBody, inputs: list[Any], tops: list[int | None]) -> list[tuple[int, ...]]:
    """Return the ids of token_ids_logprob for each prompt. They are ids, or a list of ids for each prompt."""
    given, field = body.token_ids_logprob or [], "token_ids_logprob"
    flat = isinstance(given, list) and not any(isinstance(ids, list) for ids in given)
    of_prompts = [given] * len(inputs) if flat else per_prompt(field, given, inputs)
    for ids, top in zip(of_prompts, tops, strict=True):
        if ids and not (isinstance(ids, list) and all(type(token) is int for token in ids)):
            raise InvalidField(field, "expected token ids, or a list of them per prompt")
        if ids and top:
            raise InvalidField("top_logprobs_num", f"expected 0 with token_ids_logprob, got {top}")
    return [tuple(ids or ()) for ids in of_prompts]


def _flat_forms(body: GenerateBody) -> tuple[str, str]:
    """Return the forms of the best tokens of prompts and of outputs, see LogprobOptions."""
    forms = []
    for field in ("return_flat_raw_top_logprobs", "return_flat_raw_output_top_logprobs"):
        flat, as_base64 = getattr(body, field), getattr(body, f"{field}_b64")
        if as_base64 and not flat:
            raise InvalidField(f"{field}_b64", f"expected {field} with it")
        forms.append("base64" if as_base64 else "list" if flat else "")
    return forms[0], forms[1]


async def _sampling(
    context: ServingContext, params: SamplingBody, body: GenerateBody, prompt_tokens: int, logprobs: LogprobOptions
) -> SamplingParams:
    """Return the parameters of one prompt. max_new_tokens is limited to the rest of the context, which is also its
    value for null. With the ids that tokens are drawn from, log probabilities are normalised over these ids."""
    wanted = params.max_new_tokens
    if wanted is not None and wanted < 0:
        raise InvalidField("sampling_params.max_new_tokens", f"expected an integer >= 0, got {wanted}")
    if logprobs.start < -1 or logprobs.start > prompt_tokens:
        raise InvalidField("logprob_start_len", f"expected -1 to {prompt_tokens} (the length of the prompt)")
    given = given_fields(params, SamplingParams, NAMES)
    cut = given.get("top_p", 1.0) < 1 or given.get("top_k", -1) > 0 or given.get("min_p", 0.0) > 0
    masked = bool(logprobs.mask) or (logprobs.top_p_ids and cut)
    mode = params.logprobs_mode or body.logprobs_mode or ("processed" if masked else "temperature")
    if masked and mode != "processed":
        raise InvalidField("logprobs_mode", f"expected processed with the ids that tokens are drawn from, got {mode!r}")
    if 0.0 <= given.get("temperature", 1.0) < GREEDY_BELOW:
        given["temperature"] = 0.0
    if given.get("seed", NO_SEED) != NO_SEED:
        given["seed"] %= 2**SEED_BITS
    given |= {
        "logprobs": logprobs.top if logprobs.wanted else None,
        "prompt_logprobs": logprobs.top if 0 <= logprobs.start < prompt_tokens - 1 else None,
        "logprobs_mode": mode,
        "logprob_token_ids": logprobs.ids if logprobs.wanted else (),
        "return_sampling_mask": masked,
        "return_sampling_mask_logprobs": logprobs.mask_logprobs,
        **await _constraints(context, params),
    }
    if body.return_routed_experts:
        start = body.routed_experts_start_len
        routing = Asked(Form.SGLANG, "return_routed_experts", "routed_experts_start_len", start)
        given |= routing.sampling(context, prompt_tokens)
    max_tokens = None if wanted is None else max(wanted, 1)
    return context.sampling(given, prompt_tokens, max_tokens, "sampling_params.min_new_tokens")


async def _constraints(context: ServingContext, params: SamplingBody) -> dict[str, Any]:
    """Return the checked fields of SamplingParams that restrict the answer."""
    asked = [(field, kind, value) for field, kind in KINDS.items() if (value := getattr(params, field)) is not None]
    if len(asked) > 1:
        raise InvalidField(f"sampling_params.{asked[-1][0]}", "expected only one field that asks for a grammar")
    given: dict[str, Any] = {}
    for name, kind, value in asked:
        field = f"sampling_params.{name}"
        given["grammar"] = await checked(context, field, builder(kind, value, field))
    if params.logit_bias is not None:
        given["logit_bias"] = biases(params.logit_bias, "sampling_params.logit_bias")
    return given


def _text_options(context: ServingContext, params: SamplingBody) -> TextOptions:
    return TextOptions(
        stops=context.stop_strings(params.stop, "sampling_params.stop"),
        include_stop=params.no_stop_trim,
        skip_special_tokens=params.skip_special_tokens,
        min_tokens=params.min_new_tokens,
        prompt_only=params.max_new_tokens == 0,
    )
