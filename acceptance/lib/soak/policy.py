"""The weights of a soak's trainer, by number of the update. Any process can compute those of any update."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from acceptance.lib.soak.plan import generator, update_kind
from fastdeploy.testing.tensors import float32_tensors

NOISE = 0.05  # standard deviation of a changed weight, as a share of its value
DELTA_SHARE = 0.02  # of the values of each tensor that a delta changes
PARTIAL_TENSORS = 3


class Policy:
    """The weights of one step. Step 0 is the checkpoint in ``folder``. A full step changes all values, a delta some
    of each tensor, a partial step a few tensors. Changed values are values of the checkpoint with noise, so that the
    weights stay near it."""

    def __init__(self, seed: int, folder: Path):
        self._seed = seed
        self._base = float32_tensors(folder)
        self.step = 0
        self.state = dict(self._base)

    def go_to(self, step: int) -> None:
        """Make ``state`` the weights of ``step``: from the last full step before it, or from the present step."""
        full = next((k for k in range(step, 0, -1) if update_kind(self._seed, k) == "full"), 0)
        if self.step < full or self.step > step:
            self.step, self.state = (full, self._full(full)) if full else (0, dict(self._base))
        while self.step < step:
            self.step += 1
            self.state = self._after(self.step)

    def changed(self, step: int) -> list[str]:
        """Return the names of the tensors that a partial ``step`` changes."""
        names = list(self._base)
        chosen = generator(self._seed, 7, step).choice(len(names), PARTIAL_TENSORS, replace=False)
        return [names[k] for k in sorted(chosen)]

    def _after(self, step: int) -> dict[str, np.ndarray]:
        kind = update_kind(self._seed, step)
        if kind == "full":
            return self._full(step)
        rng, names = generator(self._seed, 8, step), self.changed(step) if kind == "partial" else list(self._base)
        share = 1.0 if kind == "partial" else DELTA_SHARE
        new = dict(self.state)
        for name in names:
            values = new[name].copy()
            places = rng.choice(values.size, math.ceil(share * values.size), replace=False, shuffle=False)
            noise = 1 + NOISE * rng.standard_normal(len(places), np.float32)
            values.reshape(-1)[places] = self._base[name].reshape(-1)[places] * noise
            new[name] = values
        return new

    def _full(self, step: int) -> dict[str, np.ndarray]:
        rng = generator(self._seed, 8, step)
        return {
            name: base * (1 + NOISE * rng.standard_normal(base.shape, np.float32)) for name, base in self._base.items()
        }
