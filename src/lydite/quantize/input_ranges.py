"""How the inputs of linears are rounded to integers: by one static range, or one a group of steps.

Ranges come from rows of all steps of a calibration set, the last included. TaQ-DiT moves the
asymmetric values behind a GELU to the middle of their range, channel by channel, and divides
channels with outliers by an integer that their weights take over; its outliers are a static list,
ours are the channels whose best scale is 1.5 times the median.

Shift and divisor are the same for all steps, whatever the ranges are: a layer has one weight, which
is multiplied by the divisor, and one bias, which gives back the shift.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from lydite.models.layers import on_cpu
from lydite.quantize.grid import Floats
from lydite.quantize.range_search import on_device
from lydite.weights.quantized_format import DIVISOR, RANGE, SHIFT, TIMES

POWER, CANDIDATES = 2.4, 24  # of the error; shares of the range that are tried on each side
MOMENTUM, BATCHES, BATCH = 0.95, 100, 32  # of the mid-range: its average over shuffled rows
GELU_LOWEST = -0.1701  # no value of GELU is below
OUTLIER = 1.5  # times the median scale of all channels
BINS = 1 << 13  # of the histogram that a search looks at: 32 for each of 256 steps
AT_ONCE = 1 << 26  # values that are counted in one call, on a GPU
MOST_ROWS = 1 << 11  # of a channel that a search looks at


@dataclass(frozen=True, eq=False)
class InputRange:
    """How one input is rounded: shift and divide its channels, then 2 ** bits steps of `scale`."""

    bits: int
    scale: float | Floats  # a number, or one for each group of steps
    zero: float | Floats
    shift: Floats | None = None
    divisor: Floats | None = None
    times: Floats | None = None  # the lowest timestep of each group, descending

    @property
    def most(self) -> int:
        return 2**self.bits - 1

    def folded(self) -> Floats | None:
        """What the shift takes from the input of the product: the bias gives it back."""
        if self.shift is None:
            return None
        return self.shift if self.divisor is None else self.shift / self.divisor

    def extras(self) -> dict[str, Floats]:
        """What a layer stores of it."""
        parts = np.broadcast_arrays(self.scale, self.zero, self.most)
        found = {RANGE: np.stack(parts, axis=-1).astype(np.float32)}
        if self.times is not None:
            found[TIMES] = self.times
        if self.shift is not None:
            found[SHIFT] = self.shift
        if self.divisor is not None:
            found[DIVISOR] = self.divisor
        return found

    def moved(self, values: Floats) -> Floats:
        """Inputs as they are rounded: shifted and divided."""
        values = values if self.shift is None else values - self.shift
        return values if self.divisor is None else values / self.divisor

    def scaled(self, weight: Floats) -> Floats:
        """The weight that takes over the divisor."""
        return weight if self.divisor is None else weight * self.divisor

    def for_groups(self, groups: Iterable[tuple[float, Floats]]) -> "InputRange":
        """With scales and zero points for groups of steps: lowest timestep, inputs."""
        found = [
            (lowest, *_search(self.moved(values).reshape(-1), self.bits))
            for lowest, values in groups
        ]
        times, scales, zeros = np.array(found, np.float32).T
        return replace(self, scale=scales, zero=zeros, times=times)


def plain_range(values: Floats, bits: int) -> InputRange:
    """One scale and zero point for all values."""
    scale, zero = _search(values.reshape(-1), bits)
    return InputRange(bits, scale, zero)


def group_times(timesteps: Floats, groups: int) -> list[float]:
    """The lowest timestep of each of so many groups with as many steps, from the first step on."""
    steps = np.unique(timesteps)[::-1]
    parts = np.array_split(steps, min(groups, len(steps)))
    return [float(part[-1]) for part in parts]


def is_behind_gelu(values: Floats) -> NDArray[np.bool_]:
    """Per channel: whether its values can be outputs of a GELU."""
    flat = values.reshape(-1, values.shape[-1])
    return (flat.min(axis=0) >= GELU_LOWEST) & (flat.max(axis=0) > -GELU_LOWEST)


def time_aware_range(
    values: Floats, bits: int, *, shift: bool = True, migrate: bool = True, seed: int = 0
) -> InputRange:
    """TaQ-DiT's range of an input behind a GELU: (rows, tokens, channels)."""
    behind = is_behind_gelu(values)
    moved = np.where(behind, momentum_shift(values, seed), 0).astype(np.float32)
    if not shift:
        moved = np.zeros_like(moved)
    centred = (values - moved).reshape(-1, values.shape[-1])
    divisor = np.ones_like(moved)
    if migrate:
        divisor = np.where(behind, migration(centred, bits), 1).astype(np.float32)
    scale, zero = _search((centred / divisor).reshape(-1), bits)
    return InputRange(bits, scale, zero, moved if shift else None, divisor if migrate else None)


def momentum_shift(values: Floats, seed: int = 0) -> Floats:
    """The middle of each channel's range, as a moving average over batches of all steps."""
    generator = np.random.default_rng([seed, 2])
    low, high = values.min(axis=1), values.max(axis=1)  # (rows, channels)
    middle = (low.min(axis=0) + high.max(axis=0)) / 2
    for _ in range(BATCHES):
        rows = generator.integers(0, len(values), min(BATCH, len(values)))
        own = (low[rows].min(axis=0) + high[rows].max(axis=0)) / 2
        middle = MOMENTUM * middle + (1 - MOMENTUM) * own
    return middle


