"""The text of one tool call, as each family of models writes it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

# Markers inside of a call that are tokens of their own in some vocabularies.
INNER_MARKERS = ("<｜tool▁sep｜>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
# A name of a function, and the JSON schema of its arguments.
Tools = Mapping[str, Mapping[str, Any]]
FENCE = "```"
MAX_NESTING = 128  # of lists and objects in the arguments of a call
# Strings are found too, since what is in them does not count. One without an end is found as well: otherwise the time
# would grow with the square of its length.
BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"?|[\[{\]}]', re.DOTALL)
OPENING = {"[": 1, "{": 1, "]": -1, "}": -1}
MAX_DEPTH = 8  # of anyOf and oneOf in each other
WORDS = {"True": "true", "False": "false", "None": "null"}  # of Python, which templates write for JSON's
JSON_KINDS = {'"': "string", "{": "object", "[": "array", "t": "boolean", "f": "boolean", "n": "null"}
SPACE = re.compile(r"\s*")
FUNCTION = re.compile(r"\s*<function=([^>\n]+)>")
_encode = msgspec.json.Encoder().encode


class BrokenCall(Exception):
    """The text is no tool call. The message says why."""


class Call(NamedTuple):
    """A tool call. arguments: the text of a JSON object, as it was sampled where it was JSON."""

    name: str
    arguments: str


class CallObject(msgspec.Struct):
    """A call as one JSON object. Llama writes "parameters"."""

    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"")
    parameters: msgspec.Raw = msgspec.Raw(b"")


def json_call(text: str, tools: Tools) -> list[Call]:
    """Read ``{"name": ..., "arguments": {...}}`` (Hermes, Qwen, ERNIE)."""
    try:
        _require_json(text)
        call = msgspec.json.decode(text.strip().encode(errors="replace"), type=CallObject)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BrokenCall(f"expected a JSON object with a name and arguments: {error}") from error
    arguments = bytes(call.arguments) or bytes(call.parameters)
    return [_checked(call.name, arguments.decode() or "{}", tools)]


def llama_calls(text: str, tools: Tools) -> list[Call]:
    """Read ``{"name": ..., "parameters": {...}}``, and further ones behind semicolons (Llama 3)."""
    return [call for part in _objects(text) for call in json_call(part, tools)]


def deepseek_call(text: str, tools: Tools) -> list[Call]:
    """Read ``function<｜tool▁sep｜>name`` with arguments in a code block (V3, R1), or ``name<｜tool▁sep｜>arguments``
    (V3.1)."""
    name, separator, rest = text.partition(INNER_MARKERS[0])
    if not separator:
        raise BrokenCall(f"expected {INNER_MARKERS[0]} between the name and the arguments")
    if FENCE in rest and not rest.lstrip().startswith("{"):
        name, _, rest = rest.partition(FENCE)
        rest = rest.removeprefix("json").rstrip().removesuffix(FENCE)
    return [_checked(name.strip(), rest.strip(), tools)]


def qwen_coder_call(text: str, tools: Tools) -> list[Call]:
    """Read ``<function=name>`` with ``<parameter=key>value</parameter>`` for each argument (Qwen3-Coder, Qwen3.5)."""
    head = FUNCTION.match(text)
    if head is None:
        raise BrokenCall("expected <function=NAME>")
    name, body = head[1].strip(), text[head.end() :].rstrip()
    if not body.endswith("</function>"):
        raise BrokenCall("expected </function> at the end")
    body = body.removesuffix("</function>")
    pairs = _pairs(body, "<parameter=", ">", "", "</parameter>")
    return [_of_pairs(name, [(key, _without_frame(value)) for key, value in pairs], tools)]


def glm_call(text: str, tools: Tools) -> list[Call]:
    """Read a name, then ``<arg_key>key</arg_key>`` and ``<arg_value>value</arg_value>`` for each argument (GLM)."""
    name, opening, body = text.partition("<arg_key>")
    pairs = _pairs(opening + body, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    return [_of_pairs(name.strip(), list(pairs), tools)]


def _checked(name: str, arguments: str, tools: Tools) -> Call:
    """Return the call, if there is such a function and the arguments are a JSON object."""
    if name not in tools:
        raise BrokenCall(f"there is no function {name[:100]!r}")
    try:
        _require_json(arguments)
        if arguments.lstrip().startswith('"'):  # the object as JSON in a string
            arguments = msgspec.json.decode(arguments.encode(errors="replace"), type=str)
            _require_json(arguments)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BrokenCall(f"expected arguments in JSON: {error}") from error
    if not arguments.lstrip().startswith("{"):
        raise BrokenCall("expected a JSON object of arguments")
    return Call(name, arguments)


def _require_json(text: str) -> None:
    """Raise MsgspecError unless ``text`` is JSON. Numbers may be of any size, as in grammars. The limit of nesting is
    fixed, since that of decoders depends on the stack of the caller: a stream would differ from a whole reply."""
    depth = 0
    for found in BRACKETS.finditer(text):
        depth += OPENING.get(found[0], 0)
        if depth > MAX_NESTING:
            raise msgspec.DecodeError(f"it is nested more than {MAX_NESTING} deep")
    msgspec.json.decode(text.encode(errors="replace"), type=msgspec.Raw)


def _objects(text: str) -> Iterator[str]:
    """Return the text of each JSON object in a row of them."""
    decoder, at = json.JSONDecoder(), _past_space(text, 0)
    while at < len(text):
        try:
            _, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            raise BrokenCall(f"expected a JSON object with a name and parameters: {error}") from error
        yield text[at:end]
        at = _past_space(text, end)
        if text.startswith(";", at):
            at = _past_space(text, at + 1)


def _pairs(text: str, opens: str, key_end: str, value_start: str, closes: str) -> Iterator[tuple[str, str]]:
    """Return the key and the value of each argument. Between arguments is only white space."""
    at = 0
    while (at := _past_space(text, at)) < len(text):
        key_at = _past(text, at, opens)
        key_ends = _find(text, key_at, key_end)
        value_at = _past(text, key_ends + len(key_end), value_start)
        value_ends = _find(text, value_at, closes)
        yield text[key_at:key_ends].strip(), text[value_at:value_ends]
        at = value_ends + len(closes)


def _past_space(text: str, at: int) -> int:
    space = SPACE.match(text, at)
    return at if space is None else space.end()


def _past(text: str, at: int, marker: str) -> int:
    """Return the place behind ``marker``, which must stand at ``at``, or behind white space there."""
    start = _past_space(text, at) if marker else at
    if not text.startswith(marker, start):
        raise BrokenCall(f"expected {marker}, got {text[start : start + 40]!r}")
    return start + len(marker)


def _find(text: str, at: int, marker: str) -> int:
    found = text.find(marker, at)
    if found < 0:
        raise BrokenCall(f"expected {marker} in an argument")
    return found


def _without_frame(value: str) -> str:
    """Return the value without the line breaks that stand around it."""
    return value.removeprefix("\n").removesuffix("\n")


def _of_pairs(name: str, pairs: list[tuple[str, str]], tools: Tools) -> Call:
    """Return a call of arguments that are written as texts. The schema of the function says which are JSON."""
    properties = tools.get(name, {}).get("properties")
    schemas = properties if isinstance(properties, dict) else {}
    parts = [f"{_encode(key).decode()}: {_as_json(value, schemas.get(key))}" for key, value in pairs]
    return _checked(name, "{" + ", ".join(parts) + "}", tools)


def _as_json(value: str, schema: Any) -> str:
    """Return ``value`` as it is where it is JSON of a type that the schema allows, and else as a string."""
    kinds = json_types(schema)
    if kinds != {"string"}:
        text = WORDS.get(value.strip(), value.strip())
        kind = JSON_KINDS.get(text[:1], "number")
        # A text that may be a string, too, is JSON only if its type is named.
        if (not kinds or kind in kinds) and _is_json(text):
            return text
    return _encode(value).decode()


def json_types(schema: Any, depth: int = 0) -> set[str]:
    """Return the JSON types that a schema allows. None of them = any. depth: of the schema in anyOf and oneOf."""
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return set()
    given = schema.get("type")
    kinds = {kind for kind in (given if isinstance(given, list) else [given]) if isinstance(kind, str)}
    branches = schema.get("anyOf") or schema.get("oneOf")
    if not kinds and isinstance(branches, list):
        found = [json_types(branch, depth + 1) for branch in branches]
        kinds = set().union(*found) if all(found) else set()
    if not kinds and isinstance(schema.get("enum"), list) and all(isinstance(v, str) for v in schema["enum"]):
        kinds = {"string"}
    return {"number" if kind == "integer" else kind for kind in kinds}


def _is_json(text: str) -> bool:
    try:
        _require_json(text)
    except (msgspec.MsgspecError, RecursionError):
        return False
    return True
