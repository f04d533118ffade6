"""Log probabilities of prompts and answers from any engine, by the routes of vLLM, SGLang or OpenAI.

A dialect says how a question becomes a body, and how a reply becomes answers. The first dialect that gives log
probabilities of the prompts is used; if none does, the first that gives those of the answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from fastdeploy.core.errors import FastDeployError
from fastdeploy.rl.check_sync.serving import Calls

Body: TypeAlias = dict[str, Any]
BATCH = 16  # prompts of one request


class Question(NamedTuple):
    """The options of a request, for all of its prompts. max_tokens: of an answer, which does not end before.
    with_prompt: log probabilities of the prompts, too; engines then compute the whole prompt. salt: no KV is shared
    with requests of another salt."""

    max_tokens: int
    temperature: float = 0.0
    with_prompt: bool = False
    salt: str | None = None


class Answer(NamedTuple):
    """prompt_logprobs: of the prompt's tokens from the second on, float64, NaN for what the engine does not say; None:
    it says none. token_ids, logprobs: of the answer. cached: tokens of the prompt whose KV was reused; None: the engine
    does not say."""

    prompt: tuple[int, ...]
    prompt_logprobs: np.ndarray | None
    token_ids: tuple[int, ...]
    logprobs: np.ndarray
    cached: int | None


class Unusable(OSError):
    """An engine refuses a question, or its reply lacks what was asked for."""


class Dialect(NamedTuple):
    """path: of the route. body: takes the prompts, the question and the model's name. read: takes the prompts and the
    reply. salted: the field that separates KV."""

    name: str
    path: str
    body: Callable[[Sequence[Sequence[int]], Question, str], Body]
    read: Callable[[Sequence[Sequence[int]], Any], list[Answer]]
    salted: str


class Completions:
    """The route of an engine that answers questions. model: the name of the model at the engine."""

    def __init__(self, calls: Calls, model: str):
        self._calls, self._model = calls, model
        self._dialect: Dialect | None = None

    def ask(self, prompts: Sequence[Sequence[int]], question: Question, batch: int = BATCH) -> list[Answer]:
        """Return the answers in the order of the prompts. Raises Unusable, or Unreachable."""
        if self._dialect is None:
            self._dialect = self._chosen(prompts[:1], question)
        return [
            answer
            for first in range(0, len(prompts), batch)
            for answer in self._ask(self._dialect, prompts[first : first + batch], question)
        ]

    def _chosen(self, prompts: Sequence[Sequence[int]], question: Question) -> Dialect:
        reasons, usable = [], []
        for dialect in DIALECTS:
            try:
                [answer] = self._ask(dialect, prompts, question._replace(with_prompt=True))
            except Unusable as error:
                reasons.append(str(error))
                continue
            if answer.prompt_logprobs is not None:
                return dialect
            usable.append(dialect)
        if not usable:
            raise Unusable(f"no route of the engine gives log probabilities: {'; '.join(reasons)}")
        return usable[0]

    def _ask(self, dialect: Dialect, prompts: Sequence[Sequence[int]], question: Question) -> list[Answer]:
        body = dialect.body(prompts, question, self._model)
        if question.salt is not None:
            body[dialect.salted] = question.salt
        try:
            reply = self._calls.send("POST", dialect.path, json=body)
        except FastDeployError as error:
            if (status := error.detail.get("status")) is None:
                raise
            raise Unusable(f"POST {dialect.path}: status {status}: {error.message}") from error
        try:
            answers = dialect.read(prompts, reply.json())
            for one in answers:
                if not one.token_ids or one.logprobs.shape != (len(one.token_ids),):
                    raise ValueError(f"{len(one.token_ids)} tokens with {one.logprobs.size} log probabilities")
            return answers
        except (KeyError, TypeError, ValueError, IndexError) as error:
            what = f"{type(error).__name__}: {error}"
            raise Unusable(
                f"POST {dialect.path}: the reply has no log probabilities of {dialect.name} ({what})"
            ) from error


def _vllm_body(prompts: Sequence[Sequence[int]], question: Question, model: str) -> Body:
    """vLLM and this server: one list of log probabilities for the prompt, beside those of the answer."""
    asked = {"prompt_logprobs": 0} if question.with_prompt else {}
    return _completion(prompts, question, model) | {"return_token_ids": True} | asked


def _echo_body(prompts: Sequence[Sequence[int]], question: Question, model: str) -> Body:
    """OpenAI's first completions: the prompt is repeated in front of the answer."""
    return _completion(prompts, question, model) | {"echo": question.with_prompt}


