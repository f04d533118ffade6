"""Everything random of a soak, drawn from the seed: cycles, kills and rollouts. Each is drawn by its number alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Victim = Literal["trainer", "engine", "api"]
VICTIMS: tuple[Victim, ...] = ("trainer", "engine", "api")
STRETCH = 100  # cycles. Kills are in its first part, so that processes also live long enough to show a slow leak
KILLS = 3  # of each victim in a whole stretch
STORM = 0.6  # share of a stretch in which processes are killed
PROMPT_TOKENS = (4, 48)
VOCABULARY = 256  # tokens of bytes; the end-of-sequence token is above
MEDIAN_TOKENS, MAX_TOKENS = 30, 500  # of an answer. The lengths have a heavy tail


@dataclass(frozen=True)
class Cycle:
    """One pause and update. mode: of the pause; None: the commit is live. update: what is sent, of the step
    ``number`` + 1 of the weights. sleeps: tags to put to sleep before the update. adapter: an adapter is loaded, used
    and unloaded meanwhile. aborts: single requests that are aborted. rest_s: seconds until the next cycle."""

    number: int
    mode: Literal["abort", "wait", "keep"] | None
    clear_cache: bool
    update: Literal["full", "delta", "partial"]
    via: Literal["shared_memory", "upload", "folder"]
    kv: Literal["keep", "recompute"]
    sleeps: tuple[str, ...]
    adapter: bool
    aborts: int
    rest_s: float


@dataclass(frozen=True)
class Prompt:
    """One rollout. kind: base weights or the adapter."""

    number: int
    ids: list[int]
    params: dict[str, Any]


def generator(seed: int, *path: int) -> np.random.Generator:
    """Return the random numbers of one part of a soak. path: which part, and its number."""
    return np.random.default_rng([seed, *path])


def cycle(seed: int, number: int) -> Cycle:
    """Return the cycle ``number``."""
    rng = generator(seed, 1, number)
    tags = [("weight",), ("kv_cache",), ("weight", "kv_cache")]
    modes: list[Any] = [None, None, "abort", "wait", "keep", "keep"]
    return Cycle(
        number,
        modes[rng.integers(len(modes))],
        bool(rng.integers(2)),
        update_kind(seed, number + 1),
        ("shared_memory", "upload", "folder")[rng.integers(3)],
        ("keep", "recompute")[rng.integers(2)],
        tags[rng.integers(3)] if rng.random() < 0.06 else (),
        bool(rng.random() < 0.1),
        int(rng.integers(0, 3)),
        float(rng.uniform(0.1, 1.0)),
    )


def update_kind(seed: int, step: int) -> Literal["full", "delta", "partial"]:
    """Return how the weights of ``step`` differ from those of the step before."""
    return ("full", "delta", "delta", "partial")[generator(seed, 2, step).integers(4)]


def kills(seed: int, cycles: int) -> dict[int, Victim]:
    """Return the cycles in which a process is killed, and which process. At least one of each kind, if there are five
    cycles; between two kills there is at least one cycle without one, if there is room."""
    found: dict[int, Victim] = {}
    for start in range(0, cycles, STRETCH):
        length = min(STRETCH, cycles - start)
        places = list(range(start + 1, start + max(int(length * STORM), 2 * len(VICTIMS)), 2))
        places = [place for place in places if place < cycles]
        each = max(1, KILLS * length // STRETCH)
        rng = generator(seed, 3, start)
        chosen = sorted(rng.choice(places, min(each * len(VICTIMS), len(places)), replace=False)) if places else []
        victims = [VICTIMS[k % len(VICTIMS)] for k in range(len(chosen))]
        rng.shuffle(victims)
        found.update(zip(map(int, chosen), victims, strict=True))
    return found


def kill_delay_s(seed: int, number: int) -> float:
    """Return the seconds from the start of a cycle to its kill."""
    return float(generator(seed, 4, number).uniform(0.0, 0.8))


def prompt(seed: int, number: int) -> Prompt:
    """Return the rollout ``number``. One in three prompts begins like others, so that prefixes are shared."""
    rng = generator(seed, 5, number)
    family = generator(seed, 6, int(rng.integers(4)))
    ids = rng.integers(0, VOCABULARY, rng.integers(*PROMPT_TOKENS)).tolist()
    if rng.random() < 1 / 3:
        ids = family.integers(0, VOCABULARY, 40).tolist() + ids[:8]
    tokens = min(int(MEDIAN_TOKENS * rng.pareto(1.2)) + 2, MAX_TOKENS)
    temperature = 0.0 if rng.random() < 0.4 else 1.0
    params = {"max_tokens": tokens, "ignore_eos": True, "temperature": temperature, "seed": int(rng.integers(2**31))}
    return Prompt(number, ids, params)
