"""The outputs of the offline ``LLM``, by FastDeploy's names. Log probabilities are made into objects when they are
read: one of a position is 8 bytes before, and some hundreds after."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from fastdeploy.core.experts import RoutedExperts
from fastdeploy.core.outputs import Logprob as Entry
from fastdeploy.core.outputs import Span

OK, FAILED = 200, 500  # error_code
TokenText = Callable[[int], str]


class Logprob(NamedTuple):
    """The log probability of one token. rank: 1 + number of tokens that are more probable; None if it was not counted.
    decoded_token: its text; None without a tokenizer."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class LogprobReader(NamedTuple):
    """The maker of the objects. token_text: None without a tokenizer. ranked: the further tokens of a position are the
    best ones, and not ids that the request names."""

    token_text: TokenText | None = None
    ranked: bool = True

    def of(self, token_id: int, entry: Entry) -> dict[int, Logprob]:
        """Return the log probabilities at one position, by token id: first that of the token that is there."""
        found = {token_id: self._one(token_id, entry.logprob, entry.rank)}
        for i, (other, value) in enumerate(entry.top):
            if other not in found:
                found[other] = self._one(other, value, i + 1 if self.ranked else None)
        return found

    def _one(self, token_id: int, logprob: float, rank: int | None) -> Logprob:
        return Logprob(logprob, rank, None if self.token_text is None else self.token_text(token_id))


@dataclass
class CompletionOutput:
    """One choice, or with ``stream`` what one step has added to it.

    index: number of the choice. send_idx: position of its first token here; 0 for a whole choice.
    text: without reasoning and tool calls, if it is the answer of a chat that has them; these are in
    ``reasoning_content`` and ``tool_calls``.
    finish_reason: stop, length, abort, error or tool_calls; None = it goes on. stop_reason: the stop text or stop id
    that ended it; of an error, its code. message: cause of an abort or an error.
    spans: the weights that drew each token. num_preempted: how often its KV was lost and computed again.
    routed_experts: of all tokens of prompt and choice but the last one, which experts computed it, if asked for. With
    ``stream``, of the whole choice in its last output, else None.
    entries: one for each token if log probabilities were asked for, else none. See core/outputs.py.
    """

    index: int
    token_ids: list[int]
    text: str = ""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    spans: list[Span] = field(default_factory=list)
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    message: str = ""
    send_idx: int = 0
    num_preempted: int = 0
    routed_experts: RoutedExperts | None = field(default=None, repr=False)
    entries: list[Entry] = field(default_factory=list, repr=False)
    reader: LogprobReader = field(default=LogprobReader(), repr=False)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def token_logprobs(self) -> list[float] | None:
        """The log probability of each token; None unless ``logprobs`` were asked for."""
        return [entry.logprob for entry in self.entries] if self.entries else None

    @cached_property
    def logprobs(self) -> list[dict[int, Logprob]] | None:
        """For each token, the log probabilities at its position by token id, its own first; None unless asked for."""
        pairs = zip(self.token_ids, self.entries, strict=False)
        return [self.reader.of(token, entry) for token, entry in pairs] if self.entries else None

    @property
    def sampling_mask(self) -> list[list[int]] | None:
        """For each token, the ids that it was drawn from; None without ``return_sampling_mask``."""
        masks = [entry.mask_ids for entry in self.entries]
        return [array("i", mask).tolist() for mask in masks] if any(masks) else None


class Completions(Sequence[CompletionOutput]):
    """The choices of a prompt. What FastDeploy's users read is that of the first choice (``outputs.text``); those of
    vLLM read ``outputs[0].text``."""

    def __init__(self, choices: Sequence[CompletionOutput]):
        self._choices = tuple(choices)

    def __getitem__(self, number: Any) -> Any:
        return self._choices[number]

    def __len__(self) -> int:
        return len(self._choices)

    def __iter__(self) -> Iterator[CompletionOutput]:
        return iter(self._choices)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Completions) and self._choices == other._choices

    __hash__ = None  # type: ignore[assignment]  # choices can be changed

    def __repr__(self) -> str:
        return repr(list(self._choices))

    def __getattribute__(self, name: str) -> Any:
        if name in FIELDS:  # before the methods of Sequence: it has an ``index``, too
            return getattr(self._choices[0], name)
        return super().__getattribute__(name)


FIELDS = frozenset(CompletionOutput.__dataclass_fields__) | {
    name for name, value in vars(CompletionOutput).items() if isinstance(value, property | cached_property)
}


@dataclass
class RequestMetrics:
    """Times of a request. arrival_time: time.time(). The others are seconds after it. first_token_time: None unless the
    request was streamed or had stop texts, since otherwise nobody looks at its first token. The last three are not
    measured for one request here, and are None; the server's metrics have them for all."""

    arrival_time: float
    model_execute_time: float | None = None
    first_token_time: float | None = None
    preempted_count: int = 0
    inference_start_time: float | None = None
    time_in_queue: float | None = None
    model_forward_time: float | None = None


@dataclass
class RequestOutput:
    """A prompt and its choices, or with ``stream`` what one step has added to them.

    prompt: the text or the token ids that were given; for a conversation, its text by the chat template.
    outputs: see Completions. finished: no choice goes on. num_cached_tokens: tokens of the prompt whose KV was there.
    seed: of the random numbers. The same seed, prompt and weights draw the same tokens.
    error_code, error_msg: 500 and the cause if every choice ended with an error, else 200 and None.
    """

    request_id: str
    prompt: str | list[int]
    prompt_token_ids: list[int]
    outputs: Completions
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int = 0
    seed: int | None = None
    error_code: int = OK
    error_msg: str | None = None
    num_input_image_tokens: int = 0
    num_input_video_tokens: int = 0
    prompt_entries: list[Entry] | None = field(default=None, repr=False)
    reader: LogprobReader = field(default=LogprobReader(), repr=False)

    @cached_property
    def prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """For each token of the prompt, the log probabilities at its position; None for the first token. None unless
        they were asked for, and after an abort within the prompt."""
        if self.prompt_entries is None:
            return None
        pairs = zip(self.prompt_token_ids[1:], self.prompt_entries, strict=True)
        return [None, *(self.reader.of(token, entry) for token, entry in pairs)]
