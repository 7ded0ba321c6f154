"""One value in two axis orders: from axis names where both traces give them, else by search.

A port may keep channels last, merge heads, split a fused axis, drop a batch of one, or hold only a
part of the reference's value. What is assumed to make two shapes fit is a `Fit`; its note is shown
to the user.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations
from math import inf, prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lydite.diff.measure.distance import correlation, relative_error, wide

Shape = tuple[int, ...]
Cut = tuple[int, int]  # into how many equal parts, along which axis
MAX_AXES = 6  # of a search: 720 orders
MAX_PARTS = 8  # into which the reference's value may be cut
SAMPLES = 4096  # values compared while searching
WHOLE: Cut = (1, 0)
PICTURE_AXES = {4: ("b", "c", "h", "w"), 5: ("b", "c", "t", "h", "w")}  # channels first


@dataclass(frozen=True)
class Fit:
    """How the port's array becomes the reference's shape: reshape, transpose, reshape."""

    split: Shape
    order: tuple[int, ...]
    shape: Shape
    note: str = ""

    def apply(self, port: NDArray[Any]) -> NDArray[Any]:
        """The port's value as the reference would store it."""
        return port.reshape(self.split).transpose(self.order).reshape(self.shape)

    def undo(self, reference: NDArray[Any], port_shape: Shape) -> NDArray[Any]:
        """The reference's value as the port would store it."""
        moved = reference.reshape([self.split[axis] for axis in self.order])
        return moved.transpose(np.argsort(self.order)).reshape(port_shape)

    @property
    def plain(self) -> bool:
        """Whether values stay where they are in memory."""
        kept = [axis for axis in self.order if self.split[axis] != 1]
        return kept == sorted(kept)

    @property
    def moved_axes(self) -> tuple[int, ...]:
        """The order without the leading axes that stay: the same with and without a batch."""
        kept = 0
        while kept < len(self.order) and self.order[kept] == kept:
            kept += 1
        return tuple(axis - kept for axis in self.order[kept:])

    @property
    def moves_channels(self) -> bool:
        """Whether the channels of a picture or a video move from one end to the other."""
        moved = self.moved_axes
        last = len(moved) - 1
        return last >= 2 and moved in ((last, *range(last)), (*range(1, last + 1), 0))

    @property
    def exchanges_equal(self) -> bool:
        """Whether axes of one length change places, other than where channels or heads move."""
        if self.moves_channels or self.moved_axes[:2] == (1, 0):
            return False
        sizes = [self.split[axis] for axis in self.order]
        return any(
            size == other > 1 and self.order[a] > self.order[b]
            for b, other in enumerate(sizes)
            for a, size in enumerate(sizes[:b])
        )


def fit_dims(port: Shape, port_dims: str | None, ref: Shape, ref_dims: str | None) -> Fit | None:
    """The fit given by two lists of axis names, or None when they do not decide it."""
    if not port_dims or not ref_dims:
        return None
    actual, expected = _parse(port_dims), _parse(ref_dims)
    if actual is None or expected is None or len(actual) != len(port) or len(expected) != len(ref):
        return None
    sizes = _sizes([*zip(actual, port, strict=True), *zip(expected, ref, strict=True)])
    flat, wanted = [a for group in actual for a in group], [a for group in expected for a in group]
    if sizes is None or sorted(flat) != sorted(wanted) or len(set(flat)) != len(flat):
        return None
    order = tuple(flat.index(axis) for axis in wanted)
    note = "" if port_dims == ref_dims else f"axes {port_dims} → {ref_dims}, from the traces"
    return Fit(tuple(sizes[axis] for axis in flat), order, ref, note)


@lru_cache(maxsize=4096)
def possible_fits(port: Shape, ref: Shape) -> tuple[Fit, ...]:
    """Every way to turn one shape into the other, the simplest first; empty when there is none."""
    if prod(port) != prod(ref):
        return ()
    fits = [Fit(port, tuple(range(len(port))), ref)] if port == ref else []
    small, target = tuple(n for n in port if n != 1), tuple(n for n in ref if n != 1)
    if len(small) > MAX_AXES or len(target) > MAX_AXES:
        return tuple(fits)
    if port != ref and (small == target or _merges(small, target) or _merges(target, small)):
        how = "axes of length 1" if small == target else "merged axes"
        fits.append(Fit(port, tuple(range(len(port))), ref, f"{how}: {_arrow(port, ref)}"))
    if port != ref and not fits and _regroups(small, target):
        order = tuple(range(len(port)))
        fits.append(Fit(port, order, ref, f"rows of rows: {_arrow(port, ref)}"))
    moved_fits: list[tuple[float, Fit]] = []
    if len(small) >= len(target):
        moved_fits += [
            (_rarity(order), Fit(small, order, ref))
            for order in permutations(range(len(small)))
            if _merges(tuple(small[axis] for axis in order), target)
        ]
    else:
        for order in permutations(range(len(target))):
            moved = tuple(target[axis] for axis in order)
            if _merges(moved, small):
                back = tuple(int(axis) for axis in np.argsort(order))
                moved_fits.append((_rarity(order), Fit(moved, back, ref)))
    for _, fit in sorted(moved_fits, key=lambda pair: pair[0]):
        if not fit.plain:
            fits.append(Fit(fit.split, fit.order, ref, _order_text(fit, port, ref)))
    return (*fits, *_packed(small, target, ref))


