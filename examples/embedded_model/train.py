"""Train the embedded model from random weights and write its checkpoint: ``python -m examples.embedded_model.train``.

One process, a fixed seed and a fixed number of steps; arithmetic.py generates the text. Training takes about six
minutes on one core. The same kind of CPU and the same number of threads give the same checkpoint bit for bit.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import paddle
import paddle.nn.functional as F

from examples.embedded_model import arithmetic, tokenizer
from examples.embedded_model.checkpoint import save
from examples.embedded_model.model import ModelConfig, Qwen3, initial_weights
from fastdeploy.embedded import MODEL_DIR

SEED = 20
MODEL_CONFIG = ModelConfig()
STEPS = 900
ROW_LENGTHS = (160, 352)
"""Each document is packed into a row of the smallest of these lengths that is long enough."""
TOKENS_PER_STEP = 2048
PEAK_LR, WARMUP_STEPS = 3e-3, 100
PROMPT_WEIGHT = 0.1
"""Loss weight of a prompt's token; a token of the answer has 1. Not 0, so that the model continues with another problem
where ignore_eos lets it generate past the end of an answer."""

CHAT_FORMS = ("{}=", "{}", "What is {}?")
SYSTEM_LINES = ("You are a helpful assistant.", "Show every step.", "Answer the question.")


class Batch(NamedTuple):
    """ids, targets: int64 [B, T]. weight: float32 [B, T], of each target in the loss."""

    ids: np.ndarray
    targets: np.ndarray
    weight: np.ndarray


Document = tuple[list[int], list[float]]
"""The ids of a training text, and the weight of each in the loss."""
Answer = Callable[[arithmetic.Problem, random.Random], str]


def solution(problem: arithmetic.Problem, rng: random.Random) -> str:
    """Return the answer that the embedded model learns: the problem's solution."""
    return problem.solution


def document(problem: arithmetic.Problem, rng: random.Random, answer: Answer = solution) -> tuple[list[int], int]:
    """Return the ids of a training text and the length of its prompt. Half of the texts are chats, half are plain."""
    prompt = tokenizer.encode(problem.prompt)
    if rng.random() < 0.5:
        (form,) = rng.choices(CHAT_FORMS, (0.8, 0.1, 0.1))
        system = rng.choice(SYSTEM_LINES) if rng.random() < 0.1 else None
        prompt = tokenizer.chat_ids(form.format(problem.prompt.rstrip("=")), system)
    return prompt + tokenizer.encode(answer(problem, rng)) + [tokenizer.END_ID], len(prompt)


def batches(seed: int, answer: Answer = solution) -> Iterator[Batch]:
    """Yield batches of problems and their answers without end."""
    rng = random.Random(seed)
    texts = (document(problem, rng, answer) for problem in arithmetic.stream(seed, "train"))
    return packed((ids, [PROMPT_WEIGHT] * prompt + [1.0] * (len(ids) - prompt)) for ids, prompt in texts)


def packed(documents: Iterable[Document]) -> Iterator[Batch]:
    """Yield batches. A row holds whole documents, in the order they are generated, then padding. The rare document that
    is too long for a row is left out."""
    full: dict[int, list[list[Document]]] = {length: [[]] for length in ROW_LENGTHS}
    for doc in documents:
        length = next((length for length in ROW_LENGTHS if len(doc[0]) <= length), None)
        if length is None:
            continue
        rows = full[length]
        if sum(len(ids) for ids, _ in rows[-1]) + len(doc[0]) > length:
            if len(rows) * length >= TOKENS_PER_STEP:
                yield _collate(rows, length)
                rows.clear()
            rows.append([])
        rows[-1].append(doc)


def _collate(rows: list[list[Document]], length: int) -> Batch:
    ids = np.full((len(rows), length + 1), tokenizer.PAD_ID, np.int64)
    weight = np.zeros((len(rows), length + 1), np.float32)
    for r, row in enumerate(rows):
        at = 0
        for doc, weights in row:
            ids[r, at : at + len(doc)] = doc
            weight[r, at : at + len(doc)] = weights
            at += len(doc)
    return Batch(ids[:, :-1], ids[:, 1:], weight[:, 1:])


def learning_rate(step: int, steps: int) -> float:
    """Return the learning rate: linear from 0 to PEAK_LR over the warm-up, then linear to 0 at the last step."""
    return PEAK_LR * min((step + 1) / WARMUP_STEPS, (steps - step) / max(1, steps - WARMUP_STEPS))


def mean_loss(model: Qwen3, batch: Batch) -> paddle.Tensor:
    """Return the weighted mean of the cross entropy of a batch's targets, a scalar."""
    logits = model.logits(paddle.to_tensor(batch.ids))
    losses = F.cross_entropy(
        logits.reshape([-1, model.config.vocab_size]),
        paddle.to_tensor(batch.targets).reshape([-1]),
        reduction="none",
    )
    weight = paddle.to_tensor(batch.weight).reshape([-1, 1])
    return (losses.reshape([-1, 1]) * weight).sum() / weight.sum()


def train(steps: int, seed: int = SEED, config: ModelConfig = MODEL_CONFIG, report_every: int = 50) -> Qwen3:
    """Train for ``steps`` steps and return the model, in float32. Progress goes to stdout."""
    model = Qwen3(config, initial_weights(config, seed))
    optimizer = paddle.optimizer.AdamW(
        PEAK_LR,
        beta2=0.98,
        weight_decay=0.05,
        parameters=list(model.weights.values()),
        grad_clip=paddle.nn.ClipGradByGlobalNorm(1.0),
    )
    began, cpu_began = time.perf_counter(), time.process_time()
    for step, batch in zip(range(steps), batches(seed), strict=False):
        loss = mean_loss(model, batch)
        loss.backward()
        optimizer.set_lr(learning_rate(step, steps))
        optimizer.step()
        optimizer.clear_grad()
        if step % report_every == 0 or step == steps - 1:
            wall, cpu = time.perf_counter() - began, time.process_time() - cpu_began
            print(f"step {step:5d}  loss {float(loss):.4f}  {wall:6.0f} s wall  {cpu:6.0f} s CPU", flush=True)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of matrix products")
    parser.add_argument("--output", type=Path, default=MODEL_DIR)
    arguments = parser.parse_args()
    paddle.set_device("cpu")
    paddle.set_flags({"FLAGS_use_stride_kernel": False})  # strided views make the backward pass here 1.6 times slower
    paddle.base.core.set_num_threads(arguments.threads)
    model = train(arguments.steps, arguments.seed)
    save(model, arguments.output)
    print(f"wrote {arguments.output}")


if __name__ == "__main__":
    main()
