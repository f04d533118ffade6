"""Parameters of sampling."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Sequence
from typing import Annotated, Literal, get_args, get_type_hints

import msgspec
from msgspec import Meta

from fastdeploy.core.errors import InvalidField
from fastdeploy.core.grammar import MAX_GRAMMAR_CHARS

MAX_LOGPROBS = 1024  # of one position; teachers ask for 64 to 256
# In all prompts of a request, with the entries of the prompts' own tokens: 16 MiB in the engine, and 50 to 100 bytes of
# a JSON reply each.
MAX_PROMPT_LOGPROB_ENTRIES = 2**21
MAX_REASONING_END = 256
MAX_INT32 = 2**31 - 1
SEED_BITS = 63
NO_SEED = -1  # of clients, as in vLLM: a seed is chosen for them
TokenId = Annotated[int, Meta(ge=0, le=MAX_INT32)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
BadWord = Annotated[tuple[TokenId, ...], Meta(min_length=1, max_length=64)]
LogprobsMode = Literal["raw", "temperature", "processed"]
LOGPROBS_MODES = get_args(LogprobsMode)
TOP = "absent = none; 0 = of the sampled token only; k = of the k best tokens too"
PROMPT_TOP = "the same for the prompt's tokens, always raw"
FIRST_ROW = "with routed_experts: position of the first token whose routing is returned, at most that behind the prompt"
# The words of msgspec for types -> ours.
WORDS = {"Expected": "expected", "`float": "a number", "`int": "an integer", "`array": "a list", " | null": "", "`": ""}


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """Parameters of sampling. They are declared here alone: HTTP bodies and their description take names, types, limits
    and defaults from here. The API server checks them, and the engine once more, since it trusts no client.

    logprobs_mode: raw = log softmax of the logits; temperature = of the logits / temperature (greedy: raw);
    processed = of the distribution that was drawn from, after penalties, bans, temperature, top_k, top_p and min_p
    (greedy: after penalties and bans). processed returns fewer than k if fewer tokens can be drawn.
    logprob_token_ids: return the logprobs of these ids at each position, instead of the best tokens. At the positions
    of the prompt too if prompt_logprobs is 0.
    return_sampling_mask: return the ids that each token was drawn from (Logprob.mask_ids). Needs logprobs in mode
    processed, which are normalised over these ids: for greedy, over the token alone.
    return_sampling_mask_logprobs: return the logprobs of these ids too.
    routed_experts: return the routing of each token, that of the prompt included (core/experts.py), from position
    routed_experts_start on. Only of a Mixture of Experts, by a server with --enable-return-routed-experts.
    seed: fixes the random number of each token, together with the number of the choice and the absolute position. So a
    request that is aborted and resubmitted with its tokens draws the tokens of an undisturbed run. None = the engine
    chooses a seed for each request.
    grammar: the output is a word of this grammar (core/grammar.py), or its beginning if it ends early; "" = any output.
    EOS and stop ids may be drawn only where the grammar may end; where it cannot go on, nothing else may be. The output
    begins behind the prompt without resumed_tokens. min_tokens keeps EOS away as long as the grammar can go on.
    logit_bias: added to the logits of ids, before penalties. allowed_token_ids: no other id may be drawn; None = all.
    bad_words: sequences of ids that may not be drawn; the last id of one is forbidden behind the others in the output.
    reasoning_max_tokens: behind so many tokens of reasoning in the output, the ids of ``reasoning_end`` are drawn, one
    after the other. None = no limit.
    reasoning_ids: the id that opens reasoning, and the one that closes it. reasoning_end: ends with the latter.
    """

    max_tokens: Annotated[int, Meta(ge=1)] = 16
    min_tokens: Annotated[int, Meta(ge=0, description="at most max_tokens")] = 0
    temperature: Annotated[float, Meta(ge=0, le=100, description="0 is greedy")] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1, description="1 is off")] = 1.0
    top_k: Annotated[int, Meta(ge=0, le=MAX_INT32, description="0 is off")] = 0
    min_p: Annotated[float, Meta(ge=0, le=1, description="0 is off; relative to the best token")] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] = 1.0
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    seed: Annotated[int, Meta(ge=0, le=2**SEED_BITS - 1)] | None = None
    stop_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=1024)] = ()
    ignore_eos: bool = False
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS, description=TOP)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS, description=PROMPT_TOP)] | None = None
    logprobs_mode: LogprobsMode = "raw"
    logprob_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=MAX_LOGPROBS)] = ()
    return_sampling_mask: bool = False
    return_sampling_mask_logprobs: bool = False
    routed_experts: bool = False
    routed_experts_start: Annotated[int, Meta(ge=0, le=MAX_INT32, description=FIRST_ROW)] = 0
    grammar: Annotated[str, Meta(max_length=MAX_GRAMMAR_CHARS)] = ""
    logit_bias: Annotated[tuple[tuple[TokenId, Bias], ...], Meta(max_length=1024)] = ()
    allowed_token_ids: Annotated[tuple[TokenId, ...], Meta(min_length=1, max_length=65536)] | None = None
    bad_words: Annotated[tuple[BadWord, ...], Meta(max_length=1024)] = ()
    reasoning_max_tokens: Annotated[int, Meta(ge=0, le=MAX_INT32)] | None = None
    reasoning_ids: Annotated[tuple[TokenId, ...], Meta(max_length=2)] = ()
    reasoning_end: Annotated[tuple[TokenId, ...], Meta(max_length=MAX_REASONING_END)] = ()

    def check(self) -> SamplingParams:
        """Return self, or raise InvalidField naming the first field that is out of range."""
        check_limits(self, SamplingParams)
        if self.min_tokens > self.max_tokens:
            raise InvalidField("min_tokens", f"expected an integer from 0 to max_tokens, got {self.min_tokens}")
        if self.return_sampling_mask and (self.logprobs is None or self.logprobs_mode != "processed"):
            raise InvalidField("return_sampling_mask", "expected logprobs in mode processed with it")
        if self.return_sampling_mask_logprobs and not self.return_sampling_mask:
            raise InvalidField("return_sampling_mask_logprobs", "expected return_sampling_mask with it")
        if self.routed_experts_start and not self.routed_experts:
            raise InvalidField("routed_experts_start", "expected routed_experts with it")
        if self.reasoning_max_tokens is not None:
            ids, end = self.reasoning_ids, self.reasoning_end
            if len(ids) != 2 or ids[1] not in end or end.index(ids[1]) + 1 != len(end):
                raise InvalidField("reasoning_end", "expected ids that end with the second one of reasoning_ids")
        if self.logprob_token_ids and self.logprobs:
            raise InvalidField("logprob_token_ids", f"expected logprobs 0 with it, got {self.logprobs}")
        return self

    def seeded(self, name: str = "") -> SamplingParams:
        """Return these parameters with a seed. If they have none: one that follows from ``name``; without a name, a new
        random one."""
        if self.seed is not None:
            return self
        digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()
        seed = int.from_bytes(digest) >> (256 - SEED_BITS) if name else secrets.randbits(SEED_BITS)
        return msgspec.structs.replace(self, seed=seed)

    def check_ids(self, vocab_size: int) -> None:
        """Raise InvalidField for an id outside of the vocabulary."""
        biased = [token for token, _ in self.logit_bias]
        bad = [token for word in self.bad_words for token in word]
        for field, ids in (("stop_token_ids", self.stop_token_ids), ("logit_bias", biased), ("bad_words", bad),
                           ("allowed_token_ids", self.allowed_token_ids or ()), ("reasoning_ids", self.reasoning_ids),
                           ("reasoning_end", self.reasoning_end)):  # fmt: skip
            check_vocabulary(ids, vocab_size, field)

    @property
    def limits_tokens(self) -> bool:
        """Whether top_k, top_p, min_p or a mask may leave less than the whole vocabulary to draw from."""
        filtered = self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0
        return self.temperature > 0 and (filtered or self.is_masked)

    @property
    def is_masked(self) -> bool:
        """Whether a mask forbids some tokens."""
        limits = self.allowed_token_ids, self.reasoning_max_tokens
        return bool(self.grammar or self.bad_words) or limits != (None, None)

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def check_vocabulary(ids: Sequence[int], vocab_size: int, field: str) -> None:
    """Raise InvalidField for an id outside of the vocabulary."""
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        bad = next(t for t in ids if not 0 <= t < vocab_size)
        raise InvalidField(field, f"token id {bad} is outside of the vocabulary (0 to {vocab_size - 1})")


def check_prompt_logprobs(top: int | None, num_tokens: int, field: str = "prompt_logprobs") -> None:
    """Raise InvalidField for more prompt logprobs than one reply may hold. top: SamplingParams.prompt_logprobs.
    num_tokens: number of tokens of all prompts together."""
    if top is not None and (entries := num_tokens * (top + 1)) > MAX_PROMPT_LOGPROB_ENTRIES:
        expected = f"at most {MAX_PROMPT_LOGPROB_ENTRIES} logprobs of prompts in one request"
        raise InvalidField(field, f"expected {expected}, got {num_tokens} prompt tokens x {top + 1} = {entries}")


def check_limits(fields: msgspec.Struct, kind: type[msgspec.Struct]) -> None:
    """Raise InvalidField naming the first field of ``kind`` whose value in ``fields`` breaks its declaration."""
    given = {name: getattr(fields, name) for name in kind.__struct_fields__}
    try:
        msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        plain = {name: value.item() for name, value in given.items() if hasattr(value, "item")}  # numbers of numpy
        if plain:
            return check_limits(msgspec.structs.replace(fields, **plain), kind)
        message, _, path = str(error).rpartition(" - at `")
        field, expected = re.split(r"[\[`.]", path.rpartition("$.")[2])[0], message.partition(", got ")[0]
        for word, ours in WORDS.items():
            expected = expected.replace(word, ours)
        if message.startswith("Invalid enum"):
            expected = f"expected one of {', '.join(get_args(get_type_hints(kind)[field]))}"
        raise InvalidField(field, f"{expected}, got {given[field]!r}") from error
