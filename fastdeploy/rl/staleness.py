"""Staleness: the age of a token's weights, counted in publications of this client.

weight_epoch counts the commits of one engine since its start, and versions may repeat. So neither can be compared
over a restart. Publications can. The answer to a commit says which weight_epoch the publication has.

The loads of an adapter are counted in the same way, in a ledger for each name, with adapter_epoch for weight_epoch.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Literal

from fastdeploy.rl.errors import TooStale
from fastdeploy.rl.rollout import Rollout, TokenSpan

OnStale = Literal["raise", "retry", "mark"]
MAX_COMMITS = 1024  # kept per engine


class PublicationLedger:
    """The map from each weight_epoch (or adapter_epoch) to a publication. ``newest`` is the number of publications so
    far; 0 stands for the weights before the first."""

    def __init__(self) -> None:
        self.newest = 0
        self._pending = 0
        self._commits: dict[str | None, list[tuple[int, int]]] = {}  # by boot_id: (epoch, publication)

    def begin_publication(self) -> int:
        """Return the number of the next publication, which becomes ``newest`` with its commit."""
        self._pending = self.newest + 1
        return self._pending

    def end_publication(self, boot_id: str | None = None, epoch: int | None = None) -> None:
        """Record that the engine ``boot_id`` serves the publication as weight_epoch (or adapter_epoch) ``epoch``.
        Without an epoch: the publication failed."""
        if epoch is not None:
            self.newest = self._pending
            commits = self._commits.setdefault(boot_id, [])
            insort(commits, (epoch, self.newest))
            del commits[:-MAX_COMMITS]
        self._pending = 0

    def publication_of(self, span: TokenSpan) -> int:
        """Return the newest publication that the engine had committed when it sampled the span's tokens."""
        commits = self._commits.get(span.boot_id, [])
        epoch = span.weight_epoch if span.lora_name is None else span.adapter_epoch
        at = bisect_right(commits, epoch, key=itemgetter(0))
        if at == len(commits) and self._pending and epoch > (commits[-1][0] if commits else 0):
            return self._pending  # the first tokens of new weights may arrive before the answer to their commit
        return commits[at - 1][1] if at else 0

    def with_staleness(self, rollout: Rollout) -> Rollout:
        """Return ``rollout`` with the publication of each span, and its staleness now."""
        spans = [replace(span, publication=self.publication_of(span)) for span in rollout.spans]
        oldest = min((span.publication for span in spans), default=self.newest)
        return replace(rollout, spans=spans, staleness=max(self.newest - oldest, 0))


def is_fresh_enough(rollouts: Sequence[Rollout], max_staleness: int | None, on_stale: OnStale) -> bool:
    """Return whether the caller gets these rollouts; False: they are to be generated again. Raises TooStale."""
    oldest = max(rollout.staleness for rollout in rollouts)
    if max_staleness is None or oldest <= max_staleness or on_stale == "mark":
        return True
    if on_stale == "raise":
        raise TooStale(f"{oldest} publications behind, where {max_staleness} are allowed", list(rollouts))
    return False
