"""The embedded model's tokenizer: one token per UTF-8 byte (id = byte value), and a few special tokens.

Every text is encoded and decoded without loss. ``build`` writes the tokenizer's files for transformers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from examples.embedded_model.arithmetic import Problem

SPECIAL_TOKENS = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
SPECIAL_TOKENS += [f"<|reserved_{i}|>" for i in range(16 - len(SPECIAL_TOKENS))]
PAD_ID, END_ID, SYSTEM_ID, USER_ID, ASSISTANT_ID = range(256, 261)
VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|' + message['role'] + '|>' + message['content'] -}}"
    "{%- if message['role'] == 'assistant' -%}{{- '<|end|>' -}}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def encode(text: str) -> list[int]:
    """Return the token ids of a text without special tokens."""
    return list(text.encode())


def decode(ids: list[int]) -> str:
    """Return the text of ids up to the first <|end|>, without special tokens. Malformed UTF-8 becomes U+FFFD."""
    ids = ids[: ids.index(END_ID)] if END_ID in ids else ids
    return bytes(i for i in ids if i < 256).decode(errors="replace")


def chat_ids(content: str, system: str | None = None) -> list[int]:
    """Return the token ids of a user message (after a system message) by the chat template, up to the answer."""
    head = [] if system is None else [SYSTEM_ID, *encode(system)]
    return [*head, USER_ID, *encode(content), ASSISTANT_ID]


def prompt_ids(problem: Problem, chat: bool) -> list[int]:
    """Return the token ids of a problem as a chat message, or as the prompt of a plain completion."""
    return chat_ids(problem.prompt) if chat else encode(problem.prompt)


def build(folder: Path, pieces: Sequence[str] = (), template: str = CHAT_TEMPLATE) -> None:
    """Write tokenizer.json and tokenizer_config.json (with the chat template) to ``folder``. pieces: texts that are one
    token each; they take the ids of the reserved special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab = {char: byte for byte, char in enumerate(_byte_chars())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    used = ASSISTANT_ID + 1 - PAD_ID
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL_TOKENS[:used]])
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in pieces])
    rest = SPECIAL_TOKENS[used + len(pieces) :]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in rest])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        "pad_token": "<|pad|>",
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def _byte_chars() -> list[str]:
    """Return the character that byte-level BPE uses for each byte: Latin-1 if printable, else one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]
