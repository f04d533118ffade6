#!/usr/bin/env python
"""Write a checkpoint for benchmarks: the shape of a Qwen model with random bfloat16 weights. No download.

    python benchmarks/make_model.py [OUT] [--shape q05]    (default: $PEERS_DIR/q05, or ~/.cache/fastdeploy-peers/q05)

q05, q15 and q3 have the shapes of Qwen2.5-0.5B, 1.5B and 3B: 1.0, 3.1 and 6.2 GB. moe is Qwen3-30B-A3B with half the
width, half the experts, 20 layers and fewer tokens: 1.67 B parameters, 3.3 GB; a step with one token reads 0.32 B. The
same seed gives the same bytes. Numpy and `tokenizers` only.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.lib.random_tensors import RandomTensor, write_random_tensors

COMMON = {
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
    "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "bos_token_id": 256,
    "eos_token_id": 257,
}
QWEN2 = COMMON | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 151936,
    "num_key_value_heads": 2,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
}
QWEN3_MOE = COMMON | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
}
SHAPES: dict[str, dict[str, Any]] = {
    "q05": QWEN2 | {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "q15": QWEN2 | {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
    "q3": QWEN2 | {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16},
    "moe": QWEN3_MOE
    | {
        "vocab_size": 32768,
        "hidden_size": 1024,
        "intermediate_size": 3072,  # of a dense layer, of which there is none
        "num_hidden_layers": 20,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 384,
    },
}
SPECIAL_TOKENS = ("<|startoftext|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 256 to 259
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def config_of(shape: str, layers: int | None = None) -> dict[str, Any]:
    """Return config.json of a key of SHAPES. layers: fewer than it has, for a quick test."""
    layers = layers or SHAPES[shape]["num_hidden_layers"]
    return SHAPES[shape] | {"num_hidden_layers": layers, "max_window_layers": layers}


def default_out(shape: str) -> Path:
    return Path(os.environ.get("PEERS_DIR", Path.home() / ".cache" / "fastdeploy-peers")) / shape


def tensors(config: dict[str, Any]) -> Iterator[RandomTensor]:
    """Yield every tensor, in file order.

    Norms differ from 1 and biases from 0, so that an engine that ignores one of them gives other tokens. Standard
    deviations are larger than the usual 0.02, with which a random model repeats one token and equal texts prove
    nothing.
    """
    yield from mixture(config) if "num_experts" in config else dense(config)
    yield RandomTensor("model.norm.weight", (config["hidden_size"],), 1.0, 0.1)


def dense(config: dict[str, Any]) -> Iterator[RandomTensor]:
    """Yield the embedding and the layers of a Qwen2 model."""
    hidden = config["hidden_size"]
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
        yield from mlp(base + "mlp.", hidden, config["intermediate_size"], 0.03, 0.03)


def mixture(config: dict[str, Any]) -> Iterator[RandomTensor]:
    """Yield the embedding, the head and the layers of a Qwen3 model with experts in every layer.

    The logits of a router have a standard deviation of about 1.6 (0.05 times the root of 1024 columns), so that the
    best of 64 experts has a probability of about 0.2. Different tokens choose different experts, because the embedding
    and the experts change the residual more than attention, which gives the tokens of a sequence something in common.
    """
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    yield RandomTensor("model.embed_tokens.weight", (config["vocab_size"], hidden), 0.0, 1.0)
    yield RandomTensor("lm_head.weight", (config["vocab_size"], hidden), 0.0, 0.05)
    for layer in range(config["num_hidden_layers"]):
        base = f"model.layers.{layer}."
        yield RandomTensor(base + "input_layernorm.weight", (hidden,), 1.0, 0.1)
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            yield RandomTensor(base + f"self_attn.{name}_proj.weight", (rows, hidden), 0.0, 0.05)
        for name in ("q", "k"):
            yield RandomTensor(base + f"self_attn.{name}_norm.weight", (head_dim,), 1.0, 0.1)
        yield RandomTensor(base + "self_attn.o_proj.weight", (hidden, q), 0.0, 0.02)
        yield RandomTensor(base + "post_attention_layernorm.weight", (hidden,), 1.0, 0.1)
        yield RandomTensor(base + "mlp.gate.weight", (config["num_experts"], hidden), 0.0, 0.05)
        for expert in range(config["num_experts"]):
            yield from mlp(base + f"mlp.experts.{expert}.", hidden, config["moe_intermediate_size"], 0.05, 0.1)


def mlp(base: str, hidden: int, inner: int, up_std: float, down_std: float) -> Iterator[RandomTensor]:
    """Yield the tensors of an MLP, or of one expert."""
    yield RandomTensor(base + "gate_proj.weight", (inner, hidden), 0.0, up_std)
    yield RandomTensor(base + "up_proj.weight", (inner, hidden), 0.0, up_std)
    yield RandomTensor(base + "down_proj.weight", (hidden, inner), 0.0, down_std)


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
        "model_max_length": COMMON["max_position_embeddings"],
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
    parser.add_argument("out", nargs="?", type=Path, help="folder (default: named after the shape, among the peers)")
    parser.add_argument("--shape", choices=SHAPES, default="q05", help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, help="fewer than the shape has, for a quick test")
    args = parser.parse_args(argv)
    config, out = config_of(args.shape, args.layers), args.out or default_out(args.shape)
    out.mkdir(parents=True, exist_ok=True)
    write_tokenizer(out)
    count = write_random_tensors(out / "model.safetensors", list(tensors(config)), args.seed)
    (out / "generation_config.json").write_text(json.dumps({"bos_token_id": 256, "eos_token_id": 257}))
    (out / "config.json").write_text(json.dumps(config, indent=2))
    print(f"{out}: {count / 1e6:.1f} M parameters, seed {args.seed}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
