"""Replies in FastDeploy's form: OpenAI's, with what its clients read of a message, of an event and of the usage."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any

from fastdeploy.client.choice import Choice, ChoiceDelta
from fastdeploy.client.generation import WORK_PER_TOKEN, Generation
from fastdeploy.core.errors import InvalidField
from fastdeploy.core.reasoning import Reasoning
from fastdeploy.http.context import ServingContext
from fastdeploy.http.openai.chat import ChatView
from fastdeploy.http.openai.completion import CompletionView
from fastdeploy.http.openai.protocol import GenerationBody

NO_TOKENS: dict[str, Any] = dict.fromkeys(("prompt_token_ids", "completion_token_ids"))
NO_TEXTS: dict[str, Any] = dict.fromkeys(("prompt_tokens", "completion_tokens"))


class ReasoningCounts:
    """The number of tokens of reasoning in each choice; 0 for a model without reasoning."""

    def __init__(self, context: ServingContext, generation: Generation):
        self._choices: list[Reasoning] = []
        with contextlib.suppress(InvalidField):  # a model without reasoning
            start = Reasoning(*context.reasoning_ids("messages"))
            prompts = [start.after_prompt(prompt) for prompt in generation.prompts]
            self._choices = [prompts[i // generation.n] for i in range(len(generation.choices))]

    def add(self, index: int, tokens: Sequence[int]) -> None:
        """Count the next tokens of a choice."""
        if self._choices:
            self._choices[index] = self._choices[index].after(tokens)

    def details(self, index: int | None = None) -> dict[str, int]:
        """Return the completion_tokens_details of one choice, or of all."""
        counted = self._choices if index is None else self._choices[index : index + 1]
        return {"reasoning_tokens": sum(choice.used for choice in counted), "image_tokens": 0}


def with_details(usage: dict[str, Any], details: dict[str, int]) -> dict[str, Any]:
    """Add FastDeploy's details to a usage."""
    prompt = usage["prompt_tokens_details"] | {"image_tokens": 0, "video_tokens": 0}
    return usage | {"prompt_tokens_details": prompt, "completion_tokens_details": details}


class FastDeployChat(ChatView):
    """A chat. The first event of each choice has no token: it has the role and, with return_token_ids, the prompt."""

    def __init__(self, context: ServingContext, generation: Generation, body: GenerationBody):
        super().__init__(context, generation, body)  # type: ignore[arg-type]
        self._form = _Form(context, generation, body)

    async def choice(self, index: int, choice: Choice) -> dict[str, Any]:
        shown = await super().choice(index, choice)
        self._form.count.add(index, choice.token_ids)
        nothing = {"reasoning_content": None, "tool_calls": None}
        shown["message"] = nothing | shown["message"] | await self._form.whole(index, choice)
        return shown

    async def events(self, index: int, delta: ChoiceDelta) -> list[dict[str, Any]]:
        first = index not in self._seen
        self._form.count.add(index, delta.token_ids)
        events = await super().events(index, delta)
        head = []
        if first:
            message = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": None}
            message |= NO_TOKENS | NO_TEXTS | await self._form.prompt(index)
            choice = {"index": index, "delta": message, "logprobs": None, "finish_reason": None}
            head = [self._head(self.event_kind) | {"choices": [choice]}]
            if self._continuous_usage:
                head[0]["usage"] = self._usage_so_far(index, delta._replace(first=0, token_ids=[]))
        nothing = {"content": "", "reasoning_content": None, "tool_calls": None}
        for event in events:
            event.pop("prompt_token_ids", None)
            [shown] = event["choices"]
            shown["delta"] = nothing | shown["delta"] | self._form.delta(delta)
            self._form.finish_event(shown, head)
            delta = delta._replace(text="", token_ids=[])
        return head + events

    def usage(self) -> dict[str, Any]:
        return with_details(super().usage(), self._form.count.details())

    def _usage_so_far(self, index: int, delta: ChoiceDelta) -> dict[str, Any]:
        return with_details(super()._usage_so_far(index, delta), self._form.count.details(index))


class FastDeployCompletion(CompletionView):
    """A completion. With return_token_ids the first event of each choice has no token: it has the prompt."""

    def __init__(self, context: ServingContext, generation: Generation, body: GenerationBody):
        super().__init__(context, generation, body)
        self._form = _Form(context, generation, body)

    async def choice(self, index: int, choice: Choice) -> dict[str, Any]:
        shown = await super().choice(index, choice)
        self._form.count.add(index, choice.token_ids)
        nothing = {"reasoning_content": None, "tool_calls": None, "arrival_time": None}
        return shown | nothing | await self._form.whole(index, choice)

    async def events(self, index: int, delta: ChoiceDelta) -> list[dict[str, Any]]:
        first = index not in self._seen
        self._form.count.add(index, delta.token_ids)
        events = await super().events(index, delta)
        head = []
        if first and (prompt := await self._form.prompt(index)):
            head = [self._head(self.event_kind) | {"choices": [{"index": index, "text": "", **prompt}]}]
        for event in events:
            [shown] = event["choices"]
            shown |= {"reasoning_content": None, "tool_calls": None, **self._form.delta(delta)}
            self._form.finish_event(shown, head)
        return head + events

    def usage(self) -> dict[str, Any]:
        return with_details(super().usage(), self._form.count.details())

    def _usage_so_far(self, index: int, delta: ChoiceDelta) -> dict[str, Any]:
        return with_details(super()._usage_so_far(index, delta), self._form.count.details(index))


class _Form:
    """What chats and completions have in common."""

    def __init__(self, context: ServingContext, generation: Generation, body: GenerationBody):
        self.count = ReasoningCounts(context, generation)
        self._tokenizer = context.tokenizer
        self._generation = generation
        self._asks = bool(body.return_token_ids)
        self._began = time.monotonic()

    async def whole(self, index: int, choice: Choice) -> dict[str, Any]:
        """Return the tokens and the texts of a choice and of its prompt; nulls if nobody asked for them."""
        if not self._asks:
            return NO_TOKENS | NO_TEXTS
        of_choice = {"completion_token_ids": choice.token_ids, "completion_tokens": choice.text}
        return await self.prompt(index) | of_choice

    async def prompt(self, index: int) -> dict[str, Any]:
        """Return the tokens and the text of a prompt; {} if nobody asked for them."""
        if not self._asks:
            return {}
        ids = self._generation.prompts[index // self._generation.n]
        await self._generation.pace.spend(WORK_PER_TOKEN * len(ids))
        text = "" if self._tokenizer is None else self._tokenizer.decode(ids, skip_special_tokens=False)
        return NO_TOKENS | NO_TEXTS | {"prompt_token_ids": ids, "prompt_tokens": text}

    def delta(self, delta: ChoiceDelta) -> dict[str, Any]:
        """Return the tokens and the text that an event adds."""
        if not self._asks:
            return NO_TOKENS | NO_TEXTS
        return NO_TOKENS | NO_TEXTS | {"completion_token_ids": delta.token_ids, "completion_tokens": delta.text}

    def finish_event(self, choice: dict[str, Any], head: list[dict[str, Any]]) -> None:
        """Add the seconds since the request to the choice of an event. Its prompt is in the event before it."""
        choice["arrival_time"] = round(time.monotonic() - self._began, 6)
        if head and isinstance(choice.get("prompt_token_ids"), list):
            choice["prompt_token_ids"] = None
