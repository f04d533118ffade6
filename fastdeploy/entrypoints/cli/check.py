"""``fastdeploy check``: what ``fastdeploy serve`` with the same arguments would serve, without serving it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fastdeploy.core.errors import InvalidField
from fastdeploy.entrypoints.cli.command import Commands, Context
from fastdeploy.entrypoints.cli.fastdeploy_variables import take_variables
from fastdeploy.entrypoints.cli.flags import USAGE, add_serve_flags, configs, exposure
from fastdeploy.entrypoints.cli.settings import SettingsParser, named_source, settings_of
from fastdeploy.entrypoints.preview import Memory, Model, Preview, Refusal, Speed, preview, refusal
from fastdeploy.http.guards.keys import read_keys

WIDTH = 120  # of the output, where there is no terminal
GIB = float(1 << 30)


def add_parser(commands: Commands) -> SettingsParser:
    """Add this command."""
    text = "print what serve with the same arguments would serve, and what is refused"
    parser = commands.add_parser("check", help=text, allow_abbrev=False, usage=USAGE)
    add_serve_flags(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.take_settings()
    return parser


def run(args: argparse.Namespace, context: Context) -> int:
    """Print what would be served. Return 0, or 1 if something is refused."""
    settings = settings_of(args)
    args.without_effect += take_variables(os.environ)
    found, warnings = Preview(), list[str]()
    try:
        engine, serve = configs(args)
        keys = read_keys(args.api_key, args.control_key, os.environ)
    except InvalidField as error:
        found.refused.append(refusal(error))
    else:
        found = preview(engine, serve)
        warnings += filter(None, [exposure(serve, keys)])
    warnings += [f"{name} is taken without effect (docs/fastdeploy.md)" for name in dict.fromkeys(args.without_effect)]
    found.refused = [Refusal(_place(args, one.what), one.why) for one in found.refused]
    if args.json:
        report = msgspec.to_builtins(found) | {"warnings": warnings, "settings": [one._asdict() for one in settings]}
        print(msgspec.json.format(msgspec.json.encode(report), indent=1).decode())
    else:
        show(found, warnings, [(one.name, one.value, one.source) for one in settings], Console())
    return 1 if found.refused else 0


def _place(args: argparse.Namespace, what: str) -> str:
    """Return how the report names a setting: by its flag, variable or file."""
    return named_source(args, what).removeprefix("argument ") if what in args.sources else what


def show(found: Preview, warnings: list[str], settings: list[tuple[str, Any, str]], console: Console) -> None:
    """Print the report as tables."""
    if not console.is_terminal:
        console.width = WIDTH
    if found.model:
        console.print(_table("Model", ("", ""), model_rows(found.model)))
    if found.memory:
        console.print(_table("Memory", ("", "GiB", ""), memory_rows(found.memory), numbers=(1,)))
    if found.speed:
        console.print(_table("Speed, at most", ("", "", ""), speed_rows(found.speed), numbers=(1,)))
    elif found.model:
        console.print("Speed: not known. These ops cannot measure the machine, which takes the C++ ops.\n")
    console.print(_table("Settings", ("name", "value", "from"), [(n, _shown(v), s) for n, v, s in settings]))
    for warning in warnings:
        console.print(Text(f"warning: {warning}", style="yellow"))
    for one in found.refused:
        console.print(Text(f"refused: {one.what}: {one.why}", style="bold red"))
    if not found.refused:
        console.print(
            Text("Nothing is refused. fastdeploy serve with the same arguments would serve this.", style="green")
        )


def _table(title: str, columns: tuple[str, ...], rows: Any, numbers: tuple[int, ...] = ()) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, show_header=any(columns))
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index in numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    table.add_row()
    return table


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return "" if value is None else str(value)


def model_rows(model: Model) -> Iterator[tuple[str, str]]:
    """Yield what the table about the model has."""
    served = model.dtype if model.quantization == "none" else f"{model.dtype}, multiplied as {model.quantization}"
    yield "name", f"{model.name} ({model.path})"
    yield "architecture", f"{model.architecture}, {model.layers} layers, {_count(model.parameters)} parameters"
    size = f"{model.checkpoint_bytes / GIB:.2f} GiB"
    yield "checkpoint", f"{model.checkpoint_dtype}, {size}, layout {model.layout}; all tensors are there"
    yield "served in", served
    yield "longest sequence", f"{model.max_model_len} tokens"
    template = "with a chat template" if model.chat_template else "no chat template"
    none = "none: token ids only"
    yield "tokenizer", none if model.tokenizer == "none" else f"{model.tokenizer}, {model.vocabulary} ids, {template}"
    yield "parsers", f"tool calls: {model.tool_call_parser}; reasoning: {model.reasoning_parser}"
    yield "ops", f"{model.isa}, {model.threads} threads"


def memory_rows(memory: Memory) -> Iterator[tuple[str, str, str]]:
    """Yield what the table about memory has."""
    tokens = memory.kv_blocks * memory.kv_block_tokens
    yield "weights, packed", _gib(memory.weights), ""
    yield "standby copy", _gib(memory.standby), "for updates" if memory.standby else "none: updates are slower"
    blocks = f"{memory.kv_blocks} blocks of {memory.kv_block_tokens} tokens, {tokens} tokens in all"
    yield "KV cache", _gib(memory.kv_cache), blocks
    yield "free now", _gib(memory.free), ""
    yield "left", _gib(memory.left), "when all of these are in use"
    yield "adapters", _gib(memory.adapters), "at most, of what is left"
    yield "retained results", _gib(memory.retained), "at most, of what is left"


def speed_rows(speed: Speed) -> Iterator[tuple[str, str, str]]:
    """Yield what the table about speed has."""
    yield "read bandwidth", f"{speed.read / 1e9:.1f} GB/s", "measured now, by all threads"
    if speed.peak is not None:
        yield "bfloat16 peak", f"{speed.peak / 1e12:.2f} TFLOP/s", "measured now, in registers"
    for streams, rate in speed.tokens_per_s.items():
        text = f"{rate / streams:.1f} for each, with {speed.context} tokens of context"
        yield f"{streams} stream{'s' if streams > 1 else ''}", f"{rate:.1f} tok/s", text
    yield "", "", "An upper bound: the time to read weights and KV, or to multiply. Less is reached."


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.3f}"


def _count(number: int) -> str:
    for size, name in ((1e9, "billion"), (1e6, "million")):
        if number >= size:
            return f"{number / size:.2f} {name}"
    return str(number)
