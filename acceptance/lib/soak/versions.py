"""Checks of spans against the publications of a trainer: which weights may have sampled which token."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from acceptance.lib.ledger import Ledger
from fastdeploy.rl.rollout import Rollout


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
