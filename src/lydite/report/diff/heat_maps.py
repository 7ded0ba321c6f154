"""Heat maps of a value on both sides: slices where they differ most, small enough for a page.

A cell for many values shows the one where the two sides differ most, on both sides: a single wrong
value is visible at any size.
"""

from dataclasses import dataclass
from math import ceil, isfinite

import numpy as np
from PIL import Image

from lydite.diff.findings.evidence import axis_names
from lydite.report.contact_sheets import png_bytes
from lydite.report.diff.read_values import Array, Value, apart
from lydite.report.diff.row_text import number

MAX_ROWS, MAX_COLUMNS = 256, 384  # cells of a map
MAX_PLANES = 6
STACK = 2.6  # wider maps are stacked
SIDE = 192  # pixels a small map is enlarged to
OUTLIER = 8.0  # times the rms: larger values saturate, or one value would blank the map

# Blue to rust: distinguishable without red and green, and by lightness from the middle out.
STOPS = ("#1b4b8f", "#7ba6d2", "#f4f1ea", "#e39a66", "#97300c")
NOT_FINITE = "#d6007f"
WORDS = {"b": "batch row", "s": "token", "l": "token", "c": "channel", "d": "channel"}
LEVELS = 255  # odd: zero has a colour of its own; the last palette entry is for NaN and infinity


@dataclass(frozen=True)
class Map:
    """One picture of one plane."""

    png: bytes
    caption: str
    alt: str
    aspect: float  # width over height on the page
    ring: tuple[float, float] | None  # where the largest difference is, in per cent


@dataclass(frozen=True)
class Maps:
    """The maps of one plane, and what their colours mean."""

    title: str
    items: tuple[Map, ...]
    scale: str  # the number at both ends of the colours of the values
    difference: str
    note: str
    stacked: bool = False  # wide maps under each other: the same column stays in line


@dataclass(frozen=True)
class _Plane:
    """A cut through a value: rows × columns of both sides."""

    title: str
    reference: Array
    port: Array
    spatial: bool


def draw_maps(value: Value) -> tuple[Maps, ...]:
    """A few planes, the most different first; each side by itself where shapes differ."""
    if value.together:
        return tuple(_compared(plane) for plane in _planes(*value.together, value.dims))
    sides = (("reference", value.reference), ("port", value.port))
    return tuple(_alone(side, array) for side, array in sides if array is not None and array.size)


def _planes(reference: Array, port: Array, dims: str | None) -> list[_Plane]:
    """Cut along the leading axes where the difference is largest."""
    cut = _Cut(reference, port, apart(reference, port), axis_names(dims, reference.ndim), ())
    while cut.rank > 3 or (cut.rank == 3 and not cut.is_picture):
        cut = cut.deeper()
    if cut.rank == 3:
        axis = cut.channel_axis
        return [
            _Plane(
                cut.title(axis, at),
                np.take(cut.reference, at, axis),
                np.take(cut.port, at, axis),
                True,
            )
            for at in _most_different(cut.away, axis)[:MAX_PLANES]
        ]
    shape = cut.reference.shape if cut.rank == 2 else (1, -1)
    return [_Plane(cut.title(), cut.reference.reshape(shape), cut.port.reshape(shape), False)]


@dataclass(frozen=True, eq=False)
class _Cut:
    """What is left of a value after fixing some of its leading axes."""

    reference: Array
    port: Array
    away: Array
    names: list[str] | None
    fixed: tuple[int, ...]  # the leading axes, so far

    @property
    def rank(self) -> int:
        return self.reference.ndim

    @property
    def is_picture(self) -> bool:
        """Whether three axes are a picture's and not the tokens of a batch."""
        shape = self.reference.shape
        if self.names:
            return {"h", "w"} <= set(self.names)
        if self.fixed:
            return True
        return 3 in (shape[0], shape[-1]) and sorted(shape)[1] > 4

    @property
    def channel_axis(self) -> int:
        """Of three axes the one that is not a side of the image: by name, or by shape."""
        for name in ("c", "channels", "channel"):
            if self.names and name in self.names:
                return self.names.index(name)
        first, middle, last = self.reference.shape
        return 2 if abs(np.log(first / middle)) < abs(np.log(middle / last)) else 0

    def deeper(self) -> "_Cut":
        """The first axis fixed where the two differ most."""
        at = _most_different(self.away, 0)[0]
        names = self.names[1:] if self.names else None
        return _Cut(self.reference[at], self.port[at], self.away[at], names, (*self.fixed, at))

    def title(self, axis: int | None = None, at: int = 0) -> str:
        """The cut as an index, and what its two axes count."""
        left = [":"] * self.rank
        if axis is not None:
            left[axis] = str(at)
        index = f"[{', '.join([*map(str, self.fixed), *left])}]"
        if axis is not None:
            return f"{index} {self._word(axis, 'channel')} {at}"
        tokens = ("row", "column") if not self.fixed else ("token", "channel")
        words = [self._word(place, word) for place, word in zip((-2, -1), tokens, strict=True)]
        return f"{index} {words[0]}s ↓, {words[1]}s →" if self.rank == 2 else index

    def _word(self, axis: int, otherwise: str) -> str:
        if not self.names or len(self.names) < abs(axis):
            return otherwise
        return WORDS.get(self.names[axis], self.names[axis])


