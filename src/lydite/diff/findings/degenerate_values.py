"""What a wrong value shows without the reference: NaN, zeros, a constant, repeated entries."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lydite.diff.findings.evidence import Evidence, apart
from lydite.diff.measure.distance import wide
from lydite.diff.result import Finding

F16_MAX = 65504.0
MIN_REPEATED = 16  # values that equal others


def not_finite(e: Evidence) -> Finding | None:
    """NaN or infinite where the reference is finite."""
    port, reference = wide(e.port), wide(e.reference)
    broken = ~np.isfinite(port)
    right = np.isfinite(reference)
    if e.same_shape:
        broken &= right
    if not broken.any() or (not right.all() and _mask_like(port, reference)):
        return None
    nan, count = int(np.isnan(port[broken]).sum()), int(broken.sum())
    first = tuple(int(index) for index in np.argwhere(broken)[0])
    what = " and ".join(f"{n} {word}" for n, word in ((nan, "NaN"), (count - nan, "Inf")) if n)
    where = f"{what} of {port.size} values, the first at {list(first)}"
    largest = float(np.abs(reference[right]).max(initial=0.0))
    inputs = [wide(own) for _, own in e.inputs.values()]
    finite_inputs = bool(inputs) and all(np.isfinite(own).all() for own in inputs)
    if largest > F16_MAX and e.dtype == "f16":
        return Finding(
            "f16-overflow",
            f"{where}; the reference reaches {largest:.3g} here, and float16 ends at 65504"
            f"{', while every input is finite' if finite_inputs else ''}.",
            "Compute this in bfloat16 or float32, or scale it down before.",
        )
    origin = (
        ", from finite inputs" if finite_inputs else ", already in its inputs" if inputs else ""
    )
    return Finding(
        "not-finite",
        f"{where}{origin}; the reference is finite there, at most {largest:.3g}.",
        "Look for a division by zero, an exp or a square that overflows, a softmax over a row that "
        "is fully masked, or memory never written.",
    )


def mask_differs(e: Evidence) -> Finding | None:
    """−Inf in other places than in the reference."""
    port, reference = wide(e.port), wide(e.reference)
    if not e.same_shape or not _mask_like(port, reference):
        return None
    masked, wanted = np.isneginf(port), np.isneginf(reference)
    more, fewer = int((masked & ~wanted).sum()), int((wanted & ~masked).sum())
    if not more and not fewer:
        return None
    return Finding(
        "mask-differs",
        f"−Inf at {more} positions where the reference is finite, and finite at {fewer} of "
        f"{int(wanted.sum())} positions where the reference is −Inf.",
        "Compare the two masks: causal or not, inverted, shifted by one, or not applied.",
    )


def constant(e: Evidence) -> Finding | None:
    """Every value the same where the reference's differ."""
    port, reference = wide(e.port), wide(e.reference)
    if port.size < 2 or reference.size < 2 or _is_constant(reference) or not _is_constant(port):
        return None
    value = float(port.reshape(-1)[0])
    if value == 0.0:
        return Finding(
            "all-zero",
            f"all {port.size} values are zero; the reference has rms {_rms(reference):.3g}.",
            "Look for a weight that was never loaded, a gate or scale of zero, or a buffer that "
            "was never written.",
        )
    return Finding(
        "constant",
        f"all {port.size} values are {value:g}; the reference has rms {_rms(reference):.3g}.",
        "Look for a weight left at its initial value, a value saturated, or one number broadcast "
        "over the whole array.",
    )


def repeated(e: Evidence) -> Finding | None:
    """Equal entries along an axis where the reference's differ: rows, tokens or pixels."""
    reference, port = e.values
    if not e.same_shape or _is_constant(port):
        return None
    for axis in range(port.ndim):
        if port.shape[axis] < 2 or port.size - port.size // port.shape[axis] < MIN_REPEATED:
            continue
        first = np.take(port, [0], axis)
        if not bool((np.take(port, [1], axis) == first).all() and (port == first).all()):
            continue
        differ = apart(reference, np.broadcast_to(np.take(reference, [0], axis), reference.shape))
        if differ <= e.noise() or differ < 0.1 * e.lost:
            continue
        what = {"batch": "batch row", "position": "position", "head": "head"}
        return Finding(
            "repeated",
            f"all {port.shape[axis]} entries of {e.axis(axis)} are equal; in the reference they "
            f"differ by {differ / max(e.norms[0], 1e-300):.2g} of the value.",
            f"What makes each {what.get(e.role(axis), 'entry')} different is missing: a value that "
            "is not added, one entry broadcast over all, or an index that does not advance.",
        )
    return None


def _mask_like(port: NDArray[Any], reference: NDArray[Any]) -> bool:
    """Whether the reference masks with −Inf, and neither side has NaN or +Inf."""
    return bool(
        reference.min() == -np.inf
        and not (np.isnan(port).any() or np.isnan(reference).any())
        and not (np.isposinf(port).any() or np.isposinf(reference).any())
    )


def _is_constant(array: NDArray[Any]) -> bool:
    flat = array.reshape(-1)
    return bool(flat[1:2] == flat[:1]) and bool((flat == flat[0]).all()) if flat.size > 1 else True


def _rms(array: NDArray[Any]) -> float:
    finite = array[np.isfinite(array)].astype(np.float64)
    return float(np.sqrt(np.mean(finite**2))) if finite.size else float("nan")


def padding_mask(e: Evidence) -> Finding | None:
    """Other tokens than the reference's are zero, and the rest agree: another mask of padding."""
    if not e.same_shape or e.port.ndim < 2 or e.port.shape[-1] < 2:
        return None
    reference, port = e.values
    right, wrong = ((x == 0).all(-1) for x in (reference, port))
    both = ~(right | wrong)
    if not right.any() or (right == wrong).all() or 2 * both.sum() < both.size or e.variety < 5:
        return None
    left = float(np.linalg.norm((port - reference)[both]))
    if left > e.noise() or not e.explains(left):
        return None
    row = tuple(np.argwhere(right != wrong)[0][:-1])
    tokens = [_listed(np.flatnonzero(x[row])) for x in (right, wrong)]
    return Finding(
        "padding-mask",
        f"The port sets {tokens[1]} to zero, the reference {tokens[0]}; all others agree: the "
        "mask of padding is another one, moved, or not applied.",
        "Set the tokens to zero that the reference's mask hides, counted from the same token.",
    )


def _listed(tokens: NDArray[Any]) -> str:
    """Numbers of tokens for people."""
    if not tokens.size:
        return "no token"
    if tokens.size > 1 and tokens[-1] - tokens[0] == tokens.size - 1:
        return f"tokens {tokens[0]} to {tokens[-1]}"
    return f"tokens {', '.join(map(str, tokens[:4]))}" + (" …" if tokens.size > 4 else "")
