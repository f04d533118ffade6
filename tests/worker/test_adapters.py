"""Adapters at the runner: the tokens are those of transformers and PEFT, whatever else is in the step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from support.adapters import cases, write_adapter
from support.checkpoints import SPECS, prompt
from support.step_driver import Driver, Sequence, load
from support.torch_adapters import adapted_greedy

FLOAT32 = [name for name, spec in SPECS.items() if spec.dtype == "float32"]
KINDS = list(cases(SPECS["qwen2"]))
LENGTHS, STEPS = [1, 17, 70], 24


@pytest.fixture(scope="session")
def adapters(tmp_path_factory) -> dict[str, dict[str, Path]]:
    """Write an adapter of each kind for each checkpoint; give their folders by checkpoint and kind."""
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: {kind: write_adapter(root / name / kind, spec, adapter) for kind, adapter in cases(spec).items()}
        for name, spec in SPECS.items()
    }


def _sequence(length: int, served=None, **more) -> Sequence:
    return Sequence(f"p{length}", prompt(length, 211), **({} if served is None else {"served": served}), **more)


@pytest.mark.parametrize("name", FLOAT32)
def test_greedy_ids_and_logprobs_are_those_of_peft_in_one_batch_of_all_kinds(
    name, make_runner, checkpoints, adapters, expected, torch_process
):
    runner = make_runner(name, num_blocks=400)
    served = {kind: load(runner, i + 1, adapters[name][kind]) for i, kind in enumerate(KINDS)}
    sequences = {(kind, n): _sequence(n, served[kind]) for kind in KINDS for n in LENGTHS}
    base = [_sequence(n) for n in (1, 17)]
    Driver(runner).generate([*sequences.values(), *base], STEPS, chunk=32)
    wanted = torch_process.run(adapted_greedy, checkpoints[name], adapters[name], LENGTHS, STEPS)
    for kind in KINDS:
        for n in LENGTHS:
            one, reference = sequences[kind, n], wanted[kind][n]
            assert reference["margin"].min() > 1e-4, f"{kind}: the fixture has a tie: choose another seed"
            assert one.output == reference["ids"].tolist(), kind
            logprobs = np.array([entry.logprob for entry in one.logprobs])
            assert np.abs(logprobs - reference["logprobs"]).max() < 1e-3, kind
        unlike = [n for n in (1, 17) if sequences[kind, n].output != expected[name][n]["ids"][:STEPS].tolist()]
        assert unlike, f"{kind}: the adapter changes no token"
    for one, n in zip(base, (1, 17), strict=True):
        assert one.output == expected[name][n]["ids"][:STEPS].tolist()
