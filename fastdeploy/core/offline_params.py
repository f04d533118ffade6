"""The parameters that a user gives to the offline ``LLM``, with text in them, by FastDeploy's names.

The engine's own parameters are another type, core/sampling_params.py: they have token ids only. The ``LLM`` makes them
of these, by the checks of the HTTP routes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from fastdeploy.core.errors import InvalidField
from fastdeploy.core.request_fields import RequestFields
from fastdeploy.core.sampling_params import NO_SEED
from fastdeploy.core.sampling_params import SamplingParams as EngineParams

# Fields of both types, with the same meaning. They are checked when they are given, and not only when they are used.
SHARED = (
    "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p", "seed",
    "max_tokens", "min_tokens", "stop_token_ids", "ignore_eos", "logprobs_mode", "logprob_token_ids",
    "return_sampling_mask", "return_sampling_mask_logprobs", "routed_experts", "routed_experts_start",
    "allowed_token_ids",
)  # fmt: skip
MAX_BIAS = 100.0
COMBINED = ("return_sampling_mask", "return_sampling_mask_logprobs", "logprob_token_ids")  # need others, added later
WHOLE_VOCABULARY = -1  # of logprobs and prompt_logprobs


@dataclass
class GuidedDecodingParams:
    """The form that the answer must have. At most one field is given. json: a schema, as an object or as text.
    grammar: in Lark or GBNF. structural_tag: not supported."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None

    def __post_init__(self) -> None:
        if self.structural_tag is not None:
            raise InvalidField("guided_decoding.structural_tag", "not supported; give a grammar")
        if len(self.asked()) > 1:
            raise InvalidField("guided_decoding", f"expected one kind of grammar, got {', '.join(self.asked())}")

    def asked(self) -> dict[str, Any]:
        """Return the kinds that are given, with their values."""
        return {kind: value for kind, value in vars(self).items() if value is not None}


def _list_of(kind: type) -> Callable[[Any], bool]:
    """Return a test: is a value a list of ``kind``? A text is none."""
    return lambda value: (
        isinstance(value, Sequence)
        and not isinstance(value, str | bytes)
        and all(isinstance(one, kind) and not isinstance(one, bool) for one in value)
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


# Name of a field -> whether a value has its type, and what an error expects.
TYPES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "stop": (lambda value: isinstance(value, str) or _list_of(str)(value), "a text or a list of texts"),
    "reasoning_max_tokens": (_is_number, "an integer"),
    "response_max_tokens": (_is_number, "an integer"),
    "bad_words": (_list_of(str), "a list of texts"),
    "bad_words_token_ids": (_list_of(int), "a list of token ids"),
    "guided_decoding": (lambda value: isinstance(value, GuidedDecodingParams), "GuidedDecodingParams"),
    "logits_processors_args": (lambda value: isinstance(value, Mapping), "a dict"),
    "logit_bias": (lambda value: isinstance(value, Mapping), "a dict of token ids and numbers"),
}


@dataclass
class SamplingParams:
    """Parameters of one prompt for the offline ``LLM``. The first fields are FastDeploy's, in its order; those behind
    ``logits_processors_args`` are named. None = not given: then the value of the HTTP routes holds. Raises InvalidField
    for a value that is out of range.

    n: choices. best_of: 1 or None.
    top_p: 0 is the best token alone. top_k: 0 and -1 are off.
    seed: None or -1 = a new one for each prompt, which the output tells.
    stop: texts that end a choice. stop_seqs_len: has no effect; it is the length of ``stop``.
    max_tokens: None = as many as the context has room for. min_tokens: FastDeploy's default is 1, which forbids EOS as
    the first token; here tokens are drawn from the model's own distribution unless you ask for less.
    reasoning_max_tokens, response_max_tokens: limits of the two parts of a chat's answer.
    logprobs, prompt_logprobs: so many of the best tokens at each position, beside the token itself; -1 = all.
    temp_scaled_logprobs: the same as logprobs_mode "temperature". top_p_normalized_logprobs: with it, or at temperature
    1, the same as logprobs_mode "processed".
    bad_words: texts that are not written. bad_words_token_ids: ids that are not drawn.
    logits_processors_args: of FastDeploy's own processors: logit_bias ({token id: number}; one above 100, or below
    -100, counts as that), thinking_budget and think_stop_sentence.

    logprobs_mode to allowed_token_ids: see core/sampling_params.py. logit_bias: by token id. detokenize: False = the
    choices have no text.
    """

    n: int = 1
    best_of: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    stop_seqs_len: Any = None
    max_tokens: int | None = None
    reasoning_max_tokens: int | None = None
    response_max_tokens: int | None = None
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    temp_scaled_logprobs: bool = False
    top_p_normalized_logprobs: bool = False
    bad_words: Sequence[str] | None = None
    guided_decoding: GuidedDecodingParams | None = None
    bad_words_token_ids: Sequence[int] | None = None
    logits_processors_args: Mapping[str, Any] | None = None
    _: KW_ONLY
    ignore_eos: bool = False
    logprobs_mode: str | None = None
    logprob_token_ids: Sequence[int] | None = None
    return_sampling_mask: bool = False
    return_sampling_mask_logprobs: bool = False
    routed_experts: bool = False
    routed_experts_start: int = 0
    allowed_token_ids: Sequence[int] | None = None
    logit_bias: Mapping[int, float] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raise InvalidField, which names the first field that is out of range. Fields may be changed later, so the
        ``LLM`` checks them again."""
        self._check_types()
        RequestFields(n=self.n).check_fields()
        fields = {name: value for name, value in self.shared().items() if name not in COMBINED}
        if fields.get("top_p") == 0:
            del fields["top_p"]
        if fields.get("top_k") == -1:
            del fields["top_k"]
        if fields.get("seed") == NO_SEED:
            del fields["seed"]
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) not in (None, WHOLE_VOCABULARY):
                fields[name] = getattr(self, name)
        if self.max_tokens is None:
            fields["max_tokens"] = max(1, self.min_tokens) if isinstance(self.min_tokens, int) else 1
        EngineParams(**fields).check()
        self.processors_args()

    def _check_types(self) -> None:
        """Check the fields that the engine's parameters do not have: what reads them takes their types for granted."""
        for name, (test, expected) in TYPES.items():
            value = getattr(self, name)
            if value is not None and not test(value):
                raise InvalidField(name, f"expected {expected}, got {type(value).__name__}")

    def shared(self) -> dict[str, Any]:
        """Return the given fields that the engine's parameters have, too. A sequence is a tuple there."""
        given = {name: getattr(self, name) for name in SHARED if getattr(self, name) is not None}
        return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}

    def processors_args(self) -> dict[str, Any] | None:
        """Return logits_processors_args as the HTTP routes take them. Raises InvalidField."""
        if self.logits_processors_args is None:
            return None
        args = dict(self.logits_processors_args)
        if (bias := args.get("logit_bias")) is not None:
            if not isinstance(bias, Mapping):
                raise InvalidField("logits_processors_args", "expected a dict of token ids and numbers as logit_bias")
            args["logit_bias"] = {str(token): max(-MAX_BIAS, min(value, MAX_BIAS)) for token, value in bias.items()}
        return args
