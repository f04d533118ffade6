"""How old a token is, counted in publications of this client.

Epochs count the commits of one start of one engine, and labels may repeat: neither can be compared between replicas.
What can be compared is the publication whose weights made the token, and each commit tells which epoch it became.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from dataclasses import replace
from operator import itemgetter

from fastdeploy.rl.rollout import Rollout, TokenSpan

KEPT = 1024  # epochs remembered per engine


class Ledger:
    """``newest`` is the number of publications so far. Number 0 is what served before the first."""

    def __init__(self) -> None:
        self.newest = 0
        self._pending = 0
        self._commits: dict[tuple[str, str | None], list[tuple[int, int]]] = {}

    def begin(self) -> int:
        """The number of the next publication; it counts from its first commit on."""
        self._pending = self.newest + 1
        return self._pending

    def committed(self, number: int, replica: str, boot_id: str | None, weight_epoch: int) -> None:
        """``replica`` serves publication ``number`` as ``weight_epoch``."""
        self.newest = max(self.newest, number)
        commits = self._commits.setdefault((replica, boot_id), [])
        insort(commits, (weight_epoch, number))
        del commits[:-KEPT]

    def end(self) -> None:
        """All replicas have answered the commit."""
        self._pending = 0

    def publication_of(self, span: TokenSpan) -> int:
        """The newest publication that had reached the replica when it made the span's tokens."""
        commits = self._commits.get((span.replica, span.boot_id), [])
        at = bisect_right(commits, span.weight_epoch, key=itemgetter(0))
        if at == len(commits) and self._pending and span.weight_epoch > (commits[-1][0] if commits else 0):
            return self._pending  # its first tokens may overtake the answer to the commit
        return commits[at - 1][1] if at else 0

    def label(self, rollout: Rollout) -> Rollout:
        """``rollout`` with the publication of each span, and its staleness now."""
        spans = [replace(span, publication=self.publication_of(span)) for span in rollout.spans]
        oldest = min((span.publication for span in spans), default=self.newest)
        return replace(rollout, spans=spans, staleness=max(self.newest - oldest, 0))
