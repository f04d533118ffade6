"""The token ids of earlier turns that a client sends back with its messages, as NeMo-RL, NeMo-Gym and HUD do."""

from __future__ import annotations

from typing import Any, NamedTuple

from fastdeploy.client.generation import Generation
from fastdeploy.client.tokenizer import Tokenizer
from fastdeploy.client.turns import KnownTurn, extend
from fastdeploy.core.errors import InvalidField
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.http.body import given_fields
from fastdeploy.http.context import ServingContext
from fastdeploy.http.openai.protocol import ChatBody

ASSISTANT = "assistant"
# Fields of a message that say what its tokens are. The chat template does not get them.
TURN_FIELDS = frozenset({"prompt_token_ids", "generation_token_ids", "generation_log_probs"})
# Fields of a body whose ids the prompt begins with: NeMo-RL's, and HUD's.
PREFIXES = ("required_prefix_token_ids", "prompt_token_ids")


class GivenTurn(NamedTuple):
    """A turn whose ids the client knows. field: the field of the body that has them."""

    turn: KnownTurn
    field: str


def given_turn(context: ServingContext, body: ChatBody) -> GivenTurn | None:
    """Return the last turn of ``body`` whose ids are given: by a field of the body, whose ids end with the last
    assistant's message, or by the message itself. None if there is none. Raises InvalidField."""
    turns = [i for i, message in enumerate(body.messages) if message.role == ASSISTANT]
    for field in PREFIXES:
        if ids := getattr(body, field):
            if not turns:
                raise InvalidField(field, "expected an assistant's message that they end with")
            return GivenTurn(KnownTurn(turns[-1] + 1, context.check_prompt(ids, field, "a list of token ids")), field)
    for i in reversed(turns):
        if body.messages[i].prompt_token_ids:
            field = f"messages.{i}.prompt_token_ids"
            return GivenTurn(KnownTurn(i + 1, _message_ids(context, body, i)), field)
    return None


def _message_ids(context: ServingContext, body: ChatBody, i: int) -> list[int]:
    parts = ("prompt_token_ids", "generation_token_ids")
    for name in parts:
        if not isinstance(getattr(body.messages[i], name), list):
            raise InvalidField(f"messages.{i}.{name}", f"expected a list of token ids, with {' and '.join(parts)}")
    ids = body.messages[i].prompt_token_ids + body.messages[i].generation_token_ids
    return context.check_prompt(ids, f"messages.{i}.prompt_token_ids", "a list of token ids")


async def turn_fields(generation: Generation, index: int) -> dict[str, Any]:
    """Return the fields of a reply's message that a client sends back with the next turn, as NeMo-RL names them."""
    choice = generation.choices[index]
    return {
        "prompt_token_ids": generation.prompts[index // generation.n],
        "generation_token_ids": choice.token_ids,
        "generation_log_probs": await generation.pace.array(entry.logprob for entry in choice.logprobs),
    }


async def extended(
    context: ServingContext,
    tokenizer: Tokenizer,
    body: ChatBody,
    messages: list[dict[str, Any]],
    given: GivenTurn,
    template: dict[str, Any],
) -> list[int]:
    """Return the prompt that begins with the ids of ``given``. template: see fastdeploy.client.turns.extend. Raises
    InvalidField if the template writes no text that they could be followed by."""
    ids = await extend(tokenizer, messages, given.turn, end_ids(context, body), **template)
    if ids is None:
        why = "the chat template writes this turn in another way when messages follow it, so no text follows these ids"
        raise InvalidField(given.field, why)
    return ids


def end_ids(context: ServingContext, body: ChatBody) -> set[int]:
    """Return the tokens that may have ended a turn."""
    return {*context.end_ids, *given_fields(body, SamplingParams).get("stop_token_ids", ())}
