"""Small tokenizers of the kinds that models have, each with special tokens, an unknown id, and text in pieces."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import tokenizers as hf
from tokenizers import AddedToken, decoders, models

from fastdeploy.client.tokenizer import Tokenizer, _byte_alphabet

SPECIALS = ["<s>", "</s>", "<|end|>"]
WORDS = ["▁", "▁▁", "a", "▁a", "▁b", "b▁", "é", "▁é", "😀", "\ufffd", "."]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
# Bytes that a random sequence often makes characters of: those of é, 😀 and ▁, a letter, a space, and bad ones.
SOME_BYTES = sorted({*"é😀▁a ".encode(), 0x80, 0xB9, 0xC3, 0xED, 0xFF})


def _byte_level() -> hf.Tokenizer:
    """As GPT-2, Llama 3 and Qwen: a token is any bytes. The merges begin and end inside characters."""
    alphabet = {byte: char for char, byte in _byte_alphabet().items()}
    merges = [(0xF0, 0x9F), (0x98, 0x80), (0x80, 0x61), (0x20, 0xC3), (0xA9, 0xC3), (0x80, 0xF0)]
    vocab = {alphabet[byte]: byte for byte in range(256)}
    vocab |= {alphabet[a] + alphabet[b]: 256 + i for i, (a, b) in enumerate(merges)}
    tokenizer = hf.Tokenizer(models.BPE(vocab=vocab, merges=[(alphabet[a], alphabet[b]) for a, b in merges]))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pieces(words: list[str]) -> hf.Tokenizer:
    vocab = {piece: i for i, piece in enumerate(["<unk>", *words])}
    return hf.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))


def _llama() -> hf.Tokenizer:
    """As Llama 2 and Mistral: SentencePiece with bytes where the vocabulary has no text."""
    tokenizer = _pieces([*BYTES, *WORDS])
    strip = decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    return tokenizer


def _gemma() -> hf.Tokenizer:
    """As Gemma: the same without the strip."""
    tokenizer = _pieces([*BYTES, *WORDS])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def _byte_metaspace() -> hf.Tokenizer:
    """Bytes that may make a ▁, which the Metaspace decoder then reads as a space."""
    tokenizer = _pieces([*BYTES, *WORDS])
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return tokenizer


def _metaspace() -> hf.Tokenizer:
    """As T5: Unigram without bytes."""
    tokenizer = hf.Tokenizer(models.Unigram([("<unk>", 0.0), *((word, -1.0) for word in WORDS)], unk_id=0))
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def _word_piece() -> hf.Tokenizer:
    """As BERT: a space before each token that does not go on with a word, except before punctuation."""
    vocab = {piece: i for i, piece in enumerate(["[UNK]", "a", "##b", "é", "##😀", ".", "n't", "\ufffd"])}
    tokenizer = hf.Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


KINDS: dict[str, Callable[[], hf.Tokenizer]] = {
    "byte-level": _byte_level,
    "llama": _llama,
    "gemma": _gemma,
    "bytes and metaspace": _byte_metaspace,
    "metaspace": _metaspace,
    "word-piece": _word_piece,
}


def make_tokenizer(kind: str, folder: Path) -> Tokenizer:
    """Write the files of a tokenizer to ``folder``, and load them as a server does."""
    from transformers import PreTrainedTokenizerFast

    backend = KINDS[kind]()
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    backend.add_tokens([AddedToken("<tool>")])
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(folder)
    return Tokenizer(str(folder))


def telling_ids(tokenizer: Tokenizer) -> list[int]:
    """Return the ids to draw from: all but most bytes, with one that the tokenizer does not know."""
    vocab = tokenizer._hf.get_vocab()
    if tokenizer.byte_tokens:
        ids = [token for token in vocab.values() if tokenizer.byte_tokens.get(token, SOME_BYTES[0]) in SOME_BYTES]
    else:
        ids = [token for token in vocab.values() if token in SOME_BYTES or token > 255 or len(vocab) < 256]
    return sorted(ids) + [len(vocab) + 5]
