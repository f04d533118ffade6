"""Log probabilities of many tokens in SGLang's compact forms: arrays, as base64 or as flat lists."""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from fastdeploy.core.outputs import Logprob

FILL_VALUE, FILL_ID = struct.pack("<f", -9999.0), struct.pack("<i", -1)


def top_p_ids(entries: list[Logprob]) -> dict[str, str]:
    """Return the ids that each token was drawn from, as slime reads them: base64 of the int32 ids of all tokens in a
    row, and base64 of the int32 offsets of each token's first id, with the end as last offset. Empty if neither top_p
    nor top_k nor min_p excludes a token."""
    if entries and not any(entry.mask_ids for entry in entries):
        return {}
    offsets = [0, *accumulate(len(entry.mask_ids) // 4 for entry in entries)]
    return {
        "top_p_token_ids": base64.b64encode(b"".join(entry.mask_ids for entry in entries)).decode(),
        "top_p_token_offsets": base64.b64encode(struct.pack(f"<{len(offsets)}i", *offsets)).decode(),
    }


def flat_top(side: str, entries: Sequence[Logprob | None], top: int, as_base64: bool) -> dict[str, Any]:
    """Return the best tokens of each entry as two arrays [entries, top]: float32 logprobs and int32 ids, row by row.
    side: "input" or "output", with which the names of the fields begin. Leading entries of None are counted alone
    (null_prefix). A row with fewer tokens is filled with -9999.0 and id -1."""
    rows = [entry for entry in entries if entry is not None]
    name, missing = f"{side}_top_logprobs", [top - entry.num_top for entry in rows]
    values = b"".join(e.top_logprobs + FILL_VALUE * m for e, m in zip(rows, missing, strict=True))
    ids = b"".join(e.top_ids + FILL_ID * m for e, m in zip(rows, missing, strict=True))
    fields: dict[str, Any] = {f"{name}_shape": [len(rows), top], f"{name}_null_prefix": len(entries) - len(rows)}
    if not as_base64:
        flat = memoryview(values).cast("f").tolist(), memoryview(ids).cast("i").tolist()
        return fields | {f"{name}_val_flat": flat[0], f"{name}_idx_flat": flat[1]}
    return fields | {
        f"{name}_val_flat_b64": base64.b64encode(values).decode(),
        f"{name}_val_flat_b64_dtype": "float32",
        f"{name}_idx_flat_b64": base64.b64encode(ids).decode(),
        f"{name}_idx_flat_b64_dtype": "int32",
    }
