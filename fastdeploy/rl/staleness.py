"""Staleness: the age of a token's weights, counted in publications of this client.

weight_epoch counts the commits of one engine since its start, and versions may repeat. So neither can be compared
between replicas. Publications can. A replica's answer to a commit says which weight_epoch the publication has there.

The loads of an adapter are counted in the same way, in a ledger of their own, with adapter_epoch for weight_epoch. A
name that is loaded again after an unload or a reset gets a ledger that continues those of all unloaded adapters.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from dataclasses import replace
from operator import itemgetter

from fastdeploy.rl.rollout import Rollout, TokenSpan

MAX_COMMITS = 1024  # kept per engine


class PublicationLedger:
    """Maps each weight_epoch (or adapter_epoch) to a publication. ``newest`` is the number of publications so far; 0
    stands for the weights before the first."""

    def __init__(self) -> None:
        self.newest = 0
        self._pending = 0
        self._commits: dict[tuple[str, str | None], list[tuple[int, int]]] = {}

    def continued(self) -> PublicationLedger:
        """Return a ledger whose publications come after those of this one. Older weights count as the last of these."""
        ledger = PublicationLedger()
        ledger.newest = self.newest
        ledger._commits = {engine: commits[-1:] for engine, commits in self._commits.items()}
        return ledger

    def add_past(self, other: PublicationLedger) -> None:
        """Count the publications of ``other`` as earlier ones of this ledger. Later ones get higher numbers."""
        self.newest = max(self.newest, other.newest)
        for engine, commits in other._commits.items():
            for count, _ in commits[-1:]:
                self.record_commit(self.newest, *engine, count)

    def begin_publication(self) -> int:
        """Return the number of the next publication, which becomes ``newest`` with its first commit."""
        self._pending = self.newest + 1
        return self._pending

    def record_commit(self, number: int, replica: str, boot_id: str | None, count: int) -> None:
        """Note that ``replica`` serves publication ``number`` as weight_epoch (or adapter_epoch) ``count``."""
        self.newest = max(self.newest, number)
        commits = self._commits.setdefault((replica, boot_id), [])
        insort(commits, (count, number))
        del commits[:-MAX_COMMITS]

    def end_publication(self) -> None:
        """Note that every replica has answered the commit."""
        self._pending = 0

    def publication_of(self, span: TokenSpan) -> int:
        """Return the newest publication that the replica had committed when it sampled the span's tokens."""
        commits = self._commits.get((span.replica, span.boot_id), [])
        count = span.weight_epoch if span.lora_name is None else span.adapter_epoch
        at = bisect_right(commits, count, key=itemgetter(0))
        if at == len(commits) and self._pending and count > (commits[-1][0] if commits else 0):
            return self._pending  # the first tokens of new weights may arrive before the answer to their commit
        return commits[at - 1][1] if at else 0

    def with_staleness(self, rollout: Rollout) -> Rollout:
        """Return ``rollout`` with the publication of each span, and its staleness now."""
        spans = [replace(span, publication=self.publication_of(span)) for span in rollout.spans]
        oldest = min((span.publication for span in spans), default=self.newest)
        return replace(rollout, spans=spans, staleness=max(self.newest - oldest, 0))
