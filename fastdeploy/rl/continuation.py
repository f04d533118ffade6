"""Continuation after an abort: the request for the rest of an answer, and the join of all attempts. No I/O here.

An aborted choice is requested again with its prompt, the tokens so far, and the rest of its token budget. The random
number of a token depends on (seed, choice, position) only, so the joined answer equals that of an undisturbed run.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fastdeploy.core.errors import InvalidField
from fastdeploy.core.outputs import ADAPTER_UNLOADED, DEADLINE, QUEUE_TIMEOUT
from fastdeploy.core.sampling_params import NO_SEED, SEED_BITS
from fastdeploy.rl.errors import MalformedReply
from fastdeploy.rl.joined_rows import JoinedRows
from fastdeploy.rl.rollout import PromptLogprobs, Rollout, TokenSpan

# Fields that the client sets itself.
OWN_FIELDS = frozenset(
    {"prompt", "messages", "model", "n", "stream", "stream_options", "request_id", "resumed_tokens", "echo"}
)
# A choice continues after an abort for every other reason.
FINAL_ABORTS = frozenset({DEADLINE, QUEUE_TIMEOUT, ADAPTER_UNLOADED})
MIN_DEADLINE_S = 0.001
REST_OF_CONTEXT = 2**31 - 1  # a server reduces max_tokens to the rest of its context
MAX_ID_CHARS = 448  # the server allows 512; the id of a later attempt is longer than the caller's


class RolloutRequest:
    """A generation that the caller asked for: one prompt, ``n`` choices. ``params`` are copied, never changed.

    Without a seed, or with -1, one is drawn here, so that every attempt uses the same. Without max_tokens, the answer
    may fill the rest of the context. Without routed_experts, a server that returns them unasked is told not to.
    eos_ids: an aborted choice whose last token is one of them is complete. lora_name: the adapter that computes the
    answer.

    prompt_logprobs: those of the prompt, which a server sends once for all choices; None until all have come.
    adapter: its loads when the generation began, if this client has loaded it.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        params: Mapping[str, Any],
        n: int = 1,
        request_id: str = "",
        eos_ids: Sequence[int] = (),
        lora_name: str | None = None,
    ):
        for name in OWN_FIELDS & params.keys():
            raise InvalidField(name, "expected no such sampling parameter, since the client sets this field itself")
        if n < 1:
            raise InvalidField("n", f"expected an integer >= 1, got {n}")
        if len(request_id) > MAX_ID_CHARS:
            raise InvalidField("request_id", f"expected at most {MAX_ID_CHARS} characters, got {len(request_id)}")
        self.prompt_ids = [int(token) for token in prompt_ids]
        self.params = {k: v for k, v in params.items() if v is not None or k == "logprobs"}
        self.params.setdefault("logprobs", 0)
        self.params.setdefault("routed_experts", False)
        if self.params.get("seed", NO_SEED) == NO_SEED:
            self.params["seed"] = random.getrandbits(SEED_BITS)
        self.seed: int = self.params["seed"]
        self.first_choice: int = self.params.pop("first_choice", 0)
        self.max_tokens: int | None = self.params.get("max_tokens")
        self.params.setdefault("max_tokens", REST_OF_CONTEXT)
        self.min_tokens: int = self.params.get("min_tokens", 0)
        self.deadline_s: float | None = self.params.get("deadline_s")
        self._began = time.monotonic()
        self.n = n
        self.request_id = request_id
        self.lora_name = lora_name
        self.prompt_logprobs: PromptLogprobs | None = None
        self.adapter: object | None = None
        self._restarts = 0
        self._end_ids = set(self.params.get("stop_token_ids", ()))
        if not self.params.get("ignore_eos"):
            self._end_ids |= set(eos_ids)

    @property
    def wants_top(self) -> bool:
        """Whether each token comes with logprobs of further tokens."""
        return bool(self.params["logprobs"] or self.params.get("logprob_token_ids"))

    def start_over(self) -> None:
        """Begin again at the prompt. The next attempts get new ids, since a server may retain results under the old
        ids (retain_s)."""
        self._restarts += 1
        self.prompt_logprobs = None

    def add_prompt_logprobs(self, entries: Sequence[Any], began: bool) -> None:
        """Read the logprobs of the prompt from a reply, whose prompt may end with tokens of an earlier attempt. A part
        of them is dropped, since the next attempt asks for them again. began: the reply has a token, so that all must
        be there. Raises MalformedReply if they are not."""
        count = len(self.prompt_ids)
        if len(entries) < count:
            if began:
                raise MalformedReply(f"expected logprobs of {count} prompt tokens, got {len(entries)}")
        elif self.prompt_logprobs is None:
            self.prompt_logprobs = [e and {int(t): logprob for t, logprob in e.items()} for e in entries[:count]]

    def body(self, choices: Sequence[PartialRollout]) -> dict[str, Any]:
        """Return the request body of an attempt that ``choices`` have begun. They are the whole group without a token
        yet, or one choice with its tokens so far."""
        first = choices[0]
        assert len(choices) == 1 or not any(c.token_ids for c in choices)
        num_tokens = len(first.token_ids)
        body = self.params | {
            "prompt": self.prompt_ids + first.token_ids,
            "n": len(choices),
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        if self.lora_name is not None:
            body["model"] = self.lora_name
        if self.first_choice + first.index:
            body["first_choice"] = self.first_choice + first.index
        if first.rows is not None and first.rows.end:
            body["routed_experts_start"] = first.rows.end
        if num_tokens:
            body["resumed_tokens"] = num_tokens
            if self.max_tokens is not None:
                body["max_tokens"] = self.max_tokens - num_tokens
            if self.min_tokens:
                body["min_tokens"] = max(self.min_tokens - num_tokens, 0)
        if self.deadline_s is not None:  # counted from the first attempt
            body["deadline_s"] = max(self.deadline_s - (time.monotonic() - self._began), MIN_DEADLINE_S)
        if self.prompt_logprobs is not None:
            body.pop("prompt_logprobs", None)
        if self.request_id:
            body["request_id"] = self._attempt_id(first)
        return body

    def _attempt_id(self, choice: PartialRollout) -> str:
        """Return an id that no other attempt has, since an aborted attempt may still run at the server for a moment.
        The first attempt has the caller's id, a later one "<caller's id>~restart.choice.attempt". A choice also counts
        the attempts of its whole group, so the ids of a group and of its first choice alone differ."""
        attempt = choice.num_attempts - 1
        if not attempt and not self._restarts:
            return self.request_id
        return f"{self.request_id}~{self._restarts}.{choice.index}.{attempt}"

    def is_last_token(self, token: int, count: int) -> bool:
        """Return whether ``token``, the last of ``count``, ends the answer."""
        return token in self._end_ids and count >= self.min_tokens


@dataclass
class PartialRollout:
    """One choice, which grows with each attempt. ``finish_reason`` is None until the choice is complete."""

    request: RolloutRequest
    index: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    masks: list[list[int]] = field(default_factory=list)
    mask_logprobs: list[list[float]] = field(default_factory=list)
    rows: JoinedRows | None = None
    spans: list[TokenSpan] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_preempted: int = 0
    cached_tokens: int | None = None
    num_attempts: int = 0
    _base: int = 0
    _is_new_attempt: bool = True
    _preempted_before: int = 0

    def __post_init__(self) -> None:
        params = self.request.params
        if params.get("routed_experts"):
            self.rows = JoinedRows(params.get("routed_experts_start", 0))

    def begin_attempt(self) -> None:
        """Start an attempt. Its spans, text and count of preemptions begin at zero."""
        self._base = len(self.token_ids)
        self._is_new_attempt = True
        self._preempted_before = self.num_preempted
        self.num_attempts += 1

    def add_output(self, choice: Mapping[str, Any], boot_id: str | None) -> None:
        """Add what one event of a stream says of this choice. Raises MalformedReply if tokens and logprobs do not
        match, if there are more tokens than max_tokens, or if a token came with fewer logprobs of the prompt than the
        prompt has tokens."""
        ids = choice.get("token_ids") or []
        self._add_logprobs(ids, choice.get("logprobs"))
        self._add_masks(ids, choice)
        if self.rows is not None:
            last = len(self.request.prompt_ids) + len(self.token_ids) + len(ids) - 1
            self.rows.add(choice.get("routed_experts"), before=last if ids else 0)
        # The text of an attempt includes that of the resumed tokens: a stop string may span two attempts.
        self.text = ("" if self._is_new_attempt else self.text) + (choice.get("text") or "")
        self._is_new_attempt = False
        self.token_ids += ids
        if self.request.max_tokens is not None and len(self.token_ids) > self.request.max_tokens:
            raise MalformedReply(f"expected at most {self.request.max_tokens} tokens, got {len(self.token_ids)}")
        self._add_spans(choice.get("weight_versions") or [], boot_id)
        if choice.get("prompt_logprobs") is not None:
            self.request.add_prompt_logprobs(choice["prompt_logprobs"], bool(ids))
        if choice.get("num_preempted") is not None:
            self.num_preempted = self._preempted_before + choice["num_preempted"]
        reason, stop_reason = choice.get("finish_reason"), choice.get("stop_reason")
        if reason == "abort" and stop_reason not in FINAL_ABORTS:
            self.end_attempt_early()
        elif reason is not None:
            self.finish_reason, self.stop_reason = reason, stop_reason

    def _add_logprobs(self, ids: list[int], logprobs: Mapping[str, Any] | None) -> None:
        if self.request.params["logprobs"] is None:
            return
        logprobs = logprobs or {}
        values = logprobs.get("token_logprobs") or []
        if len(values) != len(ids) or None in values:
            raise MalformedReply(f"expected a logprob for each of {len(ids)} tokens, got {len(values)}")
        self.logprobs += values
        if self.request.wants_top and ids:
            self.top_logprobs += [
                {int(name.rpartition(":")[2]): value for name, value in top.items()} for top in logprobs["top_logprobs"]
            ]

    def _add_masks(self, ids: list[int], choice: Mapping[str, Any]) -> None:
        for name, so_far in (("sampling_mask", self.masks), ("sampling_mask_logprobs", self.mask_logprobs)):
            if self.request.params.get(f"return_{name}"):
                rows = choice.get(name) or []
                if len(rows) != len(ids):
                    raise MalformedReply(f"expected a {name} for each of {len(ids)} tokens, got {len(rows)}")
                so_far += rows

    def _add_spans(self, spans: Sequence[Mapping[str, Any]], boot_id: str | None) -> None:
        for s in spans:
            start, end = s["start"] + self._base, s["end"] + self._base
            span = TokenSpan(
                str(s["version"]),
                s["weight_epoch"],
                start,
                end,
                bool(s.get("recomputed")),
                boot_id,
                lora_name=s.get("lora_name"),
                adapter_epoch=s.get("adapter_epoch", 0),
                quantization=s.get("quantization"),
            )
            last = self.spans[-1] if self.spans else None
            if last is not None and replace(span, start=last.start) == replace(last, end=span.end):
                self.spans[-1] = replace(last, end=span.end)
            else:
                self.spans.append(span)

    def add_usage(self, usage: Mapping[str, Any]) -> None:
        """Read the count of cached tokens in the usage that ends a stream, if this attempt began without a token."""
        if not self._base:
            self.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]

    def end_attempt_early(self) -> None:
        """End an aborted attempt. The choice is complete if its last token ends it or max_tokens is reached."""
        count = len(self.token_ids)
        if count and self.request.is_last_token(self.token_ids[-1], count):
            self.finish_reason = "stop"
        elif count == self.request.max_tokens:
            self.finish_reason = "length"

    def end_without_adapter(self) -> None:
        """End the choice with the tokens that it has: its adapter was unloaded."""
        self.finish_reason, self.stop_reason = "abort", ADAPTER_UNLOADED

    def rollout(self) -> Rollout:
        """Return the joined answer so far; its finish_reason is "abort" if the choice is not complete."""
        params = self.request.params
        return Rollout(
            prompt_ids=self.request.prompt_ids,
            token_ids=self.token_ids,
            logprobs=None if params["logprobs"] is None else self.logprobs,
            spans=self.spans,
            finish_reason=self.finish_reason or "abort",
            stop_reason=self.stop_reason,
            text=self.text,
            seed=self.request.seed,
            index=self.index,
            top_logprobs=self.top_logprobs if self.request.wants_top else None,
            sampling_masks=self.masks if params.get("return_sampling_mask") else None,
            sampling_mask_logprobs=self.mask_logprobs if params.get("return_sampling_mask_logprobs") else None,
            prompt_logprobs=self.request.prompt_logprobs,
            routed_experts=None if self.rows is None else self.rows.whole(),
            num_preempted=self.num_preempted,
            num_resumes=max(self.num_attempts - 1, 0),
            cached_tokens=self.cached_tokens,
        )
