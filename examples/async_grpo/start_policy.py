"""Make the policy that training starts from: ``python -m examples.async_grpo.start_policy`` writes ``start_policy/``.

The embedded model has seen too little text to be improved by rewards: it errs because it cannot compute. A base model
of the usual kind knows more than it shows. This program makes one, from the embedded model, in two stages:

1. practice: more worked solutions, until the model can work most problems out.
2. habit: a mix of worked solutions and answers without any work ("347+85=" -> "#432"), as in text that people write.
   Without work, the model cannot know the answer of a longer problem. But that is what it writes most often.

Reinforcement learning then finds out by itself that work pays: answers get longer, and right.

One thread and a fixed seed: the same kind of CPU gives the same checkpoint bit for bit. This takes some 20 minutes.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import paddle

from examples.async_grpo.config import START_POLICY
from examples.embedded_model import arithmetic
from examples.embedded_model.checkpoint import load, save
from examples.embedded_model.model import Qwen3
from examples.embedded_model.train import Answer, Batch, batches, mean_loss, solution
from fastdeploy.embedded import MODEL_DIR

WARMUP_STEPS = 50
WORKS = {1: 0.7, 2: 0.25, 3: 0.15, 4: 0.1}
"""Share of worked solutions in the stage "habit", by level. A sum of level 2 counts as level 1."""


def with_habit(problem: arithmetic.Problem, rng: random.Random) -> str:
    """Return the solution of ``problem`` with or without the work."""
    level = 1 if problem.kind == "sum" and problem.level == 2 else problem.level
    return problem.solution if rng.random() < WORKS[level] else f"#{problem.answer}"


STAGES: dict[str, tuple[int, int, float, Answer]] = {
    "practice": (777, 3000, 2e-3, solution),
    "habit": (778, 200, 5e-4, with_habit),
}
"""Seed, steps, highest learning rate and answers of each stage."""


class Muon:
    """Momentum whose matrix is made orthogonal before it is added to a weight.

    https://kellerjordan.github.io/posts/muon/, with the scale of https://arxiv.org/abs/2502.16982, so that a learning
    rate of Adam fits. weights: matrices, changed in place."""

    def __init__(self, weights: Iterable[paddle.Tensor]):
        self._weights = list(weights)
        self._momenta = [paddle.zeros_like(weight) for weight in self._weights]

    @paddle.no_grad()
    def step(self, learning_rate: float) -> None:
        for i, weight in enumerate(self._weights):
            gradient = weight.grad
            assert gradient is not None
            self._momenta[i] = self._momenta[i] * 0.95 + gradient
            update = self._orthogonal(gradient + 0.95 * self._momenta[i])
            scale = learning_rate * (0.2 * max(weight.shape) ** 0.5)
            weight.set_value(weight * (1 - learning_rate * 0.01) - update * scale)
            weight.clear_gradient()

    @staticmethod
    def _orthogonal(x: paddle.Tensor) -> paddle.Tensor:
        """Return a matrix with the singular vectors of ``x`` and singular values near 1 (Newton-Schulz)."""
        tall = x.shape[0] > x.shape[1]
        x = x.t() if tall else x
        x = x / (paddle.sqrt((x * x).sum()) + 1e-7)
        for _ in range(5):
            a = paddle.matmul(x, x, transpose_y=True)
            x = 3.4445 * x + paddle.matmul(-4.7750 * a + 2.0315 * paddle.matmul(a, a), x)
        return x.t() if tall else x


def train(model: Qwen3, batches: Iterable[Batch], steps: int, peak: float) -> None:
    """Train ``model`` in place on the first ``steps`` batches. The learning rate rises to ``peak``, stays, and falls to
    0 in the last 60 % of the steps."""
    matrices = [name for name, weight in model.weights.items() if weight.ndim == 2 and "embed" not in name]
    muon = Muon(model.weights[name] for name in matrices)
    adam = paddle.optimizer.AdamW(
        peak,
        beta2=0.98,
        weight_decay=0.01,
        parameters=[weight for name, weight in model.weights.items() if name not in matrices],
        grad_clip=paddle.nn.ClipGradByGlobalNorm(1.0),
    )
    began = time.perf_counter()
    for step, batch in zip(range(steps), batches, strict=False):
        loss = mean_loss(model, batch)
        loss.backward()
        rate = peak * min(1, (step + 1) / WARMUP_STEPS) * min(1, (steps - step) / (steps * 0.6))
        adam.set_lr(rate)
        muon.step(rate)
        adam.step()
        adam.clear_grad()
        if (step + 1) % 50 == 0 or step + 1 == steps:
            print(f"step {step + 1:5d}  loss {float(loss):.4f}  {time.perf_counter() - began:6.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the policy that training starts from.")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument(
        "--start", type=Path, default=MODEL_DIR, help="checkpoint that the first of the stages starts from"
    )
    parser.add_argument("--output", type=Path, default=START_POLICY)
    arguments = parser.parse_args()
    paddle.set_device("cpu")
    paddle.set_flags({"FLAGS_use_stride_kernel": False})  # strided views make the backward pass slower
    paddle.base.core.set_num_threads(1)
    folder = arguments.start
    with tempfile.TemporaryDirectory() as temporary:
        for stage in arguments.stages:  # each starts from the rounded weights of the one before
            model = load(folder)
            seed, steps, peak, answer = STAGES[stage]
            train(model, batches(seed, answer), steps, peak)
            folder = Path(temporary) / stage
            save(model, folder)
    save(model, arguments.output)
    print(f"wrote {arguments.output}")


if __name__ == "__main__":
    main()
