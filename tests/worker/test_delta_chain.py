"""Long chains of updates, most of them deltas: the weights are always, bit for bit, those of the trainer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from fastdeploy.core.errors import WeightUpdateRefused
from fastdeploy.core.runner import Staging
from fastdeploy.core.weight_source import FileSource
from fastdeploy.testing.checkpoints import random_tensors, write_checkpoint
from fastdeploy.testing.tensors import write_safetensors
from fastdeploy.worker.model_runner import KV_CACHE, WEIGHT, ModelRunner
from support.deltas import State, changed, checksums_of, over_all_of, state_of, widened, write_delta
from support.runner_ops import OPS
from support.specs import SPECS
from support.step_driver import outputs, sleep, wake

EVENTS = ["delta"] * 12 + ["full", "partial", "refused", "abandoned", "unseen", "sleep"]


class Chain:
    """A runner, and the state that its trainer published last."""

    def __init__(self, runner: ModelRunner, state: State, folder: Path, seed: int):
        self.runner, self.state, self.folder = runner, state, folder
        self.rng = np.random.default_rng(seed)

    def step(self) -> None:
        """Let one event happen, and sometimes the work beside steps that follows commits."""
        match EVENTS[self.rng.integers(len(EVENTS))]:
            case "delta":
                new = self.next_state(0.03)
                staged = self.deliver(new).finish()
                assert staged.fingerprint == over_all_of(new)
                self.runner.commit(staged.weights)
                self.state = new
            case "full":
                self.update(random_like(self.state, self.rng))
            case "partial":
                self.update(self.next_state(0.5), partial=True)
            case "refused":
                self.refuse()
            case "abandoned":
                self.deliver(self.next_state(0.03)).abandon()
            case "unseen":
                staging = self.deliver(self.next_state(0.03))
                staging.finish()
                staging.abandon()
            case "sleep":
                sleep(self.runner, WEIGHT, KV_CACHE)
                wake(self.runner, WEIGHT, KV_CACHE)
        if self.rng.random() < 0.6:
            self.runner.refresh_standby()
        assert self.runner.fingerprint == over_all_of(self.state)

    def next_state(self, share: float) -> State:
        return changed(self.state, self.rng, share, [name for name in self.state if self.rng.random() < 0.8])

    def deliver(self, new: State) -> Staging:
        """Begin a delta and send it in one to three parts, each with an encoding of its own."""
        staging = self.runner.begin_update(False, delta=True)
        count = int(self.rng.integers(1, 4))
        for part in range(count):
            self.add(staging, {name: new[name] for name in list(new)[part::count]})
        return staging

    def add(self, staging: Staging, new: State, wrong: str = "") -> None:
        """Send one part. wrong: the tensor whose fingerprint is not the one that the part tells."""
        encoding = str(self.rng.choice(["overwrite", "overwrite", "dense"]))
        compression = str(self.rng.choice(["none", "zstd"]))
        source, form = write_delta(self.folder / "delta", self.state, new, encoding, compression)
        if wrong:
            form.fingerprints[wrong] = "0" * 32
        staging.add(source, {}, form=form)

    def refuse(self) -> None:
        """Send a delta whose second part is refused, after it was applied."""
        new = changed(self.state, self.rng, 0.2)
        staging, names = self.runner.begin_update(False, delta=True), list(new)
        self.add(staging, {name: new[name] for name in names[::2]})
        with pytest.raises(WeightUpdateRefused, match="fingerprint"):
            self.add(staging, {name: new[name] for name in names[1::2]}, wrong=names[1])
        staging.abandon()

    def update(self, new: State, partial: bool = False) -> None:
        sent = {name: new[name] for name in new if not partial or new[name].tobytes() != self.state[name].tobytes()}
        write_safetensors(self.folder / "plain", sent)
        staging = self.runner.begin_update(partial)
        staging.add(FileSource(str(self.folder / "plain")), {})
        self.runner.commit(staging.finish().weights)
        self.state = new


def random_like(state: State, rng: np.random.Generator) -> State:
    """Return a state of which every value is another one."""
    return changed(state, rng, 2)


@contextmanager
def isa(ops: object, name: str) -> Iterator[None]:
    """Use this instruction set, if one is named."""
    if not name:
        yield
        return
    before = ops.isa
    ops.set_isa(name)
    try:
        yield
    finally:
        ops.set_isa(before)


def run_chain(model: str, dtype: str, kind: str, steps: int, every: int, folder: Path, seed: int = 0) -> None:
    """Run a chain, and compare the weights with a fresh load every so many steps."""
    ops_name, _, isa_name = kind.partition(" ")
    spec = SPECS[model]
    tensors = random_tensors(spec)
    ops = OPS[ops_name](dtype)

    def load(tensors: dict[str, np.ndarray]) -> ModelRunner:
        checkpoint = write_checkpoint(folder / "checkpoint", spec, tensors)
        return ModelRunner(str(checkpoint), dtype=dtype, num_blocks=96, ops=ops, standby_weights="on")

    with isa(ops, isa_name):
        chain = Chain(load(tensors), state_of(tensors, dtype), folder, seed)
        for step in range(1, steps + 1):
            chain.step()
            if step % every == 0 or step == steps:
                assert chain.runner.checksums() == checksums_of(chain.state)
                fresh = load({name: widened(array) for name, array in chain.state.items()})
                assert fresh.fingerprint == chain.runner.fingerprint
                assert outputs(chain.runner) == outputs(fresh)


CHAINS = [
    ("qwen2", "float32", "cpu"),
    ("llama_tied", "bfloat16", "cpu"),
    ("qwen3", "bfloat16", "cpu avx2"),
    ("gpt_oss", "bfloat16", "cpu"),
    ("qwen2", "bfloat16", "reference"),
    ("deepseek", "bfloat16", "cpu"),
]


@pytest.mark.parametrize(("model", "dtype", "kind"), [chain for chain in CHAINS if chain[2].split()[0] in OPS])
def test_after_a_chain_of_deltas_the_weights_are_those_of_a_fresh_load(model, dtype, kind, tmp_path):
    run_chain(model, dtype, kind, steps=20, every=10, folder=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "dtype"), [("qwen2", "float32"), ("qwen3", "bfloat16"), ("llama_tied", "float32")])
def test_after_a_thousand_events_the_weights_are_those_of_a_fresh_load(model, dtype, tmp_path):
    run_chain(model, dtype, "cpu", steps=1000, every=100, folder=tmp_path, seed=1)
