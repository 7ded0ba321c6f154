"""Masks of zeros and ones, and positions as whole numbers: which entries differ, and how."""

from collections.abc import Iterator

import numpy as np

from lydite.diff.findings.evidence import Array, Evidence
from lydite.diff.findings.replay.rotation_angles import law_of_positions
from lydite.diff.result import Finding

FEWEST = 8  # entries of a mask or of positions
MIN_RUN = 4  # tokens that show how they are counted
MAX_AXES = 8  # of positions


def other_mask(e: Evidence) -> Finding | None:
    """A mask of zeros and ones that hides other tokens."""
    reference, port = e.values
    is_mask = all(np.isin(x, (0.0, 1.0)).all() for x in (reference, port))
    if not e.same_shape or not is_mask or reference.size < FEWEST or reference.ndim < 2:
        return None
    if not (reference > 0).any(-1).all() or reference.all():
        return None
    words = next((w for w, mask in _masks(reference > 0) if np.array_equal(mask, port > 0)), None)
    if words is None:
        return None
    return Finding(
        "other-mask",
        f"The port's mask {words}.",
        "Make the mask as the reference: from the same tokens, and the same way round.",
    )


def _masks(shown: Array) -> Iterator[tuple[str, Array]]:
    """What a mask may be by mistake: words, and the mask."""
    size = shown.shape[-1]
    at = np.arange(size)
    yield "shows all tokens: padding is not hidden", np.ones_like(shown)
    yield "is the reference's inverted", ~shown
    yield "has the rows of prompt and negative prompt exchanged", _halves_exchanged(shown)
    first = shown.argmax(-1)[..., None]
    last = size - 1 - shown[..., ::-1].argmax(-1)[..., None]
    yield "hides the last token that the reference shows, the end token", shown & (at != last)
    yield "hides the first token that the reference shows, the start token", shown & (at != first)
    yield "shows one token more at the end", shown | (at == last + 1)
    yield "shows one token more at the start", shown | (at == first - 1)
    for by in (1, -1):
        yield f"is the reference's moved by {by:+d}, off by one", np.roll(shown, by, -1)
    yield "is the reference's backwards: padding on the other side", shown[..., ::-1]
    if shown.shape[-2] == size:
        causal = np.tri(size, dtype=bool)
        yield "is causal as well: no token sees later ones", shown & causal
        later = shown | ~causal
        yield "is not causal: tokens see later ones", later
        yield "is not causal: tokens see later ones", later & shown.any(-2, keepdims=True)


def _halves_exchanged(shown: Array) -> Array:
    return np.roll(shown, len(shown) // 2, 0) if len(shown) % 2 == 0 else shown


def other_places(e: Evidence) -> Finding | None:
    """Positions (tokens, axes) that count from another number, or not at all."""
    reference, port = e.values
    whole = all((x == np.rint(x)).all() for x in (reference, port))
    if not e.same_shape or not whole or reference.ndim < 2 or reference.size < FEWEST:
        return None
    count = reference.shape[-1]
    if not 2 <= count <= MAX_AXES or e.kind == "ids" or np.isin(reference, (0.0, 1.0)).all():
        return None
    right, wrong = (x.reshape(-1, reference.shape[-2], count)[0] for x in (reference, port))
    if len(right) < FEWEST or not all(_counts(right[:, n]) for n in range(count)):
        return None
    axes = [n for n in range(count) if not np.array_equal(right[:, n], wrong[:, n])]
    told = [_column(right, wrong, n) for n in axes]
    if not axes or not all(told):
        return None
    return Finding(
        "other-positions",
        f"Positions differ: {'; '.join(filter(None, told))}.",
        "Count the positions as the reference: which streams count, from which number, along "
        "which axis.",
    )


def _counts(column: Array) -> bool:
    """Whether an axis of positions has all whole numbers from its first to its last."""
    return bool((np.diff(np.unique(column)) == 1).all())


def _column(right: Array, wrong: Array, axis: int) -> str | None:
    """How one axis of positions differs, in words."""
    expected, actual = right[:, axis], wrong[:, axis]
    same = [n for n in range(right.shape[1]) if np.array_equal(right[:, n], actual)]
    if same and np.ptp(actual):
        return f"axis {axis} has the positions of the reference's axis {same[0]}"
    differ = np.flatnonzero(expected != actual)
    start, stop = int(differ[0]), int(differ[-1]) + 1
    tokens = f"axis {axis} of tokens {start} to {stop - 1}"
    before, after = expected[start:stop], actual[start:stop]
    if len(before) < MIN_RUN:
        return None
    if np.ptp(before) == 0 and (np.diff(after) == 1).all():
        return (
            f"{tokens} counts from {after[0]:g} in the port, and is {before[0]:g} in the reference"
        )
    if np.ptp(after) == 0 and (np.diff(before) == 1).all():
        return (
            f"{tokens} is {after[0]:g} in the port, and counts from {before[0]:g} in the reference"
        )
    if not (law := law_of_positions(actual[differ], expected[differ])):
        return None
    return f"{tokens} is {after[0]:g} in the port, {before[0]:g} in the reference{law}"
