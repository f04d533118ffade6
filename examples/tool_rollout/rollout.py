"""One rollout of several turns: what a trainer needs of it, and a check of every promise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from fastdeploy.rl.rollout import Rollout, TokenSpan


@dataclass
class ToolRollout:
    """All turns as one sequence of token ids, which only grows.

    ids: prompt, sampled tokens and tool replies. mask: 1 for a token that the model sampled, else 0. logprobs: of the
    sampled tokens, else 0.0. These three have one entry per token. spans: the weights of each sampled token, by its
    position in ``ids``. turns: what the server returned; ``prompt_ids`` of a turn are the ids that it was sent.
    replies: ids of the tool's reply to each turn. tool_errors: calls that the tool refused. tries: right or wrong, for
    each answer that the model gave.
    """

    ids: list[int]
    mask: list[int] = field(init=False)
    logprobs: list[float] = field(init=False)
    spans: list[TokenSpan] = field(default_factory=list)
    turns: list[Rollout] = field(default_factory=list)
    replies: list[list[int]] = field(default_factory=list)
    tool_errors: int = 0
    tries: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.mask = [0] * len(self.ids)
        self.logprobs = [0.0] * len(self.ids)

    def add_turn(self, turn: Rollout) -> None:
        """Append the tokens of a turn."""
        assert turn.logprobs is not None
        at = len(self.ids)
        self.ids += turn.token_ids
        self.mask += [1] * len(turn.token_ids)
        self.logprobs += turn.logprobs
        self.spans += [replace(span, start=at + span.start, end=at + span.end) for span in turn.spans]
        self.turns.append(turn)

    def add_reply(self, ids: Sequence[int]) -> None:
        """Append the tool's reply to the last turn."""
        self.ids += ids
        self.mask += [0] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.replies.append(list(ids))

    def histories(self) -> Iterator[tuple[int, int]]:
        """Yield (tokens, those of them from the prefix cache) of the history of each turn but the first, if one version
        of the weights made all of it. The history of a turn is what the turn before it computed: its prompt and its
        output but for the last token, whose KV no step has computed."""
        for before, turn in pairwise(self.turns):
            if len({(s.boot_id, s.weight_epoch) for s in [*before.spans, turn.spans[0]]}) == 1:
                tokens = len(before.prompt_ids) + len(before.token_ids) - 1
                yield tokens, min(tokens, turn.cached_tokens or 0)

    def faults(self) -> list[str]:
        """Return what is wrong with this rollout; nothing if all ids, logprobs and spans are those of the server."""
        found = []
        for number, turn in enumerate(self.turns):
            start, end = len(turn.prompt_ids), len(turn.prompt_ids) + len(turn.token_ids)
            reply = self.replies[number] if number < len(self.replies) else []
            after = end + len(reply)
            following = self.turns[number + 1].prompt_ids if number + 1 < len(self.turns) else self.ids
            for what, is_right in {
                "the prompt is not all ids so far": turn.prompt_ids == self.ids[:start],
                "the sampled ids have changed": turn.token_ids == self.ids[start:end],
                "the reply of the tool has changed": reply == self.ids[end:after],
                "the next prompt has other ids than these": len(following) == after,
                "the mask is wrong": self.mask[start:after] == [1] * len(turn.token_ids) + [0] * len(reply),
                "the logprobs are not those of the server": self.logprobs[start:end] == turn.logprobs,
            }.items():
                if not is_right:
                    found.append(f"turn {number}: {what}")
        sampled = [position for position, is_sampled in enumerate(self.mask) if is_sampled]
        if [position for span in self.spans for position in range(span.start, span.end)] != sampled:
            found.append("the spans do not cover the sampled tokens")
        if not len(self.ids) == len(self.mask) == len(self.logprobs):
            found.append("ids, mask and logprobs have different lengths")
        return found
