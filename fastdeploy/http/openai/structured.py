"""Fields that restrict the tokens of an answer: OpenAI's ``response_format`` and ``logit_bias``, vLLM's
``structured_outputs`` with its older ``guided_*``, ``bad_words``, and the limits of reasoning."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from pydantic import Field

from fastdeploy.client import grammars
from fastdeploy.core.errors import InvalidField
from fastdeploy.core.sampling_params import SamplingParams, check_vocabulary
from fastdeploy.http.body import Body, Int64, given_fields
from fastdeploy.http.context import ServingContext
from fastdeploy.http.openai.reasoning_limit import PROCESSORS, Budget, LogitsProcessorsArgs, reasoning_limit

MAX_BAD_WORDS = 512
MAX_BAD_WORD_CHARS = 16384  # in all
MAX_CHOICES = 2048


class StructuredOutputs(Body):
    """vLLM's StructuredOutputsParams. Exactly one of the first five is given. grammar: in Lark or GBNF.
    disable_any_whitespace: JSON has no white space between its tokens. whitespace_pattern: a regular expression for
    it. disable_fallback: ignored, there is one backend."""

    json_: Any = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None
    disable_fallback: bool | None = None

    def asked(self) -> dict[str, Any]:
        """Return the kinds of grammar that are given, with their values."""
        kinds = {"json": self.json_, "regex": self.regex, "choice": self.choice, "grammar": self.grammar,
                 "json_object": self.json_object or None}  # fmt: skip
        return {kind: value for kind, value in kinds.items() if value is not None}

    def options(self) -> dict[str, Any]:
        """Return the options of the JSON compiler."""
        options: dict[str, Any] = {}
        if self.disable_any_whitespace:
            options["whitespace_flexible"] = False
        if self.whitespace_pattern is not None:
            options["whitespace_pattern"] = self.whitespace_pattern
        return options


class ConstrainedBody(Body):
    """The fields of a body that restrict its answer. logit_bias: by token id. bad_words_token_ids: ids that are not
    drawn. response_format: OpenAI's text, json_object or json_schema. At most one of response_format,
    structured_outputs and guided_* is given. thinking_token_budget: as reasoning_max_tokens."""

    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    bad_words_token_ids: list[Int64] | None = None
    logits_processors_args: LogitsProcessorsArgs | None = None
    thinking_token_budget: Budget | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None


async def constraints(
    context: ServingContext, body: ConstrainedBody, grammar: str = "", whole: Callable[[str], str] | None = None
) -> dict[str, Any]:
    """Return the checked fields of SamplingParams that restrict the answer. grammar: one that the route has made of
    other fields; then the client may ask for no other. whole: makes the grammar of an answer of the one that the client
    asks for. Raises InvalidField."""
    given: dict[str, Any] = {}
    asked = grammars_asked(body)
    if len(asked) + bool(grammar) > 1:
        raise InvalidField([*asked][-1], "expected only one field that asks for a grammar")
    for field, build in asked.items():
        grammar = await checked(context, field, build)
        if whole is not None:
            grammar = await checked(context, field, functools.partial(whole, grammar))
    if grammar:
        given["grammar"] = grammar
    processors = body.logits_processors_args
    if processors is not None and processors.logit_bias is not None:
        if body.logit_bias is not None:
            raise InvalidField(f"{PROCESSORS}.logit_bias", "expected no other logit_bias beside it")
        given["logit_bias"] = biases(processors.logit_bias, f"{PROCESSORS}.logit_bias")
    if body.logit_bias is not None:
        given["logit_bias"] = biases(body.logit_bias, "logit_bias")
    if body.bad_words is not None or body.bad_words_token_ids is not None:
        check_vocabulary(body.bad_words_token_ids or (), context.vocab_size, "bad_words_token_ids")
        ids = dict.fromkeys((token,) for token in body.bad_words_token_ids or ())
        given["bad_words"] = (*await _bad_words(context, body.bad_words or []), *ids)
        if len(given["bad_words"]) > 2 * MAX_BAD_WORDS:
            raise InvalidField("bad_words_token_ids", f"expected at most {2 * MAX_BAD_WORDS} bad words and ids in all")
    limit = given_fields(body, SamplingParams).get("reasoning_max_tokens")
    return given | await reasoning_limit(context, limit, body.thinking_token_budget, processors)


async def checked(context: ServingContext, field: str, build: Callable[[], str]) -> str:
    """Return the grammar that ``build`` makes of a field. Raises InvalidField."""
    if not context.require_tokenizer(field).has_grammars:
        raise InvalidField(field, "not supported: this model has no tokenizer.json")
    try:
        grammar = await asyncio.to_thread(build)
    except (ValueError, RecursionError) as error:
        raise InvalidField(field, str(error)) from error
    return await context.grammars.check(grammar, field)


def biases(given: Mapping[str, float], field: str) -> tuple[tuple[int, float], ...]:
    """Return a logit_bias, whose keys are token ids in decimal, as SamplingParams has it."""
    for key in given:
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            raise InvalidField(f"{field}.{key}", "expected a token id")
    return tuple((int(key), bias) for key, bias in given.items())


async def _bad_words(context: ServingContext, words: list[str]) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of each word at the beginning of a text, and behind a space."""
    if len(words) > MAX_BAD_WORDS or sum(map(len, words)) > MAX_BAD_WORD_CHARS:
        raise InvalidField("bad_words", f"expected at most {MAX_BAD_WORDS} words, {MAX_BAD_WORD_CHARS} characters")
    found: dict[tuple[int, ...], None] = {}
    for i, word in enumerate(words):
        if not word.strip():
            raise InvalidField(f"bad_words.{i}", "expected a word")
        for text in (word.lstrip(), " " + word.lstrip()):
            ids = await context.encode(text, "bad_words", special_tokens=False)
            found[tuple(ids)] = None
    return tuple(found)


