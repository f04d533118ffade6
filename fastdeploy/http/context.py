"""The objects and checks that the routes of one app share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec

from fastdeploy.client.chat_format.formats import ChatFormat, choose
from fastdeploy.client.grammars import GrammarChecks
from fastdeploy.client.pace import Pace
from fastdeploy.client.serving_client import ServingClient
from fastdeploy.client.tokenizer import Tokenizer
from fastdeploy.core.config import ServeConfig
from fastdeploy.core.errors import ContextLengthExceeded, EngineDead, InvalidField, ModelNotFound
from fastdeploy.core.request_fields import AddRequest, RequestFields, check_prompt, check_room, check_vocabulary
from fastdeploy.core.sampling_params import MAX_INT32, NO_SEED, SamplingParams, check_prompt_logprobs
from fastdeploy.core.served_weights import BASE_NAMES, MAX_LORA_NAME_CHARS
from fastdeploy.http.answer_counts import AnswerCounts
from fastdeploy.http.guards.budget import Budget
from fastdeploy.http.upload_files import UploadFiles

# Characters of the longest token, unless the vocabulary has a longer one. A text that is too long for a context of such
# tokens is refused before it is tokenised.
CHARS_PER_TOKEN = 64
MAX_STOPS = 64
MAX_STOP_CHARS = 256
MAX_STOP_CHARS_IN_ALL = 4096
MAX_CHOICES = 4096  # of all prompts of one HTTP request


@dataclass(frozen=True)
class ServingContext:
    """The objects that routes use. tokenizer: None if the model folder has none; then only token ids are served.
    uploads: places for weight uploads. slice_lock: see Pace. grammars: the checks of grammars. answer_counts: of HTTP
    requests."""

    client: ServingClient
    tokenizer: Tokenizer | None
    config: ServeConfig
    uploads: Budget
    slice_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    grammars: GrammarChecks = field(default_factory=GrammarChecks)
    answer_counts: AnswerCounts = field(default_factory=AnswerCounts)

    def pace(self) -> Pace:
        """Return a new Pace, for one reply."""
        return Pace(self.slice_lock)

    @cached_property
    def upload_files(self) -> UploadFiles:
        """The files of weight uploads."""
        return UploadFiles(self.config)

    @cached_property
    def chat_format(self) -> ChatFormat:
        """How the model writes reasoning and tool calls in a chat."""
        template = "" if self.tokenizer is None else self.tokenizer.template
        return choose(template, self.config.tool_call_parser, self.config.reasoning_parser)

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

    def check_length(self, characters: int, field: str) -> None:
        """Raise ContextLengthExceeded if so many characters are more than a full context of the longest tokens has."""
        limit = self.max_model_len * max(CHARS_PER_TOKEN, self.require_tokenizer(field).longest_token)
        if characters > limit:
            asked = f"{characters} characters, more than so many tokens can have"
            raise ContextLengthExceeded(field, self.max_model_len, asked)

    async def encode(self, text: str, field: str, special_tokens: bool = True) -> list[int]:
        """Tokenise a text. Raises ContextLengthExceeded for one that is too long for any prompt."""
        self.check_length(len(text), field)
        return await self.require_tokenizer(field).encode(text, special_tokens)

    def check_prompt(self, ids: Any, field: str, expected: str = "token ids") -> list[int]:
        """Return ``ids``. Raises InvalidField unless they are a valid prompt, and ContextLengthExceeded unless the
        prompt leaves room for one token of output. A prompt that is too long is refused before its ids are checked."""
        is_list = isinstance(ids, list)
        if not is_list or (len(ids) < self.max_model_len and any(type(token) is not int for token in ids)):
            raise InvalidField(field, f"expected {expected}")
        check_prompt(ids, self.max_model_len, self.vocab_size, field)
        return ids

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The model's EOS tokens."""
        return tuple(self.client.model_info.get("eos_token_ids", ()))

    @property
    def vocab_size(self) -> int:
        return self.client.model_info.get("vocab_size", 2**31)

    def reasoning_ids(self, field: str) -> tuple[int, int]:
        """Return the tokens that open and close the reasoning of this model. Raises InvalidField for ``field``."""
        reasoning = self.chat_format.reasoning
        if reasoning is None:
            raise InvalidField(field, "this model has no known format of reasoning; --reasoning-parser names one")
        encode = self.require_tokenizer(field).encode_now
        opens, closes = (encode(marker, False) for marker in (reasoning.opens, reasoning.closes))
        if len(opens) != 1 or len(closes) != 1:
            raise InvalidField(field, f"not supported: {reasoning.closes} is no single token of this model")
        return opens[0], closes[0]

    def require_tokenizer(self, field: str) -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidField(field, "this model has no tokenizer: send token ids")
        return self.tokenizer

    def sampling(
        self, given: dict[str, Any], prompt_tokens: int, max_tokens: int | None, min_field: str = "min_tokens"
    ) -> SamplingParams:
        """Return the checked parameters for one prompt. given: fields of SamplingParams, as clients give them.
        max_tokens: is cut to the rest of the context; None = all of the rest. min_field: the client's name of
        min_tokens."""
        left, least = self.max_model_len - prompt_tokens, given.get("min_tokens", 0)
        if least > 0 and (max_tokens is None or least <= max_tokens):
            check_room(prompt_tokens, least, self.max_model_len, min_field)
        fields = {"logprobs_mode": self.config.logprobs_mode, **given}
        if given.get("return_sampling_mask"):
            fields["logprobs_mode"] = given.get("logprobs_mode", "processed")
        if given.get("logprob_token_ids") or given.get("return_sampling_mask"):
            fields["logprobs"] = 0 if given.get("logprob_token_ids") else given.get("logprobs") or 0
            check_vocabulary(given.get("logprob_token_ids", ()), self.vocab_size, "logprob_token_ids")
        fields["max_tokens"] = left if max_tokens is None else min(max_tokens, left)
        if fields.get("top_k") == -1:
            fields["top_k"] = 0
        if fields.get("seed") == NO_SEED:
            fields["seed"] = None
        if given.get("reasoning_max_tokens") is not None:
            ids = given.get("reasoning_ids") or self.reasoning_ids("reasoning_max_tokens")
            fields |= {"reasoning_ids": ids, "reasoning_end": given.get("reasoning_end") or ids[-1:]}
        params = SamplingParams(**fields).check()
        if params.return_sampling_mask and not (params.limits_tokens or params.temperature == 0):
            expected = "expected top_k, top_p or min_p with it: any token of the vocabulary can be drawn"
            raise InvalidField("return_sampling_mask", expected)
        return params

    def stop_strings(self, stop: str | list[str] | None, field: str) -> tuple[str, ...]:
        """Return the stop strings of a request. Raises InvalidField for ``field`` if they are too many or too long, or
        if there is no tokenizer to look for them."""
        stops = [stop] if isinstance(stop, str) else stop or []
        sizes = [len(text) for text in stops]
        if len(stops) > MAX_STOPS or not all(0 < size <= MAX_STOP_CHARS for size in sizes):
            raise InvalidField(field, f"expected at most {MAX_STOPS} strings of 1 to {MAX_STOP_CHARS} characters")
        if sum(sizes) > MAX_STOP_CHARS_IN_ALL:
            raise InvalidField(field, f"expected at most {MAX_STOP_CHARS_IN_ALL} characters in all, got {sum(sizes)}")
        if stops:
            self.require_tokenizer(field)
        return tuple(stops)


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
