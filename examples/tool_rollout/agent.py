"""The loop of turns: the model writes until it calls the tool, and goes on with the tool's reply."""

from __future__ import annotations

from dataclasses import dataclass

from examples.embedded_model import tokenizer
from examples.embedded_model.arithmetic import Problem, is_correct
from examples.tool_rollout.calculator import CalculatorError, calculate, step_result
from examples.tool_rollout.rollout import ToolRollout
from fastdeploy.rl.client import RolloutClient

EQUALS = ord("=")  # the embedded model's tokens are bytes


@dataclass(frozen=True)
class Agent:
    """An agent that solves arithmetic problems with a calculator.

    The ``=`` of a step calls the calculator, which writes the result of the step. After an answer, the calculator works
    out the whole problem. If the results differ, the problem is put again as a new message of the user.

    max_tries: answers that the model may give. max_tokens: limit of sampled and tool tokens together. with_tool: False
    for one answer in one turn, without the calculator.
    """

    client: RolloutClient
    temperature: float = 1.0
    max_tries: int = 4
    max_tokens: int = 1000
    with_tool: bool = True

    async def solve(self, problem: Problem, seed: int) -> ToolRollout:
        """Return a rollout. Its turns are one session, so they go to the server that has their history. The same seed
        and weights give the same rollout."""
        question = tokenizer.prompt_ids(problem, chat=True)
        rollout = ToolRollout(list(question))
        limit, answer_at = len(question) + self.max_tokens, len(question)
        while len(rollout.ids) < limit:
            params = {
                "temperature": self.temperature,
                "seed": seed,
                "max_tokens": limit - len(rollout.ids),
                "stop_token_ids": [EQUALS] if self.with_tool else [],
            }
            # The ids so far are sent as they are. Text that is tokenised again could give other ids.
            rollout.add_turn(await self.client.generate(rollout.ids, params, session_id=seed))
            text = tokenizer.decode(rollout.ids[answer_at:])
            if rollout.ids[-1] == EQUALS and self.with_tool:
                try:
                    rollout.add_reply(tokenizer.encode(step_result(text[:-1])))
                except CalculatorError:
                    rollout.tool_errors += 1
                    rollout.add_reply([])  # the model goes on by itself
                continue
            rollout.tries.append(is_correct(problem, text))
            if rollout.ids[-1] != tokenizer.END_ID or not self.with_tool or len(rollout.tries) == self.max_tries:
                break
            if text.rpartition("#")[2].strip() == str(calculate(problem.prompt.removesuffix("="))):
                break
            rollout.add_reply(question)
            answer_at = len(rollout.ids)
        return rollout