def _most_different(away: Array, axis: int) -> list[int]:
    """Positions along an axis, the one that differs most first."""
    flat = np.moveaxis(away, axis, 0).reshape(away.shape[axis], -1).astype(np.float64)
    with np.errstate(over="ignore"):
        power = np.square(flat).mean(axis=1)
    return [int(at) for at in np.argsort(-power, kind="stable")]


def _compared(plane: _Plane) -> Maps:
    reference, port, ring, how = _shrunk(plane.reference, plane.port)
    with np.errstate(invalid="ignore", over="ignore"):
        difference = port - reference
    values = _range(reference, port)
    gaps = _range(difference)
    size = f"{plane.reference.shape[0]} × {plane.reference.shape[1]}"
    items = (
        _map(reference, values, "reference", plane, ring),
        _map(port, values, "port", plane, ring),
        _map(difference, gaps, "port − reference", plane, ring),
    )
    wide = items[0].aspect > STACK
    return Maps(plane.title, items, number(values), number(gaps), f"{size}{how}", wide)


def _alone(side: str, array: Array) -> Maps:
    (plane,) = _planes(array, array, None)[:1]
    shrunk, _, _, how = _shrunk(plane.reference, plane.reference)
    scale = _range(shrunk)
    item = _map(shrunk, scale, side, plane, None)
    shape = "×".join(map(str, array.shape))
    return Maps(f"{side}, {shape}: {plane.title}", (item,), number(scale), "", f"{shape}{how}")


def _shrunk(reference: Array, port: Array) -> tuple[Array, Array, tuple[float, float] | None, str]:
    """Both with few enough cells, each the place of its block where the two differ most."""
    rows, columns = reference.shape
    tall, wide = ceil(rows / MAX_ROWS), ceil(columns / MAX_COLUMNS)
    high, broad = ceil(rows / tall), ceil(columns / wide)
    away = np.full((high * tall, broad * wide), -1.0)  # padding is never the largest
    away[:rows, :columns] = apart(reference, port)
    blocks = away.reshape(high, tall, broad, wide).transpose(0, 2, 1, 3).reshape(high, broad, -1)
    best = blocks.argmax(axis=2)
    y = np.arange(high)[:, None] * tall + best // wide
    x = np.arange(broad)[None, :] * wide + best % wide
    worst = np.take_along_axis(blocks, best[:, :, None], 2)[:, :, 0]
    top, left = np.unravel_index(int(worst.argmax()), worst.shape)
    ring = (100 * (left + 0.5) / broad, 100 * (top + 0.5) / high) if worst.max() > 0 else None
    how = f", a cell is the worst of {tall} × {wide}" if tall * wide > 1 else ""
    return reference[y, x], port[y, x], ring, how


def _range(*arrays: Array) -> float:
    """The number with the last color: the largest, unless it is an outlier."""
    finite = np.concatenate([array[np.isfinite(array)].reshape(-1) for array in arrays])
    finite = finite.astype(np.float64)
    most = float(np.abs(finite).max(initial=0.0))
    with np.errstate(over="ignore"):
        rms = float(np.sqrt(np.mean(np.square(finite)))) if finite.size else 0.0
    return min(most, OUTLIER * rms) if isfinite(rms) and rms > 0 else most


def _map(
    cells: Array, scale: float, side: str, plane: _Plane, ring: tuple[float, float] | None
) -> Map:
    rows, columns = cells.shape
    half = (LEVELS - 1) // 2
    with np.errstate(invalid="ignore", over="ignore"):
        part = np.clip(cells.astype(np.float64) / (scale or 1.0), -1, 1)
    index = np.rint(np.nan_to_num(part) * half + half).astype(np.uint8)
    index[~np.isfinite(cells)] = LEVELS
    image = Image.fromarray(index)
    image.putpalette(_palette())  # one byte a cell
    times = max(1, SIDE // max(rows, columns))
    image = image.resize((columns * times, rows * times), Image.Resampling.NEAREST)
    least, most = (0.4, 2.5) if plane.spatial else (1.0, 6.0)
    aspect = min(max(columns / rows, least), most)
    return Map(png_bytes(image), side, f"heat map, {side}: {plane.title}", round(aspect, 3), ring)


def _palette() -> bytes:
    stops = np.array([[int(stop[at : at + 2], 16) for at in (1, 3, 5)] for stop in STOPS])
    at = np.linspace(0, len(stops) - 1, LEVELS)
    known = np.arange(len(stops))
    colors = np.stack([np.interp(at, known, stops[:, channel]) for channel in range(3)], axis=1)
    last = [int(NOT_FINITE[at : at + 2], 16) for at in (1, 3, 5)]
    return bytes(np.rint(colors).astype(np.uint8).reshape(-1)) + bytes(last)
