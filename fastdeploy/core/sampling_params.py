"""Parameters of sampling."""

from __future__ import annotations

import secrets

import msgspec

from fastdeploy.core.errors import InvalidField

MAX_LOGPROBS = 20
MAX_PROMPT_LOGPROBS = 100  # TRL asks for so many
# In all prompts of a request, with the entries of the prompts' own tokens. Each takes 50 to 100 bytes of a JSON reply.
MAX_PROMPT_LOGPROB_ENTRIES = 2**19
MAX_INT32 = 2**31 - 1
SEED_BITS = 63
NO_SEED = -1  # of clients, as in vLLM: a seed is chosen for them
LOGPROBS_MODES = ("raw", "temperature", "processed")


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """Parameters of sampling. The API server checks them, and the engine once more.

    temperature: 0 is greedy. top_k: 0 is off. top_p: 1 is off. min_p: 0 is off, relative to the best token.
    logprobs: None = none; 0 = of the sampled token only; k = of the k best tokens too. prompt_logprobs: the same for
    the prompt's tokens, always raw.
    logprobs_mode: raw = log softmax of the logits; temperature = of the logits / temperature (greedy: raw);
    processed = of the distribution that was drawn from, after penalties, bans, temperature, top_k, top_p and min_p
    (greedy: after penalties and bans). processed returns fewer than k if fewer tokens can be drawn.
    return_kept: return the ids that each token was drawn from (Logprob.kept). Needs logprobs in mode processed, which
    are normalised over these ids.
    seed: fixes the random number of each token, together with the number of the choice and the absolute position. So a
    request that is aborted and resubmitted with its tokens draws the tokens of an undisturbed run. None = the engine
    chooses a seed for each request.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: str = "raw"
    return_kept: bool = False

    def check(self) -> SamplingParams:
        """Return self, or raise InvalidField naming the first field that is out of range."""
        top = self.prompt_logprobs or 0
        with_kept = self.logprobs is not None and self.logprobs_mode == "processed"
        for field, ok, expected in (
            ("max_tokens", self.max_tokens >= 1, "an integer >= 1"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, "an integer from 0 to max_tokens"),
            ("temperature", 0.0 <= self.temperature <= 100.0, "a number from 0 to 100"),
            ("top_p", 0.0 < self.top_p <= 1.0, "a number above 0 and at most 1"),
            ("top_k", 0 <= self.top_k <= MAX_INT32, "an integer from 0 to 2**31 - 1 (0 or -1 = off)"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "a number from 0 to 1"),
            ("repetition_penalty", 0.0 < self.repetition_penalty <= 100.0, "a number above 0 and at most 100"),
            ("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "a number from -2 to 2"),
            ("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "a number from -2 to 2"),
            ("seed", 0 <= (self.seed or 0) < 2**SEED_BITS, "an integer from 0 to 2**63 - 1"),
            ("stop_token_ids", all(0 <= t <= MAX_INT32 for t in self.stop_token_ids), "token ids"),
            ("logprobs", 0 <= (self.logprobs or 0) <= MAX_LOGPROBS, f"an integer from 0 to {MAX_LOGPROBS}"),
            ("prompt_logprobs", 0 <= top <= MAX_PROMPT_LOGPROBS, f"an integer from 0 to {MAX_PROMPT_LOGPROBS}"),
            ("logprobs_mode", self.logprobs_mode in LOGPROBS_MODES, f"one of {', '.join(LOGPROBS_MODES)}"),
            ("return_kept", not self.return_kept or with_kept, "logprobs in mode processed with it"),
        ):
            if not ok:
                raise InvalidField(field, f"expected {expected}, got {getattr(self, field)!r}")
        return self

    def seeded(self) -> SamplingParams:
        """Return these parameters with a seed: a new random one if they have none."""
        if self.seed is not None:
            return self
        return msgspec.structs.replace(self, seed=secrets.randbits(SEED_BITS))

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def check_prompt_logprobs(top: int | None, num_tokens: int, field: str = "prompt_logprobs") -> None:
    """Raise InvalidField for more prompt logprobs than one reply may hold. top: SamplingParams.prompt_logprobs.
    num_tokens: number of tokens of all prompts together."""
    if top is not None and (entries := num_tokens * (top + 1)) > MAX_PROMPT_LOGPROB_ENTRIES:
        expected = f"at most {MAX_PROMPT_LOGPROB_ENTRIES} logprobs of prompts in one request"
        raise InvalidField(field, f"expected {expected}, got {num_tokens} prompt tokens x {top + 1} = {entries}")
