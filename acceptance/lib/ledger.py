"""The ledger: every token that an engine has sampled is in a client's hands, or is explained, and is of weights that
served.

For each start of an engine (``boot_id``) there are three numbers:

- ``generated``: the engine's own count, ``fastdeploy:generation_tokens_total``.
- ``received``: tokens in the answers that clients have accepted. The spans say which engine sampled them.
- ``undelivered``: tokens of an attempt whose stream broke, because its API server was killed, that its client has not
  received. Every request of a soak is retained by the engine. So the rest of a broken attempt is ended by its id, then
  read back and counted, token by token. Its beginning must be what the client has.

Whenever no request is in the engine: generated = received + undelivered, to the last token. A lost token makes the
right side too small, and a token that was delivered twice makes it too large.

An engine that is killed takes its count along. The count was read just before the kill. Of these tokens, those of one
step may be missing: one token for each sequence in the batch, sampled and not sent yet.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fastdeploy.bench.timeline import uncovered
from fastdeploy.rl.rollout import Rollout

logger = logging.getLogger(__name__)
MAX_PROBLEMS = 20


@dataclass
class Ledger:
    """problems: what is wrong, the first MAX_PROBLEMS of it, in the order in which it was found. counts: of what
    happened. versions: by boot_id and weight_epoch, the label of these weights. missing: tokens that killed engines
    took along. lost_results: attempts that could not be read back, since their engine was killed."""

    problems: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    versions: dict[tuple[str, int], str] = field(default_factory=dict)
    received: Counter[str] = field(default_factory=Counter)
    undelivered: Counter[str] = field(default_factory=Counter)
    accepted: int = 0
    missing: int = 0
    lost_results: int = 0
    _open: set[str] = field(default_factory=set)

    def problem(self, what: str) -> None:
        """Record a violation."""
        self.counts["problems"] += 1
        logger.error("WRONG: %s", what)
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(what)

    # ------------------------------------------------------------------ answers

    def begin(self, name: str) -> None:
        """Record that a client asks for the answer ``name``."""
        self._open.add(name)

    def accept(self, name: str, spans: Sequence[Any], count: int) -> None:
        """Record the final output of an answer of ``count`` tokens, with its spans."""
        if name not in self._open:
            self.problem(f"{name}: a second final output")
            return
        self._open.remove(name)
        self.accepted += 1
        self.check_coverage(name, spans, count)
        for span in spans:
            self.received[span.boot_id or ""] += span.end - span.start

    def check_coverage(self, name: str, spans: Sequence[Any], count: int) -> None:
        """Check that each of ``count`` tokens is in one span."""
        if fault := uncovered([(span.start, span.end) for span in spans], count):
            self.problem(f"{name}: {fault}")

    def check_labels(self, name: str, spans: Sequence[Any]) -> None:
        """Check that a weight_epoch has one label, and that it never goes back within an answer."""
        last: tuple[str, int] | None = None
        for span in spans:
            boot, epoch = getattr(span, "boot_id", "") or "", span.weight_epoch
            self.label(name, boot, epoch, span.version)
            if last is not None and last[0] == boot and epoch < last[1]:
                self.problem(f"{name}: weight_epoch {epoch} after a token of {last[1]}")
            last = boot, epoch

    def label(self, who: str, boot_id: str, weight_epoch: int, version: str) -> None:
        """Record the label of weights, as ``who`` has seen it."""
        known = self.versions.setdefault((boot_id, weight_epoch), version)
        if known != version:
            self.problem(f"{who}: weight_epoch {weight_epoch} is version {version!r}, and was {known!r}")

    def read_back(self, name: str, boot_id: str, received: Sequence[int], kept: Sequence[int]) -> None:
        """Record all tokens that the engine has kept of an attempt, of which the client has ``received`` some."""
        if list(kept[: len(received)]) != list(received):
            self.problem(f"{name}: the client has {list(received)}, the engine has made {list(kept)}")
        self.undelivered[boot_id] += max(len(kept) - len(received), 0)

    # ------------------------------------------------------------------ balance

    def balance(self, boot_id: str, generated: int) -> None:
        """Compare with the count of an engine that has no request."""
        if self._open:
            self.problem(f"without a final output: {sorted(self._open)[:5]}")
        hands, rest = self.received[boot_id], self.undelivered[boot_id]
        if off := generated - hands - rest:
            kind = "lost" if off > 0 else "more than it has made"
            found = f"{generated} tokens made, {hands} received, {rest} undelivered"
            self.problem(f"engine {boot_id[:8]}: {found}: {abs(off)} {kind}")

    def balance_killed(self, boot_id: str, generated: int, step_tokens: int) -> None:
        """Compare with the last count of an engine that was killed. step_tokens: most tokens of one step."""
        missing = max(generated - self.received[boot_id] - self.undelivered[boot_id], 0)
        self.missing += missing
        if missing > step_tokens:
            found = f"{missing} of {generated} tokens are missing; a step has {step_tokens}"
            self.problem(f"killed engine {boot_id[:8]}: {found}")


# ---------------------------------------------------------------------- publications


class Witness(NamedTuple):
    """A rollout with the times of its begin and end (time.monotonic()). greedy: its temperature was 0."""

    name: str
    rollout: Rollout
    began: float
    ended: float
    greedy: bool = False


@dataclass
class Versions:
    """The publications of the trainer. first_boot: the engine that started with the weights of step 0. A commit may
    have happened although the trainer did not live to say so: only its begin is certain."""

    ledger: Ledger
    first_boot: str = ""
    first_version: str = ""
    _publishing: dict[str, float] = field(default_factory=dict)  # version -> when it could be committed first
    _committed: dict[str, list[tuple[float, int]]] = field(default_factory=dict)  # boot_id -> (when known, epoch)

    def publishing(self, version: str, t: float) -> None:
        """Record that the trainer begins to publish ``version``."""
        self._publishing.setdefault(version, t)

    def published(self, version: str, boot_id: str, weight_epoch: int, t: float) -> None:
        """Record a commit that the trainer has seen."""
        self._committed.setdefault(boot_id, []).append((t, weight_epoch))
        self.ledger.label(f"the trainer's commit of {version}", boot_id, weight_epoch, version)

    def check(self, witness: Witness) -> None:
        """Check each span of a rollout of the base weights. Call this when all events of the trainer up to its end were
        recorded."""
        self.ledger.check_labels(witness.name, witness.rollout.spans)
        for span in witness.rollout.spans:
            boot, epoch = span.boot_id or "", span.weight_epoch
            known = max((e for t, e in self._committed.get(boot, []) if t < witness.began), default=0)
            wrong = {
                f"weight_epoch {epoch} after {known} was committed": epoch < known,
                "tokens of the weights that a restarted engine began with": (
                    epoch == 0 and (boot, span.version) != (self.first_boot, self.first_version)
                ),
                f"version {span.version!r}, which was not published": (
                    epoch > 0 and self._publishing.get(span.version, witness.ended) >= witness.ended
                ),
            }
            for what, is_wrong in wrong.items():
                if is_wrong:
                    self.ledger.problem(f"{witness.name}: {what}")

    def forget_before(self, t: float) -> None:
        """Forget what no rollout that begins after ``t`` needs."""
        for boot, commits in self._committed.items():
            old = [commit for commit in commits if commit[0] < t]
            self._committed[boot] = old[-1:] + commits[len(old) :]
