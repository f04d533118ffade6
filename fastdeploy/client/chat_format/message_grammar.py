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

DEFINITIONS = ("$defs", "definitions")
CONTENT = "content"  # name of the grammar of the content in that of the answer
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
    content: the grammar of the content; "" = there is none, and the answer must call tools."""
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

    def any_text(self, end: str) -> str:
        """Return any text up to the first ``end``."""
        found = self._split.search(end)
        if found is None:
            return self.rule("/(?s:.*)/", f"[suffix={_string(end)}]")
        return f"{self.rule('/(?s:.*)/')} {self.literal(end[found.start() :])}"

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
        arguments = self._arguments(format.argument, schema) if format.argument else self._json(_object(schema))
        return self.rule(f"{self.literal(before)} {arguments} {self.literal(after)}")

    def _arguments(self, form: str, schema: Mapping[str, Any]) -> str:
        """Return the arguments, each in the form ``form``, in the order of the schema."""
        required = schema.get("required") or ()
        shared = {key: schema[key] for key in DEFINITIONS if key in schema}
        parts = []
        for key, of_value in (schema.get("properties") or {}).items():
            before, _, after = form.partition("VALUE")
            value = self._value(of_value, after, shared)
            parts.append(f"({self.literal(before.replace('KEY', key))} {value}){'' if key in required else '?'}")
        return " ".join(parts)

    def _value(self, schema: Any, end: str, shared: dict[str, Any]) -> str:
        """Return a value with the text behind it. Strings are not in quotes."""
        if json_types(schema) != {"string"}:
            return f"{self._json({**schema, **shared} if isinstance(schema, dict) else {})} {self.literal(end)}"
        given = schema.get("enum")
        if options := [option for option in given if isinstance(option, str)] if isinstance(given, list) else []:
            return f"({' | '.join(self.literal(option) for option in options)}) {self.literal(end)}"
        return self.any_text(end)

    def _json(self, schema: Mapping[str, Any]) -> str:
        return self.rule(f"%json {json.dumps({**schema, 'x-guidance': SPACING})}")


def _object(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema of arguments, which are an object whatever the client wrote."""
    return {"type": "object", **schema}


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
