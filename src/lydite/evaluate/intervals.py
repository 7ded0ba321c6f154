"""Mean, median and spread of a metric over pictures, with a 95 % confidence interval of the mean.

The interval is the bootstrap-t (Efron and Tibshirani, 1993, chapter 12): it holds its coverage for
skewed values and few pictures, where the percentile bootstrap is too narrow. For fewer than
`FEWEST_BOOTSTRAP` values it is Student's, for fewer than `FEWEST` there is none. It ends where the
values of the metric end.
"""

from collections.abc import Sequence
from math import inf

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

RESAMPLES = 2000
SEED = 0  # of the resampling: the same values give the same interval
FEWEST = 5  # values; of fewer, Student's interval is wider than the values differ
FEWEST_BOOTSTRAP = 10
# The 97.5 % quantile of Student's t with 4 to 8 degrees of freedom.
STUDENT = (2.77645, 2.57058, 2.44691, 2.36462, 2.306)
PIECE = 2**22  # values that are resampled at a time
Limits = tuple[float, float]  # the smallest and the largest value that a metric can have
ANY: Limits = (-inf, inf)


class Summary(msgspec.Struct, frozen=True):
    """A metric over `n` pictures."""

    mean: float
    median: float
    std: float | None  # with n - 1; None: of one value
    ci95: tuple[float, float] | None  # of the mean; None: of fewer than FEWEST values
    min: float
    max: float
    n: int


def summarize(values: ArrayLike, limits: Limits = ANY) -> Summary:
    """Of one value per picture; all finite and within the limits."""
    x = np.asarray(values, np.float64)
    if x.ndim != 1 or not x.size or not np.isfinite(x).all():
        raise ValueError(f"{x.shape} values, expected one finite number per picture.")
    return Summary(
        mean=float(x.mean()),
        median=float(np.median(x)),
        std=float(x.std(ddof=1)) if x.size > 1 else None,
        ci95=mean_interval(x, limits),
        min=float(x.min()),
        max=float(x.max()),
        n=x.size,
    )


def mean_interval(values: ArrayLike, limits: Limits = ANY) -> tuple[float, float] | None:
    """The 95 % interval of the mean, within the limits; None of fewer than `FEWEST` values."""
    x = np.asarray(values, np.float64)
    if x.size < FEWEST:
        return None
    mean, error = float(x.mean()), float(x.std(ddof=1)) / x.size**0.5
    if error == 0:
        return mean, mean
    if x.size < FEWEST_BOOTSTRAP:
        below = above = STUDENT[x.size - FEWEST] * error
    else:
        low, high = np.quantile(_studentized(x), (0.025, 0.975))
        below, above = float(high) * error, -float(low) * error
    return max(mean - below, limits[0]), min(mean + above, limits[1])


def _studentized(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """(mean of a resample − mean) / its standard error, of many resamples."""
    generator, n = np.random.default_rng(SEED), x.size
    ratios: list[NDArray[np.float64]] = []
    at_once = max(1, PIECE // n)
    for first in range(0, RESAMPLES, at_once):
        count = min(at_once, RESAMPLES - first)
        resamples = x[generator.integers(0, n, (count, n))]
        errors = resamples.std(axis=1, ddof=1) / n**0.5
        varied = errors > 0  # a resample of one value alone says nothing
        ratios.append((resamples.mean(axis=1)[varied] - x.mean()) / errors[varied])
    return np.concatenate(ratios)


def share_interval(right: Sequence[bool]) -> tuple[float, float]:
    """The 95 % interval of a share: Wilson's, which is not empty where all are right."""
    n, share, z = len(right), float(np.mean(right)), 1.959964
    centre = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    half_width = z / (1 + z**2 / n) * (share * (1 - share) / n + z**2 / (4 * n**2)) ** 0.5
    # of none and of all, one end is exactly 0 or 1; computed, it is a rounding beside it
    return (
        centre - half_width if share > 0 else 0.0,
        centre + half_width if share < 1 else 1.0,
    )


def growth(errors: Sequence[float]) -> float | None:
    """The factor by which errors grow from one step to the next: a line through their logarithms.

    None of fewer than two errors above 0.
    """
    y = np.asarray(errors, np.float64)
    steps = np.flatnonzero(y > 0)
    if steps.size < 2:
        return None
    slope = np.polyfit(steps, np.log(y[steps]), 1)[0]
    return float(np.exp(slope))
