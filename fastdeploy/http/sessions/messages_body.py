"""The bodies of Anthropic's /v1/messages, and the chats that they stand for."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, Field

from fastdeploy.core.errors import InvalidField
from fastdeploy.http.body import Int64, LaxBody
from fastdeploy.http.openai.protocol import MAX_MESSAGES
from fastdeploy.http.openapi import described

ROLES = ("user", "assistant")
# Blocks of an assistant's message that no template renders: a model gets no earlier reasoning.
DROPPED = frozenset({"thinking", "redacted_thinking"})
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
CUSTOM = (None, "custom")  # types of tools that the client runs by a schema of its own
# Fields of Anthropic's and of OpenAI's that are not supported here, each with the values that mean "not used".
UNSUPPORTED: dict[str, tuple[Any, ...]] = dict.fromkeys(
    ("container", "mcp_servers", "output_format", "response_format"), (None, [], {})
)
# Fields of a chat, and what they are made of here.
NAMES = (
    (re.compile(r"stop\b"), "stop_sequences"),
    (re.compile(r"response_format\.json_schema\b"), "output_config.format"),
    (re.compile(r"tools\.(\d+)\.function\.parameters\b"), r"tools.\1.input_schema"),
    (re.compile(r"tools\.(\d+)\.function\.name\b"), r"tools.\1.name"),
    (re.compile(r"tool_choice\.function\.name\b"), "tool_choice.name"),
)
Blocks = Annotated[Any, described(str | list[dict[str, Any]])]


class AnthropicMessage(BaseModel):
    """A message: its content is text, or a list of blocks of type text, tool_use, tool_result or thinking."""

    role: str
    content: Blocks


class AnthropicTool(BaseModel):
    """A tool of the client. input_schema: the JSON schema of its arguments. type: "custom", or absent. Tools that
    Anthropic's server has are not here."""

    type: str | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class AnthropicToolChoice(BaseModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(BaseModel):
    type: str


class OutputFormat(BaseModel):
    type: Literal["json_schema"]
    json_schema: Annotated[Any, Field(alias="schema")]


class OutputConfig(BaseModel):
    """format: the JSON schema of the answer. Other fields are hints for Anthropic's models."""

    format: OutputFormat | None = None


class CountBody(LaxBody):
    """The body of /v1/messages/count_tokens."""

    model: str | None = None
    messages: list[AnthropicMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: Blocks | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None


class MessagesBody(CountBody):
    """The body of /v1/messages. thinking: of type "disabled" = the chat template is told to leave reasoning out."""

    max_tokens: Int64
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    output_config: OutputConfig | None = None


def chat_of(body: CountBody) -> dict[str, Any]:
    """Return the fields of the chat that ``body`` stands for. Raises InvalidField."""
    messages = [{"role": "system", "content": _text(body.system, "system")}] if body.system else []
    for i, message in enumerate(body.messages):
        messages += _messages(message, f"messages.{i}")
    fields: dict[str, Any] = {"model": body.model, "messages": messages}
    if messages and messages[-1]["role"] == "assistant":  # the answer begins with it
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    if body.tools:
        fields["tools"] = [_tool(tool, f"tools.{i}") for i, tool in enumerate(body.tools)]
    if (choice := body.tool_choice) is not None:
        fields |= _choice(choice)
    if body.thinking is not None and body.thinking.type == "disabled":
        fields["chat_template_kwargs"] = {"enable_thinking": False, "thinking": False}
    if isinstance(body, MessagesBody):
        given = {name: getattr(body, name) for name in ("max_tokens", "stream", "temperature", "top_p", "top_k")}
        fields |= given | {"stop": body.stop_sequences or None}
        if body.output_config is not None and (wanted := body.output_config.format) is not None:
            fields["response_format"] = {"type": wanted.type, "json_schema": {"schema": wanted.json_schema}}
    return {name: value for name, value in fields.items() if value is not None}


@contextlib.contextmanager
def anthropic_names() -> Iterator[None]:
    """Let an InvalidField that is raised in the block name the field of Anthropic's body."""
    try:
        yield
    except InvalidField as error:
        for of_chat, name in NAMES:
            if of_chat.match(error.field):
                message = str(error).removeprefix(f"{error.field}: ")
                raise InvalidField(of_chat.sub(name, error.field), message) from error
        raise


def _tool(tool: AnthropicTool, field: str) -> dict[str, Any]:
    if tool.type not in CUSTOM:
        raise InvalidField(f"{field}.type", f"expected custom, got {tool.type!r}: this server has no tools of its own")
    function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema or {}}
    return {"type": "function", "function": function}


def _choice(choice: AnthropicToolChoice) -> dict[str, Any]:
    fields: dict[str, Any] = {"parallel_tool_calls": False} if choice.disable_parallel_tool_use else {}
    if choice.type != "tool":
        return fields | {"tool_choice": CHOICES[choice.type]}
    return fields | {"tool_choice": {"type": "function", "function": {"name": choice.name or ""}}}


def _messages(message: AnthropicMessage, field: str) -> list[dict[str, Any]]:
    """Return the messages of a chat that one message stands for: the results of tools are messages of their own."""
    if message.role not in ROLES:
        raise InvalidField(f"{field}.role", f"expected one of {', '.join(ROLES)}, got {message.role!r}")
    blocks = message.content
    if isinstance(blocks, str):
        return [{"role": message.role, "content": blocks}]
    if not isinstance(blocks, list):
        raise InvalidField(f"{field}.content", "expected a string or a list of blocks")
    if message.role == "assistant":
        return [_assistant(blocks, f"{field}.content")]
    made: list[dict[str, Any]] = []
    for k, block in enumerate(blocks):
        where = f"{field}.content.{k}"
        if _kind(block) == "tool_result":
            content = _text(block.get("content") or "", f"{where}.content")
            made.append({"role": "tool", "tool_call_id": _name(block, "tool_use_id", where), "content": content})
        elif made and made[-1]["role"] == "user":
            made[-1]["content"] += _text([block], where)
        else:
            made.append({"role": "user", "content": _text([block], where)})
    return made or [{"role": "user", "content": ""}]


def _assistant(blocks: list[Any], field: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for k, block in enumerate(blocks):
        if _kind(block) == "tool_use":
            arguments = msgspec.json.encode(block.get("input") or {}).decode()
            where = f"{field}.{k}"
            function = {"name": _name(block, "name", where), "arguments": arguments}
            call = {"id": _name(block, "id", where), "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)
        elif _kind(block) not in DROPPED:
            message["content"] += _text([block], f"{field}.{k}")
    return message


def _text(content: Any, field: str) -> str:
    """Return the text of a string, or of blocks of type text."""
    if isinstance(content, str):
        return content
    blocks: list[Any] = content if isinstance(content, list) else [content]
    for block in blocks:
        if _kind(block) != "text" or not isinstance(block.get("text"), str):
            raise InvalidField(field, f"expected text, got a block of type {_kind(block)!r}, which is not supported")
    return "".join(block["text"] for block in blocks)


def _name(block: dict[str, Any], key: str, field: str) -> str:
    if not isinstance(name := block.get(key), str):
        raise InvalidField(f"{field}.{key}", "expected a string")
    return name


def _kind(block: Any) -> Any:
    return block.get("type") if isinstance(block, dict) else None
