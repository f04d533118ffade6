#!/usr/bin/env python
"""Measure the API server's work for the prompt of a turn, by the length of the conversation before it: the whole text
tokenised anew, and the known ids of the turn before extended by the new text.

    python benchmarks/turns.py --json turns.json

Trains a byte-level BPE tokenizer on the text of this repository, and makes conversations of it: an agent's turns with
tool calls and their results. Needs no server and no model. Both ways render the conversation by the chat template.
Exits 1 if the two prompts differ.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.lib.report import Printer, json_flag, write_json
from fastdeploy.client.tokenizer import Tokenizer
from fastdeploy.client.turns import KnownTurn, extend

ROOT = Path(__file__).resolve().parent.parent
VOCABULARY = 16_000
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ["<|im_start|>", "<|im_end|>"]
OPTIONS: dict[str, Any] = {"add_generation_prompt": True, "continue_final_message": False, "variables": {}}
CALL = {"type": "function", "function": {"name": "read", "arguments": {"path": "docs/inside.md"}}}
HEADER = ("tokens of history", "messages", "whole ms", "extended ms", "ratio")


def make_tokenizer(folder: Path, text: list[str]) -> Tokenizer:
    """Train a tokenizer on ``text``, and load it from ``folder`` as a server does."""
    from transformers import PreTrainedTokenizerFast

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(text, trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet))
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", chat_template=TEMPLATE).save_pretrained(
        folder
    )
    return Tokenizer(str(folder))


def conversation(tokenizer: Tokenizer, text: str, num_tokens: int, turn_chars: int) -> list[dict[str, Any]]:
    """Return an agent's messages of about ``num_tokens`` tokens, which end with a turn of the assistant."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Read the files, and answer."}]
    tokens = 0
    while tokens < num_tokens:
        start = len(messages) * turn_chars % (len(text) - turn_chars)
        result = text[start : start + turn_chars]
        messages.append({"role": "assistant", "content": "I read the next part.", "tool_calls": [CALL]})
        messages.append({"role": "tool", "content": result})
        tokens += len(tokenizer.encode_now(result))
    return [*messages, {"role": "assistant", "content": "It is done."}]


async def timed(make: Callable[[], Awaitable[list[int]]], repeats: int) -> tuple[float, list[int]]:
    """Return the median time of ``make`` in ms, and its ids."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        ids = await make()
        times.append((time.perf_counter() - start) * 1e3)
    return median(times), ids


async def measure(tokenizer: Tokenizer, turn: list[dict[str, Any]], new: str, repeats: int) -> dict[str, Any]:
    """Measure the prompt of one more turn after ``turn``, by both ways. Raises ValueError if they differ."""
    messages = [*turn, {"role": "user", "content": new}]
    rendered = await tokenizer.chat_text(turn, **OPTIONS | {"add_generation_prompt": False})
    known = KnownTurn(len(turn), tokenizer.encode_now(rendered.removesuffix("\n"), False))
    ends = tokenizer.encode_now("<|im_end|>", False)

    async def whole() -> list[int]:
        return await tokenizer.encode(await tokenizer.chat_text(messages, **OPTIONS), False)

    async def extended() -> list[int]:
        return await extend(tokenizer, messages, known, ends, **OPTIONS) or []

    whole_ms, expected = await timed(whole, repeats)
    extended_ms, ids = await timed(extended, repeats)
    if ids != expected:
        raise ValueError(f"the prompts of {len(turn)} messages differ")
    return {"history": len(known.token_ids), "messages": len(turn), "whole_ms": whole_ms, "extended_ms": extended_ms}


def row(result: dict[str, Any]) -> tuple[str, ...]:
    whole, extended = result["whole_ms"], result["extended_ms"]
    return (
        f"{result['history']:,}",
        str(result["messages"]),
        f"{whole:.1f}",
        f"{extended:.1f}",
        f"{whole / extended:.1f}",
    )


def run(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Return the result of every length of history."""
    files = sorted([*ROOT.glob("docs/*.md"), *ROOT.glob("fastdeploy/**/*.py")])
    text = "".join(path.read_text() for path in files)
    tokenizer = make_tokenizer(folder, text.splitlines(keepends=True))
    results = []
    for history in args.history:
        turn = conversation(tokenizer, text, history, args.turn_chars)
        results.append(asyncio.run(measure(tokenizer, turn, text[: args.turn_chars], args.repeats)))
    return results


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--history", type=int, nargs="+", default=[1000, 10_000, 60_000], help="tokens")
    parser.add_argument("--turn-chars", type=int, default=2000, help="of each tool result (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=9)
    json_flag(parser)
    args, printer = parser.parse_args(argv), Printer()
    with tempfile.TemporaryDirectory(prefix="turns-") as folder:
        try:
            results = run(args, Path(folder))
        except ValueError as error:
            return printer.failed([str(error)])
    printer.table(f"one more turn, medians of {args.repeats}", HEADER, [row(result) for result in results])
    write_json(args, {"turns": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
