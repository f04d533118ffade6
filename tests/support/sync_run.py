"""Writes the record of a made-up run, as a trainer and an engine would write it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.lib.ways.record import EVENTS, RUN, TOKEN_TIMES, Way

SETTINGS = {"server": "", "trainer": ""}


class MadeUpRun:
    """A run with an update, a publication and an evaluation every second. Tests change ``events``, ``times`` and
    ``engine`` before ``write``.

    Each of 4 updates trains 2 rollouts of 30 tokens, the second of which crosses a commit. One rollout is discarded,
    and one is in flight at the end. An evaluation has 50 tokens. gap_s: silence at each commit.
    """

    def __init__(
        self, way: Way, seed: int = 0, updates: int = 4, gap_s: float = 0.2, mismatch: float = 0.0, mixed: float = 0.0
    ):
        self.way, self.seed = way, seed
        self.events: list[dict[str, Any]] = [{"kind": "run", "seed": seed, "sync": way.sync, "kv": way.kv}]
        self.events.append(self._eval(0, 0.0, 370))
        for number in range(updates):
            self._add_update(number, _mismatch(40, mismatch), _mismatch(20, mixed))
        self._add_rollout(10, [[updates, 0, 10]], "discarded", updates + 0.1, why="stale")
        self._add_rollout(7, [[updates, 0, 7]], "in_flight", updates + 0.2)
        self.events.append({"kind": "end", "t": updates + 0.5, "why": "time"})
        self.times = self._times(updates, gap_s)
        self.engine = {"generated": sum(n for _, n, _ in self.times), "recomputed": 12, "preemptions": 1}

    def _add_update(self, number: int, mismatch: dict[str, float], mixed: dict[str, float]) -> None:
        at = number + 0.5
        self._add_rollout(30, [[number, 0, 30]], "trained", at)
        before = max(number - 1, 0)
        self._add_rollout(30, [[before, 0, 10], [number, 10, 30]] if number else [[0, 0, 30]], "trained", at)
        self.events += [
            {"kind": "update", "t": at, "update": number + 1, "loss": 0.1, "reward": 0.5, "samples": 2, "tokens": 60,
             "lag_mean": 0.2, "lag_max": 1, "mismatch": mismatch, "stale_kv": mixed},
            {"kind": "sync", "t": at + 0.1, "publication": number + 1, "began": at, "paused": None, "resumed": None,
             "committed": at + 0.1, "staged_s": 0.01, "bytes": 1000},
            self._eval(number + 1, at + 0.3, 400 + 20 * number + self.seed),
        ]  # fmt: skip

    def _add_rollout(self, tokens: int, spans: list[list[int]], fate: str, at: float, why: str | None = None) -> None:
        times = {"t": at, "started": max(at - 0.8, 0.0), "ended": at}
        of_way = {"resumes": 0, "preempted": 0, "reward": 1.0, "group": len(self.events), "prompt_tokens": 9}
        self.events.append(
            {"kind": "rollout", "tokens": tokens, "spans": spans, "fate": fate, "why": why} | times | of_way
        )

    def _eval(self, publication: int, at: float, solved: int) -> dict[str, Any]:
        counts = {"update": publication, "publication": publication, "problems": 800, "solved": solved, "tokens": 50}
        return {"kind": "eval", "t": at, "seconds": 0.2} | counts

    def _times(self, updates: int, gap_s: float) -> list[tuple[float, int, int]]:
        """Return steps of one token that agree with the rollouts and evaluations, 10 ms apart within an epoch."""
        counts: dict[int, int] = {}
        for event in self.events:
            if event["kind"] == "eval":
                counts[event["publication"]] = counts.get(event["publication"], 0) + event["tokens"]
            for publication, start, end in event.get("spans", ()):
                counts[publication] = counts.get(publication, 0) + end - start
        times, now = [], 100.0
        for epoch in range(updates + 1):
            for _ in range(counts[epoch]):
                times.append((now, 1, epoch))
                now += 0.01
            now += gap_s - 0.01
        return times

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / EVENTS).write_text("".join(json.dumps(event) + "\n" for event in self.events))
        (folder / TOKEN_TIMES).write_text(json.dumps(self.times))
        way = {"sync": self.way.sync, "kv": self.way.kv, "stale_kv": self.way.stale_kv}
        done = {"way": way, "seed": self.seed, "settings": SETTINGS, "engine": self.engine}
        (folder / RUN).write_text(json.dumps(done))
        return folder


def _mismatch(tokens: int, value: float) -> dict[str, float]:
    return {"tokens": tokens, "max_abs": value, "kl": value / 10, "ratio_max": 1.0 + value}
