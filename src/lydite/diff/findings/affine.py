"""The reference times a constant, plus a constant, or both; well-known constants by name."""

from collections.abc import Iterator
from math import isqrt, prod, sqrt

from lydite.diff.findings.evidence import Evidence, explanation
from lydite.diff.findings.linear_fit import affine, scale, shift
from lydite.diff.result import Finding

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
MAX_TOLERANCE = 2e-3  # of a factor that gets a name
_RANGES = {  # a·r + b of pictures: how the port's range came from the reference's
    (0.5, 0.5): "[0, 1] where the reference has [−1, 1]",
    (2.0, -1.0): "[−1, 1] where the reference has [0, 1]",
    (127.5, 127.5): "[0, 255] where the reference has [−1, 1]",
    (1 / 127.5, -1.0): "[−1, 1] where the reference has [0, 255]",
}


def negated(e: Evidence) -> Finding | None:
    """The reference with the other sign."""
    if not e.same_shape:
        return None
    s = e.sums
    left = sqrt(max(float(s.pp[0] + s.rr[0] + 2 * s.rp[0]), 0.0))
    if not e.explains(left):
        return None
    return explanation(
        "negated",
        f"port = −reference; {e.leaves(left)}.",
        "Change the sign: a difference is taken in the other order (noise − sample), a sine of the "
        "negative angle, or a velocity instead of noise.",
        left <= e.noise(),
    )


def scaled(e: Evidence) -> Finding | None:
    """The reference times a constant."""
    if not e.same_shape:
        return None
    if e.port.size < 8 and e.kind in ("scalar", "schedule"):
        return _scaled_scalar(e)
    factors, squares = scale(e.sums)
    factor, left = float(factors[0]), sqrt(squares)
    if not e.explains(left, free=1, scale=factor):
        return None
    tolerance = 4 * max(left / e.norms[1], e.rounding)
    name = _name_factor(factor, tolerance, e.port.shape)
    return _scaled(e, factor, name, left)


def shifted(e: Evidence) -> Finding | None:
    """The reference plus a constant."""
    if not e.same_shape:
        return None
    offsets, squares = shift(e.sums)
    offset, left = float(offsets[0]), sqrt(squares)
    if not e.explains(left, free=1, scale=1.0):
        return None
    name = _name_shift(offset, 4 * max(left / (abs(offset) * sqrt(e.port.size)), e.rounding))
    return explanation(
        "shifted",
        f"port = reference + {_named(offset, name)}; {e.leaves(left)}.",
        "Look for an offset or shift factor that is missing or applied twice"
        f"{' (steps_offset, or counting from 1)' if e.kind == 'schedule' else ''}.",
        left <= e.noise(),
    )


def scaled_and_shifted(e: Evidence) -> Finding | None:
    """The reference times a constant plus a constant."""
    if not e.same_shape:
        return None
    factors, offsets, squares = affine(e.sums)
    factor, offset, left = float(factors[0]), float(offsets[0]), sqrt(squares)
    if not e.explains(left, free=2, scale=factor):
        return None
    tolerance = max(1e-4, 4 * e.rounding, left / e.norms[1])
    image = next(
        (
            words
            for (a, b), words in _RANGES.items()
            if abs(factor / a - 1) <= tolerance and abs(offset - b) <= tolerance * abs(b)
        ),
        None,
    )
    fix = (
        f"Change the range: the port has {image}."
        if image
        else f"Subtract {offset:.6g}, then divide by {factor:.6g}: a scale and a shift factor are "
        "missing, applied twice or in the other order."
    )
    return explanation(
        "scaled-and-shifted",
        f"port = {factor:.6g} × reference + {offset:.6g}; {e.leaves(left)}.",
        fix,
        left <= e.noise(factor),
    )


def _scaled_scalar(e: Evidence) -> Finding | None:
    """With few numbers, only a factor of 1000 is not a coincidence."""
    reference, port = (value.reshape(-1).astype(float) for value in e.values)
    for factor, name in ((1e3, "1000"), (1e-3, "1/1000")):
        if port.any() and (abs(port - factor * reference) <= 1e-5 * abs(port)).all():
            return _scaled(e, factor, f"{name}, {FACTORS[1][1].split(', ')[1]}", 0.0)
    return None


def _scaled(e: Evidence, factor: float, name: str | None, left: float) -> Finding:
    fix = f"Divide by {factor:.6g}"
    if name is None:
        fix += ", or find the factor that is missing: 1/√d of attention, c_in of the sampler, "
        fix += "alpha over rank of a LoRA."
    elif "variance" in name:
        fix = "Take the other variance: torch's norms divide by n, not by n − 1."
    elif "√" in name:
        fix += ": a 1/√d of attention or an embedding's √d is missing, applied twice, or of "
        fix += "another size."
    elif "VAE" in name or "autoencoder" in name:
        fix += ": the factor is missing, applied twice, or on the wrong side."
    elif "1000" in name:
        fix += ": one side counts time from 0 to 1, the other from 0 to 1000."
    else:
        fix += ": it is missing or applied twice; in attention, √width may be used instead of "
        fix += "√(head size)."
    return explanation(
        "scaled",
        f"port = {_named(factor, name)} × reference; {e.leaves(left)}.",
        fix if fix.endswith(".") else fix + ".",
        left <= e.noise(factor),
    )


def _named(value: float, name: str | None) -> str:
    """A number, and its name where that is not the number itself."""
    text = f"{value:.6g}"
    return text if name in (None, text.replace("-", "−")) else f"{text} ({name})"


def _name_factor(value: float, tolerance: float, shape: tuple[int, ...]) -> str | None:
    """`√64`, `1/1000` …: the name of a factor that ports often forget."""
    tolerance = min(max(tolerance, 1e-5), MAX_TOLERANCE)
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


def _name_shift(value: float, tolerance: float) -> str | None:
    """A well-known offset."""
    for number, name in SHIFTS:
        if abs(abs(value) / number - 1) <= min(max(tolerance, 1e-4), MAX_TOLERANCE):
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
