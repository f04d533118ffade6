"""Ways in which a tensor differs: its values are at their places, but something was done to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from fastdeploy.core.serving_dtype import in_dtype
from fastdeploy.rl.check_sync.case import Case, bits_of, values_of

FEW = 8  # values of which single bits may have flipped
NEARLY_ALL = 0.99
QUANTIZED = 0.07  # the relative error of a value with three bits of fraction
MAX_SIDE = 384  # of the part of a matrix whose rank is looked at
SEEN = 1 << 20  # values from which a ratio or a correlation is estimated


def not_finite(case: Case) -> str | None:
    """Find NaN and infinity."""
    bad = np.flatnonzero(~np.isfinite(case.served.reshape(-1)))
    if not bad.size:
        return None
    return f"{bad.size} values are NaN or infinite, the first at {place_of(int(bad[0]), case)}"


def constant(case: Case) -> str | None:
    """Find a tensor of ones, or of any other single value."""
    first = case.served.reshape(-1)[0]
    if case.served.size == 1 or not (case.served == first).all():
        return None
    return f"all values are {first:g}, as before an initialisation"


def flipped_bits(case: Case) -> str | None:
    """Find a few values of which one bit is another one."""
    if not 0 < case.changed.size <= FEW:
        return None
    flips = (case.expected_bits.reshape(-1) ^ case.served_bits.reshape(-1))[case.changed]
    if not all(int(flip).bit_count() == 1 for flip in flips):
        return None
    bits = ", ".join(str(int(flip).bit_length() - 1) for flip in flips)
    places = ", ".join(place_of(int(at), case) for at in case.changed)
    return f"one bit is flipped in {case.changed.size} of {case.served.size} values: bit {bits} at {places}"


def byte_order(case: Case) -> str | None:
    """Find values whose bytes are in the opposite order."""
    same = np.array_equal(case.served_bits, case.expected_bits.byteswap())
    return "the bytes of each value are in the opposite order" if same else None


def wrong_dtype(case: Case) -> str | None:
    """Find values that went through another dtype on their way."""
    for dtype, rounded in ROUNDINGS.items():
        with np.errstate(all="ignore"):
            found = in_dtype(np.ascontiguousarray(rounded(case.wide), np.float32), case.dtype)
        if np.array_equal(bits_of(found), case.served_bits):
            return f"the values went through {dtype} on their way to {case.dtype}"
    return None


def scaled(case: Case) -> str | None:
    """Find values that were multiplied by a number, and those that were negated. With quantized weights, a scale that
    got lost or that was applied twice."""
    expected, served = seen(case.expected), seen(case.served)
    there = (expected != 0) & np.isfinite(served)
    if there.sum() < 2 or (served[expected == 0] != 0).any():
        return None
    ratios = served[there] / expected[there]
    ratio = float(np.median(ratios))
    if not np.isfinite(ratio) or abs(ratio - 1) < 8 * case.step or abs(ratio) < 1e-30:
        return None
    error = np.abs(ratios / ratio - 1)
    what = "the values are negated" if abs(ratio + 1) < 8 * case.step else f"the values are multiplied by {ratio:.6g}"
    if float(error.max()) <= 8 * case.step:
        return what
    if float(np.quantile(error, 0.9)) <= QUANTIZED and abs(ratio - 1) > QUANTIZED:
        return f"{what} and rounded, as with a scale of quantized weights that is missing or applied twice"
    return None


def scaled_rows(case: Case) -> str | None:
    """Find a matrix of which each row was multiplied by a number of its own."""
    if case.expected.ndim < 2:
        return None
    expected, served = (one.reshape(-1, one.shape[-1])[:4096] for one in (case.expected, case.served))
    if expected.shape[1] < 8 or len(expected) < 2:
        return None
    with np.errstate(all="ignore"):
        ratios = np.where(np.abs(expected) > 1e-12, served / expected, np.nan)
        of_row = np.nanmedian(ratios, axis=1, keepdims=True)
        error = np.abs(ratios / of_row - 1)
    other = np.abs(of_row - 1) > 2 * QUANTIZED
    if not np.isfinite(of_row).all() or other.mean() < 0.5 or np.nanquantile(error, 0.9) > QUANTIZED:
        return None
    low, high = float(of_row.min()), float(of_row.max())
    return f"each row is multiplied by a number of its own, from {low:.4g} to {high:.4g}: its scale is wrong"


def shifted(case: Case) -> str | None:
    """Find values to which a number was added. Gemma's norms multiply by 1 + weight: 1 is added twice, or never."""
    expected, served = seen(case.expected), seen(case.served)
    with np.errstate(all="ignore"):
        by = float(np.median(served - expected))
        error = np.abs(served - expected - by) <= 4 * case.step * (np.abs(served) + np.abs(expected) + abs(by))
    if not np.isfinite(by) or abs(by) <= 8 * case.step * float(np.abs(expected).max()) or not error.all():
        return None
    return f"{by:.6g} is added to every value"


