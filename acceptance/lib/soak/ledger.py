"""The ledger of tokens: every token that an engine has sampled is in a client's hands, or is explained.

For each start of the engine (``boot_id``) there are three numbers:

- ``generated``: the engine's own count, ``fastdeploy:generation_tokens_total``.
- ``received``: tokens in the rollouts that clients have accepted. The spans say which engine sampled them.
- ``undelivered``: tokens of an attempt whose stream broke, because its API server was killed, that its client has not
  received. Every request of a soak is retained by the engine. So the rest of a broken attempt is ended by its id, then
  read back and counted, token by token. Its beginning must be what the client has.

Whenever no request is in the engine: generated = received + undelivered, to the last token. A lost token makes the
right side too small, and a token that was delivered twice makes it too large.

An engine that is killed takes its count along. The count was read just before the kill. Of these tokens, those of one
step may be missing: one token for each sequence in the batch, sampled and not sent yet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from fastdeploy.rl.rollout import Rollout


@dataclass
class Ledger:
    """problems: what is wrong, in the order in which it was found. missing: tokens that killed engines took along.
    lost_results: attempts that could not be read back, since their engine was killed."""

    received: Counter[str] = field(default_factory=Counter)
    undelivered: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    begun: int = 0
    accepted: int = 0
    missing: int = 0
    lost_results: int = 0
    _open: set[str] = field(default_factory=set)

    def begin(self, name: str) -> None:
        """Note that a client asks for the rollout ``name``."""
        self.begun += 1
        self._open.add(name)

    def accept(self, name: str, rollout: Rollout, want: int) -> None:
        """Note the final output of a rollout that must have ``want`` tokens."""
        if name not in self._open:
            self.problems.append(f"{name}: a second final output")
            return
        self._open.remove(name)
        self.accepted += 1
        count = len(rollout.token_ids)
        if rollout.finish_reason != "length" or count != want:
            self.problems.append(f"{name}: {count} tokens and {rollout.finish_reason!r}, expected {want} and 'length'")
        if rollout.logprobs is None or len(rollout.logprobs) != count:
            self.problems.append(f"{name}: not one logprob for each of {count} tokens")
        end = 0
        for span in rollout.spans:
            if span.start != end or span.end <= span.start:
                self.problems.append(f"{name}: the span [{span.start}, {span.end}) follows token {end}")
            end = span.end
            self.received[span.boot_id or ""] += span.end - span.start
        if end != count:
            self.problems.append(f"{name}: the spans cover {end} of {count} tokens")

    def read_back(self, name: str, boot_id: str, received: Sequence[int], kept: Sequence[int]) -> None:
        """Note all tokens that the engine has kept of an attempt, of which the client has ``received`` some."""
        if list(kept[: len(received)]) != list(received):
            self.problems.append(f"{name}: the client has {list(received)}, the engine has made {list(kept)}")
        self.undelivered[boot_id] += max(len(kept) - len(received), 0)

    def balance(self, boot_id: str, generated: int) -> None:
        """Compare with the count of an engine that has no request."""
        if self._open:
            self.problems.append(f"without a final output: {sorted(self._open)[:5]}")
        hands, rest = self.received[boot_id], self.undelivered[boot_id]
        if generated != hands + rest:
            off = generated - hands - rest
            kind = "lost" if off > 0 else "more than it has made"
            found = f"{generated} tokens made, {hands} received, {rest} undelivered"
            self.problems.append(f"engine {boot_id[:8]}: {found}: {abs(off)} {kind}")

    def balance_killed(self, boot_id: str, generated: int, step_tokens: int) -> None:
        """Compare with the last count of an engine that was killed. step_tokens: most tokens of one step."""
        missing = max(generated - self.received[boot_id] - self.undelivered[boot_id], 0)
        self.missing += missing
        if missing > step_tokens:
            found = f"{missing} of {generated} tokens are missing; a step has {step_tokens}"
            self.problems.append(f"killed engine {boot_id[:8]}: {found}")
