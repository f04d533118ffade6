#!/usr/bin/env python
"""The power of ``fastdeploy check-sync``: planted faults, the smallest errors, and false alarms.

    python -m benchmarks.check_sync --json check_sync.json

For each of the tiny models, every fault of ``lib/sync_faults.py`` is planted in the tensors that serve:

    exact     the tensors are compared, as with a server of this project: found, and named as what it is
    answers   only log probabilities are known, of an engine that rounds in its own way (transformers and torch in
              bfloat16): found, and, for what is stale, named

Then come the smallest errors that the answers show, checked with planted ones, and checks of engines that serve the
right weights. Prints Markdown tables for docs/check-sync.md. Needs ``pip install -e ".[trl]"``.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.lib.report import json_flag, markdown, write_json
from benchmarks.lib.sync_faults import Fault, Tensors, faults, updated
from benchmarks.lib.torch_engine import TorchEngine, serving_dtype, torch_engine
from fastdeploy.core.fingerprint import ZERO, fingerprint
from fastdeploy.core.serving_dtype import in_dtype
from fastdeploy.rl.check_sync.behaviour import ERROR, LENGTH, PROMPTS, fixed_prompts
from fastdeploy.rl.check_sync.bounds import NOISE, Evidence, Tokens, evidence, noise_ratio, prompts_of, smallest_found
from fastdeploy.rl.check_sync.case import Earlier, Sides
from fastdeploy.rl.check_sync.compare import differences
from fastdeploy.rl.check_sync.own_run import OwnRun, by_kind, widened, with_error
from fastdeploy.rl.check_sync.weights import TrainerWeights
from fastdeploy.testing.models import MODELS, model_folder

UPDATE = 0.02  # of the last update, relative to the root mean square of a tensor
UPDATES = (0.02, 0.005, 0.002, 0.001, 0.0005)
CLEAN_UPDATE = 0.01
SHARED = 5  # clean checks with the same weights
PLANTED = 20  # of each size, to check the computed smallest error


class Subject:
    """A tiny model after an update. old, new: tensors before and after. rounded, exact: runs of our own on ``new``."""

    def __init__(self, name: str, trainer: TrainerWeights):
        self.name, self.trainer = name, trainer
        self.old = widened(trainer)
        self.new = updated(self.old, serving_dtype, UPDATE)
        self.rounded, self.exact = OwnRun(trainer, "bfloat16"), OwnRun(trainer, "float32")

    def prompts(self, seed: int) -> list[list[int]]:
        return fixed_prompts(self.trainer.model.config.vocab_size, PROMPTS, LENGTH, seed)

    def tokens(self, tensors: Tensors, prompts: Sequence[Sequence[int]]) -> Tokens:
        """Return our log probabilities; ``found`` is to be replaced by those of an engine."""
        own, exact = (self.run(run, tensors, prompts) for run in (self.rounded, self.exact))
        return Tokens(exact, own, exact, prompts_of([LENGTH - 1] * PROMPTS), not self.exact.has_experts)

    def run(self, run: OwnRun, tensors: Tensors, prompts: Sequence[Sequence[int]]) -> np.ndarray:
        run.load(tensors)
        return run.logprobs(prompts, [1] * len(prompts))


class Before(NamedTuple):
    """Runs of our own with older tensors: all of them, and of one kind each."""

    older: np.ndarray
    parts: Mapping[str, np.ndarray]

    def evidence(self, tokens: Tokens) -> Evidence:
        return evidence(tokens, [self.older], self.parts)


def before(subject: Subject, new: Tensors, old: Tensors, prompts: Sequence[Sequence[int]]) -> Before:
    parts = {
        kind: subject.run(subject.exact, {**new, **{name: old[name] for name in names}}, prompts)
        for kind, names in by_kind(name for name in new if not np.array_equal(new[name], old[name])).items()
    }
    return Before(subject.run(subject.exact, old, prompts), parts)


def stored(tensors: Mapping[str, np.ndarray]) -> Tensors:
    return {name: in_dtype(one, serving_dtype(name)) for name, one in tensors.items()}


def digests(tensors: Mapping[str, np.ndarray]) -> dict[str, str]:
    return {name: fingerprint(np.ascontiguousarray(one)).hex for name, one in tensors.items()}


class ByTensors:
    """The comparison of tensors, as with a server that shows fingerprints and values."""

    def __init__(self, subject: Subject):
        new, old = stored(subject.new), stored(subject.old)
        self._shapes = subject.trainer.shapes
        self._sides = Sides(
            expected=digests(new),
            served={},
            earlier=[Earlier("1 update before", digests(old), old.__getitem__)],
            read=new.__getitem__,
            read_wide=subject.new.__getitem__,
            dtype="bfloat16",
            config=subject.trainer.model.config,
            zero=ZERO.hex,
        )

    def kinds(self, tensors: Mapping[str, np.ndarray]) -> dict[str, str]:
        """Return the names of the tensors that differ, each with the kind of its difference."""
        served = stored(tensors)
        sides = replace(self._sides, served=digests(served))
        names = [name for name in self._shapes if sides.expected[name] != sides.served[name]]
        found = differences(names, sides, self._shapes, lambda asked: ((name, served[name]) for name in asked))
        return {one.tensor: one.kind for one in found}


def fault_rows(subject: Subject, engine: TorchEngine, _: int) -> list[dict[str, Any]]:
    """Plant each fault, and say what was found by the tensors and by the answers."""
    prompts, by_tensors = subject.prompts(0), ByTensors(subject)
    tokens, older = subject.tokens(subject.new, prompts), before(subject, subject.new, subject.old, prompts)
    rows = []
    for fault in faults(subject.new, subject.old, serving_dtype):
        kinds = by_tensors.kinds(fault.tensors)
        found = engine.logprobs(fault.tensors, prompts)
        said = older.evidence(tokens._replace(found=found))
        rows.append(_fault_row(subject.name, fault, kinds, said))
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def _fault_row(model: str, fault: Fault, kinds: Mapping[str, str], said: Evidence) -> dict[str, Any]:
    return {
        "model": model,
        "kind": fault.kind,
        "way": fault.way,
        "exact": list(kinds) == [name for name in kinds if name in fault.changed] and len(kinds) == len(fault.changed),
        "named": set(kinds.values()) <= fault.named,
        "names": sorted(set(kinds.values())),
        "answers": said.differs,
        "by_ratio": said.ratio > NOISE,
        "ratio": said.ratio,
        "lacking": said.lacking,
        "share": said.older[0].share,
    }


def power_rows(subject: Subject, engine: TorchEngine, _: int) -> list[dict[str, Any]]:
    """Return the smallest relative error that the answers show, of all tensors and of one tensor of each kind; and how
    many of PLANTED such errors were found."""
    prompts = subject.prompts(0)
    tokens = subject.tokens(subject.new, prompts)
    tokens = tokens._replace(found=engine.logprobs(subject.new, prompts))
    chosen = {"all tensors": list(subject.new)}
    chosen |= {names[len(names) // 2]: [names[len(names) // 2]] for names in by_kind(subject.new).values()}
    rows = []
    for what, names in chosen.items():
        moved = subject.run(subject.exact, with_error(subject.new, names, ERROR), prompts)
        size = smallest_found(tokens, (moved - tokens.exact) / ERROR, np.random.default_rng(0))
        found = sum(
            noise_ratio(
                tokens._replace(found=engine.logprobs(_rounded(with_error(subject.new, names, size, i)), prompts))
            )
            > NOISE
            for i in range(PLANTED if math.isfinite(size) else 0)
        )
        rows.append({"model": subject.name, "what": what, "size": size, "found": found})
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def _rounded(tensors: Mapping[str, np.ndarray]) -> Tensors:
    return updated(tensors, serving_dtype, 0.0)


def stale_rows(subject: Subject, engine: TorchEngine, _: int) -> list[dict[str, Any]]:
    """Serve weights from before updates of several sizes, of all tensors and of one kind, and say what was found."""
    prompts, rows = subject.prompts(0), []
    for size in UPDATES:
        new = updated(subject.old, serving_dtype, size)
        tokens, older = subject.tokens(new, prompts), before(subject, new, subject.old, prompts)
        last = "experts" if subject.exact.has_experts else "MLP"
        parts = {"all tensors": "", last: r"experts|mlp\.(gate|up|down)_proj", "attention": "_attn"}
        for what, pattern in parts.items():
            names = [name for name in new if re.search(pattern, name)]
            served = {**new, **{name: subject.old[name] for name in names}}
            said = older.evidence(tokens._replace(found=engine.logprobs(served, prompts)))
            right = said.stale_by == 1 if what == "all tensors" else set(said.lacking) == set(by_kind(names))
            moved = older.older - tokens.exact
            relative = float(np.std(moved) / np.std(tokens.own - tokens.exact))
            row = {"model": subject.name, "size": size, "what": what, "moved": relative}
            rows.append(row | {"by_ratio": said.ratio > NOISE, "found": said.differs, "named": right})
            print(rows[-1], file=sys.stderr, flush=True)
    return rows


def clean_rows(subject: Subject, engine: TorchEngine, count: int) -> list[dict[str, Any]]:
    """Check engines that serve the right weights: other prompts each time, and other weights by an update for each
    SHARED checks. The first of these also fits the kinds of tensors of this update."""
    rows, new = [], subject.old
    for i in range(0, count, SHARED):
        old, new = new, updated(subject.old, serving_dtype, CLEAN_UPDATE, i)
        prompts = [ids for seed in range(i, i + SHARED) for ids in subject.prompts(seed)]
        found = np.split(engine.logprobs(new, prompts), SHARED)
        for number, one in enumerate(found):
            own = prompts[number * PROMPTS : (number + 1) * PROMPTS]
            rows.append(_clean_row(subject, new, old, own, one, with_parts=number == 0))
            print(rows[-1], file=sys.stderr, flush=True)
    return rows


def _clean_row(
    subject: Subject, new: Tensors, old: Tensors, prompts: list[list[int]], found: np.ndarray, with_parts: bool
) -> dict[str, Any]:
    tokens = subject.tokens(new, prompts)._replace(found=found)
    parts = before(subject, new, old, prompts).parts if with_parts else {}
    said = evidence(tokens, [subject.run(subject.exact, old, prompts)], parts)
    half = len(prompts) // 2  # the same weights in batches of other prompts: to the bit
    halves = [subject.run(subject.rounded, new, some) for some in (prompts[:half], prompts[half:])]
    alike = bool((tokens.own == np.concatenate(halves)).all())
    row = {"model": subject.name, "ratio": said.ratio, "alarm": said.differs, "exact_alarm": not alike}
    return row | {"share": said.older[0].share, "error": said.older[0].error, "parts": len(parts)}


PARTS: dict[str, Callable[[Subject, TorchEngine, int], list[dict[str, Any]]]] = {
    "faults": fault_rows,
    "stale": stale_rows,
    "power": power_rows,
    "clean": clean_rows,
}


def fault_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line for each way: how many were planted in all models, and what was found."""
    cells = []
    for way in dict.fromkeys(row["way"] for row in rows):
        some = [row for row in rows if row["way"] == way]
        smallest = min(row["ratio"] for row in some)
        cells.append((way, len(some), *(_count(some, key) for key in ("exact", "named", "answers")), f"{smallest:.2g}"))
    total = [("all", len(rows), *(_count(rows, key) for key in ("exact", "named", "answers")), "")]
    return markdown(("fault", "planted", "tensors: found", "named", "answers: found", "least ratio"), [*cells, *total])


