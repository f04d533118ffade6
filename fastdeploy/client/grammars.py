"""Grammars of what clients ask for, in the form of ``SamplingParams.grammar``, and their check.

The output is compared as text: a special token matches no text, and is named by its id where a grammar needs it.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from fastdeploy.core.errors import InvalidField
from fastdeploy.core.grammar import MAX_GRAMMAR_CHARS, PARSER_LIMITS, compiling_thread

# Between the tokens of JSON, where there may be none, too. Without a limit, some models never end.
WHITE_SPACE = r"[ \n\r\t]{1,40}"
MAX_GBNF_RULES = 512  # the converter's time grows with their square, and is some 0.2 s here
CHECKED = 256  # grammars that are remembered as good
MAX_PLACES = 64  # parts of a schema that are looked at to find the wrong one
# Keywords of JSON schema whose value is a schema, a list of schemas, or an object of schemas.
ONE = ("items", "additionalProperties", "additionalItems", "contains", "propertyNames", "not", "if", "then", "else")
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
OBJECTS = ("properties", "patternProperties", "$defs", "definitions")


def json_schema(schema: Any, **options: Any) -> str:
    """Return the grammar of JSON that follows a schema. options: of llguidance's JSON compiler, such as
    ``whitespace_flexible=False``: no white space between tokens."""
    return _canonical(json_schema=_with_options(schema, options))


def _with_options(schema: Any, options: Mapping[str, Any]) -> Any:
    """Return the schema with the options of the JSON compiler; false has none."""
    if schema is False:
        return False
    white_space = {} if "whitespace_flexible" in options else {"whitespace_pattern": WHITE_SPACE}
    return ({} if schema is True else schema) | {"x-guidance": white_space | {**options}}


def regex(pattern: str) -> str:
    """Return the grammar of a regular expression, which the whole output matches."""
    return lark(f"start: /{_in_slashes(pattern)}/")


def choice(options: Sequence[str]) -> str:
    """Return the grammar of an output that is one of these texts."""
    return lark(f"start: {' | '.join(map(_quoted, options))}")


def lark(text: str) -> str:
    """Return the grammar of a Lark text, as llguidance reads it."""
    return _canonical(lark_grammar=text)


def lark_or_gbnf(text: str) -> str:
    """Return the grammar of a Lark text, or of one in GBNF: the EBNF of llama.cpp and XGrammar. Raises ValueError."""
    from llguidance.gbnf_to_lark import any_to_lark

    if len(text) > MAX_GRAMMAR_CHARS:
        raise ValueError(f"expected at most {MAX_GRAMMAR_CHARS} characters, got {len(text)}")
    if (rules := text.count("::=")) > MAX_GBNF_RULES:
        raise ValueError(f"expected at most {MAX_GBNF_RULES} rules in GBNF, got {rules}; Lark may have more")
    try:
        return lark(any_to_lark(text))
    except Exception as error:  # the converter raises anything
        raise ValueError(f"expected a grammar in Lark or GBNF: {error}") from error


def with_named(text: str, name: str, grammar: str) -> str:
    """Return the grammar of a Lark text in which ``@name`` stands for ``grammar``."""
    [inner] = msgspec.json.decode(grammar)["grammars"]
    return msgspec.json.encode({"grammars": [{"lark_grammar": text}, {"name": name, **inner}]}).decode()


def _canonical(**grammar: Any) -> str:
    return msgspec.json.encode({"grammars": [grammar]}).decode()


def _in_slashes(pattern: str) -> str:
    """Return a regular expression as Lark has it between slashes."""
    escaped = re.sub(r"\\.|/", lambda m: "\\/" if m[0] == "/" else m[0], pattern, flags=re.DOTALL)
    return escaped.replace("\n", "\\n")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


class GrammarChecks:
    """The check of grammars, on a thread of its own. Those that were good are remembered: a trainer sends the same one
    with every request."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._good: OrderedDict[str, None] = OrderedDict()

    async def check(self, grammar: str, field: str) -> str:
        """Return ``grammar``. Raises InvalidField for one that cannot be compiled, or not within the limits of
        core/grammar.py. field: where the client gave it. The error names the place in a JSON schema."""
        if len(grammar) > MAX_GRAMMAR_CHARS:
            raise InvalidField(field, f"expected at most {MAX_GRAMMAR_CHARS} characters, got {len(grammar)}")
        if grammar not in self._good:
            self._thread = self._thread or compiling_thread("grammar-checks")
            loop = asyncio.get_running_loop()
            place, error = await loop.run_in_executor(self._thread, _find_error, grammar)
            if error:
                raise InvalidField(".".join([field, *place]), error)
        self._good[grammar] = None
        self._good.move_to_end(grammar)
        while len(self._good) > CHECKED:
            self._good.popitem(last=False)
        return grammar


def _find_error(grammar: str) -> tuple[list[str], str]:
    """Return the place and the text of the first error; "" if there is none."""
    error = _error_of(grammar)
    if not error:
        return [], ""
    schema = msgspec.json.decode(grammar)["grammars"][0].get("json_schema")
    place: list[str] = []
    if isinstance(schema, dict):
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        looked_at = 0
        found = True
        while found and looked_at < MAX_PLACES:
            found = False
            for path, part in _parts(schema):
                looked_at += 1
                if wrong := _error_of(_canonical(json_schema=shared | part)):
                    schema, error, found = part, wrong, True
                    place += path
                    break
                if looked_at >= MAX_PLACES:
                    break
    return place, error


def _parts(schema: dict[str, Any]) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """Yield the schemas in a schema that are objects, with their places."""
    for key in ONE:
        if isinstance(part := schema.get(key), dict):
            yield [key], part
    for key in LISTS:
        for i, part in enumerate(schema[key] if isinstance(schema.get(key), list) else ()):
            if isinstance(part, dict):
                yield [key, str(i)], part
    for key in OBJECTS:
        for name, part in (schema[key] if isinstance(schema.get(key), dict) else {}).items():
            if isinstance(part, dict):
                yield [key, name], part


def _error_of(grammar: str) -> str:
    """Return why a grammar cannot be compiled; "" if it can."""
    from llguidance import LLMatcher, LLParserLimits

    try:
        return LLMatcher.validate_grammar(grammar, limits=LLParserLimits(**PARSER_LIMITS))
    except ValueError as error:
        return str(error)
