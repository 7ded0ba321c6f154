"""The right value with fewer bits, clipped at a bound, or truncated."""

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from lydite.diff.findings.evidence import PART, ROUNDING, Evidence, apart, explanation, norm
from lydite.diff.measure.distance import wide
from lydite.diff.result import Finding

# narrow to wide: bits of the significand, with the one that is not stored
_GRIDS: dict[str, tuple[Any, int]] = {
    "f8_e5m2": (ml_dtypes.float8_e5m2, 3),
    "f8_e4m3": (ml_dtypes.float8_e4m3fn, 4),
    "bf16": (ml_dtypes.bfloat16, 8),
    "f16": (np.float16, 11),
}
_BITS = {**{name: bits for name, (_, bits) in _GRIDS.items()}, "f32": 24, "f64": 53}
_WORDS = {"bf16": "bfloat16", "f16": "float16", "f8_e4m3": "float8 e4m3", "f8_e5m2": "float8 e5m2"}
_BOUNDS = {1.0: "±1", 65504.0: "the end of float16", 448.0: "the end of float8 e4m3"}
MIN_DISTINCT = 32  # values: fewer may lie on any grid
FEW_ROUNDED = 8  # the same where the values are the reference's, rounded


def rounded(e: Evidence) -> Finding | None:
    """The reference rounded once to a narrower type and back."""
    if not e.same_shape:
        return None
    reference, port = e.values
    expected, actual = (value.reshape(-1)[e.sample] for value in e.values)
    for name, (dtype, _) in _GRIDS.items():
        if ROUNDING[name] < 2 * e.rounding or not _fine(expected, dtype):
            continue
        if float(np.mean(actual == _as(expected, dtype))) < 0.8:
            continue
        once = _as(reference, dtype)
        same = float(np.mean(port == once))
        left = apart(port, once)
        if same > 0.9 and left < 0.3 * e.lost and _fine_enough(e, FEW_ROUNDED):
            return explanation(
                "rounded",
                f"{same:.1%} of the port's values are the reference rounded once to "
                f"{_WORDS[name]}; the error is {e.error:.1e}, one such rounding.",
                f"Remove a cast to {_WORDS[name]} that is not in the reference, or load what was "
                f"stored in {_WORDS[name]} from the full checkpoint.",
            )
    return None


def low_precision(e: Evidence) -> Finding | None:
    """Values on a coarser grid than the dtype's, and an error of that size."""
    if not e.same_shape or e.dtype not in _BITS:
        return None
    expected, actual = (value.reshape(-1)[e.sample] for value in e.values)
    for name, (dtype, bits) in _GRIDS.items():
        if bits >= _BITS[e.dtype] or _fine(actual, dtype) or not _fine(expected, dtype):
            continue
        if (
            _fine(e.values[1], dtype)
            or not _fine_enough(e)
            or e.kind == "input"  # a picture of bytes has few digits by itself
            or not 0.3 * ROUNDING[name] < e.error < 30 * ROUNDING[name]
        ):
            continue
        return Finding(
            "lower-precision",
            f"The port is recorded as {e.dtype}, but every value is a {_WORDS[name]} (the last "
            f"{_BITS[e.dtype] - bits} bits are zero); the error {e.error:.1e} has that size.",
            f"Find the cast to {_WORDS[name]} on the way here, and compute in {e.dtype} as the "
            "reference does.",
        )
    return None


def clipped(e: Evidence) -> Finding | None:
    """Right between two bounds, and at a bound beyond them."""
    if not e.same_shape:
        return None
    reference, port = e.values
    low, high = float(port.min()), float(port.max())
    below, above = int((port == low).sum()), int((port == high).sum())
    over, under = int((reference > high).sum()), int((reference < low).sum())
    between = (port > low) & (port < high)
    # Many values exactly at one bound: a maximum has one.
    if not ((above > 2 and over > 2) or (below > 2 and under > 2)) or between.sum() < MIN_DISTINCT:
        return None
    left, own = apart(port, np.clip(reference, low, high)), norm(port[between])
    if left > max(e.noise(), PART * min(e.lost, own)) or left > 0.3 * min(e.lost, own):
        return None
    bounds = " and ".join(
        f"{count} values above {bound:.6g}" if top else f"{count} values below {bound:.6g}"
        for count, bound, top in ((over, high, True), (under, low, False))
        if count > 2
    )
    known = next((word for bound, word in _BOUNDS.items() if bound in (high, -low)), None)
    return explanation(
        "clipped",
        f"The port equals the reference clipped: {bounds} are at the bound"
        f"{f' ({known})' if known else ''}, the others agree; {e.leaves(left)}.",
        "Remove a clip, a saturating cast or a bounded activation, or compare before it.",
        left <= e.noise(),
    )


def not_clipped(e: Evidence) -> Finding | None:
    """The reference is the port's value, clipped."""
    if not e.same_shape:
        return None
    reference, port = e.values
    low, high = float(reference.min()), float(reference.max())
    at_bound = int((reference == low).sum()), int((reference == high).sum())
    beyond = int((port < low).sum()), int((port > high).sum())
    sides = [side for side in (0, 1) if at_bound[side] > 2 and beyond[side] > 2]
    between = (reference > low) & (reference < high)
    if not sides or between.sum() < MIN_DISTINCT:
        return None
    bounds = (low if 0 in sides else None, high if 1 in sides else None)
    left = apart(reference, np.clip(port, *bounds))
    if left > e.noise(1.0) or left > 0.1 * e.lost:
        return None
    words = " and ".join(f"{(low, high)[side]:.6g}" for side in sides)
    return explanation(
        "clip-missing",
        f"The reference is the port's value clipped at {words}: {sum(beyond)} numbers of the port "
        f"are beyond that, the others agree; {e.leaves(left)}.",
        f"Clip the value at {words}.",
        sure=True,
    )


def truncated(e: Evidence) -> Finding | None:
    """Whole numbers one too low, as when pixels are truncated instead of rounded."""
    if not e.same_shape or not _fine_enough(e):
        return None
    reference, port = e.values
    for value in (port.reshape(-1)[e.sample], port, reference):
        if not (value == np.rint(value)).all():
            return None
    difference = port - reference
    share = float(np.mean(difference != 0))
    for step, word in ((-1, "low"), (1, "high")):
        if ((difference == 0) | (difference == step)).all() and 0.1 < share < 0.9:
            return Finding(
                "truncated",
                f"{share:.0%} of the values, all whole numbers, are exactly one too {word}.",
                "Round to the nearest number before the cast to integer: one side truncates.",
            )
    return None


def _as(array: NDArray[Any], dtype: Any) -> NDArray[Any]:
    with np.errstate(over="ignore"):
        return wide(array.astype(np.float32).astype(dtype))


def _fine(array: NDArray[Any], dtype: Any) -> bool:
    """Whether some values change when rounded to this type."""
    return not np.array_equal(_as(array, dtype), array)


def _fine_enough(e: Evidence, distinct: int = MIN_DISTINCT) -> bool:
    return (
        2 ** min(e.variety, 12) >= distinct
        and e.port.size >= MIN_DISTINCT
        and norm(e.values[1]) > 0
    )
