"""The arithmetic task in the words of TRL: a data set, a reward function, and the form of an answer.

TRL calls the reward function in a process of its own, so this module imports neither TRL nor torch.
"""

from __future__ import annotations

from typing import Any

from examples.embedded_model import tokenizer
from examples.embedded_model.arithmetic import Problem, is_correct, make_problem, problems
from fastdeploy.rl.sync_client import SyncRolloutClient

# How TRL finds the text of an answer in the embedded model's chat template: all, up to the end token.
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {"content": {"close_pattern": r"<\|end\|>\s*", "content": "text"}},
}


def row(problem: Problem) -> dict[str, Any]:
    """Return a problem as a row of a data set. TRL passes its columns to the reward function."""
    prompt = [{"role": "user", "content": problem.prompt}]
    return {"prompt": prompt, "kind": problem.kind, "level": problem.level, "operands": list(problem.operands)}


def solved(
    completions: list[list[dict[str, str]]], kind: list[str], level: list[int], operands: list[list[int]], **_: Any
) -> list[float]:
    """Return the reward of each completion: 1 for the right answer, else 0."""
    tasks = zip(completions, kind, level, operands, strict=True)
    return [float(is_correct(make_problem(k, n, tuple(o)), c[-1]["content"])) for c, k, n, o in tasks]


def accuracy(url: str, count: int, lora_name: str | None = None) -> float:
    """Return the share of ``count`` held-out problems that the server at ``url`` solves, greedily, by the model that
    serves or by an adapter."""
    held_out = problems(0, count)
    prompts = [tokenizer.prompt_ids(problem, chat=True) for problem in held_out]
    with SyncRolloutClient(url) as client:
        answers = client.generate_many(prompts, {"temperature": 0, "max_tokens": 512}, lora_name=lora_name)
    texts = [tokenizer.decode(answer.token_ids) for answer in answers]
    return sum(map(is_correct, held_out, texts)) / count
