"""The check of how an engine answers prompts: for engines that do not show their weights, and for the KV.

The prompts are token ids, the same in each check, so that a check meets the KV that an earlier check has left in the
prefix cache. The engine's log probabilities are compared with those of a run of our own (``own_run``), by the
statistics of ``bounds``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fastdeploy.rl.check_sync.answers import Answer, Completions, Question, Unusable
from fastdeploy.rl.check_sync.bounds import (
    FLOAT32,
    LEVELS,
    NOISE,
    Evidence,
    Tokens,
    evidence,
    noise_ratio,
    prompts_of,
    smallest_found,
)
from fastdeploy.rl.check_sync.own_run import OwnRun, by_kind, widened, with_error
from fastdeploy.rl.check_sync.report import BehaviourReport, Divergence, ServingState, Verdict
from fastdeploy.rl.check_sync.weights import TrainerWeights

PROMPTS, LENGTH, MAX_TOKENS = 64, 64, 8
# A prefix is cached in whole blocks: of 16 tokens in most engines, of 128 in vLLM on a CPU.
KV_PROMPTS, KV_LENGTH, KV_TOKENS = 16, 320, 16
ERROR = 0.01  # relative, of a tensor: small enough that log probabilities move in proportion to it
POWER = 0.99


class Probes(NamedTuple):
    """The answers of an engine to the fixed prompts. plain: log probabilities of prompts and of greedy answers. cached,
    fresh: to the same long prompts; the KV of the first may come from the prefix cache."""

    plain: list[Answer]
    cached: list[Answer]
    fresh: list[Answer]


def check_behaviour(
    engine: Completions, state: ServingState, trainer: TrainerWeights, previous: Sequence[TrainerWeights] = ()
) -> BehaviourReport:
    """Compare the answers of an engine with those of the trainer's weights. previous: earlier weights, the latest
    first. Raises as ``Completions.ask``."""
    ours = state.engine == "fastdeploy"
    if state.quantization and not ours:
        how = f"The engine quantizes its weights ({state.quantization}); a run of our own cannot do the same."
        return BehaviourReport(Verdict.UNKNOWN, how)
    return judge(probe(engine, trainer), trainer, previous, ours, state.quantization)


def probe(engine: Completions, trainer: TrainerWeights) -> Probes:
    """Ask an engine the fixed prompts. Raises as ``Completions.ask``."""
    config = trainer.model.config
    most = config.max_position_embeddings
    plain = fixed_prompts(config.vocab_size, PROMPTS, min(LENGTH, most - MAX_TOKENS), 0)
    long = fixed_prompts(config.vocab_size, KV_PROMPTS, min(KV_LENGTH, most - KV_TOKENS), 1)
    salt = f"fastdeploy-check-sync-{np.random.default_rng().integers(1 << 62)}"
    question = Question(KV_TOKENS, temperature=1.0)
    probes = Probes(
        engine.ask(plain, Question(MAX_TOKENS, with_prompt=True)),
        engine.ask(long, question, batch=1),  # engines tell the cached tokens of a whole request only
        engine.ask(long, question._replace(salt=salt), batch=1),
    )
    ids = {token for answers in probes for one in answers for token in one.token_ids}
    if unknown := [token for token in ids if not (isinstance(token, int) and 0 <= token < config.vocab_size)]:
        raise Unusable(f"expected token ids below {config.vocab_size}, got {unknown[0]!r} in an answer")
    return probes


def fixed_prompts(vocab_size: int, count: int, length: int, seed: int) -> list[list[int]]:
    """Return prompts in which each id occurs once before any occurs again."""
    rng, tokens = np.random.default_rng(seed), count * length
    ids = np.concatenate([rng.permutation(vocab_size) for _ in range(-(-tokens // vocab_size))])[:tokens]
    return ids.reshape(count, length).tolist()


def judge(
    probes: Probes,
    trainer: TrainerWeights,
    previous: Sequence[TrainerWeights] = (),
    ours: bool = False,
    quantization: str | None = None,
) -> BehaviourReport:
    """Say what the answers mean. ours: the engine is this one, whose KV must be right to the bit. quantization: of
    ours."""
    if missing := [name for name in trainer.shapes if name not in trainer.present]:
        how = f"A run of our own needs all tensors, and {trainer.label} lack {missing[0]}."
        return BehaviourReport(Verdict.UNKNOWN, how)
    run = OwnRun(trainer, trainer.dtype, quantization)
    served, greedy = [_own_logprobs(run, answers) for answers in probes], _best(run, probes.plain)
    del run  # frees its memory before the next one
    rounded = served
    if quantization is not None or trainer.dtype == "float32":
        run = OwnRun(trainer, "bfloat16")
        rounded = [_own_logprobs(run, answers) for answers in probes]
        del run
    run = OwnRun(trainer, "float32")
    exact = [_own_logprobs(run, answers) for answers in probes]
    plain, cached, fresh = (
        Tokens(
            _found(answers) - (of_served - own if quantization is not None else 0),  # as if without quantization
            own,
            reference,
            _numbers(answers),
            not run.has_experts,
            FLOAT32 if trainer.dtype == "float32" else 1.0,
        )
        for answers, of_served, own, reference in zip(probes, served, rounded, exact, strict=True)
    )
    to_the_bit = _same_bits(_found(probes.plain), served[0])
    said = Evidence(0.0) if to_the_bit else _evidence(run, plain, probes.plain, previous)
    kv, kv_how = _kv(probes, cached, fresh, ours)
    smallest = None if said.differs or to_the_bit else _smallest(run, plain, probes.plain)
    blind = smallest is not None and math.isinf(smallest)
    return BehaviourReport(
        verdict=Verdict.DIFFERS if said.differs else Verdict.UNKNOWN if blind else Verdict.EQUAL,
        how="All log probabilities are equal to the bit." if to_the_bit else _how(said, smallest),
        statistic=said.ratio,
        bound=NOISE,
        power=POWER,
        smallest=smallest,
        tokens=len(plain.found),
        diverged=None if to_the_bit else _first_divergence(probes.plain, greedy, served[0], plain),
        kv=kv,
        kv_how=kv_how,
        stale_by=said.stale_by,
    )


def _evidence(run: OwnRun, plain: Tokens, answers: Sequence[Answer], previous: Sequence[TrainerWeights]) -> Evidence:
    older = [widened(one) for one in previous]
    parts = _parts(run.tensors, older[0]) if older else {}
    return evidence(
        plain,
        [_with(run, tensors, answers) for tensors in older],
        {kind: _with(run, tensors, answers) for kind, tensors in parts.items()},
    )


def _parts(new: Mapping[str, np.ndarray], old: Mapping[str, np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
    """Return, for each kind of tensors that an update has changed, the weights without the update of this kind."""
    changed = [name for name, values in new.items() if not np.array_equal(values, old[name])]
    return {kind: {**new, **{name: old[name] for name in names}} for kind, names in by_kind(changed).items()}


def _smallest(run: OwnRun, plain: Tokens, answers: Sequence[Answer]) -> float:
    """Return the relative error of all tensors that this check would find."""
    moved = _with(run, with_error(run.tensors, run.tensors, ERROR), answers)
    return smallest_found(plain, (moved - plain.exact) / ERROR, np.random.default_rng(0))


def _with(run: OwnRun, tensors: Mapping[str, np.ndarray], answers: Sequence[Answer]) -> np.ndarray:
    """Return our log probabilities with other tensors. The run keeps its own."""
    own = run.tensors
    run.load(tensors)
    found = _own_logprobs(run, answers)
    run.load(own)
    return found


def _given(answers: Sequence[Answer]) -> list[int]:
    """Return for each answer how many of its first tokens have no log probability."""
    return [len(one.prompt) if one.prompt_logprobs is None else 1 for one in answers]


def _sequences(answers: Sequence[Answer]) -> list[tuple[int, ...]]:
    return [one.prompt + one.token_ids for one in answers]


def _own_logprobs(run: OwnRun, answers: Sequence[Answer]) -> np.ndarray:
    return run.logprobs(_sequences(answers), _given(answers))


def _best(run: OwnRun, answers: Sequence[Answer]) -> tuple[np.ndarray, np.ndarray]:
    """Return our greedy tokens after the engine's tokens, and their log probabilities: as ``_found``."""
    return run.best(_sequences(answers), _given(answers))


