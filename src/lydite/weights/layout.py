"""Rearrangements of one tensor, each with its inverse and with what it does to a shape."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """How a tensor of the file becomes a parameter of the model, and back."""

    name: str
    forward: Callable[[Array], Array]
    inverse: Callable[[Array], Array]
    shape: Callable[[Shape], Shape]  # raises ValueError when the rank or size does not fit


def _permutation(name: str, axes: tuple[int, ...]) -> Layout:
    back = tuple(int(axis) for axis in np.argsort(axes))

    def shape(stored: Shape) -> Shape:
        if len(stored) != len(axes):
            raise ValueError(f"expected {len(axes)} dimensions, found {stored}")
        return tuple(stored[axis] for axis in axes)

    return Layout(name, lambda x: x.transpose(axes), lambda x: x.transpose(back), shape)


def _swap(x: Array) -> Array:
    half = x.shape[0] // 2
    return np.concatenate([x[half:], x[:half]])


def _even_rows(stored: Shape) -> Shape:
    if not stored or stored[0] % 2:
        raise ValueError(f"expected an even number of rows, found {stored}")
    return stored


def _one_by_one(stored: Shape) -> Shape:
    if len(stored) != 4 or stored[2:] != (1, 1):
        raise ValueError(f"expected (O, I, 1, 1), found {stored}")
    return stored[:2]


# A 2-d convolution's weight: torch's channels-first to MLX's channels-last.
OIHW_TO_OHWI = _permutation("oihw_to_ohwi", (0, 2, 3, 1))


def _conv_or_linear(found: Shape) -> Shape:
    return OIHW_TO_OHWI.shape(found) if len(found) == 4 else found


# A projection that is a 1×1 convolution in some models and a linear in others.
CONV_OR_LINEAR = Layout(
    "conv_or_linear",
    forward=lambda x: OIHW_TO_OHWI.forward(x) if x.ndim == 4 else x,
    inverse=lambda x: OIHW_TO_OHWI.inverse(x) if x.ndim == 4 else x,
    shape=_conv_or_linear,
)

# A matrix stored (in, out).
TRANSPOSE = _permutation("transpose", (1, 0))

# A 1×1 convolution that we run as a linear.
CONV1X1_TO_LINEAR = Layout(
    "conv1x1_to_linear",
    forward=lambda x: x.reshape(x.shape[:2]),
    inverse=lambda x: x.reshape((*x.shape, 1, 1)),
    shape=_one_by_one,
)


def _present(x: Array) -> Array:
    return x[:, :, -1].transpose(0, 2, 3, 1)


def _with_past(x: Array) -> Array:
    present = x.transpose(0, 3, 1, 2)[:, :, None]
    past = np.zeros((*present.shape[:2], x.shape[1] - 1, *present.shape[3:]), x.dtype)
    return np.concatenate([past, present], axis=2)


def _cube(found: Shape) -> Shape:
    if len(found) != 5 or not 0 < found[2] == found[3] == found[4]:
        raise ValueError(f"expected (O, I, K, K, K), found {found}")
    return (found[0], found[3], found[4], found[1])


def _per_channel(axes: int) -> Layout:
    ones = (1,) * axes

    def shape(found: Shape) -> Shape:
        if len(found) != axes + 1 or found[1:] != ones:
            raise ValueError(f"expected {('C', *ones)}, found {found}")
        return found[:1]

    return Layout(
        f"per_channel_{axes}", lambda x: x.reshape(-1), lambda x: x.reshape(-1, *ones), shape
    )


# A causal 3-d convolution that we run on single frames: of its kernel (O, I, frames, H, W) the
# slice for the present frame, channels last. Saved again, the slices for the past are zero.
PRESENT_FRAME = Layout("present_frame", forward=_present, inverse=_with_past, shape=_cube)

# One number per channel, stored with axes to broadcast over frames and positions.
PER_CHANNEL_2D = _per_channel(2)
PER_CHANNEL_3D = _per_channel(3)

# Rows stored (shift, scale) where the model reads (scale, shift); its own inverse.
SWAP_HALVES = Layout("swap_halves", forward=_swap, inverse=_swap, shape=_even_rows)
