"""The final images of two runs and their difference."""

from dataclasses import dataclass

import numpy as np
from PIL import Image

from lydite.diff.pairing.paired_events import Pair
from lydite.report.contact_sheets import Pixels, png_bytes
from lydite.report.diff.plots import ramp
from lydite.report.diff.read_values import Array, Sides

LONGEST = 512  # pixels of a side on the page; differences are taken before shrinking
DARK = ("#0b0a08", "#5a2a08", "#c9741a", "#f4cf6a", "#fffbe8")


@dataclass(frozen=True)
class Pictures:
    """Reference, port, and their difference made visible."""

    name: str
    reference: bytes
    port: bytes
    difference: bytes
    width: int
    height: int
    caption: str
    amplified: int


def final_pictures(sides: Sides) -> Pictures | None:
    """The last value named `image` that both runs hold as a picture."""
    for pair in reversed(sides.pairing.pairs):
        if not pair.event.name.lower().endswith("image") or pair.event.slot != "out":
            continue
        value = sides.read(pair)
        if value.together and (drawn := _pictures(pair, *value.together)):
            return drawn
    return None


def _pictures(pair: Pair, reference: Array, port: Array) -> Pictures | None:
    expected, actual = _channels_last(reference), _channels_last(port)
    if expected is None or actual is None:
        return None
    low, high = _values(reference, pair.event.dtype)
    first, second = (_pixels(side, low, high) for side in (expected, actual))
    away = np.abs(first.astype(np.int16) - second).max(axis=2)
    most = int(away.max())
    times = next((n for n in (128, 64, 32, 16, 8, 4, 2) if n * most <= 320), 1) if most else 1
    changed = float((away > 0).mean())
    if most:
        caption = (
            f"{changed:.1%} of {first.shape[1]} × {first.shape[0]} pixels differ, by up to {most} "
            f"of 255 and {away.mean():.2g} on average."
        )
    else:
        caption = f"All {first.shape[1]} × {first.shape[0]} pixels are equal."
    drawn = [_shrunk(Image.fromarray(side)) for side in (first, second)]
    heat = Image.fromarray(np.clip(_worst(away) * times, 0, 255).astype(np.uint8))
    heat.putpalette(ramp(DARK))
    return Pictures(
        pair.event.name, png_bytes(drawn[0]), png_bytes(drawn[1]), png_bytes(heat),
        drawn[0].width, drawn[0].height, caption, times,
    )  # fmt: skip


def _channels_last(array: Array) -> Array | None:
    """(H, W, 3) of the first picture, or None where this is none."""
    if array.ndim == 4:
        array = array[0]
    if array.ndim != 3 or 3 not in (array.shape[0], array.shape[2]):
        return None
    array = array if array.shape[2] == 3 else array.transpose(1, 2, 0)
    return array if min(array.shape[:2]) >= 8 else None


def _values(reference: Array, dtype: str) -> tuple[float, float]:
    """What black and white are: the reference's own range says it for both."""
    finite = reference[np.isfinite(reference)]
    low, high = float(finite.min(initial=0.0)), float(finite.max(initial=0.0))
    if dtype == "u8" or high > 8:
        return 0.0, 255.0
    return (-1.0, 1.0) if low < -0.05 else (0.0, 1.0)


def _pixels(side: Array, low: float, high: float) -> Pixels:
    part = (np.nan_to_num(side.astype(np.float64), posinf=high, neginf=low) - low) / (high - low)
    return np.rint(np.clip(part, 0, 1) * 255).astype(np.uint8)


def _shrunk(image: Image.Image) -> Image.Image:
    part = min(1.0, LONGEST / max(image.size))
    size = (max(1, round(image.width * part)), max(1, round(image.height * part)))
    return image if part == 1.0 else image.resize(size, Image.Resampling.LANCZOS)


def _worst(away: Array) -> Array:
    """The largest of every block, so that one wrong pixel is not smoothed away."""
    times = -(-max(away.shape) // LONGEST)
    rows, columns = (-(-size // times) for size in away.shape)
    padded = np.zeros((rows * times, columns * times), away.dtype)
    padded[: away.shape[0], : away.shape[1]] = away
    return padded.reshape(rows, times, columns, times).max(axis=(1, 3))
