"""Shapes as signed distances: negative inside, about one radius wide.

Each takes coordinates (x to the right, y up, in radii from the centre) and an array namespace that
is NumPy or torch. Distances are exact near edges, which is all that anti-aliasing looks at.
"""

import math
from collections.abc import Callable
from typing import Any

Distance = Callable[[Any, Any, Any], Any]


def circle(x: Any, y: Any, xp: Any) -> Any:
    return xp.sqrt(x * x + y * y) - 0.94


def square(x: Any, y: Any, xp: Any) -> Any:
    return xp.maximum(xp.abs(x), xp.abs(y)) - 0.80


def triangle(x: Any, y: Any, xp: Any) -> Any:
    lean, y = math.sqrt(3) / 2, y + 0.12  # lowered, so that it looks centred
    sides = xp.maximum(lean * x + 0.5 * y, 0.5 * y - lean * x)
    return xp.maximum(-y, sides) - 0.53


def star(x: Any, y: Any, xp: Any) -> Any:
    tip, dent = 1.03, 0.42  # where the points end and where the notches begin
    fifth = 2 * math.pi / 5
    turned = xp.arctan2(y, x) - math.pi / 2 + fifth / 2
    angle = xp.abs(xp.remainder(turned, fifth) - fifth / 2)  # from the nearest point's axis
    reach = xp.sqrt(x * x + y * y)
    edge_x, edge_y = dent * math.cos(fifth / 2) - tip, dent * math.sin(fifth / 2)
    length = math.hypot(edge_x, edge_y)
    return (edge_y * (reach * xp.cos(angle) - tip) - edge_x * reach * xp.sin(angle)) / length


def ring(x: Any, y: Any, xp: Any) -> Any:
    return xp.abs(xp.sqrt(x * x + y * y) - 0.72) - 0.23


def cross(x: Any, y: Any, xp: Any) -> Any:
    x, y = xp.abs(x), xp.abs(y)
    return xp.minimum(xp.maximum(x - 0.94, y - 0.30), xp.maximum(x - 0.30, y - 0.94))


def heart(x: Any, y: Any, xp: Any) -> Any:
    """Two circles on a square that stands on its corner (Inigo Quilez, "heart - exact")."""
    scale = 0.58
    x, y = xp.abs(x * scale), y * scale + 0.56
    lobe = xp.sqrt((x - 0.25) ** 2 + (y - 0.75) ** 2) - math.sqrt(2) / 4
    slide = 0.5 * xp.clip(x + y, 0, None)
    nearest = xp.minimum(x**2 + (y - 1) ** 2, (x - slide) ** 2 + (y - slide) ** 2)
    return xp.where(x + y > 1, lobe, xp.sqrt(nearest) * xp.sign(x - y)) / scale


def crescent(x: Any, y: Any, xp: Any) -> Any:
    moon = xp.sqrt(x * x + y * y) - 0.96
    shade = 0.80 - xp.sqrt((x - 0.45) ** 2 + (y - 0.12) ** 2)
    return xp.maximum(moon, shade)


SHAPE_DISTANCES: dict[str, Distance] = {
    "circle": circle,
    "square": square,
    "triangle": triangle,
    "star": star,
    "ring": ring,
    "cross": cross,
    "heart": heart,
    "crescent": crescent,
}
SHAPES = tuple(SHAPE_DISTANCES)
