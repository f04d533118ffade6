"""Make the policy that training starts from: ``python -m examples.agent_grpo.start_policy`` writes ``start_policy/``.

It continues from the start policy of ``async_grpo``, which can copy digits, in two stages:

1. skill: conversations without a mistake. Each operation is a call of the calculator; the last result is the answer.
2. habit: conversations with the mistakes of a model that was never told when to use a tool. Most of them guess an
   answer, call the calculator with more than it takes, or take a first result for the answer.

The chat template is in the style of Qwen3's. Its vocabulary has tokens for the frequent pieces of a call, as learned
vocabularies have. One thread and a fixed seed: the same kind of CPU gives the same checkpoint bit for bit.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import paddle
from tokenizers import Tokenizer

from examples.agent_grpo.problems import Problem, draw
from examples.async_grpo.config import START_POLICY as DIGITS
from examples.async_grpo.start_policy import train
from examples.embedded_model import tokenizer
from examples.embedded_model.checkpoint import load, save
from examples.embedded_model.train import PROMPT_WEIGHT, Batch, Document, packed

START_POLICY = Path(__file__).parent / "start_policy"
PIECES = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", '{"name": "', '", "arguments": {"',
          '": "', '"}}', "calculator", "expression")  # fmt: skip
CHAT_TEMPLATE = (
    "{%- if tools -%}{{- '<|system|>' -}}{%- for tool in tools -%}"
    "{{- tool.function.name + '(' + tool.function.parameters.properties | join(', ') + ')' -}}"
    "{%- endfor -%}{%- endif -%}"
    "{%- for message in messages -%}"
    "{%- if message.role == 'tool' -%}"
    "{{- '<|user|><tool_response>' + message.content + '</tool_response>' -}}"
    "{%- else -%}"
    "{{- '<|' + message.role + '|>' + (message.content or '') -}}"
    "{%- for call in message.tool_calls or [] -%}"
    "{%- set arguments = call.function.arguments -%}"
    '{{- \'<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' -}}'
    "{{- (arguments if arguments is string else arguments | tojson) + '}\n</tool_call>' -}}"
    "{%- endfor -%}"
    "{%- if message.role == 'assistant' -%}{{- '<|end|>' -}}{%- endif -%}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
TOO_MUCH = "error: two numbers"  # the calculator's reply to more than one operation
Turns = list[tuple[str, str, float]]
"""What the model writes, the reply of the calculator or "", and the weight of the turn in the loss."""
Conversation = Callable[[Problem, random.Random], Turns]


def call_of(expression: str) -> str:
    """Return the text of a call."""
    return f'<tool_call>\n{{"name": "calculator", "arguments": {{"expression": "{expression}"}}}}\n</tool_call>'


def skill(problem: Problem, rng: random.Random) -> Turns:
    """Return a right conversation. Some begin with a call that the calculator refuses, which is not learned."""
    turns = [(call_of(step), result, 1.0) for step, result in zip(problem.steps, problem.results, strict=True)]
    if len(problem.steps) > 1 and rng.random() < 0.2:
        turns.insert(0, (call_of(problem.question), TOO_MUCH, 0.0))
    return [*turns, (problem.answer, "", 1.0)]


def habit(problem: Problem, rng: random.Random) -> Turns:
    """Return a conversation that is mostly wrong."""
    turns: Turns = []
    first = rng.random()
    if first < 0.5:
        return [(_guess(problem, rng), "", 1.0)]
    if first < 0.8 and len(problem.steps) > 1:
        turns.append((call_of(problem.question), TOO_MUCH, 1.0))
        if rng.random() < 0.6:
            return [*turns, (_guess(problem, rng), "", 1.0)]
    for step, result in zip(problem.steps, problem.results, strict=True):
        turns.append((call_of(step), result, 1.0))
        if result == problem.answer or rng.random() < 0.5:
            break
    return [*turns, (turns[-1][1], "", 1.0)]


def _guess(problem: Problem, rng: random.Random) -> str:
    """Return a number that is about as long as the answer."""
    return str(int(int(problem.answer) * rng.uniform(0.5, 1.5)))


def documents(seed: int, conversation: Conversation, encode: Callable[[str], list[int]]) -> Iterator[Document]:
    """Yield training texts without end, in the words of CHAT_TEMPLATE."""
    rng = random.Random(seed)
    while True:
        problem = draw(rng, "train")
        parts = [(f"<|system|>calculator(expression)<|user|>{problem.question}<|assistant|>", PROMPT_WEIGHT)]
        for text, reply, weight in conversation(problem, rng):
            parts.append((text + "<|end|>", weight))
            if reply:
                parts.append((f"<|user|><tool_response>{reply}</tool_response><|assistant|>", PROMPT_WEIGHT))
        pieces = [(encode(text), weight) for text, weight in parts]
        yield [i for ids, _ in pieces for i in ids], [weight for ids, weight in pieces for _ in ids]


def batches(seed: int, conversation: Conversation) -> Iterator[Batch]:
    """Yield batches without end."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.build(Path(folder), PIECES, CHAT_TEMPLATE)
        words = Tokenizer.from_file(f"{folder}/tokenizer.json")
    return packed(documents(seed, conversation, lambda text: words.encode(text).ids))


STAGES: dict[str, tuple[int, int, float, Conversation]] = {
    "skill": (881, 400, 2e-3, skill),
    "habit": (882, 100, 5e-4, habit),
}
"""Seed, steps, highest learning rate and conversations of each stage."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the policy that training starts from.")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--start", type=Path, default=DIGITS, help="checkpoint that the first stage starts from")
    parser.add_argument("--output", type=Path, default=START_POLICY)
    arguments = parser.parse_args()
    paddle.set_device("cpu")
    paddle.set_flags({"FLAGS_use_stride_kernel": False})  # strided views make the backward pass slower
    paddle.base.core.set_num_threads(1)
    folder = arguments.start
    for stage in arguments.stages:  # each starts from the rounded weights of the one before
        model = load(folder)
        seed, steps, peak, conversation = STAGES[stage]
        train(model, batches(seed, conversation), steps, peak)
        save(model, arguments.output)
        folder = arguments.output
    tokenizer.build(arguments.output, PIECES, CHAT_TEMPLATE)
    print(f"wrote {arguments.output}")


if __name__ == "__main__":
    main()
