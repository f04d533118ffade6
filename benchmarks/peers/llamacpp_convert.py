"""Write a Qwen2 checkpoint as GGUF for llama.cpp, without quantisation: bfloat16 weights, float32 norms and biases.

    ~/.cache/fastdeploy-peers/llamacpp/bin/python benchmarks/peers/llamacpp_convert.py MODEL FILE

Prompts come as token ids, so the file has tokens but no merges to make tokens of text. Each id beyond the tokenizer's
gets a text of its own, since llama-server would stream nothing for a token without text.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np

KINDS: dict[str, np.dtype[Any]] = {"BF16": np.dtype("<u2"), "F32": np.dtype("<f4")}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """Return llama.cpp's name of a tensor. Raises KeyError."""
    module, _, kind = name.rpartition(".")
    if not module.startswith("model.layers."):
        return f"{NAMES[module]}.{kind}"
    layer, _, part = module.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{NAMES[part]}.{kind}"


def add_config(writer: Any, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)


def add_tokens(writer: Any, folder: Path, config: dict[str, Any]) -> None:
    known = json.loads((folder / "tokenizer.json").read_text())
    texts = {number: text for text, number in known["model"]["vocab"].items()}
    special = {token["id"]: token["content"] for token in known["added_tokens"]}
    size = config["vocab_size"]
    normal, control = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([special.get(i) or texts.get(i) or f"<{i}>" for i in range(size)])
    writer.add_token_types([control if i in special else normal for i in range(size)])
    writer.add_token_merges(["a b"])  # the format wants one; no token "ab" exists
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)


def add_tensors(writer: Any, path: Path) -> None:
    data = np.memmap(path, np.uint8, "r")
    start = 8 + int.from_bytes(data[:8].tobytes(), "little")
    header = json.loads(data[8:start].tobytes())
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        first, last = entry["data_offsets"]
        stored: np.ndarray = data[start + first : start + last]
        values = stored.view(KINDS[entry["dtype"]]).reshape(entry["shape"])
        if values.dtype == np.float32:
            writer.add_tensor(gguf_name(name), values)
        elif values.ndim == 1:
            writer.add_tensor(gguf_name(name), (values.astype(np.uint32) << 16).view(np.float32))
        else:
            writer.add_tensor(gguf_name(name), values.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)


def main() -> None:
    folder, target = map(Path, sys.argv[1:])
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] != "qwen2":
        sys.exit(f"model_type: expected qwen2, got {config['model_type']!r}")
    writer = gguf.GGUFWriter(target, "qwen2")
    add_config(writer, config)
    add_tokens(writer, folder, config)
    add_tensors(writer, folder / "model.safetensors")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
