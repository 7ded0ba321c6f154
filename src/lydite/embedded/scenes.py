"""Scenes of one to three coloured shapes: drawn at random from a seed, and painted.

Many scenes are stored as one set of arrays. Painting is written against an array namespace, so that
the same lines run in NumPy here and in torch on the machine that trains.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lydite.embedded.shapes import SHAPE_DISTANCES

SIDE = 128  # pixels
MOST_OBJECTS = 3
COLORS = (
    "red", "orange", "yellow", "green", "cyan", "blue", "purple", "pink", "white", "black",
)  # fmt: skip
BACKGROUNDS = ("white", "black", "gray", "navy", "teal", "beige", "maroon", "lavender")
SIZES = ("small", "large")
COLOR_RGB = np.array(
    [
        [0.86, 0.16, 0.16],
        [0.96, 0.55, 0.13],
        [0.97, 0.86, 0.22],
        [0.18, 0.65, 0.27],
        [0.20, 0.80, 0.87],
        [0.18, 0.33, 0.87],
        [0.55, 0.22, 0.74],
        [0.97, 0.55, 0.75],
        [0.97, 0.97, 0.97],
        [0.08, 0.08, 0.08],
    ],
    np.float32,
)
BACKGROUND_RGB = np.array(
    [
        [0.95, 0.95, 0.95],
        [0.07, 0.07, 0.07],
        [0.55, 0.55, 0.55],
        [0.09, 0.13, 0.36],
        [0.10, 0.42, 0.42],
        [0.90, 0.84, 0.70],
        [0.40, 0.08, 0.14],
        [0.78, 0.74, 0.92],
    ],
    np.float32,
)
TOO_CLOSE = 0.36  # RGB distance below which an object would be hard to see on its background
RADII = ((11.0, 15.0), (22.0, 29.0))  # small, large: in pixels
RADIUS_IN_THREES = 26.0  # the largest that leaves room for two small ones
MARGIN, GAP = 4.0, 3.0  # pixels kept free along the frame and between objects
SHARE = (0.28, 0.44, 0.28)  # of scenes with one, two, three objects
SHARE_GRADIENT = 0.35
SHARE_ALIKE = 0.15  # of scenes whose first two objects share a colour; as many share a shape
TILT = np.deg2rad(9.0)
TINT, BACKGROUND_TINT = 0.03, 0.025


@dataclass(frozen=True)
class Thing:
    """One object; None is an attribute that a caption leaves open."""

    shape: int | None
    color: int | None
    size: int | None


@dataclass(frozen=True)
class Scene:
    """What can be said about a scene; None is what a caption leaves open."""

    things: tuple[Thing, ...]  # from left to right, or from top to bottom
    relation: int | None  # 0: side by side, 1: one above the other
    cell: int | None  # of a 3 × 3 grid, where a single object is
    background: tuple[int, int] | None  # top and bottom; equal when plain


@dataclass(frozen=True, eq=False)
class Scenes:
    """N scenes as arrays; entries of objects beyond `count` have no meaning."""

    count: Any  # (N,) 1 to 3
    shape: Any  # (N, 3)
    color: Any  # (N, 3)
    size: Any  # (N, 3)
    x: Any  # (N, 3) pixels from the left
    y: Any  # (N, 3) pixels from the top
    radius: Any  # (N, 3) pixels
    angle: Any  # (N, 3) radians
    rgb: Any  # (N, 3, 3) 0 to 1
    relation: Any  # (N,)
    cell: Any  # (N,)
    background: Any  # (N, 2)
    background_rgb: Any  # (N, 2, 3)

    def __len__(self) -> int:
        return len(self.count)

    def __getitem__(self, index: Any) -> "Scenes":
        return self.map(lambda array: array[index])

    def map(self, change: Callable[[Any], Any]) -> "Scenes":
        """The same scenes with every array changed: moved to torch, say, or to a device."""
        return Scenes(*(change(getattr(self, field.name)) for field in fields(self)))

    def scene(self, index: int) -> Scene:
        """One scene with everything said."""
        count = int(self.count[index])
        rows = (array[index].tolist()[:count] for array in (self.shape, self.color, self.size))
        top, bottom = self.background[index].tolist()
        return Scene(
            things=tuple(Thing(*thing) for thing in zip(*rows, strict=True)),
            relation=int(self.relation[index]) if count > 1 else None,
            cell=int(self.cell[index]) if count == 1 else None,
            background=(top, bottom),
        )


def sample_scenes(
    n: int, seed: int, *, held_out: bool = False, share: tuple[float, ...] = SHARE
) -> Scenes:
    """N scenes; with `held_out`, every one of several objects has a pair never trained on."""
    g = np.random.Generator(np.random.PCG64(seed))
    count = g.choice(np.arange(1, MOST_OBJECTS + 1), n, p=share)
    shape, color = _sample_kinds(g, count, held_out)
    size = _sample_sizes(g, count)
    low, high = np.array(RADII).T
    high = np.minimum(high[size], np.where(count == 3, RADIUS_IN_THREES, np.inf)[:, None])
    radius = low[size] + g.random((n, 3)) * (high - low[size])
    relation, cell = g.integers(0, 2, n), g.integers(0, 9, n)
    x, y = _sample_places(g, count, radius, relation, cell)
    background = _sample_backgrounds(g, count, color)

    def tinted(rgb: NDArray[np.float32], amount: float) -> NDArray[np.float32]:
        return (rgb + g.uniform(-amount, amount, rgb.shape)).astype(np.float32)

    background_rgb = tinted(BACKGROUND_RGB[background], BACKGROUND_TINT)
    plain = background[:, 0] == background[:, 1]
    background_rgb[plain, 1] = background_rgb[plain, 0]
    return Scenes(
        count=count,
        shape=shape,
        color=color,
        size=size,
        x=x.astype(np.float32),
        y=y.astype(np.float32),
        radius=radius.astype(np.float32),
        angle=g.uniform(-TILT, TILT, (n, 3)).astype(np.float32),
        rgb=tinted(COLOR_RGB[color], TINT),
        relation=relation,
        cell=cell,
        background=background,
        background_rgb=background_rgb,
    )


def is_held_out(color: Any, shape: Any) -> Any:
    """Whether a pair of (colour, shape) is kept out of training, in whichever order: (..., 2)."""
    kind = (color * len(SHAPE_DISTANCES) + shape).astype(np.int64)
    low, high = kind.min(axis=-1), kind.max(axis=-1)
    return (((low * 73856093) ^ (high * 19349663)) >> 3) % 11 == 0


def render(scenes: Scenes, xp: Any = np) -> Any:
    """Pictures in 0 to 1: (N, SIDE, SIDE, 3). `xp` is numpy, or torch for scenes of tensors."""
    device = scenes.x.device
    pixel = xp.arange(SIDE, dtype=xp.float32, device=device) + 0.5
    down = (pixel / SIDE)[None, :, None, None]
    top, bottom = scenes.background_rgb[:, 0, None, None], scenes.background_rgb[:, 1, None, None]
    across = xp.zeros((1, 1, SIDE, 1), dtype=xp.float32, device=device)
    pictures = top * (1 - down) + bottom * down + across  # (N, SIDE, SIDE, 3)
    for slot in range(MOST_OBJECTS):
        for shape, distance in enumerate(SHAPE_DISTANCES.values()):
            chosen = (scenes.shape[:, slot] == shape) & (scenes.count > slot)
            if not chosen.any():
                continue
            x, y, radius, angle = (
                array[chosen, slot][:, None, None]
                for array in (scenes.x, scenes.y, scenes.radius, scenes.angle)
            )
            right, up = (pixel[None, None, :] - x) / radius, (y - pixel[None, :, None]) / radius
            cos, sin = xp.cos(angle), xp.sin(angle)
            pixels = distance(cos * right + sin * up, cos * up - sin * right, xp) * radius
            cover = xp.clip(0.5 - pixels, 0, 1)[..., None]  # one pixel from outside to inside
            ink = scenes.rgb[chosen, slot][:, None, None]
            pictures[chosen] = pictures[chosen] * (1 - cover) + ink * cover
    return xp.clip(pictures, 0, 1)


def paint(scenes: Scenes) -> NDArray[np.uint8]:
    """The pictures of scenes as files hold them: (N, SIDE, SIDE, 3)."""
    return np.round(render(scenes) * 255).astype(np.uint8)


def _sample_kinds(g: np.random.Generator, count: Any, held_out: bool) -> tuple[Any, Any]:
    """Shapes and colours: no two objects of a scene alike, and no pair from the other side."""
    shape = np.zeros((len(count), 3), np.int64)
    color = np.zeros((len(count), 3), np.int64)
    todo = np.arange(len(count))
    while len(todo):
        shape[todo] = g.integers(0, len(SHAPE_DISTANCES), (len(todo), 3))
        color[todo] = g.integers(0, len(COLORS), (len(todo), 3))
        alike = g.random(len(todo))
        same_color, same_shape = todo[alike < SHARE_ALIKE], todo[alike > 1 - SHARE_ALIKE]
        color[same_color, 1] = color[same_color, 0]
        shape[same_shape, 1] = shape[same_shape, 0]
        twins = np.zeros(len(todo), bool)
        unseen = np.zeros(len(todo), bool)
        for pair in ([0, 1], [0, 2], [1, 2]):
            there = count[todo] > pair[1]
            shapes, colors = shape[todo][:, pair], color[todo][:, pair]
            twins |= there & (np.ptp(shapes, axis=1) == 0) & (np.ptp(colors, axis=1) == 0)
            unseen |= there & is_held_out(colors, shapes)
        todo = todo[twins | ((count[todo] > 1) & (unseen != held_out))]
    return shape, color


def _sample_sizes(g: np.random.Generator, count: Any) -> Any:
    """Small or large at random; among three there is room for one large at most."""
    size = g.integers(0, 2, (len(count), 3))
    large = g.integers(0, 4, len(count))  # 3: none of them
    return np.where((count == 3)[:, None], np.arange(3) == large[:, None], size).astype(np.int64)


def _sample_places(
    g: np.random.Generator, count: Any, radius: Any, relation: Any, cell: Any
) -> tuple[Any, Any]:
    """Centres: one object in its cell, several one after the other along their axis."""
    n = len(count)
    there = np.arange(3) < count[:, None]
    taken = np.where(there, 2 * radius, 0).sum(axis=1) + GAP * (count - 1) + 2 * MARGIN
    parts = g.exponential(size=(n, 4)) * (np.arange(4) <= count[:, None])
    parts *= (np.maximum(SIDE - taken, 0) / parts.sum(axis=1))[:, None]  # free room, cut at random
    steps = parts[:, :3] + radius
    steps[:, 1:] += radius[:, :-1] + GAP
    along = MARGIN + np.cumsum(steps, axis=1)

    nearest = np.where(there, steps, np.inf)[:, 1:].min(axis=1, initial=SIDE)
    widest = np.where(there, radius, 0).max(axis=1) + MARGIN
    base = widest + g.random(n) * (SIDE - 2 * widest)
    # Half a step aside at most: what is left stays clearly left, not above.
    aside = base[:, None] + (g.random((n, 3)) - 0.5) * 0.5 * nearest[:, None]
    aside = np.clip(aside, MARGIN + radius, SIDE - MARGIN - radius)

    row = (relation == 0)[:, None]
    x, y = np.where(row, along, aside), np.where(row, aside, along)
    alone = count == 1
    x[alone, 0] = _within_third(g, cell % 3, radius[:, 0])[alone]
    y[alone, 0] = _within_third(g, cell // 3, radius[:, 0])[alone]
    return x, y


def _within_third(g: np.random.Generator, third: Any, radius: Any) -> Any:
    """A coordinate in the first, middle or last third, with a band between them left empty."""
    low = np.choose(third, [radius + MARGIN, 56, 86])
    high = np.choose(third, [42, 72, SIDE - MARGIN - radius])
    return low + g.random(len(third)) * (high - low)


def _sample_backgrounds(g: np.random.Generator, count: Any, color: Any) -> Any:
    """Top and bottom colours on which every object can be seen: (N, 2)."""
    distance = np.linalg.norm(COLOR_RGB[:, None] - BACKGROUND_RGB[None], axis=-1)
    there = np.arange(3) < count[:, None]
    hidden = ((distance < TOO_CLOSE)[color] & there[..., None]).any(axis=1)  # (N, 8)
    order = np.argsort(np.where(hidden, 2.0, g.random(hidden.shape)), axis=1)
    gradient = (g.random(len(count)) < SHARE_GRADIENT) & ((~hidden).sum(axis=1) > 1)
    return np.stack([order[:, 0], np.where(gradient, order[:, 1], order[:, 0])], axis=1)