def _found(answers: Sequence[Answer]) -> np.ndarray:
    """Return all log probabilities that the engine told, in one array."""
    parts = [part for one in answers for part in (one.prompt_logprobs, one.logprobs) if part is not None]
    return np.concatenate(parts)


def _numbers(answers: Sequence[Answer]) -> np.ndarray:
    return prompts_of([len(ids) - given for ids, given in zip(_sequences(answers), _given(answers), strict=True)])


def _same_bits(found: np.ndarray, own: np.ndarray) -> bool:
    return bool((found.astype(np.float32) == own.astype(np.float32)).all())


def _first_divergence(
    answers: Sequence[Answer], greedy: tuple[np.ndarray, np.ndarray], served: np.ndarray, plain: Tokens
) -> Divergence | None:
    """Return the first token that is not the best one of our run after the same tokens, by more than rounding can
    explain; None if there is none. Of several answers, the one that diverges soonest, then the one by the most."""
    noise = np.abs(plain.own - plain.exact) * plain.scale
    tie = NOISE * float(np.quantile(noise, 1 - LEVELS[-1][1]))
    found, end = [], 0
    for answer, given, ids in zip(answers, _given(answers), _sequences(answers), strict=True):
        end += len(ids) - given
        for position, token in enumerate(answer.token_ids):
            at = end - len(answer.token_ids) + position
            margin = float(greedy[1][at] - served[at])
            if margin > tie:
                pair = float(greedy[1][at]), float(answer.logprobs[position])
                found.append((position, -margin, Divergence(answer.prompt, position, int(greedy[0][at]), token, *pair)))
            if greedy[0][at] != token:
                break  # after a tie the two go different ways
    return min(found, key=lambda one: one[:2])[2] if found else None


