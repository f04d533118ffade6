"""The record of one run: what the trainer wrote, and what the engine counted.

A run has a folder with these files:

    events.jsonl       by the trainer: rollouts, syncs, updates, evaluations
    token_times.json   by the engine: when tokens were sampled, and by which weights (see ``engine_main``)
    run.json           the settings, and the engine's counters before and after. Written last: the run is complete
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any, Literal

import msgspec

EVENTS, TOKEN_TIMES, RUN = "events.jsonl", "token_times.json", "run.json"


class Way(msgspec.Struct, frozen=True):
    """A way to sync: ``--sync`` and ``--kv`` of the trainer. stale_kv: the engine has the fault of the control run."""

    sync: str
    kv: str = "keep"
    stale_kv: bool = False

    @property
    def name(self) -> str:
        """The name in tables, plots and folders."""
        if self.stale_kv:
            return "stale KV (control)"
        return self.sync if self.kv == "keep" else f"{self.sync}, recompute"

    @property
    def mixes_kv(self) -> bool:
        """Whether answers go on over KV of older weights."""
        return self.stale_kv or (self.sync in ("keep", "live") and self.kv == "keep")


# Only in the ways ``keep`` and ``live`` do requests cross a commit with their KV, so only there does kv matter.
WAYS = (
    Way("synchronous"),
    Way("wait"),
    Way("abort"),
    Way("keep"),
    Way("keep", "recompute"),
    Way("live"),
    Way("live", "recompute"),
)
CONTROL = Way("synchronous", stale_kv=True)  # all its answers are of one version, so all are compared


class Rollout(msgspec.Struct):
    """One answer, when its fate is known at ``t``. spans: [publication, start, end). started, ended: of its
    generation. All times are seconds since the run began."""

    t: float
    tokens: int
    spans: list[tuple[int, int, int]]
    fate: Literal["trained", "discarded", "in_flight"]
    started: float
    ended: float
    why: str | None = None
    resumes: int = 0


class Sync(msgspec.Struct):
    """One publication."""

    publication: int
    committed: float


class Mismatch(msgspec.Struct):
    """The trainer's logprobs against the engine's, on ``tokens`` tokens. kl: mean over tokens."""

    tokens: int
    max_abs: float
    kl: float
    ratio_max: float


class Update(msgspec.Struct):
    """One update. mismatch: of answers that one publication made as a whole, scored with its weights. mixed: of the
    tokens that it made in answers begun by older weights."""

    update: int
    tokens: int
    mismatch: Mismatch | None = None
    mixed: Mismatch | None = msgspec.field(name="stale_kv", default=None)


class Eval(msgspec.Struct):
    """An evaluation on held-out problems. tokens: generated for it."""

    t: float
    update: int
    publication: int
    problems: int
    solved: int
    tokens: int


class End(msgspec.Struct):
    t: float


KINDS = {"rollout": Rollout, "sync": Sync, "update": Update, "eval": Eval, "end": End}  # of the events that are read


class Engine(msgspec.Struct, kw_only=True):
    """Growth of the engine's counters over the run."""

    generated: int
    recomputed: int
    preemptions: int


class Completed(msgspec.Struct, kw_only=True):
    """The content of run.json. settings: of the measurement, to tell whether a finished run may be used again."""

    way: Way
    seed: int
    settings: dict[str, str]
    engine: Engine


class TokenTime(msgspec.Struct, array_like=True):
    """A step with tokens. at: seconds on the engine's monotonic clock."""

    at: float
    tokens: int
    weight_epoch: int


class Record(msgspec.Struct):
    """One complete run."""

    way: Way
    seed: int
    engine: Engine
    rollouts: list[Rollout]
    syncs: list[Sync]
    updates: list[Update]
    evals: list[Eval]
    seconds: float
    token_times: list[TokenTime]

    def of_fate(self, fate: str) -> list[Rollout]:
        return [rollout for rollout in self.rollouts if rollout.fate == fate]


def completed(folder: Path) -> Completed | None:
    """Return the content of run.json, or None if the run is not complete. Raises msgspec.MsgspecError if it cannot be
    read."""
    path = folder / RUN
    return msgspec.json.decode(path.read_bytes(), type=Completed) if path.exists() else None


def read_events(path: Path) -> dict[str, list[Any]]:
    """Return the events of events.jsonl by their kind. Raises ValueError that names the line which is not as
    expected."""
    found: dict[str, list[Any]] = defaultdict(list)
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            event = msgspec.json.decode(line, type=dict[str, Any])
            if kind := KINDS.get(event.pop("kind", "")):
                found[kind.__name__].append(msgspec.convert(event, kind))
        except msgspec.MsgspecError as error:
            raise ValueError(f"{path}:{number}: {error}") from error
    return found


def read(folder: Path) -> Record:
    """Return the record of a complete run. Raises ValueError if a file is not as expected."""
    done = completed(folder)
    if done is None:
        raise ValueError(f"{folder}: the run is not complete")
    events = read_events(folder / EVENTS)
    if len(events["End"]) != 1:
        raise ValueError(f"{folder / EVENTS}: expected one line of kind end, got {len(events['End'])}")
    times = msgspec.json.decode((folder / TOKEN_TIMES).read_bytes(), type=list[TokenTime])
    rollouts, syncs, updates, evals = (events[kind.__name__] for kind in (Rollout, Sync, Update, Eval))
    seconds = events["End"][0].t
    return Record(done.way, done.seed, done.engine, rollouts, syncs, updates, evals, seconds, times)