def migration(centred: Floats, bits: int) -> Floats:
    """The integers by which outlier channels are divided, 1 for the others."""
    # at random: every n-th would be of some positions in a picture only
    rows = np.random.default_rng(0).integers(0, len(centred), MOST_ROWS)
    sample = centred[rows] if len(centred) > MOST_ROWS else centred
    scales = _channel_scales(sample, bits)
    outliers = scales > OUTLIER * np.median(scales)
    if not outliers.any() or outliers.all():
        return np.ones_like(scales)
    usual, _ = _search(sample[:, ~outliers].reshape(-1), bits)
    return np.where(outliers, np.maximum(np.rint(scales / usual), 1), 1).astype(np.float32)


def balance(
    values: Floats, weights: Sequence[Floats], *, power: float = 0.5, times: Floats | None = None
) -> Floats:
    """SmoothQuant's divisor of each channel: its largest input against its largest weight.

    Xiao et al., ICML 2023. With one half, and the timestep of each row of the values, it is the
    salience balancing of PTQ4DiT (Wu et al., NeurIPS 2024).
    """
    weight = np.max([np.abs(each).max(axis=0) for each in weights], axis=0)
    if times is None:
        largest = np.abs(values.reshape(-1, values.shape[-1])).max(axis=0)
    else:
        largest = weighted_salience(values, weight, times)
    divisor = np.maximum(largest, 1e-5) ** power / np.maximum(weight, 1e-5) ** (1 - power)
    return (divisor / np.exp(np.log(divisor).mean())).astype(np.float32)


def weighted_salience(values: Floats, weight: Floats, times: Floats) -> Floats:
    """The largest input of each channel, averaged over steps: Σ η(t) max |x(t)|.

    η = softmax of -ρ, Spearman's correlation of the step's largest inputs with the largest weights:
    steps whose large channels are not those of the weights count more.
    """
    steps = np.unique(times)
    rows = np.abs(values).reshape(len(values), -1, values.shape[-1]).max(axis=1)
    largest = np.stack([rows[times == step].max(axis=0) for step in steps])  # (steps, channels)
    shares = np.exp(-np.array([rank_correlation(own, weight) for own in largest]))
    return (shares / shares.sum() @ largest).astype(np.float32)


def rank_correlation(one: Floats, other: Floats) -> float:
    """Spearman's; 0 where either is constant."""
    first, second = (ranks - ranks.mean() for ranks in (_ranks(one), _ranks(other)))
    sizes = np.sqrt((first @ first) * (second @ second))
    return float(first @ second / sizes) if sizes > 0 else 0.0


def _ranks(values: Floats) -> NDArray[np.float64]:
    """From 0 on; equal values share the mean of theirs."""
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count + 1) / 2)[place]


def _channel_scales(values: Floats, bits: int) -> Floats:
    """The best scale of each channel by itself."""
    low, high = np.minimum(values.min(axis=0), 0), np.maximum(values.max(axis=0), 0)
    best, scales = np.full(low.shape, np.inf), (high - low) / (2**bits - 1)
    tried = on_device(values.T)
    for share in np.linspace(1, 0.3, CANDIDATES):
        error = np.array(_powers(tried, share * low, share * high, bits).mean(axis=-1))
        scales = np.where(error < best, share * (high - low) / (2**bits - 1), scales)
        best = np.minimum(error, best)
    return np.maximum(scales, 1e-9).astype(np.float32)


def _search(values: Floats, bits: int) -> tuple[float, float]:
    """The scale and zero point with the least error.

    All values count, by a histogram where they are many: a few large ones make most of the error.
    """
    low, high = min(float(values.min()), 0.0), max(float(values.max()), 0.0)
    if low == high:
        return 1.0, 0.0
    tried, weights = values, np.ones(1, np.float32)
    if values.size > BINS:
        counts, edges = _histogram(values, low, high)
        middles, full = (edges[:-1] + edges[1:]) / 2, counts > 0
        tried, weights = middles[full].astype(np.float32), counts[full]

    def error(lower: float, upper: float) -> float:
        powers = _powers(tried[None], np.array([lower * low]), np.array([upper * high]), bits)
        return float((powers * weights).sum())

    shares = np.linspace(1, 0.2, CANDIDATES)
    both = min(shares, key=lambda own: error(own, own))
    lower = min(shares, key=lambda own: error(own, both))  # one side, then the other
    upper = min(shares, key=lambda own: error(lower, own))
    scale = (upper * high - lower * low) / (2**bits - 1)
    return scale, float(np.clip(np.rint(-lower * low / scale), 0, 2**bits - 1))


def _histogram(values: Floats, low: float, high: float) -> tuple[NDArray[Any], NDArray[Any]]:
    """How many values are in each bin, and the edges of the bins."""
    if on_cpu():
        return np.histogram(values, BINS, (low, high))
    counts = mx.zeros(BINS, mx.int32)
    for first in range(0, values.size, AT_ONCE):
        own = mx.array(values[first : first + AT_ONCE])
        bins = mx.clip(mx.floor((own - low) * (BINS / (high - low))), 0, BINS - 1)
        counts = counts.at[bins.astype(mx.int32)].add(1)
        mx.eval(counts)
    return np.array(counts), np.linspace(low, high, BINS + 1)


def _powers(values: Any, low: NDArray[Any], high: NDArray[Any], bits: int) -> Any:
    """|error| ** 2.4 of each value, with an integer zero point; NumPy or MLX, as the values are."""
    most = 2**bits - 1
    scale = np.maximum((high - low) / most, 1e-9)[:, None]
    zero = np.clip(np.rint(-low[:, None] / scale), 0, most)
    x: Any = np
    if isinstance(values, mx.array):
        x, scale, zero = mx, mx.array(scale, mx.float32), mx.array(zero, mx.float32)
    rounded = (x.clip(x.round(values / scale) + zero, 0, most) - zero) * scale
    return x.abs(values - rounded) ** POWER
