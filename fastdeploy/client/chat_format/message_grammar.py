"""The grammar of a chat's answer: of one that must call tools, for tool_choice "required" and named; and of one whose
content has a grammar, for a model that reasons or may call tools."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from fastdeploy.client.chat_format.call_syntax import Tools, json_types
from fastdeploy.client.chat_format.formats import ChatFormat, ToolCallFormat
from fastdeploy.client.grammars import lark, with_named

CONTENT = "content"  # name of the grammar of the content in that of the answer
ROOT = "arguments"  # name of the schema of all arguments among the definitions of the schema of one
ANY_TEXT = "(?s:.*)"
LENGTHS = ("minLength", "maxLength")
# Keywords of a schema that cannot be followed where arguments are written as texts: in the schema of all arguments, and
# in that of a string.
OF_ARGUMENTS = ("$ref", "allOf", "anyOf", "oneOf", "not", "if", "minProperties", "dependentRequired")
OF_STRING = ("$ref", "allOf", "not", "if", "pattern")
# How the chat templates write JSON, and so the models.
SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def message_grammar(
    format: ChatFormat,
    tools: Tools,
    special: Mapping[str, int],
    in_reasoning: bool = False,
    one_call: bool = False,
    content: str = "",
) -> str:
    """Return the grammar, as SamplingParams has it: reasoning as long as the model wants it, then calls of ``tools`` or
    the content.

    special: ids of the special tokens, which are no text for a grammar. in_reasoning, one_call: see ChatParser.
    content: the grammar of the content; "" = there is none, and the answer must call tools. Raises ValueError for a
    schema that calls in this format cannot follow."""
    made = Rules(special, format.markers)
    reasoning = made.reasoning(format, in_reasoning)
    options = [f"@{CONTENT}"] if content else []
    if format.tool_calls is not None:
        options.append(made.calls(format.tool_calls, tools, one_call))
    text = "\n".join([f"start: {reasoning}({' | '.join(options)})", *made.rules]) + "\n"
    return with_named(text, CONTENT, content) if content else lark(text)


class Rules:
    """The rules of a grammar in llguidance's dialect of Lark. Each method returns an expression."""

    def __init__(self, special: Mapping[str, int], markers: tuple[str, ...]):
        self.rules: list[str] = []
        self._special = {marker: special[marker] for marker in markers if marker in special}
        self._split = re.compile("|".join(map(re.escape, self._special)) or "(?!)")

    def rule(self, body: str, attributes: str = "") -> str:
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}{attributes}: {body}")
        return name

    def literal(self, text: str) -> str:
        """Return a text in which markers may be special tokens."""
        parts, at = [], 0
        for found in self._split.finditer(text):
            parts += [_string(text[at : found.start()]), f"<[{self._special[found[0]]}]>"]
            at = found.end()
        return " ".join(filter(None, [*parts, _string(text[at:])]))

    def any_text(self, end: str, pattern: str = ANY_TEXT) -> str:
        """Return any text up to the first ``end``. pattern: a regular expression that the whole text matches."""
        found, text = self._split.search(end), f"/{pattern}/"
        if found is None:
            return self.rule(text, f"[suffix={_string(end)}]")
        return f"{self.rule(text)} {self.literal(end[found.start() :])}"

    def reasoning(self, format: ChatFormat, inside: bool) -> str:
        if format.reasoning is None:
            return ""
        text = self.any_text(format.reasoning.closes)
        space = self.rule(r"/\n*/")
        body = f"{text} {space}"
        return f"{body} " if inside else f"({self.literal(format.reasoning.opens)} {body})? "

    def calls(self, format: ToolCallFormat, tools: Tools, one_call: bool) -> str:
        options = [self._call(format, name, schema) for name, schema in tools.items()]
        call = self.rule(" | ".join(options))
        more = "" if one_call else f" ({self.literal(format.between)} {call})*"
        opens, closes = format.dropped or ("", "")
        return f"{self.literal(opens)} {call}{more} {self.literal(closes)}"

    def _call(self, format: ToolCallFormat, name: str, schema: Mapping[str, Any]) -> str:
        before, _, after = format.written.partition("ARGUMENTS")
        before = ("" if format.bare else format.opens) + before.replace("NAME", name)
        after += format.closes
        schema = _object(schema)
        arguments = self._arguments(format.argument, schema) if format.argument else self._json(schema)
        return self.rule(f"{self.literal(before)} {arguments} {self.literal(after)}")

    def _arguments(self, form: str, schema: Mapping[str, Any]) -> str:
        """Return the arguments, each in the form ``form``, in the order of the schema. Raises ValueError."""
        _check(schema, OF_ARGUMENTS, "the arguments")
        given = schema.get("properties") or {}
        required = [key for key in schema.get("required") or () if isinstance(key, str)]
        parts = []
        for key, of_value in (given | {key: {} for key in required if key not in given}).items():
            if of_value is False:  # such an argument may not be written
                continue
            before, _, after = form.partition("VALUE")
            value = self._value(of_value, after, schema, key)
            parts.append(f"({self.literal(before.replace('KEY', key))} {value}){'' if key in required else '?'}")
        return " ".join(parts)

    def _value(self, schema: Any, end: str, root: Mapping[str, Any], name: str) -> str:
        """Return the value of the argument ``name`` with the text behind it. Strings are not in quotes. root: what
        references in ``schema`` refer to. Raises ValueError."""
        if json_types(schema) != {"string"}:
            return f"{self._json(_alone(schema, root))} {self.literal(end)}"
        _check(schema, OF_STRING, f"the argument {name!r}")
        branches = schema.get("anyOf") or schema.get("oneOf")
        if isinstance(branches, list) and "type" not in schema:
            return f"({' | '.join(self._value(branch, end, root, name) for branch in branches)})"
        given = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if options := [option for option in given if isinstance(option, str)] if isinstance(given, list) else []:
            return f"({' | '.join(self.literal(option) for option in options)}) {self.literal(end)}"
        lengths = [schema.get(key) for key in LENGTHS]
        for key, length in zip(LENGTHS, lengths, strict=True):
            if length is not None and (type(length) is not int or length < 0):
                raise ValueError(f"{key}: expected an integer of at least 0 for the argument {name!r}, got {length!r}")
        least, most = ("" if length is None else length for length in lengths)
        return self.any_text(end, f"(?s:.{{{least or 0},{most}}})" if least or most != "" else ANY_TEXT)

    def _json(self, schema: Mapping[str, Any]) -> str:
        return self.rule(f"%json {json.dumps({**schema, 'x-guidance': SPACING})}")


def _object(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema of arguments, which are an object. Raises ValueError for one that allows no object."""
    kinds = schema.get("type", "object")
    if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
        raise ValueError(f"type: expected object, got {kinds!r}")
    return {**schema, "type": "object"}


def _check(schema: Mapping[str, Any], keywords: tuple[str, ...], what: str) -> None:
    if wrong := next((key for key in keywords if key in schema), None):
        why = "in this model's format of tool calls, which writes them as texts"
        raise ValueError(f"{wrong}: not supported for {what} {why}")


def _alone(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema of one value with the schemas that it refers to, as definitions."""
    if not isinstance(schema, dict):
        return {}
    moved = _moved(schema)
    return schema if moved == schema else {**moved, "$defs": {ROOT: _moved(root)}}


def _moved(schema: Any) -> Any:
    """Return ``schema`` with its references pointing to the root among the definitions."""
    if isinstance(schema, list):
        return [_moved(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(part) for key, part in schema.items()}
    if isinstance(to := schema.get("$ref"), str) and to.startswith("#"):
        moved["$ref"] = f"#/$defs/{ROOT}{to[1:]}"
    return moved


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
