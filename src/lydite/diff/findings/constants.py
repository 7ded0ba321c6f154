"""Names for numbers: which well-known factor a fitted factor is."""

from collections.abc import Iterator
from math import isqrt, prod, sqrt

FACTORS: tuple[tuple[float, str], ...] = (
    (2.0, "2"),
    (1000.0, "1000, the number of training steps"),
    (sqrt(2.0), "√2"),
    (0.18215, "0.18215, the scaling factor of Stable Diffusion 1 and 2's VAE"),
    (0.13025, "0.13025, the scaling factor of SDXL's VAE"),
    (1.5305, "1.5305, the scaling factor of Stable Diffusion 3's VAE"),
    (0.3611, "0.3611, the scaling factor of FLUX's VAE"),
    (0.41407, "0.41407, the scaling factor of Sana's autoencoder"),
    (0.476986, "0.476986, the scaling factor of HunyuanVideo's VAE"),
    (255.0, "255"),
    (127.5, "127.5"),
)
SHIFTS: tuple[tuple[float, str], ...] = (
    (1.0, "1"),
    (0.5, "1/2"),
    (0.0609, "0.0609, the shift factor of Stable Diffusion 3's VAE"),
    (0.1159, "0.1159, the shift factor of FLUX's VAE"),
)
LOOSEST = 2e-3


def name_factor(value: float, tolerance: float, shape: tuple[int, ...]) -> str | None:
    """`√64`, `1/1000` …: what the factor is, when it is one of those that ports forget."""
    tolerance = min(max(tolerance, 1e-5), LOOSEST)
    size = abs(value)
    if size == 0.0:
        return None
    sign = "−" if value < 0 else ""
    if abs(size - 1.0) < 0.2:
        unbiased = _unbiased(size, tolerance, shape)
        return sign + unbiased if unbiased else None
    for number, name in FACTORS:
        if abs(size / number - 1) <= tolerance:
            return sign + name
        if abs(size * number - 1) <= tolerance:
            return f"{sign}1/{name}"
    for number in _sizes(shape):
        root = sqrt(number)
        if abs(size / root - 1) <= tolerance:
            return f"{sign}√{number}"
        if abs(size * root - 1) <= tolerance:
            return f"{sign}1/√{number}"
    for number in _sizes(shape):
        if abs(size / number - 1) <= tolerance:
            return f"{sign}{number}, a size of the shape"
        if abs(size * number - 1) <= tolerance:
            return f"{sign}1/{number}, over a size of the shape"
    return None


def name_shift(value: float, tolerance: float) -> str | None:
    """A well-known offset."""
    for number, name in SHIFTS:
        if abs(abs(value) / number - 1) <= min(max(tolerance, 1e-4), LOOSEST):
            return ("−" if value < 0 else "") + name
    return None


def _unbiased(size: float, tolerance: float, shape: tuple[int, ...]) -> str | None:
    """√((n − 1)/n), or its inverse, where n is a number of values that a norm may run over."""
    small = min(size, 1 / size)
    if small >= 1.0 or 1.0 - small < 2 * tolerance:
        return None
    n = round(1 / (1 - small * small))
    if n < 4 or abs(sqrt((n - 1) / n) - small) > 0.02 * (1 - small) or not _counts(n, shape):
        return None
    below = f"{n - 1}/{n}" if size < 1 else f"{n}/{n - 1}"
    return f"√({below}): variance over n = {n} with n − 1 for n, or the reverse"


def _counts(n: int, shape: tuple[int, ...]) -> bool:
    """Whether n values of this shape can be normalised together: a run of axes, or a part of it."""
    runs = {
        prod(shape[start:stop])
        for start in range(len(shape))
        for stop in range(start + 1, len(shape) + 1)
    }
    return any(run % n == 0 for run in runs)


def _sizes(shape: tuple[int, ...]) -> Iterator[int]:
    """Sizes of axes, the last first, then their divisors: a head's size is one of those."""
    yield from (size for size in reversed(shape) if size > 2)
    for size in dict.fromkeys(reversed(shape)):
        small = [d for d in range(2, isqrt(size) + 1) if size % d == 0]
        yield from sorted({*small, *(size // d for d in small)} - {size, 2, 1})
