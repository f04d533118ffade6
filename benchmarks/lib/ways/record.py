"""The record of one run: what the trainer wrote, and what the engine counted.

A run has a folder with these files:

    events.jsonl       by the trainer: rollouts, syncs, updates, evaluations
    token_times.json   by the engine: when tokens were sampled, and by which weights (see ``engine_main``)
    run.json           the settings, and the engine's counters before and after. Written last: the run is complete
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

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


class Event(msgspec.Struct, tag_field="kind", tag=str.lower, kw_only=True):
    """A line of events.jsonl. t: seconds since the run began."""

    t: float = 0.0


class Run(Event):
    seed: int
    sync: str
    kv: str


class Rollout(Event):
    """One answer, when its fate is known. spans: [publication, start, end). started, ended: of its generation."""

    tokens: int
    spans: list[tuple[int, int, int]]
    fate: Literal["trained", "discarded", "in_flight"]
    started: float
    ended: float
    why: str | None = None
    resumes: int = 0
    preempted: int = 0


class Sync(Event):
    """One publication. paused, resumed: None for a way without a pause."""

    publication: int
    began: float
    committed: float
    paused: float | None = None
    resumed: float | None = None


class Mismatch(msgspec.Struct):
    """The trainer's logprobs against the engine's, on ``tokens`` tokens. kl: mean over tokens."""

    tokens: int
    max_abs: float
    kl: float
    ratio_max: float


class Update(Event):
    """One update. mismatch: of answers that one publication made as a whole, scored with its weights. mixed: of the
    tokens that it made in answers begun by older weights."""

    update: int
    tokens: int
    samples: int
    reward: float
    lag_mean: float
    lag_max: float
    mismatch: Mismatch | None = None
    mixed: Mismatch | None = msgspec.field(name="stale_kv", default=None)


class Eval(Event):
    """An evaluation on held-out problems. tokens: generated for it. seconds: how long it took."""

    update: int
    publication: int
    problems: int
    solved: int
    tokens: int
    seconds: float


class Checkpoint(Event):
    update: int


class End(Event):
    why: str


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


def read_events(path: Path) -> list[Event]:
    """Return the lines of events.jsonl. Raises ValueError that names the line which is not as expected."""
    decoder = msgspec.json.Decoder(Run | Rollout | Sync | Update | Eval | Checkpoint | End)
    found = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            found.append(decoder.decode(line))
        except msgspec.MsgspecError as error:
            raise ValueError(f"{path}:{number}: {error}") from error
    return found


def read(folder: Path) -> Record:
    """Return the record of a complete run. Raises ValueError if a file is not as expected."""
    done = completed(folder)
    if done is None:
        raise ValueError(f"{folder}: the run is not complete")
    events = read_events(folder / EVENTS)
    ends = [event for event in events if isinstance(event, End)]
    if len(ends) != 1:
        raise ValueError(f"{folder / EVENTS}: expected one line of kind end, got {len(ends)}")
    return Record(
        done.way,
        done.seed,
        done.engine,
        [event for event in events if isinstance(event, Rollout)],
        [event for event in events if isinstance(event, Sync)],
        [event for event in events if isinstance(event, Update)],
        [event for event in events if isinstance(event, Eval)],
        ends[0].t,
        msgspec.json.decode((folder / TOKEN_TIMES).read_bytes(), type=list[TokenTime]),
    )
