"""A convolution with its strides, paddings and the frames of earlier calls, at some places."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from lydite.diff.findings.evidence import Array

MODES = {
    "zeros": "zeros", "edge": "the border's pixels (the edge is repeated)",
    "reflect": "reflected pixels", "wrap": "the pixels of the other side",
}  # fmt: skip
FEW_PLACES = 8  # at which forms are tried first
FEW_OUTPUTS = 8
PerAxis = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Form:
    """A convolution: parameters, and for each axis the stride and the numbers put before it.

    One number stands for all axes. `earlier` are frames of earlier calls, put before the first.
    """

    weight: Array
    bias: Array | None
    stride: int | PerAxis = 1
    before: int | PerAxis = 0
    mode: str | tuple[str, ...] = "zeros"
    dilation: int = 1
    earlier: Array | None = None

    def at(self, x: Array, pixels: Array) -> Array:
        """The values (batch, channels, pixels) of an input (batch, channels, …)."""
        if self.earlier is not None:
            x = np.concatenate((self.earlier, x), 2)
        kernel = self.weight.shape[2:]
        taps = np.stack(np.meshgrid(*map(np.arange, kernel), indexing="ij"), -1).reshape(
            -1, len(kernel)
        )
        places = pixels[:, None] * np.array(self.stride) - np.array(self.before)
        places = places + taps * self.dilation
        sizes = np.array(x.shape[2:])
        modes = (self.mode,) * len(kernel) if isinstance(self.mode, str) else self.mode
        is_zero = np.array([mode == "zeros" for mode in modes])
        inside = ((places >= 0) & (places < sizes) | ~is_zero).all(-1)
        places = np.stack(
            [_place(places[..., a], int(sizes[a]), mode) for a, mode in enumerate(modes)], -1
        )
        patches = x[(slice(None), slice(None), *np.moveaxis(places, -1, 0))]  # b c pixels taps
        patches = patches * inside
        outputs, width = self.weight.shape[:2]
        groups = x.shape[1] // width
        flat = self.weight.reshape(groups, outputs // groups, width, -1)
        split = patches.reshape(len(x), groups, width, *patches.shape[2:])
        value = np.einsum("bgcpt,goct->bgop", split, flat, optimize=True)
        value = value.reshape(len(x), outputs, -1)
        return value if self.bias is None else value + self.bias[:, None]

    def padded(self, axis: int, before: int | None = None, mode: str | None = None) -> "Form":
        """The same with another padding of one axis."""
        rank = self.weight.ndim - 2
        befores = list(np.broadcast_to(self.before, rank))
        modes = [self.mode] * rank if isinstance(self.mode, str) else list(self.mode)
        befores[axis] = befores[axis] if before is None else before
        modes[axis] = modes[axis] if mode is None else mode
        return replace(self, before=tuple(map(int, befores)), mode=tuple(map(str, modes)))


def _place(at: Array, size: int, mode: str) -> Array:
    if mode == "reflect":
        at = size - 1 - np.abs(size - 1 - np.abs(at))
    elif mode == "wrap":
        at = at % size
    return np.clip(at, 0, size - 1)


def unpadded(x: Array) -> tuple[tuple[slice, ...], Form]:
    """The part of an input that is no padding, and a form without parameters that pads it so.

    A reference may pad before the layer: planes of zeros, or of the same numbers, at the border.
    """
    slices: list[slice] = []
    befores: list[int] = []
    modes: list[str] = []
    for axis in range(2, x.ndim):
        planes = np.moveaxis(x, axis, 0)
        mode = "zeros"
        count = len(planes)
        first, last = _border(planes, np.zeros_like(planes[0])), 0
        last = _border(planes[::-1], np.zeros_like(planes[0]))
        if not first and not last and count > 2:
            mode = "edge"
            first, last = (_border(side[1:], side[0]) for side in (planes, planes[::-1]))
        if first + last >= count:
            first, last, mode = 0, 0, "zeros"
        slices.append(slice(first, count - last))
        befores.append(first)
        modes.append(mode)
    form = Form(np.zeros(0), None, before=tuple(befores), mode=tuple(modes))
    return (slice(None), slice(None), *slices), form


def _border(planes: Array, like: Array) -> int:
    """How many of the first planes are equal to another one."""
    return next((n for n, plane in enumerate(planes) if not np.array_equal(plane, like)), 0)


def usual_form(
    x: Array, at: Array, weight: Array, bias: Array | None, earlier: list[Array],
    fits: Callable[[Form], bool], expected: Array,
) -> Form | None:  # fmt: skip
    """The strides, the padding and the frames of earlier calls that give the reference."""
    few = np.linspace(0, len(at) - 1, min(len(at), FEW_PLACES)).astype(int)
    if x.shape[1] == weight.shape[1]:  # without groups a few outputs are tried first
        some = slice(0, FEW_OUTPUTS)
        part, offset = weight[some], None if bias is None else bias[some]
    else:
        some, part, offset = slice(None), weight, bias
    wanted = expected[:, some][..., few]
    size = float(np.linalg.norm(wanted))
    for form in _forms(weight, bias, earlier):
        near = replace(form, weight=part, bias=offset).at(x, at[few])
        if float(np.linalg.norm(near - wanted)) <= 0.05 * size and fits(form):
            return form
    return None


def _forms(weight: Array, bias: Array | None, earlier: list[Array]) -> Iterator[Form]:
    """All usual forms, the frequent ones first."""
    kernel = weight.shape[2:]
    space = kernel if len(kernel) < 3 else kernel[1:]
    sides = list(product(MODES, (1, 2, max(space), 4), range(max(space))))
    for mode, stride, before in sides:
        form = Form(weight, bias, stride, before, mode)
        if len(kernel) < 3:
            yield form
            continue
        befores = (before,) * 2
        for frames, steps in product((None, *earlier), (1, 2)):
            count = 0 if frames is None else frames.shape[2]
            for first in range(kernel[0] - 1 - count, -1, -1):
                for time in ("zeros", "edge") if first else ("zeros",):
                    yield replace(
                        form,
                        stride=(steps, stride, stride),
                        before=(first, *befores),
                        mode=(time, mode, mode),
                        earlier=frames,
                    )
