"""Drafters for tests: right, wrong or anything between."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from fastdeploy.core.request import Request
from support.fake_runner import FakeRunner, next_token

MOST = 6  # drafts of one request


class ScriptedDrafter:
    """A drafter that asks ``guess`` for the drafts of each request."""

    def __init__(self, guess: Callable[[Request], list[int]]):
        self.guess = guess

    def draft(self, requests: Sequence[Request], other_rows: int, most: int) -> Mapping[Request, list[int]]:
        drafts = {}
        for request in requests:
            drafted = self.guess(request)[: max(most, 0)]
            most -= len(drafted)
            drafts[request] = drafted
        return drafts

    def ended(self, request: Request) -> None: ...


def coming_tokens(runner: FakeRunner, request: Request, count: int) -> list[int]:
    """Return the next tokens of a request under the weights that serve now."""
    sampling, number = request.sampling, request.model.served.adapter
    content = runner.adapters[number].content if number else 0
    tokens = list(request.token_ids)
    for _ in range(count):
        early = len(tokens) - request.num_prompt_tokens < sampling.min_tokens
        banned = (*runner.info.eos_token_ids, *sampling.stop_token_ids) if early else ()
        tokens.append(next_token(tokens, runner.weights, runner.info.vocab_size, banned, content))
    return tokens[request.num_tokens :]


def adversary(
    coming: Callable[[Request, int], list[int]], vocab: int, seed: int = 0, most: int = MOST
) -> ScriptedDrafter:
    """Return a drafter that is right, wrong, right for a while, random or silent, in an order that ``seed`` fixes.
    coming: the next tokens of a request, at most so many. most: drafts of one request."""
    draw = random.Random(seed)

    def guess(request: Request) -> list[int]:
        kind, count = draw.choice(["right", "right", "wrong", "random", "then wrong", "silent"]), draw.randint(1, most)
        right = coming(request, count)
        match kind:
            case "right":
                return right
            case "wrong":
                return [(token + 1) % vocab for token in right]
            case "random":
                return [draw.randrange(vocab) for _ in range(count)]
            case "then wrong":
                return [*right[:-1], *((token + 1) % vocab for token in right[-1:])]
        return []

    return ScriptedDrafter(guess)


class Memory(ScriptedDrafter):
    """A drafter that never drafts, and remembers what each request got in the end. The memory of a server can then be
    asked for the coming tokens of the same request at another one."""

    def __init__(self) -> None:
        super().__init__(lambda _: [])
        self._tokens: dict[tuple[object, ...], list[int]] = {}

    def ended(self, request: Request) -> None:
        self._tokens[self._key(request)] = request.token_ids[request.num_prompt_tokens :]

    def coming(self, request: Request, count: int) -> list[int]:
        """Return the next tokens of a request, at most ``count``."""
        return self._tokens.get(self._key(request), [])[request.num_output_tokens :][:count]

    @staticmethod
    def _key(request: Request) -> tuple[object, ...]:
        return *request.token_ids[: request.num_prompt_tokens], request.key[1], request.sampling


def free(rows: int, sampled: int, keys: float) -> float:
    """Return the seconds of a step that takes one second, however wide it is."""
    return 1.0


def per_row(base: float, row: float) -> Callable[[int, int, float], float]:
    """Return a cost of ``base`` seconds, and ``row`` more for each row."""
    return lambda rows, sampled, keys: base + row * rows
