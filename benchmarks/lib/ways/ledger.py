"""The accounts of a run: each token that the engine sampled is accounted for, once."""

from __future__ import annotations

from collections import Counter

from benchmarks.lib.ways.record import Record
from fastdeploy.bench.timeline import uncovered

DISCARDED = "discarded: "


def accounts(record: Record) -> Counter[str]:
    """Return the tokens of a run. generated: by the engine's own counter. recomputed: computed again, not sampled
    again. The others are what the trainer says became of them: evaluated, trained, in_flight, and discarded by
    reason."""
    found = Counter(generated=record.engine.generated, recomputed=record.engine.recomputed)
    found["evaluated"] = sum(one.tokens for one in record.evals)
    for rollout in record.rollouts:
        is_discarded = rollout.fate == "discarded"
        found[DISCARDED + (rollout.why or "no reason given") if is_discarded else rollout.fate] += rollout.tokens
    return found


def unexplained(found: Counter[str]) -> int:
    """Return the tokens that the engine sampled and the trainer does not tell of; below 0: those that it tells of
    twice."""
    accounted = found.total() - found["generated"] - found["recomputed"]
    return found["generated"] - accounted


def mistakes(record: Record) -> list[str]:
    """Return a sentence for each way in which the trainer's account differs from the engine's; none if every token is
    explained once.

    The sums are compared as a whole, and also for each weight_epoch: a token that is lost and another that is counted
    twice rarely have the same one. The server has started for this run, so publications are weight epochs.
    """
    problems = []
    total = accounts(record)
    if missing := unexplained(total):
        problems.append(_difference(missing, "in all"))
    if total["trained"] != (by_updates := sum(update.tokens for update in record.updates)):
        problems.append(
            f"the updates trained {by_updates} tokens, the rollouts that were trained have {total['trained']}"
        )
    for number, rollout in enumerate(record.rollouts):
        if fault := uncovered([(start, end) for _, start, end in rollout.spans], rollout.tokens):
            problems.append(f"rollout {number}: {fault}")
    sampled, accounted = by_weight_epoch(record)
    if sampled.total() != total["generated"]:
        problems.append(f"the engine counted {total['generated']} tokens, and noted times of {sampled.total()}")
    problems += [
        _difference(sampled[epoch] - accounted[epoch], f"of weight_epoch {epoch}")
        for epoch in sorted(sampled.keys() | accounted.keys())
        if sampled[epoch] != accounted[epoch]
    ]
    return problems


def by_weight_epoch(record: Record) -> tuple[Counter[int], Counter[int]]:
    """Return the tokens of each weight_epoch: those that the engine sampled, and those that the trainer tells of."""
    sampled, accounted = Counter[int](), Counter[int]()
    for step in record.token_times:
        sampled[step.weight_epoch] += step.tokens
    for rollout in record.rollouts:
        for publication, start, end in rollout.spans:
            accounted[publication] += end - start
    for one in record.evals:
        accounted[one.publication] += one.tokens
    return sampled, accounted


def _difference(missing: int, where: str) -> str:
    if missing > 0:
        return f"{missing} tokens {where} are unexplained: the engine sampled them, the trainer does not tell of them"
    return f"{-missing} tokens {where} are told of twice, or the engine did not sample them"
