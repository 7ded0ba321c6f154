"""What rounding alone may do to a value, and from where on a difference is no rounding.

The floor of a value is the reference's own rounding there: two runs of it in different precision,
or, without a second run, an estimate from the dtype and the depth. A value is wrong when its error
exceeds the largest of three limits:

    K × floor              a clean port rounds elsewhere than the reference, but not much more
    RISE × ratio × floor   where the values before it already run at `ratio` times their floor
    GAIN × error before    what came in unexplained by any floor may go out larger

The numbers were measured on clean ports (benchmarks/score_seeded_bugs.py: in 16 bits a clean value
lies at 1.07 floors in the median and at 2.1 at most) and hold for every model; no tolerance is
asked of the user. Small values scatter more, so K grows where there are few numbers.
"""

from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

# half the spacing of numbers next to 1
UNIT = {
    "f64": 2.0**-53,
    "f32": 2.0**-24,
    "f16": 2.0**-11,
    "bf16": 2.0**-8 / 2,
    "f8_e4m3": 2.0**-4,
    "f8_e5m2": 2.0**-3,
    "c64": 2.0**-24,
}
FINE = ("f64", "f32", "c64")
K_FINE, K_COARSE, K_ESTIMATED, SCATTER = 8.0, 3.0, 4.0, 8.0
CAP_FINE, CAP_COARSE = 300.0, 20.0  # floors, at most, whatever came before
RISE = 2.0
GAIN_MEASURED, GAIN_ESTIMATED = 4.0, 10.0
EXPLAINED = 3.0  # floors: an error above that came from elsewhere
# Where both runs of the reference agree to the bit it pins a precision (sinusoids of timesteps in
# float32), or copies. A correct port still differs there: sin(1000 x) loses three digits.
PINNED = 300.0


@dataclass(frozen=True)
class Limit:
    """The rounding expected at one place, and the error from which a value is wrong there."""

    floor: float
    limit: float


def estimated_floor(dtype: str, depth: int) -> float:
    """The rounding after `depth` operations in `dtype`, when no second run says it."""
    return UNIT.get(dtype, UNIT["f32"]) * (2.0 + sqrt(depth))


def measured_floor(rounding: float, dtype: str) -> float:
    """The rounding two runs of the reference show, guarded where it is zero by construction."""
    unit = UNIT.get(dtype, UNIT["f32"])
    return pinned_floor(dtype) if rounding < unit / 16 else max(rounding, unit)


def local_floor(rounding: float, dtype: str, estimate: float) -> float:
    """The rounding of one place on given values, guarded by the estimate for one module.

    In float32 two libraries that sum in another order lie further apart than a kernel lies from the
    truth; in 16 bits the rounding of the result outweighs that.
    """
    unit = UNIT.get(dtype, UNIT["f32"])
    return max(rounding, estimate if dtype in FINE or rounding < unit / 16 else unit)


def pinned_floor(dtype: str) -> float:
    """What a correct port may differ by where the reference itself cannot show its rounding."""
    unit = UNIT.get(dtype, UNIT["f32"])
    return min(unit * PINNED, 0.5 * sqrt(unit))


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
    floor: float, dtype: str, count: int, *, before: float, ratio: float, measured: bool
) -> Limit:
    """The limit at a place with this floor, after values that carry the error `before` and run at
    `ratio` times their floors."""
    fine = dtype in FINE
    k = K_FINE if fine else K_COARSE + SCATTER / sqrt(max(count, 1)) if measured else K_ESTIMATED
    gain = GAIN_MEASURED if measured else GAIN_ESTIMATED
    largest = max(k * floor, RISE * ratio * floor, gain * before)
    return Limit(floor, min(largest, (CAP_FINE if fine else CAP_COARSE) * floor))


def coarser(a: str, b: str) -> str:
    """The dtype of the two that rounds more."""
    return max((a, b), key=lambda name: UNIT.get(name, 0.0))