def is_packed(port: Shape, ref: Shape) -> bool:
    """Whether one shape is that of pictures and the other that of their tokens of two by two."""
    small, target = (tuple(n for n in shape if n != 1) for shape in (port, ref))
    return any(_packed(small, target, ref))


def _packed(port: Shape, target: Shape, ref: Shape) -> Iterator[Fit]:
    """Latents as a picture where the other side has tokens of two by two, with channels first.

    Of one picture or of a batch.
    """
    if {len(port), len(target)} not in ({2, 3}, {3, 4}):
        return
    is_picture = len(port) > len(target)
    picture, tokens = (port, target) if is_picture else (target, port)
    batch, n = picture[:-3], len(picture) - 3
    for last in (False, True):
        channels, height, width = (picture[-1], *picture[n:-1]) if last else picture[n:]
        rows, columns = height // 2, width // 2
        if height % 2 or width % 2 or tokens != (*batch, rows * columns, 4 * channels):
            continue
        if is_picture:
            split = (rows, 2, columns, 2, channels) if last else (channels, rows, 2, columns, 2)
            order = (0, 2, 4, 1, 3) if last else (1, 3, 0, 2, 4)
        else:
            split = (rows, columns, channels, 2, 2)
            order = (0, 3, 1, 4, 2) if last else (2, 0, 3, 1, 4)
        order = (*range(n), *(axis + n for axis in order))
        yield Fit((*batch, *split), order, ref, "tokens of 2 × 2 as a picture")


def best_fit(
    fits: Iterable[Fit], port: NDArray[Any], reference: NDArray[Any]
) -> tuple[Fit | None, float]:
    """The fit under which the two are closest, from a sample of their values."""
    best, least = None, inf
    index = _sample(reference.shape)
    expected = wide(reference[index]) if index else wide(reference)
    for fit in fits:
        seen = fit.apply(port) if not index else _gather(fit, port, index)
        error = relative_error(wide(seen), expected)
        if best is None or error < least:
            best, least = fit, error
    return best, least


def best_correlation(fits: Iterable[Fit], port: NDArray[Any], reference: NDArray[Any]) -> float:
    """The largest correlation that any fit gives, from a sample of the values."""
    index = _sample(reference.shape)
    expected = wide(reference[index]) if index else wide(reference)
    best = 0.0
    for fit in fits:
        actual = wide(_gather(fit, port, index) if index else fit.apply(port))
        best = max(best, correlation(actual, expected))
    return best


def _gather(fit: Fit, port: NDArray[Any], index: tuple[NDArray[Any], ...]) -> NDArray[Any]:
    """Chosen values of the fitted array, without computing the whole array."""
    moved = tuple(fit.split[axis] for axis in fit.order)
    flat = np.ravel_multi_index(index, fit.shape)
    places = np.unravel_index(flat, moved)
    back = tuple(places[fit.order.index(axis)] for axis in range(len(fit.order)))
    return port.reshape(fit.split)[back]


def _sample(shape: Shape) -> tuple[NDArray[Any], ...]:
    """Indices of randomly chosen values; empty: all values."""
    if prod(shape) <= SAMPLES:
        return ()
    chosen = np.random.default_rng(0).integers(0, prod(shape), SAMPLES)
    return tuple(np.unravel_index(chosen, shape))


def _parse(dims: str) -> list[list[str]] | None:
    """Axis names, grouped where axes are merged; None for a notation not supported."""
    tokens = re.findall(r"\([^()]*\)|[^\s()]+", dims)
    groups = [token.strip("()").split() for token in tokens]
    names = [name for group in groups for name in group]
    return groups if all(re.fullmatch(r"[A-Za-z_]\w*", name) for name in names) else None


def _sizes(groups: Sequence[tuple[list[str], int]]) -> dict[str, int] | None:
    """The size of every axis, from both sides; None when they contradict or one is unknown."""
    known: dict[str, int] = {}
    for _ in range(len(groups) + 1):
        for names, size in groups:
            open_ = [name for name in names if name not in known]
            rest = prod(known[name] for name in names if name in known)
            if not open_ and rest != size:
                return None
            if len(open_) == 1:
                if rest == 0 or size % rest:
                    return None
                known[open_[0]] = size // rest
    return known if all(name in known for names, _ in groups for name in names) else None