def grammars_asked(body: ConstrainedBody) -> dict[str, Callable[[], str]]:
    """Return what makes the grammar of each field that asks for one."""
    asked: dict[str, Callable[[], str]] = {}
    if body.response_format is not None and (found := _of_response_format(body.response_format)) is not None:
        asked[found[0]] = found[1]
    if body.structured_outputs is not None:
        outputs = body.structured_outputs
        if not outputs.asked():
            raise InvalidField("structured_outputs", "expected one of json, regex, choice, grammar and json_object")
        for kind, value in outputs.asked().items():
            asked[f"structured_outputs.{kind}"] = builder(kind, value, f"structured_outputs.{kind}", outputs.options())
    pattern = body.guided_whitespace_pattern
    options = {"whitespace_pattern": pattern} if pattern else {}
    for kind in ("json", "regex", "choice", "grammar"):
        if (value := getattr(body, f"guided_{kind}")) is not None:
            asked[f"guided_{kind}"] = builder(kind, value, f"guided_{kind}", options)
    return asked


def _of_response_format(given: dict[str, Any]) -> tuple[str, Callable[[], str]] | None:
    """Return the field of the schema, and what makes its grammar; None for text."""
    kind = given.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return "response_format", builder("json_object", True, "response_format")
    if kind != "json_schema":
        raise InvalidField("response_format.type", f"expected text, json_object or json_schema, got {kind!r}")
    spec = given.get("json_schema")
    if not isinstance(spec, dict) or not isinstance(spec.get("schema"), dict | bool):
        raise InvalidField("response_format.json_schema.schema", "expected a JSON schema")
    field = "response_format.json_schema.schema"
    return field, builder("json", spec["schema"], field)


def builder(kind: str, value: Any, field: str, options: Mapping[str, Any] | None = None) -> Callable[[], str]:
    """Return what makes a grammar. kind: a name of vLLM's StructuredOutputsParams. options: of the JSON compiler.
    Raises InvalidField for a value of the wrong form."""
    options = options or {}
    if kind == "json_object":
        return lambda: grammars.json_schema({"type": "object"}, **options)
    if kind == "json":
        schema = _schema(value, field)
        return lambda: grammars.json_schema(schema, **options)
    if kind == "choice":
        if not 1 <= len(value) <= MAX_CHOICES:
            raise InvalidField(field, f"expected 1 to {MAX_CHOICES} texts, got {len(value)}")
        return lambda: grammars.choice(value)
    return lambda: grammars.regex(value) if kind == "regex" else grammars.lark_or_gbnf(value)


def _schema(value: Any, field: str) -> dict[str, Any] | bool:
    """Return a JSON schema, which clients also send as text."""
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (ValueError, RecursionError) as error:
            raise InvalidField(field, f"expected a JSON schema: {error}") from error
    if not isinstance(value, dict | bool):
        raise InvalidField(field, "expected a JSON schema")
    return value
