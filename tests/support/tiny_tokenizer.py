"""A byte-level tokenizer without a download: 256 bytes, a few merges, specials, a chat template."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from fastdeploy.client.tokenizer import _byte_alphabet

MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w")]
SPECIALS = ["<eos>", "<user>", "<bot>"]
TEMPLATE = (
    "{% for t in tools or [] %}<tools:{{ t.function.name }}>{% endfor %}"
    "{% for m in messages %}{% if m.role == 'evil' %}{{ raise_exception('no evil') }}{% endif %}"
    "{{ '<user>' if m.role == 'user' else '<bot>' }}{{ m.content }}{% endfor %}"
    "{{ mood }}{% if add_generation_prompt %}<bot>{% endif %}"
)


def save_tokenizer(path: Path) -> None:
    """Ids 0 to 255 are the bytes themselves; then the merges, then the specials (261 is <eos>)."""
    from transformers import PreTrainedTokenizerFast

    vocab = _byte_alphabet()
    for pair in MERGES:
        vocab["".join(pair)] = len(vocab)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
