"""The trainer of a runner, which sends it deltas."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fastdeploy.core.errors import WeightUpdateRefused
from fastdeploy.core.runner import Staging
from fastdeploy.core.weight_source import FileSource, PartFormat
from fastdeploy.testing.checkpoints import random_tensors
from fastdeploy.testing.tensors import write_safetensors
from fastdeploy.worker.model_runner import ModelRunner
from support.deltas import State, changed, checksums_of, over_all_of, state_of, write_delta
from support.specs import SPECS


class Trainer:
    """The state of a runner's trainer. Sends deltas of it to the runner."""

    def __init__(self, runner: ModelRunner, folder: Path, model: str):
        self.runner, self.folder = runner, folder
        self.state = state_of(random_tensors(SPECS[model]), runner.info.dtype)
        self.rng = np.random.default_rng(0)

    def next_state(self, *names: str, share: float = 0.05) -> State:
        return changed(self.state, self.rng, share, names or None)

    def source(self, payloads: dict[str, np.ndarray]) -> FileSource:
        write_safetensors(self.folder / "part", payloads)
        return FileSource(str(self.folder / "part"))

    def begin(self) -> Staging:
        return self.runner.begin_update(False, delta=True)

    def publish(self, new: State, encoding: str = "overwrite", compression: str = "none") -> None:
        source, form = write_delta(self.folder / "part", self.state, new, encoding, compression)
        staging = self.begin()
        receipt = staging.add(source, {}, form=form)
        assert receipt.tensors == len(form.fingerprints)
        staged = staging.finish()
        assert staged.fingerprint == over_all_of(new)
        self.runner.commit(staged.weights)
        self.state = new

    def check(self) -> None:
        """Check that the weights which serve are those of the trainer, bit for bit."""
        assert self.runner.checksums() == checksums_of(self.state)
        assert self.runner.fingerprint == over_all_of(self.state)

    def check_refused(self, payloads: dict[str, np.ndarray], form: PartFormat, why: str, tensor: str | None) -> None:
        """Send a part that must be refused, after one that is not. The weights stay, and the next delta works."""
        staging, good = self.begin(), self.next_state(*list(self.state)[-2:])
        source, good_form = write_delta(self.folder / "good", self.state, good)
        staging.add(source, {}, form=good_form)
        with pytest.raises(WeightUpdateRefused, match=why) as caught:
            staging.add(self.source(payloads), {}, form=form)
        assert caught.value.detail.get("tensor") == tensor
        with pytest.raises(WeightUpdateRefused, match="begin again"):
            staging.finish()
        staging.abandon()
        self.check()
        self.publish(self.next_state())
        self.check()
