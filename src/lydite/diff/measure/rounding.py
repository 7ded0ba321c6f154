"""What rounding alone may do to a value, and the limit above which an error is not rounding.

The rounding of a value is the reference's own: the difference of two runs in different precision,
or, without a second run, an estimate from the dtype and the depth. A value is wrong when its error
exceeds the largest of three limits:

    K × rounding              a correct port rounds in other places, but not much more
    RISE × ratio × rounding   where the values before it already are `ratio` times their rounding
    GAIN × error before       an error that came in and that no rounding explains may grow

The numbers were measured on correct ports (benchmarks/score_seeded_bugs.py: in 16 bits a correct
value has 1.07 times its rounding in the median and 2.1 times at most) and hold for every model; the
user sets no tolerance. Small values scatter more, so K grows where there are few numbers.
"""

from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Half the spacing of numbers next to 1: the largest error of one rounding. bfloat16 has half of
# that, 2⁻⁹ and not 2⁻⁸: errors are measured as L2, and one rounding gives 0.76 × 2⁻⁹ there. The
# factors below were measured with it; twice as much hides bugs that no second run measures.
UNIT = {
    "f64": 2.0**-53,
    "f32": 2.0**-24,
    "f16": 2.0**-11,
    "bf16": 2.0**-9,
    "f8_e4m3": 2.0**-4,
    "f8_e5m2": 2.0**-3,
    "c64": 2.0**-24,
}
FINE = ("f64", "f32", "c64")
K_FINE, K_COARSE, K_ESTIMATED, SCATTER = 8.0, 3.0, 4.0, 8.0
CAP_FINE, CAP_COARSE = 300.0, 20.0  # times the rounding at most, whatever came before
RISE = 2.0
PASSED_ON = 1.5  # times an error that came in, up to K times the rounding it came in with
GAIN_MEASURED, GAIN_ESTIMATED = 4.0, 10.0
EXPLAINED = 3.0  # times the rounding: a larger error came in from an earlier value
# Where both runs of the reference are bit-equal, it fixes a precision (sinusoids of timesteps in
# float32) or copies. A correct port still differs there: sin(1000 x) loses three digits.
FIXED = 300.0


@dataclass(frozen=True)
class Limit:
    """The rounding expected at a site, and the error above which a value is wrong there."""

    rounding: float
    limit: float


def estimated_rounding(dtype: str, depth: int) -> float:
    """The rounding after `depth` operations in `dtype`, without a second run."""
    return UNIT.get(dtype, UNIT["f32"]) * (2.0 + sqrt(depth))


def measured_rounding(rounding: float, dtype: str) -> float:
    """The difference of two runs of the reference, at least what is possible where it is zero."""
    unit = UNIT.get(dtype, UNIT["f32"])
    return fixed_rounding(dtype) if rounding < unit / 16 else max(rounding, unit)


def local_rounding(rounding: float, dtype: str, estimate: float) -> float:
    """The rounding of one module on given inputs, at least the estimate for one module.

    In float32 two libraries that sum in another order differ more than a kernel differs from the
    exact result; in 16 bits the rounding of the result is larger than that.
    """
    unit = UNIT.get(dtype, UNIT["f32"])
    return max(rounding, estimate if dtype in FINE or rounding < unit / 16 else unit)


def fixed_rounding(dtype: str) -> float:
    """How much a correct port may differ where the reference does not show its rounding."""
    unit = UNIT.get(dtype, UNIT["f32"])
    return min(unit * FIXED, 0.5 * sqrt(unit))


def is_sinusoid(value: NDArray[Any]) -> bool:
    """Whether the last axis holds sines and cosines of the same angles: an embedding of time."""
    if value.ndim < 1 or value.shape[-1] % 2 or not value.shape[-1] >= 4 or value.dtype.kind != "f":
        return False
    row = value.reshape(-1, value.shape[-1])[0].astype(np.float64)
    half = row.size // 2
    for a, b in ((row[:half], row[half:]), (row[::2], row[1::2])):
        if np.allclose(a * a + b * b, 1.0, atol=0.02):
            return True
    return False


def limit_for(
    rounding: float,
    dtype: str,
    count: int,
    *,
    before: float,
    ratio: float,
    measured: bool,
    carried: float = 0.0,
) -> Limit:
    """The limit at a site with this rounding.

    The values before it have the error `before`, are `ratio` times their rounding, and round by
    `carried` at most: a sinusoid of large angles rounds far more than what is computed from it.
    """
    fine = dtype in FINE
    k = K_FINE if fine else K_COARSE + SCATTER / sqrt(max(count, 1)) if measured else K_ESTIMATED
    gain = GAIN_MEASURED if measured else GAIN_ESTIMATED
    largest = max(k * rounding, RISE * ratio * rounding, gain * before)
    largest = min(largest, (CAP_FINE if fine else CAP_COARSE) * rounding)
    return Limit(rounding, max(largest, min(PASSED_ON * before, k * carried)))


def coarser(a: str, b: str) -> str:
    """The dtype of the two that rounds more."""
    return max((a, b), key=lambda name: UNIT.get(name, 0.0))
