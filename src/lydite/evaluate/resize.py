"""Pictures as feature networks take them, resized as the tools do that published the figures.

References: clean-fid 0.1.35, resize.py; torch-fidelity 0.4.0, interpolate_compat_tensorflow.py;
pytorch-fid 0.3.0, inception.py; transformers 5.22.2, CLIPImageProcessorPil.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from lydite.core.errors import InputError
from lydite.models.features.inception import SIZE

Pixels = NDArray[np.uint8]  # (N, H, W, 3)
Values = NDArray[np.float32]  # (N, height, width, 3)


def resize_clean(pixels: Pixels) -> Values:
    """clean-fid: Pillow's bicubic filter, antialiased, in float; values cut to 0…255."""
    values = np.empty((len(pixels), SIZE, SIZE, 3), np.float32)
    for picture, out in zip(pixels.astype(np.float32), values, strict=True):
        for channel in range(3):
            plane = Image.fromarray(np.ascontiguousarray(picture[:, :, channel]))
            out[:, :, channel] = np.asarray(plane.resize((SIZE, SIZE), Image.Resampling.BICUBIC))
    return _centred(values.clip(0, 255))


def resize_legacy_tensorflow(pixels: Pixels) -> Values:
    """The graph of 2015, torch-fidelity and the evaluator of ADM: bilinear, pixel 0 at 0."""
    return _centred(_bilinear(pixels, lambda index, scale: index * scale))


def resize_legacy_pytorch(pixels: Pixels) -> Values:
    """pytorch-fid: bilinear as torch has it, the centre of pixel 0 at ½; -1…1 is 0…255."""
    values = _bilinear(pixels, lambda index, scale: (index + 0.5) * scale - 0.5)
    return np.asarray(values / 127.5 - 1, np.float32)


def _centred(values: NDArray[Any]) -> Values:
    """As the graph of 2015 scales its input."""
    return np.asarray((values - 128) / 128, np.float32)


def _bilinear(
    pixels: Pixels, source: Callable[[NDArray[Any], np.float32], NDArray[Any]]
) -> NDArray[Any]:
    """To 299 × 299 without a filter; `source` gives the place of an output in the input."""
    x: NDArray[Any] = pixels.astype(np.float32)
    for axis in (2, 1):
        length = x.shape[axis]
        scale = np.float32(length / SIZE)
        positions = source(np.arange(SIZE, dtype=np.float32), scale).clip(0, length - 1)
        low = positions.astype(np.intp)
        high = np.minimum(low + 1, length - 1)
        weight = (positions - low).astype(np.float32)
        shape = [SIZE if other == axis else 1 for other in range(4)]
        first, second = x.take(low, axis), x.take(high, axis)
        x = first + (second - first) * weight.reshape(shape)
    return x


# By clean-fid's names.
RESIZERS: Mapping[str, Callable[[Pixels], Values]] = {
    "clean": resize_clean,
    "legacy_tensorflow": resize_legacy_tensorflow,
    "legacy_pytorch": resize_legacy_pytorch,
}


@dataclass(frozen=True)
class ClipResizer:
    """CLIP's: the shorter edge by Pillow's bicubic filter in bytes, the centre, mean and std."""

    shortest_edge: int
    crop: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    def __call__(self, pixels: Pixels) -> Values:
        height, width = pixels.shape[1:3]
        short = min(height, width)
        # The longer edge is cut down to a whole number, not rounded.
        rows, columns = (self.shortest_edge * edge // short for edge in (height, width))
        top, left = (rows - self.crop) // 2, (columns - self.crop) // 2
        values = np.empty((len(pixels), self.crop, self.crop, 3), np.float32)
        for picture, out in zip(pixels, values, strict=True):
            resized = Image.fromarray(picture).resize((columns, rows), Image.Resampling.BICUBIC)
            out[:] = np.asarray(resized)[top : top + self.crop, left : left + self.crop]
        mean, std = np.array(self.mean, np.float32), np.array(self.std, np.float32)
        return np.asarray((values / 255 - mean) / std, np.float32)


def check_pixels(pixels: Pixels) -> None:
    """Refuse what is no batch of RGB pictures in bytes."""
    if pixels.dtype != np.uint8 or pixels.ndim != 4 or pixels.shape[3] != 3 or not pixels.size:
        raise InputError(
            "pictures for a feature network: expected bytes of shape (n, height, width, 3), "
            f"found {pixels.dtype} {pixels.shape}."
        )
