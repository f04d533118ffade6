from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fastdeploy.core.weight_source import FileSource
from fastdeploy.testing.checkpoints import Spec, write_checkpoint
from fastdeploy.testing.tensors import write_safetensors
from fastdeploy.worker.model_runner import ModelRunner
from support.runner_ops import OPS
from support.specs import SPECS
from support.step_driver import outputs
from support.torch_generation import greedy
from support.torch_process import TorchProcess

PROMPT_LENGTHS = [1, 2, 15, 16, 17, 31, 64, 100, 311]
STEPS = 48

Expected = dict[int, dict[str, np.ndarray]]


@pytest.fixture(scope="session")
def expected(checkpoints: dict[str, Path], torch_process: TorchProcess) -> dict[str, Expected]:
    """Return transformers' greedy output for every checkpoint and prompt length, in float32 (weights as stored)."""
    return {name: torch_process.run(greedy, at, PROMPT_LENGTHS, STEPS) for name, at in checkpoints.items()}


@pytest.fixture(params=sorted(OPS))
def make_runner(request: pytest.FixtureRequest, checkpoints: dict[str, Path]) -> Callable[..., ModelRunner]:
    """Return a function that makes a ModelRunner of a checkpoint (its name or folder). Each test runs with all OPS."""

    def make(model: str | Path, **settings: object) -> ModelRunner:
        folder = checkpoints[model] if model in SPECS else model
        dtype = "bfloat16" if "bf16" in str(model) else "float32"
        settings = {"num_blocks": 96, "dtype": dtype, "ops": OPS[request.param](dtype)} | settings
        return ModelRunner(str(folder), **settings)

    return make


@pytest.fixture
def part(tmp_path: Path) -> Callable[[dict[str, np.ndarray]], FileSource]:
    """Write tensors to a file: one source per call."""
    count = itertools.count()

    def write(tensors: dict[str, np.ndarray]) -> FileSource:
        path = tmp_path / f"part-{next(count)}.safetensors"
        write_safetensors(path, tensors)
        return FileSource(str(path))

    return write


@pytest.fixture
def fresh(make_runner: Callable[..., ModelRunner], tmp_path: Path) -> Callable[[Spec, dict[str, np.ndarray]], list]:
    """Return the outputs of a runner that starts with these tensors."""
    count = itertools.count()

    def outputs_of(spec: Spec, tensors: dict[str, np.ndarray]) -> list:
        folder = write_checkpoint(tmp_path / f"{spec.dtype.replace('bfloat16', 'bf16')}-{next(count)}", spec, tensors)
        return outputs(make_runner(folder))

    return outputs_of
