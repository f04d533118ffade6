"""The objects and checks that the routes of one app share."""

from __future__ import annotations

import asyncio
import hashlib
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from fastdeploy.client.choice import TextOptions
from fastdeploy.client.generation import GenerationRequest
from fastdeploy.client.pace import Pace
from fastdeploy.client.serving_client import ServingClient
from fastdeploy.client.tokenizer import Tokenizer
from fastdeploy.core.config import ServeConfig
from fastdeploy.core.errors import ContextLengthExceeded, EngineDead, InvalidField, ModelNotFound
from fastdeploy.core.request_fields import TIMING, AddRequest, RequestFields, part_id
from fastdeploy.core.sampling_params import MAX_INT32, NO_SEED, SamplingParams, check_prompt_logprobs
from fastdeploy.core.served_weights import BASE_NAMES, MAX_LORA_NAME_CHARS
from fastdeploy.http.guards.budget import Budget
from fastdeploy.http.openai.protocol import MAX_CHOICES, GenerationBody, stop_strings
from fastdeploy.http.upload_files import UploadFiles

# Characters of the longest token, unless the vocabulary has a longer one. A text that is too long for a context of such
# tokens is refused before it is tokenised.
CHARS_PER_TOKEN = 64
# Fields that SamplingParams takes unchanged. None means "absent": the default of SamplingParams applies.
PASSED_ON = (
    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "ignore_eos",
    "min_tokens",
)  # fmt: skip


