"""What is known about the first wrong value, and when a hypothesis explains its error."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import inf, log2, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lydite.diff.findings.linear_fit import Sums, sums
from lydite.diff.measure.distance import wide
from lydite.diff.result import Finding

Array = NDArray[Any]

SAMPLE = 4096  # values tried before all are
FEW = 4.0  # times the rounding: practically equal
PART = sqrt(1e-3)  # of the error may be left when the rounding is uncertain: 99.9 % of its square
MOST = 0.4  # of the error may be left in any case
BITS = 40.0  # of agreement: thousands of hypotheses are tried, and none may fit by chance
BIGGEST = 1e15  # larger values are scaled down: their squares would overflow

# Half a unit in the last place of a value with a random mantissa, as rms.
ROUNDING = {
    "f64": 2e-16,
    "f32": 4e-8,
    "f16": 2e-4,
    "bf16": 1.7e-3,
    "f8_e4m3": 2.7e-2,
    "f8_e5m2": 5e-2,
}


@dataclass(frozen=True)
class Recorded:
    """A value of the reference that was computed earlier, and the port's, where it is paired."""

    name: str
    value: Array
    own: Callable[[], Array | None] = lambda: None
    is_input: bool = False  # given to the run, as noise is


@dataclass(frozen=True, eq=False)
class Layer:
    """A linear layer or convolution, and its output on the side of the port."""

    apply: Callable[[Array], Array]
    output: "Evidence"


