"""Going on after an abort: what is left to ask for, and how the attempts join into one answer. No I/O here.

A choice that was cut off is submitted again with its prompt and the tokens it has, and with what is left of its budget.
The random number of a token is keyed by (seed, choice, position), so the joined answer is that of an undisturbed run.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fastdeploy.core.errors import InvalidField
from fastdeploy.rl.errors import MalformedReply
from fastdeploy.rl.rollout import PromptLogprobs, Rollout, TokenSpan

# The client sets these itself.
OWN_FIELDS = frozenset({"prompt", "messages", "n", "stream", "stream_options", "request_id", "resumed_tokens", "echo"})
# An abort for these reasons is what the caller asked for; every other abort is gone on from.
FINAL_ABORTS = frozenset({"deadline", "queue_timeout"})
MIN_DEADLINE_S = 0.001
REST_OF_CONTEXT = 2**31 - 1  # a server cuts max_tokens to what is left of its context
MAX_ID_CHARS = 448  # of the server's 512: the ids of later attempts are longer


class Request:
    """A request of the caller. The caller's ``params`` are copied, never changed.

    seed is chosen here if absent, so that every attempt draws the same numbers. eos_ids: where the client knows them, a
    cut-off choice that ends in one of them is complete. max_tokens absent: what is left of the context.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        params: Mapping[str, Any],
        n: int = 1,
        request_id: str = "",
        eos_ids: Sequence[int] = (),
    ):
        for name in OWN_FIELDS & params.keys():
            raise InvalidField(name, "set by the client itself, expected not to be among the sampling parameters")
        if n < 1:
            raise InvalidField("n", f"expected an integer >= 1, got {n}")
        if len(request_id) > MAX_ID_CHARS:
            raise InvalidField("request_id", f"expected at most {MAX_ID_CHARS} characters, got {len(request_id)}")
        self.prompt_ids = [int(token) for token in prompt_ids]
        self.params = {k: v for k, v in params.items() if v is not None or k == "logprobs"}
        self.params.setdefault("logprobs", 0)
        self.params.setdefault("seed", random.getrandbits(63))
        self.seed: int = self.params["seed"]
        self.first_choice: int = self.params.pop("first_choice", 0)
        self.max_tokens: int | None = self.params.get("max_tokens")
        self.params.setdefault("max_tokens", REST_OF_CONTEXT)
        self.min_tokens: int = self.params.get("min_tokens", 0)
        self.deadline_s: float | None = self.params.get("deadline_s")
        self._began = time.monotonic()
        self.n = n
        self.request_id = request_id
        self._restarts = 0
        self._ends = set(self.params.get("stop_token_ids", ()))
        if not self.params.get("ignore_eos"):
            self._ends |= set(eos_ids)

    def start_over(self) -> None:
        """Discard the answers so far: the next attempts begin at the prompt, and are new requests to a server that has
        kept the old ones (retain_s)."""
        self._restarts += 1

    def body(self, choices: Sequence[Partial]) -> dict[str, Any]:
        """The next request for these choices, which have begun an attempt: all of the group without a token, or one
        with what it has."""
        first = choices[0]
        assert len(choices) == 1 or not any(c.token_ids for c in choices)
        done = len(first.token_ids)
        body = self.params | {
            "prompt": self.prompt_ids + first.token_ids,
            "n": len(choices),
            "stream": True,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        if self.first_choice + first.index:
            body["first_choice"] = self.first_choice + first.index
        if done:
            body["resumed_tokens"] = done
            if self.max_tokens is not None:
                body["max_tokens"] = self.max_tokens - done
            if self.min_tokens:
                body["min_tokens"] = max(self.min_tokens - done, 0)
        if self.deadline_s is not None:  # counted from the first attempt
            body["deadline_s"] = max(self.deadline_s - (time.monotonic() - self._began), MIN_DEADLINE_S)
        if first.prompt_logprobs is not None:
            body.pop("prompt_logprobs", None)
        if self.request_id:
            body["request_id"] = self._attempt_id(first)
        return body

    def _attempt_id(self, choice: Partial) -> str:
        """An id that no other attempt has, since one that was cut off may live on at the server for a moment. The first
        has the caller's, the others "caller's~restart.choice.attempt". A choice counts the attempts that it made
        together with its group, so the ids of a group and of its first choice alone differ."""
        attempt = choice.num_attempts - 1
        if not attempt and not self._restarts:
            return self.request_id
        return f"{self.request_id}~{self._restarts}.{choice.index}.{attempt}"

    def ended_by(self, token: int, count: int) -> bool:
        """Whether ``token``, the last of ``count``, ends the answer."""
        return token in self._ends and count >= self.min_tokens


@dataclass
class Partial:
    """One choice as it grows over its attempts. ``begin`` an attempt, ``take`` what it sends; ``finish_reason`` is set
    when there is nothing left to ask for."""

    request: Request
    index: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    spans: list[TokenSpan] = field(default_factory=list)
    text: str = ""
    prompt_logprobs: PromptLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_preempted: int = 0
    replicas: list[str] = field(default_factory=list)
    _base: int = 0
    _fresh: bool = True
    _preempted_before: int = 0

    @property
    def num_attempts(self) -> int:
        return len(self.replicas)

    def begin(self, replica: str) -> None:
        """A new attempt, on ``replica``: its counts and its text start anew."""
        self._base = len(self.token_ids)
        self._fresh = True
        self._preempted_before = self.num_preempted
        self.replicas.append(replica)

    def take(self, choice: Mapping[str, Any], boot_id: str | None) -> None:
        """Add one chunk's choice. Raises MalformedReply for what would make unusable training data."""
        ids = choice.get("token_ids") or []
        self._take_logprobs(ids, choice.get("logprobs"))
        # The text of an attempt covers the resumed tokens too: a stop string or a character may lie over the seam.
        self.text = ("" if self._fresh else self.text) + (choice.get("text") or "")
        self._fresh = False
        self.token_ids += ids
        if self.request.max_tokens is not None and len(self.token_ids) > self.request.max_tokens:
            raise MalformedReply(f"{len(self.token_ids)} tokens came where {self.request.max_tokens} were asked for")
        self._take_spans(choice.get("weight_versions") or [], boot_id)
        if choice.get("prompt_logprobs") is not None and self.prompt_logprobs is None:
            whole = choice["prompt_logprobs"][: len(self.request.prompt_ids)]
            self.prompt_logprobs = [e and {int(token): entry for token, entry in e.items()} for e in whole]
        if choice.get("num_preempted") is not None:
            self.num_preempted = self._preempted_before + choice["num_preempted"]
        if choice.get("finish_reason") is not None:
            self._finish(choice["finish_reason"], choice.get("stop_reason"))

    def _take_logprobs(self, ids: list[int], logprobs: Mapping[str, Any] | None) -> None:
        if self.request.params["logprobs"] is None:
            return
        values = (logprobs or {}).get("token_logprobs") or []
        if len(values) != len(ids) or None in values:
            raise MalformedReply(f"{len(ids)} tokens came with {len(values)} logprobs")
        self.logprobs += values
        if self.request.params["logprobs"] and ids:
            self.top_logprobs += [
                {int(name.rpartition(":")[2]): value for name, value in top.items()} for top in logprobs["top_logprobs"]
            ]

    def _take_spans(self, spans: Sequence[Mapping[str, Any]], boot_id: str | None) -> None:
        for s in spans:
            span = TokenSpan(
                str(s["version"]),
                s["weight_epoch"],
                s["start"] + self._base,
                s["end"] + self._base,
                bool(s.get("recomputed")),
                self.replicas[-1],
                boot_id,
            )
            last = self.spans[-1] if self.spans else None
            if last is not None and replace(span, start=last.start) == replace(last, end=span.end):
                self.spans[-1] = replace(last, end=span.end)
            else:
                self.spans.append(span)

    def _finish(self, reason: str, stop_reason: int | str | None) -> None:
        if reason != "abort" or stop_reason in FINAL_ABORTS:
            self.finish_reason, self.stop_reason = reason, stop_reason
        else:
            self.cut_off()

    def cut_off(self) -> None:
        """The attempt ended early. What it brought may be all there is to ask for."""
        count = len(self.token_ids)
        if count and self.request.ended_by(self.token_ids[-1], count):
            self.finish_reason = "stop"
        elif count == self.request.max_tokens:
            self.finish_reason = "length"

    def rollout(self) -> Rollout:
        """The joined answer so far; finish_reason "abort" if it has not ended."""
        asked = self.request.params["logprobs"]
        return Rollout(
            prompt_ids=self.request.prompt_ids,
            token_ids=self.token_ids,
            logprobs=None if asked is None else self.logprobs,
            spans=self.spans,
            finish_reason=self.finish_reason or "abort",
            stop_reason=self.stop_reason,
            text=self.text,
            seed=self.request.seed,
            index=self.index,
            top_logprobs=self.top_logprobs if asked else None,
            prompt_logprobs=self.prompt_logprobs,
            num_preempted=self.num_preempted,
            num_resumes=max(len(self.replicas) - 1, 0),
            replicas=tuple(self.replicas),
        )