def _count(rows: Iterable[Mapping[str, Any]], key: str) -> int:
    return sum(bool(row[key]) for row in rows)


def clean_table(rows: Sequence[Mapping[str, Any]]) -> str:
    cells = []
    for model in dict.fromkeys(row["model"] for row in rows):
        some = [row for row in rows if row["model"] == model]
        ratios = [row["ratio"] for row in some]
        figures = f"{min(ratios):.2f} to {max(ratios):.2f}", _count(some, "exact_alarm"), _count(some, "alarm")
        cells.append((model, len(some), *figures))
    head = "model", "checks", "ratio", "false alarms to the bit", "false alarms by answers"
    return markdown(head, cells)


def plain_table(rows: Sequence[Mapping[str, Any]]) -> str:
    def shown(value: Any) -> str:
        return f"{value:.2g}" if isinstance(value, float) else str(value)

    return markdown(tuple(rows[0]), [tuple(shown(value) for value in row.values()) for row in rows]) if rows else ""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--only", default=",".join(PARTS), help="parts to run")
    parser.add_argument("--clean", type=int, default=250, help="checks of each model with the right weights")
    json_flag(parser)
    args = parser.parse_args(argv)
    parts = args.only.split(",")
    found: dict[str, list[dict[str, Any]]] = {part: [] for part in parts}
    for name in args.models.split(","):
        folder = Path(model_folder(name))
        with TrainerWeights(folder) as trainer, torch_engine(folder) as engine:
            subject = Subject(name, trainer)
            for part in parts:
                found[part] += PARTS[part](subject, engine, args.clean)
    tables = {"faults": fault_table, "power": plain_table, "stale": plain_table, "clean": clean_table}
    for part in parts:
        print(f"\n{part}\n\n{tables[part](found[part])}")
    planted = found.get("faults", [])
    print(
        f"\n{len({row['kind'] for row in planted})} kinds; by model: {dict(Counter(row['model'] for row in planted))}"
    )
    write_json(args, found)
    wrong = [row for row in found.get("clean", []) if row["alarm"] or row["exact_alarm"]]
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
