"""An environment for verifiers: sums in two turns. Its harness talks to verifiers' endpoint in this process, since the
built-in ones install a program by uv. Its renderer keeps the sampled tokens of the first turn as they are."""

from __future__ import annotations

from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI
from renderers.base import RenderedTokens
from renderers.configs import DefaultRendererConfig
from renderers.default import DefaultRenderer

__all__ = ["SumsHarness", "SumsTaskset"]

QUESTIONS = [("12+34=", "46"), ("7+5=", "12"), ("85-9=", "76")]
SECOND_TURN = "3+5="


class SumsData(vf.TaskData):
    answer: str


class SumsTask(vf.Task[SumsData]):
    @vf.reward(weight=1.0)
    async def is_right(self, trace: vf.Trace) -> float:
        """Return 1.0 if the first answer ends with the sum."""
        first = next(node for node in trace.nodes if node.sampled)
        return float((first.message.content or "").endswith(f"#{self.data.answer}"))


class SumsConfig(vf.TasksetConfig):
    pass


class SumsTaskset(vf.Taskset[SumsTask, SumsConfig]):
    def load(self) -> list[SumsTask]:
        return [SumsTask(SumsData(prompt=prompt, answer=answer), self.config.task) for prompt, answer in QUESTIONS]


class SumsHarness(vf.Harness[vf.HarnessConfig]):
    """Asks the question of the task, then SECOND_TURN."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **_: Any) -> vf.ProgramResult:
        messages: list[dict[str, Any]] = []
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            for question in (data.prompt, SECOND_TURN):
                messages.append({"role": "user", "content": question})
                reply = await client.chat.completions.create(model=ctx.model, messages=messages)
                messages.append({"role": "assistant", "content": reply.choices[0].message.content})
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


class SumsRendererConfig(DefaultRendererConfig):
    pass


class SumsRenderer(DefaultRenderer):
    """The default renderer, with the step that verifiers' own renderers for known models have."""

    config_class = SumsRendererConfig

    def bridge_to_next_turn(self, previous_prompt_ids, previous_completion_ids, new_messages, *, tools=None):
        """Return the tokens of the turn before, and behind them those of the new messages."""
        before = [*previous_prompt_ids, *previous_completion_ids]
        if before[-1] not in self.get_stop_token_ids():
            return None
        new = self.render(new_messages, tools=tools, add_generation_prompt=True)
        return RenderedTokens(
            token_ids=before + new.token_ids,
            message_indices=[-1] * len(before) + new.message_indices,
            message_roles=new.message_roles,
            message_tool_names=new.message_tool_names,
        )
