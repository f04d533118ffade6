"""A stand-in for the package ``kernels``: variable-length attention by torch's own function."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention


def get_kernel(name: str, version: int | None = None) -> Any:
    return SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
) -> torch.Tensor:
    """Return attention [Tq, heads, dim] of q [Tq, heads, dim] and k, v [Tk, kv_heads, dim], whose sequences are
    concatenated. The last query of a sequence has the position of its last key. No sliding window."""
    assert causal and window_size == (-1, -1)
    groups = q.shape[1] // k.shape[1]
    parts = []
    bounds = zip(cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), strict=True)
    q_start, k_start = next(bounds)
    for q_end, k_end in bounds:
        rows, keys = q_end - q_start, k_end - k_start
        query = q[q_start:q_end].transpose(0, 1)
        key = k[k_start:k_end].transpose(0, 1).repeat_interleave(groups, 0)
        value = v[k_start:k_end].transpose(0, 1).repeat_interleave(groups, 0)
        visible = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
        out = scaled_dot_product_attention(query[None], key[None], value[None], visible, scale=softmax_scale)
        parts.append(out[0].transpose(0, 1))
        q_start, k_start = q_end, k_end
    return torch.cat(parts)
