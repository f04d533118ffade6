"""Ways in which a tensor differs: values are right, but not at their places, or only at some of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fastdeploy.rl.check_sync.case import Case

NEEDLE = 8  # values that are looked for to find where a run of values comes from
SHORTEST = 16  # values of a run that is looked at
MAX_FOUND = 64  # places of the same values that are tried


def transposed(case: Case) -> str | None:
    """Find a matrix that is transposed, also one that is not square: its values, row by row, are those of the
    transpose."""
    if case.expected.ndim < 2:
        return None
    flat = case.served_bits.reshape(-1)
    if np.array_equal(flat, np.swapaxes(case.expected_bits, -1, -2).reshape(-1)):
        return "the matrix is transposed"
    if case.expected.ndim == 3 and np.array_equal(flat, case.expected_bits.T.reshape(-1)):
        return "the dimensions are in the opposite order"
    return None


def rows(case: Case) -> str | None:
    """Find rows that are all there, in another order."""
    return _permuted(case.expected_bits, case.served_bits, case, "rows")


def columns(case: Case) -> str | None:
    """Find columns that are all there, in another order."""
    if case.expected.ndim != 2:
        return None
    return _permuted(case.expected_bits.T, case.served_bits.T, case, "columns")


def mixed_parts(case: Case) -> str | None:
    """Find rows of q, k and v, or of gate and up, in one tensor: a fused tensor was split in another way."""
    if case.expected.ndim != 2 or not (names := case.relatives()):
        return None
    own = _row_keys(case.expected_bits)
    others = {key: name for name in names for key in _row_keys(case.sides.read(name)) if case.served.shape[1:]}
    served = _row_keys(case.served_bits)
    found = [others.get(key) for key in served]
    known = set(own)
    if any(name is None and key not in known for name, key in zip(found, served, strict=True)):
        return None
    from_other = sorted({name for name, key in zip(found, served, strict=True) if name and key not in known})
    if not from_other:
        return None
    count = sum(key not in known for key in served)
    return f"{count} of {len(served)} rows are those of {', '.join(from_other)}: a fused tensor was split wrongly"


def part_of_rows(case: Case) -> str | None:
    """Find a shard that was not updated: only some rows differ."""
    return _part(case, "rows", 0)


def part_of_columns(case: Case) -> str | None:
    """Find a shard that was not updated: only some columns differ."""
    return _part(case, "columns", 1) if case.expected.ndim == 2 else None


def moved_run(case: Case) -> str | None:
    """Find a run of values that comes from another place of the tensor: a chunk was written twice, left out, or
    written at a wrong offset."""
    flat, own = case.served_bits.reshape(-1), case.expected_bits.reshape(-1)
    first, last = int(case.changed[0]), int(case.changed[-1]) + 1
    if last - first < SHORTEST:
        return None
    size = flat.itemsize
    haystack, needle = own.tobytes(), flat[first : first + NEEDLE].tobytes()
    at = -size
    for _ in range(MAX_FOUND):
        at = haystack.find(needle, at + size)
        if at < 0:
            return None
        start = at // size
        if at % size or start == first:
            continue
        length = min(last - first, own.size - start)
        same = int(np.argmin(np.append(flat[first : first + length] == own[start : start + length], False)))
        if same >= max(SHORTEST, (last - first) // 4):
            run = f"[{first}, {first + same})"
            return f"the values {run} of the flat tensor are those from {start} on, {abs(start - first)} places away"
    return None


def part_of_values(case: Case) -> str | None:
    """Find a few values that differ."""
    share = case.changed.size / case.served.size
    if share > 0.02 or case.served.size < 64:
        return None
    return f"only {case.changed.size} of {case.served.size} values differ"


# ---------------------------------------------------------------------- rows


def _row_keys(bits: np.ndarray) -> list[bytes]:
    """Return the bytes of each row; of a tensor of experts, of each expert."""
    if bits.ndim < 2:
        return []
    flat = np.ascontiguousarray(bits).reshape(bits.shape[0], -1)
    return [row.tobytes() for row in flat]


def _permuted(expected: np.ndarray, served: np.ndarray, case: Case, kind: str) -> str | None:
    """Return a sentence if the rows are all there, in another order."""
    if expected.ndim == 1:
        if expected.size > 3 and np.array_equal(np.sort(expected), np.sort(served)) and kind == "rows":
            return f"the values are all there, in another order{_of_heads(_order_of_values(expected, served), case)}"
        return None
    before, after = _row_keys(expected), _row_keys(served)
    if len(set(before)) != len(before):
        return None
    where = {key: row for row, key in enumerate(before)}
    order = [where.get(key) for key in after]
    if None in order:
        return None
    found = [one for one in order if one is not None]
    if len(set(found)) == len(found):
        return f"the {kind} are all there, in another order{_of_heads(found, case)}"
    missing = len(found) - len(set(found))
    first = next(row for row, origin in enumerate(found) if origin != row)
    return f"{missing} {kind} are there twice, in place of others: the first, {first}, is a copy of {found[first]}"


def _order_of_values(expected: np.ndarray, served: np.ndarray) -> list[int]:
    first, second = np.argsort(expected, kind="stable"), np.argsort(served, kind="stable")
    order = np.empty(expected.size, np.int64)
    order[second] = first
    return [int(one) for one in order]


def _of_heads(order: Sequence[int], case: Case) -> str:
    """Return what the order of rows means for heads; "" if nothing. order: of each row, where it comes from."""
    places = np.asarray(order)
    size, dim = len(places), case.sides.config.head_dim
    if size % dim == 0 and ".self_attn." in case.name:
        heads = places.reshape(-1, dim)
        within = heads - heads[:, :1] // dim * dim
        half, pairs = np.arange(dim).reshape(2, -1), np.arange(dim).reshape(-1, 2)
        for layout, words in ((half.T, "interleaved"), (pairs.T, "split in halves")):
            if np.array_equal(within, np.broadcast_to(layout.reshape(-1), within.shape)):
                return f": the dimensions of each head are {words}, as for another rotary embedding"
        if np.array_equal(within, np.broadcast_to(np.arange(dim), within.shape)):
            return f": the heads are {[int(one) for one in heads[:, 0] // dim]}"
    if np.array_equal(places, np.arange(size)[::-1]):
        return ": reversed"
    return _shards(places) or (f": shifted by {places[0]}" if _is_shifted(places) else "")


def _is_shifted(places: np.ndarray) -> bool:
    return np.array_equal(places, (np.arange(places.size) + places[0]) % places.size)


def _shards(places: np.ndarray) -> str:
    """Return the order of equal blocks of rows, as of shards in a wrong order; "" if there are no such blocks."""
    for shards in (2, 4, 8, 16, 3):
        if places.size % shards == 0:
            blocks = places.reshape(shards, -1)
            if np.array_equal(blocks - blocks[:, :1], np.broadcast_to(np.arange(blocks.shape[1]), blocks.shape)):
                order = [int(one) for one in blocks[:, 0] // blocks.shape[1]]
                return f": {shards} shards are in the order {order}"
    return ""


# ---------------------------------------------------------------------- parts


def _part(case: Case, kind: str, axis: int) -> str | None:
    """Return a sentence if only some rows (axis 0) or columns (axis 1) differ."""
    if (found := _stale_part(case, kind, axis)) is not None:
        return found
    same = case.expected_bits == case.served_bits
    others = tuple(one for one in range(same.ndim) if one != axis)
    differs = ~same.all(axis=others)
    changed = np.flatnonzero(differs)
    size = differs.size
    if size < 2 or not 0 < changed.size <= 0.95 * size:
        return None
    first, last = int(changed[0]), int(changed[-1]) + 1
    # A few rows in which single values differ are no part that was left out.
    inside = np.take(~same, changed, axis).mean()
    if inside < 0.3 or changed.size < 0.9 * (last - first):
        return None
    what = f"only the {kind} [{first}, {last}) of {size} differ"
    values = np.take(case.served, changed, axis)
    if not values.any():
        return f"{what}: they are 0, as without the shard that has them"
    return f"{what}: a shard of {changed.size} {kind} was not updated, or updated wrongly"


def _stale_part(case: Case, kind: str, axis: int) -> str | None:
    """Return a sentence if some rows or columns are those of earlier weights, and all others are new."""
    others = tuple(one for one in range(case.expected_bits.ndim) if one != axis)
    for one, old in case.earlier():
        is_new = (case.served_bits == case.expected_bits).all(axis=others)
        is_old = (case.served_bits == old).all(axis=others)
        stale, fresh = np.flatnonzero(is_old & ~is_new), np.flatnonzero(is_new & ~is_old)
        if not stale.size or not fresh.size or not (is_new | is_old).all():
            continue
        first, last = int(stale[0]), int(stale[-1]) + 1
        if is_old[first:last].all():
            return f"only the {kind} [{first}, {last}) of {is_old.size} differ: they are those of {one.label}"
        return f"{stale.size} of {is_old.size} {kind} are those of {one.label}, from {first} to {last - 1}"
    return None