def _completion(prompts: Sequence[Sequence[int]], question: Question, model: str) -> Body:
    return {
        "model": model,
        "prompt": [list(prompt) for prompt in prompts],
        "max_tokens": question.max_tokens,
        "temperature": question.temperature,
        "seed": 0,
        "ignore_eos": True,
        "logprobs": 1,
        "return_tokens_as_token_ids": True,
    }


def _read_vllm(prompts: Sequence[Sequence[int]], reply: Any) -> list[Answer]:
    return [
        Answer(
            tuple(prompt),
            _of_prompt(prompt, choice.get("prompt_logprobs")),
            tuple(choice.get("token_ids") or _named_ids(choice["logprobs"]["tokens"])),
            _numbers(choice["logprobs"]["token_logprobs"]),
            _cached(reply, len(prompts)),
        )
        for prompt, choice in _choices(prompts, reply)
    ]


def _read_echo(prompts: Sequence[Sequence[int]], reply: Any) -> list[Answer]:
    answers = []
    for prompt, choice in _choices(prompts, reply):
        values, names = _numbers(choice["logprobs"]["token_logprobs"]), choice["logprobs"]["tokens"]
        echoed = len(prompt) if len(values) > len(prompt) else 0
        of_prompt = values[1:echoed] if echoed else None
        token_ids = _named_ids(names[echoed:])
        answers.append(Answer(tuple(prompt), of_prompt, token_ids, values[echoed:], _cached(reply, len(prompts))))
    return answers


def _sglang_body(prompts: Sequence[Sequence[int]], question: Question, model: str) -> Body:
    """SGLang: with temperature 1, or greedily, its log probabilities are those of the logits as they are."""
    return {
        "input_ids": [list(prompt) for prompt in prompts],
        "sampling_params": {
            "max_new_tokens": question.max_tokens,
            "temperature": question.temperature,
            "sampling_seed": 0,
            "ignore_eos": True,
        },
        "return_logprob": True,
        "logprob_start_len": 0 if question.with_prompt else -1,
    }


def _read_sglang(prompts: Sequence[Sequence[int]], reply: Any) -> list[Answer]:
    answers = []
    for prompt, one in zip(prompts, reply, strict=True):
        info = one["meta_info"]
        given, made = info.get("input_token_logprobs") or [], info["output_token_logprobs"]
        of_prompt = _numbers([entry[0] for entry in given[1:]]) if len(given) == len(prompt) else None
        token_ids = tuple(entry[1] for entry in made)
        logprobs = _numbers([entry[0] for entry in made])
        answers.append(Answer(tuple(prompt), of_prompt, token_ids, logprobs, info.get("cached_tokens")))
    return answers


def _choices(prompts: Sequence[Sequence[int]], reply: Any) -> list[tuple[Sequence[int], Any]]:
    return list(zip(prompts, sorted(reply["choices"], key=lambda choice: choice["index"]), strict=True))


def _of_prompt(prompt: Sequence[int], entries: Any) -> np.ndarray | None:
    if entries is None:
        return None
    pairs = zip(prompt[1:], entries[1:], strict=True)
    return _numbers([None if entry is None else entry[str(token)]["logprob"] for token, entry in pairs])


def _numbers(values: Sequence[float | None]) -> np.ndarray:
    return np.array([math.nan if value is None else value for value in values], np.float64)


def _named_ids(names: Sequence[str]) -> tuple[int, ...]:
    """Return ids of names such as "token_id:7" (vLLM) or "token:7"."""
    return tuple(int(name.rpartition(":")[2]) for name in names)


def _cached(reply: Any, num_prompts: int) -> int | None:
    """Return the cached tokens of the prompt, if the reply is to one prompt."""
    details = (reply.get("usage") or {}).get("prompt_tokens_details") or {}
    return details.get("cached_tokens") if num_prompts == 1 else None


DIALECTS = (
    Dialect("vLLM", "/v1/completions", _vllm_body, _read_vllm, "cache_salt"),
    Dialect("SGLang", "/generate", _sglang_body, _read_sglang, "extra_key"),
    Dialect("OpenAI", "/v1/completions", _echo_body, _read_echo, "cache_salt"),
)