@dataclass(frozen=True, eq=False)
class Evidence:
    """The first wrong value and the right one, with the values around them."""

    reference: Array  # in the port's axis order where a layout was assumed
    port: Array
    floor: float  # relative rounding error expected here
    name: str
    slot: str
    dtype: str
    kind: str
    dims: str | None
    inputs: Mapping[str, tuple[Array, Array]]  # of the same module, (reference, port) by slot
    others: Callable[[], Iterable[tuple[str, Array]]]  # reference values near it, of its size
    near: Callable[[], Iterable[tuple[str, Array]]] = lambda: ()  # of any size
    before: Callable[[], Iterable[Recorded]] = lambda: ()  # of any size, computed earlier
    beside: Callable[[], Iterable[Recorded]] = lambda: ()  # other outputs of the same call
    parameters: Callable[[], Mapping[str, Array]] = dict  # of the same module: weight, bias …
    parameters_of: Callable[[str], Mapping[str, Array]] = lambda _: {}  # of another module
    parameters_like: Callable[[tuple[int, ...]], Iterable[tuple[str, Array]]] = lambda _: ()
    # Of the module and of those inside, with this last axis.
    parameters_inside: Callable[[int], Iterable[tuple[str, Array]]] = lambda _: ()
    tables: Callable[[], Iterable[tuple[str, Array]]] = lambda: ()  # sigmas and timesteps
    step: int = 0
    ruled_out: list[str] = field(default_factory=list)  # operations replayed without success
    layer: Layer | None = None  # takes this value, of which the port recorded only its output

    @property
    def same_shape(self) -> bool:
        """Whether the two can be compared element by element."""
        return self.reference.shape == self.port.shape

    @property
    def same_size(self) -> bool:
        """Whether one can be a rearrangement of the other."""
        return self.reference.size == self.port.size

    @cached_property
    def values(self) -> tuple[Array, Array]:
        """Reference and port, contiguous, at least float32, every value finite."""
        reference, port = comparable(self.reference, self.port)
        return reference, port

    @property
    def rounding(self) -> float:
        """The expected rounding, at least that of the port's dtype."""
        return max(self.floor, ROUNDING.get(self.dtype, ROUNDING["f32"]))

    @cached_property
    def sums(self) -> Sums:
        """Sums over all values; of equal shapes only."""
        reference, port = self.values
        return sums(reference.reshape(1, 1, -1), port.reshape(1, 1, -1)).total

    @cached_property
    def norms(self) -> tuple[float, float]:
        """‖reference‖ and ‖port‖."""
        return norm(self.values[0]), norm(self.values[1])

    @cached_property
    def lost(self) -> float:
        """‖port − reference‖; of unequal shapes, what two unrelated values would show."""
        return sqrt(float(self.sums.dd[0])) if self.same_shape else self.spread

    @cached_property
    def spread(self) -> float:
        """The distance of two unrelated values with these statistics."""
        port, total = self.values[1], self.norms[1] ** 2
        return sqrt(2.0 * max(total - float(port.sum(dtype=np.float64)) ** 2 / port.size, 0.0))

    @property
    def error(self) -> float:
        """The error relative to the reference."""
        return self.lost / self.norms[0] if self.norms[0] else float("inf")

    @property
    def wrong(self) -> bool:
        """Whether there is anything to explain."""
        return not self.same_shape or self.lost > 2 * self.rounding * max(self.norms)

    @cached_property
    def sample(self) -> NDArray[np.int64]:
        """Flat positions tried first: half of them random, half where the two differ most."""
        draw, size = np.random.default_rng(0), self.port.size
        if size <= SAMPLE:
            return draw.permutation(size)
        positions = draw.integers(size, size=SAMPLE)
        if self.same_shape:  # the worst of every stretch: a single wrong row is not missed
            stretch = size // (SAMPLE // 2)
            differ = np.abs(self.values[1] - self.values[0]).reshape(-1)
            worst = differ[: stretch * (SAMPLE // 2)].reshape(-1, stretch).argmax(axis=1)
            positions[::2] = draw.permutation(worst + stretch * np.arange(SAMPLE // 2))
        return positions

    @cached_property
    def effective(self) -> float:
        """The number of values that make up value and error; a single outlier counts as one."""
        reference, port = self.values
        own = _effective(port - float(port.mean(dtype=np.float64)))
        return min(own, _effective(port - reference)) if self.same_shape else own

    @cached_property
    def variety(self) -> float:
        """Bits of information in one value: a mask of zeros and ones has one."""
        value = self.values[1]
        if len(value.shape) > 1 and len(value) > 1 and self._has_equal_rows(value):
            values = value[0].reshape(-1)[:SAMPLE]  # a time embedding is the same in each row
        else:
            values = value.reshape(-1)[self.sample]
        distinct = np.unique(values).size
        coarse = 4 * distinct < 3 * values.size or bool((values == np.rint(values)).all())
        return log2(max(distinct, 1)) if coarse else 24.0

    def _has_equal_rows(self, value: Array) -> bool:
        """Whether all rows of the batch are one, up to rounding."""
        return _peak(value - value[:1]) <= FEW * self.rounding * _peak(value)

    def explains(
        self,
        left: float,
        lost: float = inf,
        *,
        free: int = 0,
        scale: float = 0.0,
        choices: float = 0.0,
    ) -> bool:
        """Whether a hypothesis that leaves ‖left‖ of an error explains it, and not by chance.

        `free` numbers were fitted to the values, and `choices` bits went into choosing; a fit adds
        rounding errors of the reference times `scale`.
        """
        lost = min(lost, self.lost, self.spread)
        if left > MOST * lost or left > max(self.noise(scale), PART * lost) or lost == 0.0:
            return False
        bits = min(log2(lost / left) if left else 24.0, self.variety)
        return self.effective * (1 - free / self.port.size) * bits >= BITS + choices

    def promises(self, actual: Array, other: Array, right: Array | None) -> bool:
        """Whether a few values of a hypothesis are close enough to the port's to try all.

        `right` is the reference at the same positions. They were chosen for being wrong: there any
        other value is closer, so closer is not enough.
        """
        actual = actual.astype(np.float64)
        wrong = actual - (actual.mean() if right is None else right)
        lost, left = float(wrong @ wrong), norm(actual - other) ** 2
        noise = 2 * FEW * self.rounding * norm(actual)
        return left < MOST * lost and left < max(noise**2, 9 * PART**2 * lost)

    def noise(self, scale: float = 0.0) -> float:
        """The norm below which a difference is only rounding."""
        return FEW * self.rounding * max(self.norms[1], abs(scale) * self.norms[0])

    def leaves(self, left: float) -> str:
        """The error without and with an explanation, for people."""
        after = left / max(self.norms)
        return f"that explains the difference: error {self.error:.2g} before, {after:.0e} after"

    def axis(self, axis: int) -> str:
        """An axis for people: `axis 2 (w)`."""
        names = axis_names(self.dims, self.port.ndim)
        return f"axis {axis} ({names[axis]})" if names else f"axis {axis}"

    def role(self, axis: int) -> str:
        """What an axis runs over: batch, head, position, space, channel, or "" when unknown."""
        names = axis_names(self.dims, self.port.ndim)
        if names:
            return _role(names[axis], names)
        by_rank = {
            1: ("channel",),
            2: ("position", "channel"),
            3: ("batch", "position", "channel"),
        }
        if self.port.ndim in by_rank:
            return by_rank[self.port.ndim][axis]
        return "batch" if axis == 0 else ""


def explanation(cause: str, evidence: str, fix: str, sure: bool = True) -> Finding:
    """A finding that is `sure` if it leaves only rounding of the error."""
    return Finding(cause, evidence, fix, "certain" if sure else "likely")


Hypothesis = Callable[[Evidence], Finding | None]


def axis_names(dims: str | None, rank: int) -> list[str] | None:
    """`b s (h d)` as three names, or None when they are not known."""
    names = re.findall(r"\([^)]*\)|[^\s()]+", dims or "")
    return names if names and len(names) == rank else None


def comparable(*arrays: Array) -> tuple[Array, ...]:
    """Contiguous, at least float32; infinities become twice the largest value, NaN zero."""
    values = [np.ascontiguousarray(wide(array)) for array in arrays]
    top = max(_peak(array) for array in values)
    if not np.isfinite(top):
        top = max(_peak(array[np.isfinite(array)]) for array in values)
        far = 2.0 * min(top, BIGGEST) or 1.0
        values = [np.nan_to_num(array, nan=0.0, posinf=far, neginf=-far) for array in values]
    if top > BIGGEST:
        values = [array.astype(np.float64) / top for array in values]
    return tuple(values)


def norm(array: Array) -> float:
    """‖array‖ in float64 without a copy."""
    flat = array.reshape(-1)
    return sqrt(float(np.einsum("i,i->", flat, flat, dtype=np.float64)))


def apart(value: Array, other: Array) -> float:
    """‖value − other‖ of equal shapes, in float64."""
    return norm(value - other)


def _peak(array: Array) -> float:
    """The largest magnitude; NaN or infinite if there is such a value."""
    if not array.size:
        return 0.0
    low, high = float(array.min()), float(array.max())
    return max(abs(low), abs(high)) if low == low else low


def _effective(values: Array) -> float:
    squares = np.square(values).reshape(-1)
    fourth = float(np.einsum("i,i->", squares, squares, dtype=np.float64))
    return float(squares.sum(dtype=np.float64)) ** 2 / fourth if fourth else 0.0


def _role(name: str, names: list[str]) -> str:
    words = set(re.findall(r"\w+", name))
    if words & {"c", "d", "channels", "channel", "dim"}:
        return "channel"
    if len(words) > 1 or words & {"s", "l", "t", "seq", "tokens", "token", "q", "k"}:
        return "position"
    if words & {"w", "x", "y", "height", "width"} or (words == {"h"} and "w" in names):
        return "space"
    return {"b": "batch", "n": "batch", "batch": "batch", "h": "head", "heads": "head"}.get(
        name, ""
    )
