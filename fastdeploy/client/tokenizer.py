"""Tokenizer and chat template of a model. The engine itself handles token ids only."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import logging
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any

import msgspec
from jinja2 import TemplateError

from fastdeploy.core.errors import InvalidField

logger = logging.getLogger(__name__)
# Below this many characters, encoding takes less time than a change of threads.
INLINE_CHARS = 2048
# Files of a Hugging Face folder that make up the tokenizer. One of VOCABULARIES must be there.
SENTENCEPIECE = "tokenizer.model"
VOCABULARIES = frozenset({"tokenizer.json", "vocab.json", SENTENCEPIECE})
NEEDS_SENTENCEPIECE = (
    "needs the Python package sentencepiece, or a tokenizer.json beside it. To make one, where sentencepiece is "
    "installed: transformers.LlamaTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
)
JSON_FILES = frozenset(
    {"tokenizer.json", "vocab.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"}
)
FILES = VOCABULARIES | JSON_FILES | {"merges.txt", "chat_template.jinja"}
MAX_CHARACTER_BYTES = 4
BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")
# Template variables that a client may not set, beside the arguments of transformers' apply_chat_template.
NOT_VARIABLES = frozenset({"messages", "functions"})


def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each printable character that stands for a byte in byte-level BPE vocabularies (GPT-2)."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in set(shown)]
    return {chr(b): b for b in shown} | {chr(256 + i): b for i, b in enumerate(hidden)}


class Tokenizer:
    """The tokenizer of a Hugging Face folder: encode, decode, chat template.

    num_ids: ``decode`` leaves out this id and higher ones.
    has_grammars: the engine can follow grammars with this tokenizer.
    byte_tokens: the byte of each token that stands for one where the vocabulary has no text (SentencePiece: <0xE2>).
    special: the ids of the special tokens, which ``decode`` may skip.
    context: the text of a token depends on so many tokens before it. One shows that the text does not begin with this
    token. More are needed where the bytes of a character may be spread over several tokens.
    """

    def __init__(self, model_path: str, chat_template: str = ""):
        self._hf = _load(model_path)
        if chat_template:
            self._hf.chat_template = chat_template
        backend = getattr(self._hf, "backend_tokenizer", None)
        decoder, vocab = str(getattr(backend, "decoder", "")), self._hf.get_vocab()
        if backend is not None:
            self._decode = backend.decode
            added = backend.get_added_tokens_decoder()
            self.special = {token.content: token_id for token_id, token in added.items() if token.special}
            self.num_ids = max(vocab.values(), default=-1) + 1
            unknown = set(range(self.num_ids)) - set(vocab.values())
        else:
            self._decode = partial(self._hf.decode, clean_up_tokenization_spaces=False)  # it changes earlier text
            self.special = dict(zip(self._hf.all_special_tokens, self._hf.all_special_ids, strict=True))
            unknown = set()
            self.num_ids = sys.maxsize  # such a tokenizer does not tell which ids are unknown
        self.has_grammars = os.path.isfile(os.path.join(model_path, "tokenizer.json"))
        self._without_text = {True: frozenset(unknown.union(self.special.values())), False: frozenset(unknown)}
        has_bytes = backend is None or "ByteFallback" in decoder
        self.byte_tokens = {vocab[p]: int(p[3:5], 16) for p in vocab if has_bytes and BYTE_TOKEN.fullmatch(p)}
        self.context = 1 if backend is not None and "ByteLevel" not in decoder else MAX_CHARACTER_BYTES
        self._alphabet = _byte_alphabet() if "ByteLevel" in decoder else None
        # One thread only: two encodings at once would share settings inside the tokenizer.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        self.longest_token = max(map(len, vocab), default=1)
        self._reserved = NOT_VARIABLES | inspect.signature(self._hf.apply_chat_template).parameters.keys()
        self.ids_without_text = cache(self._ids_without_text)
        self.token_text = cache(self._token_text)
        self.token_bytes = cache(self._token_bytes)

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if len(text) < INLINE_CHARS:
            return self.encode_now(text, add_special_tokens)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self.encode_now, text, add_special_tokens)

    def encode_now(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._hf.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        return self._decode(token_ids, skip_special_tokens=skip_special_tokens)

    def _ids_without_text(self, skip_special_tokens: bool, kept: frozenset[int] = frozenset()) -> frozenset[int]:
        """Return the ids below ``num_ids`` that have no text: unknown ones, and if special tokens are skipped, these
        without those in ``kept``."""
        return self._without_text[skip_special_tokens] - kept

    @property
    def kind(self) -> str:
        """The name of its class in transformers."""
        return type(self._hf).__name__

    @property
    def template(self) -> str:
        """The chat template, all of them if there are several, or "" if there is none."""
        template = self._hf.chat_template or ""
        return template if isinstance(template, str) else "".join(map(str, template.values()))

    async def chat_text(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: dict[str, Any],
        tools: list[dict[str, Any]] | None = None,
        template: str | None = None,
    ) -> str:
        """Render a conversation to the text of its prompt. variables: the client's chat_template_kwargs. tools: JSON
        schemas of functions. template: Jinja, instead of the model's own. Raises InvalidField if there is no template,
        if it refuses the conversation, or for a variable that may not be set."""
        if not (template or self._hf.chat_template):
            raise InvalidField("messages", "this model has no chat template; use /v1/completions")
        for name in variables:
            if name in self._reserved or name.startswith("return_"):
                raise InvalidField(f"chat_template_kwargs.{name}", "not a variable of the chat template")
        render = partial(
            self._hf.apply_chat_template,
            messages,
            tools=tools,
            chat_template=template,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **variables,
        )
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, render)
        except Exception as error:  # a template is a program, and may raise anything
            field = "chat_template" if template else "messages"
            if variables and not isinstance(error, TemplateError):
                field = "chat_template_kwargs"
            raise InvalidField(field, f"the chat template failed: {error}") from error

    def _token_text(self, token_id: int) -> str:
        return self._decode([token_id], skip_special_tokens=False)

    def _token_bytes(self, token_id: int) -> tuple[int, ...]:
        """Return the UTF-8 bytes of one token, which may be a part of a character."""
        if token_id in self.byte_tokens:
            return (self.byte_tokens[token_id],)
        piece = self._hf.convert_ids_to_tokens(token_id) or ""
        if self._alphabet is not None and all(c in self._alphabet for c in piece):
            return tuple(self._alphabet[c] for c in piece)
        return tuple(self.token_text(token_id).encode())


def load_tokenizer(model_path: str, chat_template: str = "") -> Tokenizer | None:
    """Return the tokenizer of ``model_path``, or None if the folder has none (then only token ids are served).
    chat_template: Jinja, in place of the model's own template. Raises InvalidField, whose ``field`` is the file that
    cannot be used."""
    present = {name for name in FILES if os.path.exists(os.path.join(model_path, name))}
    if not present & VOCABULARIES:
        logger.warning("%s has no tokenizer: only token ids are served", model_path)
        return None
    for name in sorted(present):
        if not os.path.isfile(os.path.join(model_path, name)):  # opening a pipe would wait for its writer
            raise InvalidField(name, "is not a regular file")
    try:
        return Tokenizer(model_path, chat_template)
    except Exception as error:  # the libraries may raise anything
        for name in sorted(present & JSON_FILES):
            _require_json_object(model_path, name)
        name = min(present & VOCABULARIES)
        if name == SENTENCEPIECE and importlib.util.find_spec("sentencepiece") is None:
            raise InvalidField(name, NEEDS_SENTENCEPIECE) from error
        raise InvalidField(name, f"no tokenizer can be made of it: {type(error).__name__}: {error}") from error


def _require_json_object(model_path: str, name: str) -> None:
    try:
        with open(os.path.join(model_path, name), "rb") as file:
            value = msgspec.json.decode(file.read())
    except OSError as error:
        raise InvalidField(name, f"cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidField(name, f"is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidField(name, "expected a JSON object")


def _load(model_path: str) -> Any:
    # Otherwise transformers warns about missing torch, and about prompts above the tokenizer's own limit.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if os.path.exists(os.path.join(model_path, "tokenizer.json")):
        # AutoTokenizer would import torch if it is installed. Torch and Paddle may not share a process.
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(model_path)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_path)
