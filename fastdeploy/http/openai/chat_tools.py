"""Tools and reasoning of a chat request: the checked fields, what the template gets, and how the answer is read."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from fastdeploy.client.chat_format.call_syntax import Tools
from fastdeploy.client.chat_format.formats import ChatFormat
from fastdeploy.client.chat_format.message_grammar import message_grammar
from fastdeploy.client.choice import TextOptions
from fastdeploy.client.grammars import json_schema
from fastdeploy.core.errors import InvalidField
from fastdeploy.http.body import parse_json
from fastdeploy.http.context import ServingContext
from fastdeploy.http.openai.protocol import ChatBody
from fastdeploy.http.openai.structured import checked, constraints, grammars_asked

NAME = re.compile(r"[\w.:/-]{1,256}")
DEVELOPER = "developer"
NO_TOOLS: Tools = {}
MAX_MARKER_TOKENS = 16  # of a marker that is no token of its own, with white space behind it


class AnswerFormat(NamedTuple):
    """How an answer is read. tools: the functions that it may call. one_call: it ends behind its first call. must_call:
    it is nothing but reasoning and calls."""

    format: ChatFormat
    tools: Tools = NO_TOOLS
    one_call: bool = False
    must_call: bool = False

    def text_options(self, context: ServingContext, options: TextOptions) -> TextOptions:
        """Return ``options`` with markers kept that are special tokens, and a stop at the end of an only call."""
        calls, stops = self.format.tool_calls, options.stops
        if self.one_call and calls is not None and calls.closes and options.detokenize:
            stops = (*stops, calls.closes)
        special = context.require_tokenizer("messages").special
        kept = frozenset(special[marker] for marker in self.format.markers if marker in special)
        return options._replace(stops=stops, kept=kept)


def answer_format(context: ServingContext, body: ChatBody) -> AnswerFormat:
    """Return how the answer to ``body`` is read. Raises InvalidField for tools that cannot be used."""
    reasoning, calls = context.chat_format
    if body.separate_reasoning is False:
        reasoning = None
    if not body.tools or body.tool_choice == "none":
        if body.tool_choice not in (None, "none", "auto"):
            raise InvalidField("tool_choice", "expected tools with it")
        return AnswerFormat(ChatFormat(reasoning))
    if calls is None:
        why = "this model's chat template has no known format of tool calls; the server's --tool-call-parser names one"
        raise InvalidField("tools", f'{why}. With tool_choice "none" tools are rendered, and calls stay text')
    tools = functions(body.tools)
    named = _named(body.tool_choice, tools)
    if named is not None:
        tools = {named: tools[named]}
    one_call = body.parallel_tool_calls is False or named is not None
    return AnswerFormat(
        ChatFormat(reasoning, calls), tools, one_call, named is not None or body.tool_choice == "required"
    )


async def answer_limits(
    context: ServingContext, body: ChatBody, answer: AnswerFormat, prompt: list[int]
) -> dict[str, Any]:
    """Return the checked fields of SamplingParams that restrict the answer. A grammar that the client asks for is that
    of the content: the model may reason before it, and call tools in its place. Raises InvalidField, also for a schema
    of a tool that no grammar can follow."""
    format = ChatFormat(context.chat_format.reasoning, answer.format.tool_calls)

    def whole(content: str) -> str:
        special = context.require_tokenizer("messages").special
        begins_inside = in_reasoning(context, format, body, prompt)
        return message_grammar(format, answer.tools, special, begins_inside, answer.one_call, content)

    if answer.must_call or (answer.tools and grammars_asked(body)):
        for i, tool in enumerate(body.tools or ()):
            if (name := tool["function"]["name"]) in answer.tools:
                build = functools.partial(_of_arguments, answer.format, name, answer.tools[name])
                await checked(context, f"tools.{i}.function.parameters", build)
    if answer.must_call:
        return await constraints(context, body, await checked(context, "tools", functools.partial(whole, "")))
    return await constraints(context, body, whole=whole if any(format) else None)


def _of_arguments(format: ChatFormat, name: str, schema: Mapping[str, Any]) -> str:
    """Return the grammar of a schema. Raises ValueError if calls in ``format`` cannot follow it."""
    message_grammar(format, {name: schema}, {})
    return json_schema(schema)


def functions(tools: list[dict[str, Any]]) -> Tools:
    """Return the functions in ``tools``: their names, with the JSON schemas of their arguments. Raises InvalidField."""
    found: dict[str, Mapping[str, Any]] = {}
    for i, tool in enumerate(tools):
        function = tool.get("function")
        if tool.get("type", "function") != "function" or not isinstance(function, dict):
            raise InvalidField(f"tools.{i}", 'expected {"type": "function", "function": {"name": ...}}')
        name, schema = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise InvalidField(f"tools.{i}.function.name", "expected 1 to 256 letters, digits and characters of _.:/-")
        if name in found:
            raise InvalidField(f"tools.{i}.function.name", f"expected different names, got {name!r} twice")
        _check_schema(schema, f"tools.{i}.function.parameters")
        found[name] = schema or {}
    return found


def _check_schema(schema: Any, field: str) -> None:
    """Raise InvalidField unless ``schema`` may be the JSON schema of arguments. None = any arguments."""
    if schema is None:
        return
    if not isinstance(schema, dict):
        raise InvalidField(field, "expected a JSON schema")
    if not isinstance(schema.get("properties", {}), dict):
        raise InvalidField(f"{field}.properties", "expected an object with a JSON schema for each argument")
    if not isinstance(schema.get("required", []), list):
        raise InvalidField(f"{field}.required", "expected a list of names")


def _named(choice: Any, tools: Tools) -> str | None:
    """Return the function that a tool_choice names, None for any or none. Raises InvalidField."""
    if choice in (None, "auto", "required"):
        return None
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    if not isinstance(function, dict):
        raise InvalidField("tool_choice", 'expected none, auto, required or {"type": "function", "function": ...}')
    name = function.get("name")
    if not isinstance(name, str) or name not in tools:
        raise InvalidField("tool_choice.function.name", f"expected the name of a tool, got {name!r}")
    return name


def template_variables(body: ChatBody) -> dict[str, Any]:
    """Return the variables of the chat template. A reasoning_effort sets the names that templates have for it, unless
    the client sets them."""
    variables: dict[str, Any] = {}
    if body.reasoning_effort is not None:
        thinks = body.reasoning_effort != "none"
        variables = {"reasoning_effort": body.reasoning_effort, "enable_thinking": thinks, "thinking": thinks}
    return variables | (body.chat_template_kwargs or {})


def template_message(context: ServingContext, message: dict[str, Any]) -> dict[str, Any]:
    """Return a message as the chat template expects it. Clients send the arguments of tool calls as OpenAI does, as
    JSON in a string; most templates expect objects. Values of other forms stay unchanged. OpenAI's role developer is
    system in most templates, which leave out roles that they do not know. vLLM's name of reasoning_content is
    "reasoning"."""
    if message["role"] == DEVELOPER and DEVELOPER not in context.require_tokenizer("messages").template:
        message["role"] = "system"
    if isinstance(message.get("reasoning"), str):
        message.setdefault("reasoning_content", message["reasoning"])
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    form = context.chat_format.tool_calls
    as_text = form is not None and form.text_arguments
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            function["arguments"] = _arguments(function.get("arguments"), as_text)
    return message


def _arguments(given: Any, as_text: bool) -> Any:
    if as_text:
        return given if isinstance(given, str) else msgspec.json.encode(given or {}).decode()
    if isinstance(given, str):
        with contextlib.suppress(InvalidField):
            return parse_json(given.encode(errors="replace"))
    return given


def in_reasoning(context: ServingContext, format: ChatFormat, body: ChatBody, prompt: list[int]) -> bool:
    """Return whether the answer begins inside of reasoning: the template of a model that always thinks opens it, or the
    message that the answer continues."""
    if format.reasoning is None:
        return False
    opens, closes, _ = format.reasoning
    last = body.messages[-1].content
    if body.continue_final_message and isinstance(last, str) and opens in last:
        return last.rfind(opens) > last.rfind(closes)
    end = len(prompt) - body.request_fields.resumed_tokens
    tail = prompt[max(0, end - MAX_MARKER_TOKENS) : end]
    return context.require_tokenizer("messages").decode(tail, skip_special_tokens=False).rstrip().endswith(opens)
