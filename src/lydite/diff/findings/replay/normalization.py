"""A value normalised by a mean and a deviation of each channel, as latents are, or the reverse."""

from collections.abc import Iterator
from itertools import islice, product

import numpy as np

from lydite.diff.findings.evidence import Array, Evidence
from lydite.diff.findings.replay.norm_forms import affine_left
from lydite.diff.findings.replay.selections import patch_orders
from lydite.diff.findings.replay.variants import (
    Candidate,
    Source,
    apart_of,
    fit_tolerance,
    is_replayable,
    sources,
    told_apart,
)
from lydite.diff.result import Finding

MAX_LATELY = 8  # values of which one may be normalised
MAX_PATCHED = 2**18  # numbers of a value whose patches are read in all orders
FEWEST = 8  # numbers of a channel that show its factor
SAME = "a · x + b"


def other_normalization(e: Evidence) -> Finding | None:
    """The reference is a · x + b, with numbers of each channel; the port uses them otherwise."""
    if not is_replayable(e) or e.port.ndim not in (3, 4, 5):
        return None
    for source, channels in product(_lately(e), (1, -1)):
        fit = _factors(e, source, channels)
        if fit is None:
            continue
        tried = list(_forms(source.x, *fit))
        told = told_apart(e, tried, lambda s=source, f=fit: _forms(s.own, *f), reference_is=SAME)
        if told is not None:
            low, high = float(fit[0].min()), float(fit[0].max())
            return Finding(
                "other-normalization",
                f"The reference is {SAME}, where x is {source.name} and each channel has its own a "
                f"({low:.3g} to {high:.3g}) and b; the port is {told.wrong}; {told.leaves}.",
                "Normalise by the mean and the deviation of each channel as the reference: what "
                "is multiplied and what divided, and in which order.",
            )
    return None


def _lately(e: Evidence) -> list[Source]:
    """Values that were computed last, in the shape of this one; tokens of patches as a picture."""
    alike = (s for s in sources(e) if s.x.size == e.port.size)
    found: list[Source] = []
    for source in islice(alike, MAX_LATELY):
        if source.x.shape == e.port.shape:
            found.append(source)
        elif source.x.ndim == 3 and e.port.ndim > 3 and source.x.size <= MAX_PATCHED:
            orders = (patch_orders(x, e.port.shape) for x in (source.x, source.own))
            for x, own in zip(*orders, strict=True):
                name = f"{source.name} in patches {x.name}"
                found.append(Source(name, x.value, lambda own=own: own.value))
    return found


def _factors(e: Evidence, source: Source, channels: int) -> tuple[Array, Array] | None:
    """Factor and shift of each channel with which a value becomes the reference's."""
    if source.x.shape[channels] < 2 or source.x.size < FEWEST * source.x.shape[channels]:
        return None
    left, scale, shift = affine_left(source.x, e.values[0], channels)
    near = fit_tolerance(e) * e.norms[0]
    if left > near or apart_of(source.x, e.values[0]) <= near or not scale.all():
        return None
    return (scale, shift) if np.ptp(scale) > 0.01 * np.abs(scale).max() else None


def _forms(x: Array, a: Array, b: Array) -> Iterator[Candidate]:
    """The same factors used in other ways."""
    root = np.sqrt(np.abs(a))
    yield Candidate(SAME, a * x + b)
    factors = {
        "x / a": x / a,
        "a² · x": a * a * x,
        "√a · x": root * x,
        "x / a²": x / (a * a),
        "x / √a": x / root,
        "x": x,
        "a · x": a * x,
    }
    shifts = {" + b": b, "": 0 * b, " − b": -b}
    shifts |= {" + a · b": a * b, " + b / a": b / a, " + b / a²": b / (a * a)}
    shifts |= {" − a · b": -a * b, " − b / a": -b / a, " + a² · b": a * a * b}
    for (words, value), (more, shift) in product(factors.items(), shifts.items()):
        if words + more not in (SAME, "x"):
            yield Candidate(f"{words}{more}{_in_words(words, more)}", value + shift)


def _in_words(factor: str, shift: str) -> str:
    """What a form does that the reference does not."""
    told = {
        "x / a": "it divides where the reference multiplies, or multiplies where it divides",
        "a² · x": "the variance in place of the deviation, or the factor applied twice",
        "√a · x": "the root of the factor",
        "x / a²": "the inverse of the factor, squared",
        "x / √a": "the inverse of the root of the factor",
        "x": "without the factor",
    }.get(factor, "")
    if factor == "a · x":
        told = (
            "without the shift" if not shift else "with another shift, or shifted in another order"
        )
    return f" ({told})"
