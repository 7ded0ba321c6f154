"""The quantile of the Beta distribution, without SciPy.

The integral is the usual continued fraction by Lentz's method; the quantile, Newton's method on
ln I as a function of ln x, which is concave, so that it cannot run away.
"""

import math

from lydite.core.errors import InputError

TINY = 1e-300


def beta_quantile(share: float, a: float, b: float) -> float:
    """The x below which `share` of Beta(a, b) lies."""
    if not (0 <= share <= 1 and 0 < a < math.inf and 0 < b < math.inf):
        raise InputError(
            f"beta quantile of {share} at ({a}, {b}); expected 0 to 1, both numbers above 0."
        )
    if share in (0, 1) or (share == 0.5 and a == b):  # exact: ComfyUI rounds half an index
        return float(share)
    if share > beta_integral(0.5, a, b):
        return 1 - _left_quantile(1 - share, b, a)
    return _left_quantile(share, a, b)


def beta_integral(x: float, a: float, b: float) -> float:
    """I: the share of Beta(a, b) below x."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    front = math.exp(a * math.log(x) + b * math.log1p(-x) - _log_beta(a, b))
    if x < (a + 1) / (a + b + 2):
        return front * _fraction(x, a, b) / a
    return 1 - front * _fraction(1 - x, b, a) / b


def _left_quantile(share: float, a: float, b: float) -> float:
    """Where the quantile is at most one half."""
    first = (math.log(share) + math.log(a) + _log_beta(a, b)) / a  # I is xᵃ/(a·B) as x falls to 0
    at = min(first, math.log(0.5))
    for _ in range(100):
        x = math.exp(at)
        below = beta_integral(x, a, b)
        slope = math.exp(a * at + (b - 1) * math.log1p(-x) - _log_beta(a, b)) / below
        step = math.log(share / below) / slope
        at = min(at + step, math.log(0.5))
        if abs(step) < 1e-14:
            break
    return math.exp(at)


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


def _fraction(x: float, a: float, b: float) -> float:
    """1/(1+ d₁/(1+ d₂/(1+ …))), which converges fast for x below (a + 1)/(a + b + 2)."""
    upper, lower = 1.0, 1 / _away(1 - (a + b) * x / (a + 1))
    value = lower
    for m in range(1, 500):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            lower = 1 / _away(1 + term * lower)
            upper = _away(1 + term / upper)
            value *= lower * upper
        if abs(lower * upper - 1) < 1e-16:
            break
    return value


def _away(value: float) -> float:
    """Not 0, for it is divided by."""
    return value if abs(value) > TINY else TINY
