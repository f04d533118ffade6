"""Measure how many held-out problems the embedded model solves: ``python -m examples.embedded_model.evaluate``."""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import numpy as np
import paddle

from examples.embedded_model import arithmetic, tokenizer
from examples.embedded_model.checkpoint import load
from examples.embedded_model.model import Cache, Qwen3
from fastdeploy.embedded import MODEL_DIR


@paddle.no_grad()
def generate(model: Qwen3, prompts: list[list[int]], max_tokens: int, temperature: float, seed: int) -> list[list[int]]:
    """Return the completions of ``prompts`` as token ids, <|end|> included. temperature 0 is greedy."""
    rng = np.random.default_rng(seed)
    width = max(map(len, prompts))
    ids = np.array([[tokenizer.PAD_ID] * (width - len(p)) + p for p in prompts])
    visible = ids != tokenizer.PAD_ID
    completions: list[list[int]] = [[] for _ in prompts]
    cache: Cache = []
    live = np.arange(len(prompts))
    for _ in range(max_tokens):
        logits = model.logits(paddle.to_tensor(ids), paddle.to_tensor(visible), cache)[:, -1].numpy()
        chosen = _sample(logits, temperature, rng)
        for row, token in zip(live, chosen, strict=True):
            completions[row].append(int(token))
        unfinished = np.flatnonzero(chosen != tokenizer.END_ID)
        if not unfinished.size:
            break
        if unfinished.size < live.size:
            kept = paddle.to_tensor(unfinished)
            cache = [(k.index_select(kept), v.index_select(kept)) for k, v in cache]
        live, ids = live[unfinished], chosen[unfinished, None]
        visible = np.pad(visible[unfinished], ((0, 0), (0, 1)), constant_values=True)
    return completions


def _sample(logits: np.ndarray, temperature: float, rng: np.random.Generator) -> np.ndarray:
    """Sample token ids [B] from logits [B, V]: by the Gumbel-max trick, or greedily if temperature is 0."""
    if temperature > 0:
        logits = logits / temperature + rng.gumbel(size=logits.shape)
    return logits.argmax(-1)


def report(problems: list[arithmetic.Problem], completions: list[list[int]]) -> str:
    """Return a text with the fraction of solved problems, by kind and level, and with the lengths in tokens."""
    solved = [
        arithmetic.is_correct(problem, tokenizer.decode(completion))
        for problem, completion in zip(problems, completions, strict=True)
    ]
    lines = [f"solved {sum(solved)} of {len(solved)}: {sum(solved) / len(solved):.1%}"]
    lines.append("        " + "".join(f"{f'level {level}':>14}" for level in arithmetic.LEVELS))
    for kind in arithmetic.KINDS:
        cells = []
        for level in arithmetic.LEVELS:
            hits = [hit for p, hit in zip(problems, solved, strict=True) if (p.kind, p.level) == (kind, level)]
            cells.append(f"{f'{sum(hits)} of {len(hits)}':>14}")
        lines.append(f"{kind:8}" + "".join(cells))
    lengths = sorted(map(len, completions))
    ended = sum(completion[-1] == tokenizer.END_ID for completion in completions)
    lines.append(
        f"tokens per completion: min {lengths[0]}, median {statistics.median(lengths):g}, "
        f"90% {lengths[len(lengths) * 9 // 10]}, max {lengths[-1]}; {ended} of {len(lengths)} ended by themselves"
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL_DIR)
    parser.add_argument("--problems", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0, help="which held-out problems")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--plain", action="store_true", help="bare prompts instead of chat messages")
    arguments = parser.parse_args()
    paddle.set_device("cpu")
    problems = arithmetic.problems(arguments.seed, arguments.problems)
    prompts = [tokenizer.prompt_ids(problem, chat=not arguments.plain) for problem in problems]
    model = load(arguments.model)
    completions = generate(model, prompts, arguments.max_tokens, arguments.temperature, arguments.seed)
    how = "greedy" if arguments.temperature == 0 else f"temperature {arguments.temperature:g}"
    print(f"{len(problems)} held-out problems, {'plain' if arguments.plain else 'chat'}, {how}")
    print(report(problems, completions))


if __name__ == "__main__":
    main()