def between_updates(case: Case) -> str | None:
    """Find values between those of the trainer and those of earlier weights: an average of both, an update that was
    applied twice, or an update of which some values got lost."""
    for one, old in case.earlier():
        bits = old.reshape(-1)[case.changed]
        if not case.changed.size:
            return None
        lost = float((bits == case.served_bits.reshape(-1)[case.changed]).mean())
        if lost >= NEARLY_ALL:
            share = case.changed.size / max(1, int((old != case.expected_bits).sum()))
            return f"{case.changed.size} values are those of {one.label}: {share:.2%} of the update got lost"
        step = values_of(old) - case.expected
        length = float((step.astype(np.float64) ** 2).sum())
        if not length or not np.isfinite(case.difference).all():
            continue
        part = float((step.astype(np.float64) * case.difference).sum()) / length
        rest = float(((case.difference - part * step).astype(np.float64) ** 2).sum())
        rounding = float(((case.step * case.expected).astype(np.float64) ** 2).sum())
        if abs(part) > 0.02 and rest <= 0.1 * part * part * length + 4 * rounding:
            if part < 0:
                return f"the change since {one.label} was applied {1 - part:.2f} times"
            return f"the values lie between those of the trainer and those of {one.label}: {part:.0%} of the way"
    return None


def low_rank(case: Case) -> str | None:
    """Find a difference of a low rank: an adapter was merged on one side only."""
    if case.expected.ndim != 2 or min(case.expected.shape) < 24 or not np.isfinite(case.difference).all():
        return None
    part = case.difference[:MAX_SIDE, :MAX_SIDE].astype(np.float64)
    powers = np.linalg.svd(part, compute_uv=False) ** 2
    total = powers.sum()
    if not total:
        return None
    rank = int(np.searchsorted(np.cumsum(powers), 0.97 * total)) + 1
    if rank > min(part.shape) // 6 or (np.abs(part) > 0).mean() < 0.5:
        return None
    return f"the difference has the rank {rank}: an adapter (LoRA) is merged on one side only"


def unrelated(case: Case) -> str | None:
    """Find values that have nothing to do with those of the trainer."""
    expected, served = (seen(one).astype(np.float64) for one in (case.expected, case.served))
    if expected.size < 64 or not np.isfinite(served).all() or not expected.std() or not served.std():
        return None
    correlation = float(np.corrcoef(expected, served)[0, 1])
    # The correlation of values that have nothing in common has a deviation of size ** -0.5.
    if abs(correlation) > 0.05 + 5 / np.sqrt(expected.size):
        return None
    spread = float(served.std() / expected.std())
    like = "random values of the same size" if 0.5 < spread < 2 else f"values {spread:.3g} times as large"
    return f"the values have nothing in common with the trainer's (correlation {correlation:.3f}): {like}"


def near(case: Case) -> str | None:
    """Find values close to those of the trainer: of another step, or with noise."""
    if not np.isfinite(case.served).all():
        return None
    expected, difference = (one.astype(np.float64) for one in (case.expected, case.difference))
    size = float(np.sqrt((expected**2).mean()))
    if not size:
        return None
    relative = float(np.sqrt((difference**2).mean())) / size
    if relative > 0.5:
        return None
    return f"the values are near the trainer's, {relative:.3g} of their size away: another step, or noise"


def seen(values: np.ndarray) -> np.ndarray:
    """Return at most SEEN values, evenly chosen."""
    flat = values.reshape(-1)
    return flat[:: -(-flat.size // SEEN)]


def place_of(index: int, case: Case) -> str:
    """Return the place of a flat index as [row, column]."""
    return str([int(one) for one in np.unravel_index(index, case.expected.shape)])


# ---------------------------------------------------------------------- dtypes


def _float(bits: int, low: int, high: float) -> Callable[[np.ndarray], np.ndarray]:
    """Return the rounding, to nearest even, to floats with so many bits of fraction, the smallest normal exponent
    ``low`` and the largest value ``high``."""

    def rounded(values: np.ndarray) -> np.ndarray:
        exponent = np.maximum(np.frexp(values)[1] - 1, low)
        unit = np.ldexp(np.float32(1), exponent - bits)
        found: np.ndarray = np.clip(np.rint(values / unit) * unit, -high, high)
        return found

    return rounded


def _cut(values: np.ndarray) -> np.ndarray:
    """Cut the lower half of float32."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    return bits.view(np.float32)


def _scaled(
    rounded: Callable[[np.ndarray], np.ndarray], high: float, axis: int | None
) -> Callable[[np.ndarray], np.ndarray]:
    """Return the rounding with a scale for each row (axis -1) or for the tensor (None), so that the largest value
    becomes ``high``."""

    def found(values: np.ndarray) -> np.ndarray:
        scale = np.abs(values).max(axis=axis, keepdims=True).astype(np.float32) / np.float32(high)
        scale = np.where(scale == 0, np.float32(1), scale)
        return rounded(values / scale) * scale

    return found


_e4m3, _e5m2 = _float(3, -6, 448.0), _float(2, -14, 57344.0)
ROUNDINGS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "float16": lambda values: values.astype(np.float16).astype(np.float32),
    "bfloat16": _float(7, -126, 3.3895313892515355e38),
    "bfloat16, cut and not rounded,": _cut,
    "float8_e4m3": _e4m3,
    "float8_e5m2": _e5m2,
    "float8_e4m3 with a scale for the tensor": _scaled(_e4m3, 448.0, None),
    "float8_e4m3 with a scale for each row": _scaled(_e4m3, 448.0, -1),
    "int8 with a scale for each row": _scaled(np.rint, 127.0, -1),
    "int8 with a scale for the tensor": _scaled(np.rint, 127.0, None),
}
