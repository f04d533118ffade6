#!/usr/bin/env python
"""Write the benchmark checkpoint "q05": the shape of Qwen2.5-0.5B with random bfloat16 weights. No download.

    python benchmarks/make_q05.py [OUT]        (default: $PEERS_DIR/q05, $PEERS_DIR default ~/.cache/fastdeploy-peers)

494 M parameters, 0.99 GB. The same seed gives the same bytes. Numpy and `tokenizers` only.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.lib.tensors import RandomTensor, write_random_tensors

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
    "sliding_window": 32768,
    "max_window_layers": 24,
    "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "bos_token_id": 256,
    "eos_token_id": 257,
}
SPECIAL_TOKENS = ("<|startoftext|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 256 to 259
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def default_out() -> Path:
    return Path(os.environ.get("PEERS_DIR", Path.home() / ".cache" / "fastdeploy-peers")) / "q05"


def tensors(config: dict) -> Iterator[RandomTensor]:
    """Yield every tensor, in file order.

    Norms differ from 1 and biases from 0, so that an engine that ignores one of them gives other tokens. The standard
    deviation is larger than the usual 0.02, with which a random model repeats one token and equal texts prove nothing.
    """
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    yield RandomTensor("model.embed_tokens.weight", (config["vocab_size"], hidden), 0.0, 0.05)
    for layer in range(config["num_hidden_layers"]):
        base = f"model.layers.{layer}."
        yield RandomTensor(base + "input_layernorm.weight", (hidden,), 1.0, 0.1)
        for name, rows in (("q", hidden), ("k", kv), ("v", kv)):
            yield RandomTensor(base + f"self_attn.{name}_proj.weight", (rows, hidden), 0.0, 0.05)
            yield RandomTensor(base + f"self_attn.{name}_proj.bias", (rows,), 0.0, 0.1)
        yield RandomTensor(base + "self_attn.o_proj.weight", (hidden, hidden), 0.0, 0.05)
        yield RandomTensor(base + "post_attention_layernorm.weight", (hidden,), 1.0, 0.1)
        for name, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
            yield RandomTensor(base + f"mlp.{name}_proj.weight", shape, 0.0, 0.03)
    yield RandomTensor("model.norm.weight", (hidden,), 1.0, 0.1)


def write_tokenizer(folder: Path) -> None:
    """Write a byte-level tokenizer: id b is byte b (0 to 255), then the special tokens."""
    by_byte = byte_alphabet()
    tokenizer = Tokenizer(BPE(vocab={char: byte for byte, char in by_byte.items()}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[0],
        "eos_token": SPECIAL_TOKENS[1],
        "pad_token": SPECIAL_TOKENS[1],
        "model_max_length": CONFIG["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def byte_alphabet() -> dict[int, str]:
    """Return the character that byte-level tokenizers use for each byte: itself if printable, else one from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(rest)}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", nargs="?", type=Path, default=default_out(), help="folder (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=CONFIG["num_hidden_layers"], help="fewer for a quick test")
    args = parser.parse_args(argv)
    config = CONFIG | {"num_hidden_layers": args.layers, "max_window_layers": args.layers}
    args.out.mkdir(parents=True, exist_ok=True)
    write_tokenizer(args.out)
    count = write_random_tensors(args.out / "model.safetensors", list(tensors(config)), args.seed)
    (args.out / "generation_config.json").write_text(json.dumps({"bos_token_id": 256, "eos_token_id": 257}))
    (args.out / "config.json").write_text(json.dumps(config, indent=2))
    print(f"{args.out}: {count / 1e6:.1f} M parameters, seed {args.seed}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
