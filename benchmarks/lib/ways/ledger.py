"""The ledger of a run: each token that the engine sampled is accounted for, once."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from benchmarks.lib.ways.record import Record


@dataclass(frozen=True)
class Ledger:
    """Tokens of one run, or of several. generated: by the engine's own counter. The others are what the trainer says
    became of them. discarded: by reason. recomputed: computed again, not sampled again; it is no part of the sum."""

    generated: int
    evaluated: int
    trained: int
    discarded: dict[str, int]
    in_flight: int
    recomputed: int

    @property
    def explained(self) -> int:
        return self.evaluated + self.trained + sum(self.discarded.values()) + self.in_flight

    def __add__(self, other: Ledger) -> Ledger:
        return Ledger(
            self.generated + other.generated,
            self.evaluated + other.evaluated,
            self.trained + other.trained,
            dict(Counter(self.discarded) + Counter(other.discarded)),
            self.in_flight + other.in_flight,
            self.recomputed + other.recomputed,
        )


def ledger(record: Record) -> Ledger:
    discarded: Counter[str] = Counter()
    for rollout in record.of_fate("discarded"):
        discarded[rollout.why or "no reason given"] += rollout.tokens
    return Ledger(
        generated=record.engine.generated,
        evaluated=sum(one.tokens for one in record.evals),
        trained=sum(rollout.tokens for rollout in record.of_fate("trained")),
        discarded=dict(discarded),
        in_flight=sum(rollout.tokens for rollout in record.of_fate("in_flight")),
        recomputed=record.engine.recomputed,
    )


def mistakes(record: Record) -> list[str]:
    """Return a sentence for each way in which the trainer's account differs from the engine's; none if every token is
    explained once.

    The sums are compared as a whole, and also for each weight_epoch: a token that is lost and another that is counted
    twice rarely have the same one. The server has started for this run, so publications are weight epochs.
    """
    found = []
    total = ledger(record)
    if missing := total.generated - total.explained:
        found.append(_difference(missing, "in all"))
    if total.trained != (by_updates := sum(update.tokens for update in record.updates)):
        found.append(f"the updates trained {by_updates} tokens, the rollouts that were trained have {total.trained}")
    for number, rollout in enumerate(record.rollouts):
        at = 0
        for _, start, end in rollout.spans:
            at = end if start == at and end > start else -1
        if at != rollout.tokens:
            found.append(f"rollout {number}: the spans {rollout.spans} do not cover its {rollout.tokens} tokens once")
    sampled, told = by_weight_epoch(record)
    if sum(sampled.values()) != total.generated:
        found.append(f"the engine counted {total.generated} tokens, and noted times of {sum(sampled.values())}")
    found += [
        _difference(sampled[epoch] - told[epoch], f"of weight_epoch {epoch}")
        for epoch in sorted(sampled.keys() | told.keys())
        if sampled[epoch] != told[epoch]
    ]
    return found


def by_weight_epoch(record: Record) -> tuple[Counter[int], Counter[int]]:
    """Return the tokens of each weight_epoch: those that the engine sampled, and those that the trainer tells of."""
    sampled, told = Counter[int](), Counter[int]()
    for step in record.token_times:
        sampled[step.weight_epoch] += step.tokens
    for rollout in record.rollouts:
        for publication, start, end in rollout.spans:
            told[publication] += end - start
    for one in record.evals:
        told[one.publication] += one.tokens
    return sampled, told


def _difference(missing: int, where: str) -> str:
    if missing > 0:
        return f"{missing} tokens {where} are unexplained: the engine sampled them, the trainer does not tell of them"
    return f"{-missing} tokens {where} are told of twice, or the engine did not sample them"
