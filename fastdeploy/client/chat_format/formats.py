"""How the families of models write reasoning and tool calls, and which of these formats a model uses.

The formats are tables here, because no package reads them in a stream: the response schemas of transformers take whole
texts, and ``renderers`` needs development versions of other packages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from fastdeploy.client.chat_format import call_syntax
from fastdeploy.client.chat_format.call_syntax import Call, Tools
from fastdeploy.core.config import AUTO, NO_PARSER


class ReasoningFormat(NamedTuple):
    """The markers around reasoning. It comes first in an answer. dropped: markers that belong to no text."""

    opens: str = "<think>"
    closes: str = "</think>"
    dropped: tuple[str, ...] = ()


class ToolCallFormat(NamedTuple):
    """How tool calls are written. opens, closes: markers around one call. closes "" = the end of the answer.

    read: makes calls of the text between the markers, or raises BrokenCall. written: that text, with NAME and ARGUMENTS
    for what differs. argument: how one argument is written, with KEY and VALUE; "" = all of them are a JSON object.
    between: text between two calls. bare: a call may also begin with "{" at the beginning of the answer, without a
    marker. dropped: markers around all calls. text_arguments: the chat template wants the arguments of earlier calls as
    JSON text; other templates want objects.
    """

    opens: str
    closes: str
    read: Callable[[str, Tools], list[Call]]
    written: str
    argument: str = ""
    between: str = "\n"
    bare: bool = False
    dropped: tuple[str, ...] = ()
    text_arguments: bool = False


class ChatFormat(NamedTuple):
    """The format of an answer. None = such text is content like any other."""

    reasoning: ReasoningFormat | None = None
    tool_calls: ToolCallFormat | None = None

    @property
    def markers(self) -> tuple[str, ...]:
        """All texts that have a meaning of their own."""
        reasoning, calls = self
        of_reasoning = () if reasoning is None else (reasoning.opens, reasoning.closes, *reasoning.dropped)
        of_calls = () if calls is None else (calls.opens, calls.closes, *calls.dropped, *call_syntax.INNER_MARKERS)
        return tuple(filter(None, (*of_reasoning, *of_calls)))


THINK = ReasoningFormat()
HERMES = ToolCallFormat(
    "<tool_call>", "</tool_call>", call_syntax.json_call, '\n{"name": "NAME", "arguments": ARGUMENTS}\n'
)
DEEPSEEK_V3 = ToolCallFormat(
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    call_syntax.deepseek_call,
    "function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```",
    dropped=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    text_arguments=True,
)
DEEPSEEK_V31 = DEEPSEEK_V3._replace(written="NAME<｜tool▁sep｜>ARGUMENTS", between="")
GLM = ToolCallFormat(
    "<tool_call>",
    "</tool_call>",
    call_syntax.glm_call,
    "NAME\nARGUMENTS",
    "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n",
)
LLAMA = ToolCallFormat(
    "<|python_tag|>",
    "",
    call_syntax.llama_calls,
    '{"name": "NAME", "parameters": ARGUMENTS}',
    between="; ",
    bare=True,
)
QWEN_CODER = ToolCallFormat(
    "<tool_call>",
    "</tool_call>",
    call_syntax.qwen_coder_call,
    "\n<function=NAME>\nARGUMENTS</function>\n",
    "<parameter=KEY>\nVALUE\n</parameter>\n",
)
REASONING: Mapping[str, ReasoningFormat] = {
    "deepseek_r1": THINK,
    "ernie45": ReasoningFormat(dropped=("<response>", "</response>")),
    "glm45": THINK,
    "qwen3": THINK,
}
TOOL_CALLS: Mapping[str, ToolCallFormat] = {
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v31": DEEPSEEK_V31,
    "ernie45": HERMES,
    "glm45": GLM,
    "hermes": HERMES,
    "llama3_json": LLAMA,
    "qwen3_coder": QWEN_CODER,
}
# Texts in a chat template that tell its format. The first row whose texts are all there counts.
TEMPLATE_SIGNS = (
    ("deepseek_v3", ("<｜tool▁call▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁call▁begin｜>",)),
    ("glm45", ("<arg_key>",)),
    ("qwen3_coder", ("<tool_call>", "<function=")),
    ("ernie45", ("<tool_call>", "<response>")),
    ("hermes", ("<tool_call>",)),
    ("llama3_json", ("<|start_header_id|>", '"parameters"')),
)
REASONING_OF = {"ernie45": "ernie45", "glm45": "glm45", "deepseek_v3": "deepseek_r1", "deepseek_v31": "deepseek_r1"}


def tool_call_parser(template: str) -> str:
    """Return the name of the format of tool calls that a chat template uses, or "none"."""
    return next((name for name, signs in TEMPLATE_SIGNS if all(sign in template for sign in signs)), NO_PARSER)


def reasoning_parser(template: str) -> str:
    """Return the name of the format of reasoning that a chat template uses, or "none"."""
    if THINK.closes not in template:
        return NO_PARSER
    return REASONING_OF.get(tool_call_parser(template), "qwen3")


def choose(template: str, tool_calls: str = AUTO, reasoning: str = AUTO) -> ChatFormat:
    """Return the format of a model with this chat template. tool_calls, reasoning: names of formats, "none", or "auto"
    for those of the template."""
    if tool_calls == AUTO:
        tool_calls = tool_call_parser(template)
    if reasoning == AUTO:
        reasoning = reasoning_parser(template)
    return ChatFormat(REASONING.get(reasoning), TOOL_CALLS.get(tool_calls))
