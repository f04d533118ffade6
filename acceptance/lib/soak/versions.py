"""Checks of spans: which weights may have sampled which token."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

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

    first_boot: str = ""
    first_version: str = ""
    problems: list[str] = field(default_factory=list)
    _publishing: dict[str, float] = field(default_factory=dict)  # version -> when it could be committed first
    _version_of: dict[tuple[str, int], str] = field(default_factory=dict)  # (boot_id, weight_epoch) -> version
    _committed: dict[str, list[tuple[float, int]]] = field(default_factory=dict)  # boot_id -> (when known, epoch)

    def publishing(self, version: str, t: float) -> None:
        """Note that the trainer begins to publish ``version``."""
        self._publishing.setdefault(version, t)

    def published(self, version: str, boot_id: str, weight_epoch: int, t: float) -> None:
        """Note a commit that the trainer has seen."""
        self._committed.setdefault(boot_id, []).append((t, weight_epoch))
        self._bind(f"the trainer's commit of {version}", boot_id, weight_epoch, version)

    def check(self, witness: Witness) -> None:
        """Check each span of a rollout of the base weights. Call this when all events of the trainer up to its end were
        noted."""
        last: tuple[str, int] | None = None
        for span in witness.rollout.spans:
            boot, epoch = span.boot_id or "", span.weight_epoch
            self._bind(witness.name, boot, epoch, span.version)
            known = max((e for t, e in self._committed.get(boot, []) if t < witness.began), default=0)
            if epoch < known:
                self._wrong(witness, f"weight_epoch {epoch} after {known} was committed")
            if last is not None and last[0] == boot and epoch < last[1]:
                self._wrong(witness, f"weight_epoch {epoch} after a token of {last[1]}")
            if epoch == 0 and (boot, span.version) != (self.first_boot, self.first_version):
                self._wrong(witness, "tokens of the weights that a restarted engine began with")
            if epoch > 0 and self._publishing.get(span.version, witness.ended) >= witness.ended:
                self._wrong(witness, f"version {span.version!r}, which was not published")
            last = boot, epoch

    def forget_before(self, t: float) -> None:
        """Forget what no rollout that begins after ``t`` needs."""
        for boot, commits in self._committed.items():
            old = [commit for commit in commits if commit[0] < t]
            self._committed[boot] = old[-1:] + commits[len(old) :]

    def _bind(self, who: str, boot_id: str, weight_epoch: int, version: str) -> None:
        known = self._version_of.setdefault((boot_id, weight_epoch), version)
        if known != version:
            self.problems.append(f"{who}: weight_epoch {weight_epoch} is version {version!r}, and was {known!r}")

    def _wrong(self, witness: Witness, what: str) -> None:
        self.problems.append(f"{witness.name}: {what}")
