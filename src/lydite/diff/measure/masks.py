"""Masks of attention in their forms: true where a token is seen, or a bias that hides others.

A mask of ones and zeros, a boolean one and a bias of zeros and large negative numbers say the same
where they hide the same tokens, with any axes of length 1 or along which nothing changes.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

FEWEST = 4  # tokens of a mask
HIDING = -50.0  # a bias that hides a token is lower: exp(-50) is nothing
OF_ANY = -1e3  # the same, where a mask has more than one such number

Array = NDArray[Any]


def as_masks(value: Array, expected: Array) -> tuple[Array, Array] | None:
    """Both masks with 1 where a token is seen, in one shape; None unless one of them is a bias."""
    both = (value, expected)
    if any(x.size < FEWEST or x.dtype.kind not in "fViub" for x in both):
        return None
    biases = [_is_bias(x) for x in both]
    if not any(biases):
        return None
    seen = [_seen(x, is_bias=bias) for x, bias in zip(both, biases, strict=True)]
    if seen[0] is None or seen[1] is None:
        return None
    return _of_one_shape(seen[0], seen[1])


def is_mask(value: Array) -> bool:
    """Whether a value has only ones and zeros, or zeros and numbers that hide a token."""
    return value.dtype.kind in "fViub" and _seen(value, is_bias=_is_bias(value)) is not None


def are_inverted(value: Array, expected: Array) -> bool:
    """Whether one mask has ones, or true, for the hidden tokens, and the other for those seen."""
    own, right = as_masks(value, expected) or (value.squeeze(), expected.squeeze())
    if own.shape != right.shape or own.size < FEWEST or "c" in (own.dtype.kind, right.dtype.kind):
        return False
    of_ones = all(np.isin(x, (0, 1)).all() for x in (own, right))
    return of_ones and bool((own.astype(np.float32) + right.astype(np.float32) == 1).all())


def _is_bias(value: Array) -> bool:
    """Whether the numbers are zeros and such as hide a token."""
    if value.dtype.kind not in "fV":
        return False
    with np.errstate(over="ignore"):  # of float64: -1e308 hides as well as infinity
        kinds = np.unique(value.astype(np.float32))
    lower = kinds[:-1]
    if not lower.size or kinds[-1] != 0 or np.isnan(lower).any():
        return False
    return bool(lower[-1] <= (HIDING if lower.size == 1 else OF_ANY))


def _seen(value: Array, *, is_bias: bool) -> Array | None:
    """Where tokens are seen; None if the value is no mask. Zeros alone are a bias that hides none.

    The other value is one.
    """
    if is_bias:
        return value == 0
    numbers = value.astype(np.float32) if value.dtype.kind == "V" else value
    if not np.isin(numbers, (0, 1)).all():
        return None
    return np.ones(value.shape, bool) if not numbers.any() else numbers == 1


def _of_one_shape(value: Array, expected: Array) -> tuple[Array, Array] | None:
    """Both as numbers in the second's shape, or in that without repeated entries."""
    if value.shape == expected.shape:
        return value.astype(np.float32), expected.astype(np.float32)
    own, right = value.squeeze(), expected.squeeze()
    if own.shape != right.shape:
        own, right = (_without_repeats(x) for x in (own, right))
    if own.shape != right.shape:
        return None
    if right.size == expected.size:
        own, right = (x.reshape(expected.shape) for x in (own, right))
    return own.astype(np.float32), right.astype(np.float32)


def _without_repeats(mask: Array) -> Array:
    """A mask without the axes along which nothing changes; the last axis is that of the tokens."""
    for axis in reversed(range(mask.ndim - 1)):
        if (mask == mask.take([0], axis)).all():
            mask = mask.take(0, axis)
    return mask
