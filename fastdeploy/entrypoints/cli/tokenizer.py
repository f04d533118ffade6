"""``fastdeploy tokenizer``: what the tokenizer of a model makes of a text, and of token ids."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from fastdeploy.core.errors import InvalidField
from fastdeploy.entrypoints.cli.command import Commands, Context
from fastdeploy.entrypoints.cli.settings import SettingsParser


def add_parser(commands: Commands) -> SettingsParser:
    """Add this command."""
    parser = commands.add_parser("tokenizer", help="encode and decode with a model's tokenizer", allow_abbrev=False)
    add = parser.add_argument
    add("-m", "--model", "--model-name-or-path", "--model_name_or_path", metavar="PATH", help="folder of the model")
    add("-e", "--encode", metavar="TEXT", help="print the token ids of a text")
    add("-d", "--decode", metavar="IDS", help="print the text of token ids, such as 1,2,3 or [1, 2, 3]")
    add("-vs", "--vocab-size", action="store_true", help="print the number of token ids")
    add("-i", "--info", action="store_true", help="print the class, the special tokens and their ids, as JSON")
    add("-ve", "--vocab-export", metavar="FILE", help="write the vocabulary: JSON if it is *.json, else a token a line")
    add("-mm", "--enable-mm", action="store_true", help=argparse.SUPPRESS)  # FastDeploy's; models here read text
    return parser


def run(args: argparse.Namespace, context: Context) -> int:
    """Do what is asked, in the order of the flags. Return the exit status. Raises InvalidField."""
    from transformers import AutoTokenizer

    from fastdeploy.embedded import MODEL_DIR

    asked = (args.encode, args.decode, args.vocab_size or None, args.info or None, args.vocab_export)
    if all(value is None for value in asked):
        raise InvalidField("encode", "expected one of --encode, --decode, --vocab-size, --info, --vocab-export")
    folder = args.model or str(MODEL_DIR)
    if not Path(folder).is_dir():
        raise InvalidField("model", f"expected the folder of a model, got {folder!r}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the libraries may raise anything
        raise InvalidField("model", f"no tokenizer can be made of {folder!r}: {error}") from None
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    if args.encode is not None:
        print(tokenizer.encode(args.encode))
    if args.decode is not None:
        print(tokenizer.decode(read_ids(args.decode, len(vocabulary))))
    if args.vocab_size:
        print(len(vocabulary))
    if args.info:
        special = {token: tokenizer.convert_tokens_to_ids(token) for token in tokenizer.all_special_tokens}
        about = {"class": type(tokenizer).__name__, "vocab_size": len(vocabulary), "special_tokens": special}
        print(json.dumps(about, ensure_ascii=False, indent=1))
    if args.vocab_export is not None:
        export(Path(args.vocab_export), vocabulary)
    return 0


def read_ids(text: str, size: int) -> list[int]:
    """Return the token ids in ``text``. Raises InvalidField for other words, and for ids that are not below size."""
    words = [word for word in re.split(r"[\s,\[\]]+", text) if word]
    if not all(word.isascii() and word.isdigit() and int(word) < size for word in words):
        raise InvalidField("decode", f"expected token ids below {size} with commas between them, got {text!r}")
    return [int(word) for word in words]


def export(path: Path, vocabulary: dict[str, int]) -> None:
    """Write all tokens with their ids, in the order of the ids."""
    ordered = dict(sorted(vocabulary.items(), key=lambda item: item[1]))
    is_json = path.suffix.lower() == ".json"
    lines = [f"{token_id}\t{token!r}\n" for token, token_id in ordered.items()]
    path.write_text(json.dumps(ordered, ensure_ascii=False, indent=1) if is_json else "".join(lines), encoding="utf-8")
    print(f"{path}: {len(ordered)} tokens")
