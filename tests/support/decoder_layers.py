"""Random decoder layers and adapters for tests of the ops."""

from __future__ import annotations

from copy import copy
from dataclasses import replace

import numpy as np
import paddle

from fastdeploy.model_executor.ops.blocks import AttentionBlock, AttentionSpec, DecoderLayer, MlpBlock
from fastdeploy.model_executor.ops.interface import AttentionBatch, LoraPart, PackedAdapter

BLOCK = 16


class Layer:
    """Random weights of one layer; ``on(ops)`` packs them."""

    def __init__(self, rng, hidden: int, heads: int, kv_heads: int, dim: int, inner: int, biased: bool):
        def weight(n: int, k: int) -> np.ndarray:
            return (rng.standard_normal((n, k)) / k**0.5).astype(np.float32)

        self.hidden, self.heads, self.kv_heads, self.dim = hidden, heads, kv_heads, dim
        sizes = [heads * dim, kv_heads * dim, kv_heads * dim]
        linears = {
            "qkv": [weight(n, hidden) for n in sizes],
            "o": [weight(hidden, heads * dim)],
            "gate_up": [weight(inner, hidden), weight(inner, hidden)],
            "down": [weight(hidden, inner)],
        }
        biases = {name: [rng.standard_normal(len(w)).astype(np.float32) for w in ws] for name, ws in linears.items()}
        self.linears = {name: (weights, biases[name] if biased else None) for name, weights in linears.items()}
        self.norms = [paddle.to_tensor(rng.uniform(0.5, 1.5, hidden).astype(np.float32)) for _ in range(2)]
        angles = np.arange(256)[:, None] * rng.random(dim // 2)
        self.rope = [paddle.to_tensor(f(angles).astype(np.float32)) for f in (np.cos, np.sin)]

    def on(self, ops) -> DecoderLayer:
        spec = AttentionSpec(0, self.heads, self.kv_heads, self.dim, self.dim**-0.5, *self.rope, None, None, 1e-6)
        linears = {name: ops.pack_linear(*parts) for name, parts in self.linears.items()}
        attention = AttentionBlock(self.norms[0], 1e-6, linears["qkv"], spec, linears["o"])
        return DecoderLayer((attention, MlpBlock(self.norms[1], 1e-6, linears["gate_up"], linears["down"])))

    def cache(self, ops, sequences: int):
        return ops.new_kv_cache(1, sequences * 16, BLOCK, self.kv_heads, self.dim)


def with_attention(packed: DecoderLayer, **changes) -> DecoderLayer:
    """Return the layer with changes to the spec of its attention."""
    attention, mlp = packed.blocks
    return DecoderLayer((replace(attention, attention=attention.attention._replace(**changes)), mlp))


def make_batch(sequences: list[int], starts: list[int], lengths: list[int]) -> AttentionBatch:
    """Return a batch of ``lengths`` tokens from positions ``starts`` on. Each sequence has its own blocks."""
    cu = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    tables = np.array([range(s * 16, s * 16 + 16) for s in sequences], np.int32)
    positions = np.concatenate([np.arange(a, a + n) for a, n in zip(starts, lengths, strict=True)]).astype(np.int32)
    return AttentionBatch(cu, np.array(starts, np.int32), tables, positions)


SHAPES = {
    "small": (64, 4, 2, 16, 96, True),
    "odd": (70, 3, 1, 10, 37, True),  # no width is a whole tile, gate and up share one
    "half a tile of depth": (96, 2, 2, 32, 48, False),
    "wide": (256, 4, 2, 64, 5000, True),  # K of the last linear is cut into blocks
}


class Adapter:
    """A random adapter of a ``Layer``. ranks: for each linear that has one, the rank of each of its projections; None
    for a projection without. The ranks of a linear differ in their scaling as well."""

    def __init__(self, rng, layer: Layer, ranks: dict[str, list[int | None]], scale: float = 1.0):
        def part(weight: np.ndarray, rank: int, scaling: float) -> LoraPart:
            n, k = weight.shape
            a, b = rng.standard_normal((rank, k)) / k**0.5, rng.standard_normal((n, rank)) / rank**0.5
            return LoraPart(a.astype(np.float32), b.astype(np.float32), scaling * scale)

        self.layer = layer
        self.parts = {
            name: [
                None if rank is None else part(weight, rank, 0.5 + i)
                for i, (rank, weight) in enumerate(zip(ranks[name], weights, strict=True))
            ]
            for name, (weights, _) in layer.linears.items()
            if name in ranks
        }

    def on(self, ops, layers: int = 1) -> PackedAdapter:
        """Pack the adapter for ``layers`` equal layers."""

        def packed(name: str):
            if name not in self.parts:
                return None
            weights = self.layer.linears[name][0]
            return ops.pack_lora(self.parts[name], [len(weight) for weight in weights], weights[0].shape[1])

        loras = [packed(name) for name in ("qkv", "o", "gate_up", "down")]
        nbytes = layers * sum(lora.nbytes for lora in loras if lora is not None)
        return PackedAdapter(((tuple(loras[:2]), tuple(loras[2:])),) * layers, None, nbytes)

    def merged(self) -> Layer:
        """Return the layer with the adapter added to its weights."""
        merged = copy(self.layer)
        merged.linears = dict(self.layer.linears)
        for name, parts in self.parts.items():
            weights, bias = self.layer.linears[name]
            added = [w if p is None else w + p.scaling * (p.b @ p.a) for w, p in zip(weights, parts, strict=True)]
            merged.linears[name] = (added, bias)
        return merged