def _kv(probes: Probes, cached: Tokens, fresh: Tokens, ours: bool) -> tuple[Verdict, str]:
    """Say whether KV from the prefix cache is of the weights that serve."""
    hits = [one.cached for one in probes.cached]
    reused = sum(hit or 0 for hit in hits)
    source = f"{reused} tokens of KV from the prefix cache" if None not in hits else "KV that may be cached"
    same = [(one.token_ids, one.logprobs.tolist()) for one in probes.cached] == [
        (one.token_ids, one.logprobs.tolist()) for one in probes.fresh
    ]
    of_cached, of_fresh = noise_ratio(cached), noise_ratio(fresh)
    if not same and ours:
        return Verdict.DIFFERS, f"Answers from {source} are not those from fresh KV: it is of other weights."
    if of_cached > NOISE and of_fresh <= NOISE:
        figures = f"{of_cached:.1f} times our own rounding, from fresh KV {of_fresh:.1f}; bound {NOISE:g}"
        return Verdict.DIFFERS, f"Answers from {source} are off by {figures}: it is of other weights."
    if of_fresh > NOISE:
        return Verdict.UNKNOWN, "The answers from fresh KV are not those of the trainer's weights either."
    if reused or None in hits:
        return Verdict.EQUAL if reused else Verdict.UNKNOWN, f"Answers from {source} are those from fresh KV."
    return Verdict.UNKNOWN, (
        "Not tested: the prefix cache had none of the prompts. Either the sync has emptied it, or no check came before."
    )


def _how(said: Evidence, smallest: float | None) -> str:
    """Say in a few sentences what was found."""
    times = f"{said.ratio:.2g} times our own rounding apart, bound {NOISE:g}"
    sentences = [f"Log probabilities are {'not finite' if math.isinf(said.ratio) else times}."]
    if said.stale_by is not None:
        updates = "1 update" if said.stale_by == 1 else f"{said.stale_by} updates"
        sentences.append(f"They fit the weights of {updates} before.")
    elif said.older and said.older[0].is_off and said.older[0].share > 0:
        sentences.append(f"The engine lacks {said.older[0].share:.0%} of the last update.")
    if said.lacking and said.stale_by is None:
        sentences.append(f"Stale, all or in part: {_shares(said, said.lacking)}.")
    if said.doubled:
        sentences.append(f"Moved too far by the last update: {_shares(said, said.doubled)}.")
    if not said.differs and smallest is not None and math.isinf(smallest):
        sentences.append("These answers would not show any error of the weights.")
    elif not said.differs and smallest is not None:
        sentences.append(f"A relative error of {smallest:.1g} in all tensors would be found in 99 % of the checks.")
        if said.older and math.isfinite(said.older[0].smallest):
            sentences.append(f"So would be {said.older[0].smallest:.0%} of the last update missing.")
    return " ".join(sentences)


def _shares(said: Evidence, kinds: Sequence[str]) -> str:
    return ", ".join(f"{kind} ({min(abs(said.parts[kind].share), 1):.0%})" for kind in kinds)
