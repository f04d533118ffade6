"""Random layers of latent attention for tests of the ops."""

from __future__ import annotations

import numpy as np
import paddle

from fastdeploy.model_executor.ops.blocks import AttentionSpec, DecoderLayer, LatentAttentionBlock
from tests.support.decoder_layers import BLOCK

# hidden, heads, plain, rotary, latent, value, inner (0: no q_a), interleaved
SHAPES = {
    "small": (64, 4, 32, 16, 48, 16, 24, True),
    "no q_a": (70, 3, 16, 32, 32, 32, 0, False),
    "wide": (256, 16, 128, 64, 512, 128, 96, True),  # as DeepSeek's
}


class LatentLayer:
    """Random weights of one block of latent attention; ``on(ops)`` packs them."""

    def __init__(
        self, rng, hidden: int, heads: int, plain: int, rotary: int, latent: int, value: int, inner: int, turned: bool
    ):
        def weight(n: int, k: int) -> np.ndarray:
            return (rng.standard_normal((n, k)) / k**0.5).astype(np.float32)

        def norm(size: int) -> paddle.Tensor:
            return paddle.to_tensor(rng.uniform(0.5, 1.5, size).astype(np.float32))

        self.hidden, self.heads, self.dim, self.inner, self.interleaved = hidden, heads, rotary + latent, inner, turned
        self.plain, self.rotary, self.latent = plain, rotary, latent
        self.norms = {"norm": norm(hidden), "kv_norm": norm(latent)}
        self.weights = {
            "q": weight(heads * (plain + rotary), inner or hidden),
            "kv_a": weight(rotary + latent, hidden),
            "kv_b": weight(heads * (plain + value), latent),
            "o": weight(hidden, heads * value),
        }
        if inner:
            self.norms["q_norm"], self.weights["q_a"] = norm(inner), weight(inner, hidden)
        angles = np.arange(256)[:, None] * rng.random(rotary // 2)
        self.rope = [paddle.to_tensor(f(angles).astype(np.float32)) for f in (np.cos, np.sin)]

    def on(self, ops) -> DecoderLayer:
        spec = AttentionSpec(
            layer=0,
            num_heads=self.heads,
            num_kv_heads=1,
            head_dim=self.dim,
            scale=(self.plain + self.rotary) ** -0.5,
            rope_cos=self.rope[0],
            rope_sin=self.rope[1],
            q_norm=None,
            k_norm=None,
            norm_eps=1e-6,
            interleaved=int(self.interleaved),
            rotary_dim=self.rotary,
        )
        keys = self.weights["kv_b"].reshape(self.heads, -1, self.latent)[:, : self.plain]
        absorbed = np.ascontiguousarray(keys.transpose(0, 2, 1)).reshape(-1, self.plain)
        linears = {name: ops.pack_linear([weight]) for name, weight in (self.weights | {"absorbed": absorbed}).items()}
        return DecoderLayer((LatentAttentionBlock(norm_eps=1e-6, attention=spec, **linears, **self.norms),))

    def cache(self, ops, sequences: int):
        return ops.new_kv_cache(1, sequences * 16, BLOCK, 1, self.dim, keys_only=True)
