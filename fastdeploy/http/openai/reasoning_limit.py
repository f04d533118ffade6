"""Fields that limit the reasoning of an answer, in the names of several engines: FastDeploy's ``reasoning_max_tokens``,
vLLM's ``thinking_token_budget``, and FastDeploy's ``logits_processors_args``."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from fastdeploy.core.errors import InvalidField
from fastdeploy.core.sampling_params import MAX_INT32, MAX_REASONING_END
from fastdeploy.http.body import Body
from fastdeploy.http.context import ServingContext

Budget = Annotated[int, Field(ge=0, le=MAX_INT32, strict=True)]
PROCESSORS = "logits_processors_args"


class LogitsProcessorsArgs(Body):
    """The arguments of FastDeploy's own logits processors; a processor of one's own is a program, and is not run here.
    logit_bias: by token id. thinking_budget: as reasoning_max_tokens. think_stop_sentence: is written behind the
    budget, before the reasoning ends."""

    logit_bias: dict[str, float] | None = None
    thinking_budget: Budget | None = None
    think_stop_sentence: Annotated[str, Field(max_length=64 * MAX_REASONING_END)] | None = None


async def reasoning_limit(
    context: ServingContext, given: int | None, budget: int | None, processors: LogitsProcessorsArgs | None
) -> dict[str, Any]:
    """Return the fields of SamplingParams that limit the reasoning; the smallest of several limits counts. given:
    reasoning_max_tokens. budget: thinking_token_budget. Raises InvalidField."""
    args = processors or LogitsProcessorsArgs()
    limits = [limit for limit in (given, budget, args.thinking_budget) if limit is not None]
    if not limits:
        return {}
    fields: dict[str, Any] = {"reasoning_max_tokens": min(limits)}
    if args.think_stop_sentence:
        field = f"{PROCESSORS}.think_stop_sentence"
        sentence = await context.encode(args.think_stop_sentence, field, special_tokens=False)
        ids = context.reasoning_ids(field)
        if len(sentence) >= MAX_REASONING_END or ids[1] in sentence:
            expected = f"at most {MAX_REASONING_END - 1} tokens, none of them the one that ends reasoning"
            raise InvalidField(field, f"expected {expected}")
        fields |= {"reasoning_ids": ids, "reasoning_end": (*sentence, ids[1])}
    return fields