@dataclass(frozen=True)
class ServingContext:
    """The objects that routes use. tokenizer: None if the model folder has none; then only token ids are served.
    uploads: places for weight uploads. upload_files: files through which uploads reach the engine. slice_lock: see
    Pace."""

    client: ServingClient
    tokenizer: Tokenizer | None
    config: ServeConfig
    uploads: Budget
    upload_files: UploadFiles
    slice_lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def pace(self) -> Pace:
        """Return a new Pace, for one reply."""
        return Pace(self.slice_lock)

    @property
    def max_model_len(self) -> int:
        """The number of tokens in a context. Raises EngineDead if no engine is connected."""
        if self.client.welcome is None:
            raise EngineDead("no engine is connected: it is starting, or it died and is being restarted")
        return self.client.welcome.max_model_len

    def adapter(self, model: str | None) -> str:
        """Return the name of the adapter that ``model`` names, or "" if it names the base model.

        The base model's names are the served name, the path of its folder, BASE_NAMES, and no name at all. Any other
        name is an adapter's, with or without a name of the base model and a colon before it ("base:adapter", as in
        SGLang). The engine knows which adapters there are. Raises ModelNotFound for a name that is too long."""
        if not model:
            return ""
        for base in (self.config.served_model_name, self.config.model, *BASE_NAMES):
            if model == base or model.startswith(f"{base}:"):
                model = model[len(base) + 1 :]
                break
        if len(model) > MAX_LORA_NAME_CHARS:
            raise ModelNotFound(f"model: {model!r} is not served here", param="model")
        return model

    def model_name(self, adapter: str) -> str:
        """Return the name that replies show for a request of this adapter; "" = the base model."""
        return adapter or self.config.served_model_name

    def check_choices(self, num_prompts: int, n: int) -> None:
        """Raise InvalidField for more choices than one HTTP request may have, or than the engine's queue can hold."""
        if num_prompts * n > MAX_CHOICES:
            field = "prompt" if num_prompts > MAX_CHOICES else "n"
            raise InvalidField(field, f"{num_prompts} prompts x {n} choices; expected at most {MAX_CHOICES} in all")
        queue = self.client.model_info.get("max_waiting", MAX_CHOICES)
        if n > queue:
            raise InvalidField("n", f"expected at most {queue} (the server's --max-waiting), got {n}")

    def check_reply(
        self,
        sampling: Sequence[SamplingParams],
        prompts: Sequence[Sequence[int]],
        n: int,
        prompt_field: str = "prompt_logprobs",
    ) -> None:
        """Raise InvalidField if the reply might hold too many log probabilities: more than --max-reply-logprobs for
        output tokens, or more for prompts than the engine computes for one request.

        ``sampling`` has the parameters of each prompt, and each prompt has ``n`` choices. ``prompt_field`` is the field
        to name in an error about prompts."""
        limit = self.config.max_reply_logprobs
        total = sum(n * s.max_tokens * (1 + s.logprobs) for s in sampling if s.logprobs is not None)
        if total > limit:
            why = f"up to {total} log probabilities (choices x max_tokens x (1 + the best of each)); ask for fewer"
            raise InvalidField("logprobs", f"{why}, expected at most {limit} (--max-reply-logprobs)")
        pairs = zip(sampling, prompts, strict=True)
        asked = [(s.prompt_logprobs, len(ids)) for s, ids in pairs if s.prompt_logprobs is not None]
        most = max((top for top, _ in asked), default=None)
        check_prompt_logprobs(most, sum(num_tokens for _, num_tokens in asked), prompt_field)

    def check_text(self, text: str, field: str) -> None:
        """Raise ContextLengthExceeded if ``text`` is longer than a full context of the longest tokens."""
        self.check_length(len(text), field)

    def check_length(self, characters: int, field: str) -> None:
        """Raise ContextLengthExceeded if so many characters are more than a full context of the longest tokens has."""
        limit = self.max_model_len * max(CHARS_PER_TOKEN, self.require_tokenizer(field).longest_token)
        if characters > limit:
            asked = f"{characters} characters, more than so many tokens can have"
            raise ContextLengthExceeded(field, self.max_model_len, asked)

    def check_prompt(self, ids: list[int], field: str) -> None:
        """Raise InvalidField unless ``ids`` is a valid prompt, and ContextLengthExceeded unless the prompt leaves room
        for one token of output."""
        if not ids:
            raise InvalidField(field, "expected at least one token")
        self.check_room(len(ids), 1, field)
        self.check_vocabulary(ids, field)

    def check_room(self, prompt_tokens: int, output_tokens: int, field: str) -> None:
        """Raise ContextLengthExceeded, for ``field``, unless the prompt leaves room for so many tokens of output."""
        if prompt_tokens + output_tokens > self.max_model_len:
            asked = f"a prompt of {prompt_tokens} tokens, and room for at least {output_tokens} of output"
            raise ContextLengthExceeded(field, self.max_model_len, asked)

    def check_vocabulary(self, ids: list[int], field: str) -> None:
        """Raise InvalidField for an id outside of the vocabulary. ``ids`` must not be empty."""
        vocab_size = self.client.model_info.get("vocab_size", 2**31)
        if min(ids) < 0 or max(ids) >= vocab_size:
            bad = next(t for t in ids if not 0 <= t < vocab_size)
            raise InvalidField(field, f"token id {bad} is outside of the vocabulary (0 to {vocab_size - 1})")

    def require_tokenizer(self, field: str) -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidField(field, "this model has no tokenizer: send token ids")
        return self.tokenizer

    def sampling(
        self, body: GenerationBody, prompt_tokens: int, logprobs: int | None, max_tokens: tuple[str, int | None]
    ) -> SamplingParams:
        """Return the checked parameters for one prompt. ``max_tokens`` is (name of the field, its value). The value
        is cut to the rest of the context; None means all of the rest."""
        field, wanted = max_tokens
        left = self.max_model_len - prompt_tokens
        if wanted is not None and wanted < 1:
            raise InvalidField(field, f"expected an integer >= 1, got {wanted}")
        if body.min_tokens and (wanted is None or body.min_tokens <= wanted):
            self.check_room(prompt_tokens, body.min_tokens, "min_tokens")
        given = {name: value for name in PASSED_ON if (value := getattr(body, name)) is not None}
        return SamplingParams(
            max_tokens=min(left if wanted is None else wanted, left),
            top_k=max(body.top_k or 0, 0),
            seed=None if body.seed == NO_SEED else body.seed,
            stop_token_ids=tuple(body.stop_token_ids or ()),
            logprobs=logprobs,
            prompt_logprobs=body.prompt_logprobs_wanted(),
            logprobs_mode=body.logprobs_mode or self.config.logprobs_mode,
            **given,
        ).check()

    def text_options(self, body: GenerationBody, prompt_only: bool = False) -> TextOptions:
        """Return the checked options of the choices. prompt_only: see TextOptions."""
        stops = stop_strings(body.stop, "stop")
        if stops:
            self.require_tokenizer("stop")
        if stops and body.detokenize is False:
            raise InvalidField(
                "stop", "expected no stop strings with detokenize false: they are looked for in the text"
            )
        return TextOptions(
            stops=stops,
            include_stop=bool(body.include_stop_str_in_output),
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
    fields = body.request_fields()
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
    return GenerationRequest(requests, [text] * len(prompts))


def engine_requests(
    ids: Sequence[str],
    prompts: Sequence[list[int]],
    sampling: Sequence[SamplingParams],
    adapters: Sequence[str],
    fields: RequestFields,
    group: str = "",
    arrival: float = 0.0,
    fingerprint: str = "",
) -> list[AddRequest]:
    """Return one engine request for each prompt. The choices of all prompts are numbered in one sequence, which begins
    with ``fields.first_choice``. arrival 0 means now."""
    if fields.first_choice + fields.n * len(prompts) > MAX_INT32:
        raise InvalidField("first_choice", "expected numbers of choices below 2**31 - 1")
    shared = msgspec.structs.asdict(fields)
    shared |= {"group": group, "arrival": arrival or time.time(), "fingerprint": fingerprint}
    return [
        AddRequest(*of_prompt, **shared | {"first_choice": fields.first_choice + fields.n * i, "adapter": adapters[i]})
        for i, of_prompt in enumerate(zip(ids, prompts, sampling, strict=True))
    ]


def fingerprint(body: GenerationBody) -> str:
    """Return a hash of ``body`` without the fields that say how and when its answer is delivered."""
    fields = body.model_dump(exclude={"stream", "stream_options", "request_id", *TIMING}, exclude_none=True)
    return hashlib.sha256(msgspec.json.encode(fields, order="deterministic")).hexdigest()