def _merges(fine: Shape, coarse: Shape) -> bool:
    """Whether merging neighbouring axes of `fine` gives `coarse`."""
    at = 0
    for size in coarse:
        product = 1
        while product < size and at < len(fine):
            product *= fine[at]
            at += 1
        if product != size:
            return False
    return at == len(fine)


def _regroups(a: Shape, b: Shape) -> bool:
    """Whether two tables have the same rows, several of them in one row of the other."""
    if len(a) != 2 or len(b) != 2:
        return False
    wide_, narrow = (a, b) if a[1] > b[1] else (b, a)
    return wide_[1] % narrow[1] == 0 and narrow[0] % wide_[0] == 0


def _rarity(order: Sequence[int]) -> float:
    """How unusual an axis order is: moving the channel axis to the other end is common."""
    n = len(order)
    last = list(range(n))
    for to in (1, 0):
        usual = [*last[:to], n - 1, *last[to : n - 1]]
        if list(order) == usual or list(np.argsort(order)) == usual:
            return 0.5
    return 1 + sum(abs(axis - place) for place, axis in enumerate(order))


def fits_of(port: Shape, reference: Shape) -> tuple[tuple[Fit, ...], Cut]:
    """How a value of the port can equal the reference's, or one of the equal parts of it.

    A part of its batch, where the port runs the prompt alone; or of its last axis, where the port
    has two projections for one.
    """
    if prod(port) == prod(reference):
        return possible_fits(port, reference), WHOLE
    for axis in (0, -1):
        if (part := part_of(port, reference, axis)) is not None:
            return possible_fits(port, part), (reference[axis] // part[axis], axis)
    return (), WHOLE


def part_of(port: Shape, reference: Shape, axis: int) -> Shape | None:
    """The shape of an equal part of the reference along `axis` that has the port's axes."""
    port_size, reference_size = prod(port), prod(reference)
    count, rest = divmod(reference_size, port_size) if port_size else (0, 1)
    if rest or not 1 < count <= MAX_PARTS or not reference or reference[axis] % count:
        return None
    part = list(reference)
    part[axis] //= count
    same = sorted(n for n in port if n != 1) == sorted(n for n in part if n != 1)
    return tuple(part) if same and (axis == 0 or len(reference) > 1) else None


def has_parts_of(one: Shape, other: Shape) -> bool:
    """Whether one shape is that of an equal part of the other, along any of its axes.

    Axes may have another order, or heads be apart; other axes are merged only where they are
    neighbours.
    """
    small, large = sorted((one, other), key=prod)
    count, rest = divmod(prod(large), prod(small)) if prod(small) else (0, 1)
    if rest or not 1 < count <= MAX_PARTS:
        return False
    parts = (
        tuple(size // count if at == axis else size for at, size in enumerate(large))
        for axis, n in enumerate(large)
        if n % count == 0
    )
    return any(_has_same_axes(small, part) for part in parts)


def _has_same_axes(one: Shape, other: Shape) -> bool:
    """Whether axes are the same in any order, but for heads apart and merged neighbours."""
    a, b = (tuple(n for n in shape if n != 1) for shape in (one, other))
    if sorted(a) == sorted(b) or _merges(a, b) or _merges(b, a):
        return True
    long, short = sorted((a, b), key=len, reverse=True)
    return any(
        sorted((*long[:axis], *long[axis + 1 : -1], heads * long[-1])) == sorted(short)
        for axis, heads in enumerate(long[:-1])
    )


def _order_text(fit: Fit, port: Shape, ref: Shape) -> str:
    """The fit's axis order for people; shapes with equal axes do not show it."""
    if fit.moves_channels and len(port) == len(ref) and len(ref) in PICTURE_AXES:
        axes = PICTURE_AXES[len(ref)]
        last = " ".join((axes[0], *axes[2:], axes[1]))
        first = " ".join(axes)
        is_last = fit.moved_axes[0] != 1
        return f"axes {f'{last} → {first}' if is_last else f'{first} → {last}'}"
    if fit.split == port and len(fit.order) == len(ref):
        return f"axis order {_arrow(port, ref)} (transpose {fit.order})"
    split = "×".join(map(str, fit.split))
    return f"axis order {_arrow(port, ref)} (reshape {split}, transpose {fit.order})"


def _arrow(port: Shape, ref: Shape) -> str:
    return f"{'×'.join(map(str, port))} → {'×'.join(map(str, ref))}"
