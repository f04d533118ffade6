"""Random adapters over the embedded model, as PEFT folders."""

from __future__ import annotations

from pathlib import Path

from fastdeploy.testing.checkpoints import Spec
from support.adapters import simple, write_adapter

EMBEDDED = Spec("embedded", tied=True, head_dim=64, hidden=128, inner=384, layers=4, heads=4, kv_heads=2, vocab=272)


def adapter_folder(folder: Path, seed: int) -> Path:
    """Write an adapter of rank 8 on all linears of a layer to the new ``folder``."""
    return write_adapter(folder, EMBEDDED, simple(EMBEDDED, 8, seed=seed))
