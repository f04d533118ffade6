#!/usr/bin/env python
"""Write PEFT adapters with random bfloat16 weights for the linears of all layers of a Qwen2, Qwen3 or Llama checkpoint.

    python benchmarks/make_adapters.py MODEL OUT [--count 33] [--rank 16]       (OUT/adapter-0, OUT/adapter-1, ...)

No download. The same seed gives the same bytes. Numpy only. PEFT itself initialises B with zeros; here B is random, so
that every adapter changes the tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.lib.random_tensors import RandomTensor, write_random_tensors
from benchmarks.lib.roofline import BYTES, Shape

# Of A and B. The change of a weight, scaling * B A, is then about half as large as q05's own weights at rank 16.
STD = 0.05


def linears(shape: Shape) -> dict[str, tuple[int, int]]:
    """Return (out_features, in_features) of the linears of one layer, by the name of the module in the layer."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return {
        "self_attn.q_proj": (q, shape.hidden),
        "self_attn.k_proj": (kv, shape.hidden),
        "self_attn.v_proj": (kv, shape.hidden),
        "self_attn.o_proj": (shape.hidden, q),
        "mlp.gate_proj": (shape.inner, shape.hidden),
        "mlp.up_proj": (shape.inner, shape.hidden),
        "mlp.down_proj": (shape.hidden, shape.inner),
    }


def tensors(shape: Shape, rank: int) -> Iterator[RandomTensor]:
    """Yield the tensors of an adapter, by the names under which PEFT saves them."""
    for layer in range(shape.layers):
        for name, (rows, columns) in linears(shape).items():
            base = f"base_model.model.model.layers.{layer}.{name}"
            yield RandomTensor(f"{base}.lora_A.weight", (rank, columns), 0.0, STD)
            yield RandomTensor(f"{base}.lora_B.weight", (rows, rank), 0.0, STD)


def adapter_bytes(shape: Shape, rank: int) -> int:
    """Return the bytes of one adapter in bfloat16."""
    return BYTES * shape.layers * rank * sum(rows + columns for rows, columns in linears(shape).values())


def config(shape: Shape, rank: int) -> dict[str, object]:
    """Return the content of adapter_config.json. The scaling is 2."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": [name.partition(".")[2] for name in linears(shape)],
        "inference_mode": True,
    }


def write_adapter(folder: Path, shape: Shape, rank: int, seed: int) -> None:
    """Write a PEFT folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config(shape, rank), indent=2))
    write_random_tensors(folder / "adapter_model.safetensors", list(tensors(shape, rank)), seed)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="the base model's folder, of which only config.json is read")
    parser.add_argument("out", type=Path)
    parser.add_argument("--count", type=int, default=33)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0, help="of the first adapter; the next one has the next seed")
    args = parser.parse_args(argv)
    shape = Shape.of(args.model)
    for number in range(args.count):
        write_adapter(args.out / f"adapter-{number}", shape, args.rank, args.seed + number)
    size = adapter_bytes(shape, args.rank)
    print(f"{args.out}: {args.count} adapters of rank {args.rank}, {size / 1e6:.1f} MB each")
    return 0


if __name__ == "__main__":
    sys.exit(main())
