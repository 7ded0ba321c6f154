"""Prompt accuracy: what was recognised in pictures, compared with what their prompts say.

NumPy only: the judge's network runs in MLX here and in torch where it is trained, and both give
their answers to `read`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations

import numpy as np
from numpy.typing import NDArray

from lydite.embedded.scenes import BACKGROUND_RGB, COLORS, MARGIN, SIDE, Scene, Thing
from lydite.embedded.shapes import SHAPES

STEM = ((3, 24, 2), (24, 48, 2), (48, 48, 1), (48, 96, 2))  # the judge: channels in, out, stride
WIDTH, DEPTH = 96, 4  # of what follows the stem
STRIDE = 8  # pixels per cell of the judge's answers
PRESENT, OFFSET, RADIUS = 0, slice(1, 3), 3  # what the channels of an answer mean
SHAPE = slice(4, 4 + len(SHAPES))
COLOR = slice(SHAPE.stop, SHAPE.stop + len(COLORS))
ANSWERS = COLOR.stop
RADIUS_UNIT = 16.0  # pixels
SURE_ENOUGH = 0.3  # centred between cells, an object splits: 0.5 missed 0.75 %, 0.15 to 0.35 none
LARGE_FROM = 18.5  # pixels of radius, half way between the largest small and the smallest large
THIRDS = (49.0, 79.0)  # pixels between the cells of the 3 × 3 grid
ATTRIBUTES = ("count", "shape", "color", "size", "position", "relation", "background")


@dataclass(frozen=True)
class SeenObject:
    """An object recognised in a picture."""

    thing: Thing
    x: float  # pixels
    y: float
    sure: float  # probability that there is an object


@dataclass(frozen=True)
class Reading:
    """What the judge sees in one picture."""

    objects: tuple[SeenObject, ...]
    background: tuple[int, int]  # nearest named colours at the top and at the bottom


@dataclass(frozen=True)
class PromptAccuracy:
    """Share of prompts that the pictures follow: in each attribute that is stated, and in all."""

    prompts: int
    everything: float
    attributes: Mapping[str, float]


def read(answers: NDArray[np.float32], pictures: NDArray[np.uint8]) -> list[Reading]:
    """Readings from the network's answers (N, 16, 16, ANSWERS) and the pictures themselves."""
    present = 1 / (1 + np.exp(-answers[..., PRESENT].astype(np.float64)))  # (N, 16, 16)
    peaks = (present > SURE_ENOUGH) & (present >= _largest_neighbour(present))
    grounds = _grounds(pictures)
    readings: list[Reading] = []
    for index, ground in enumerate(grounds):
        objects = [
            _seen_object(answers[index], row, column, float(present[index, row, column]))
            for row, column in zip(*peaks[index].nonzero(), strict=True)
        ]
        readings.append(Reading(tuple(objects), ground))
    return readings


def check(reading: Reading, says: Scene) -> dict[str, list[bool]]:
    """Right or wrong for everything the prompt says; objects are matched as well as they can be."""

    def fit(objects: tuple[SeenObject | None, ...]) -> tuple[int, bool]:
        ordered = says.relation is not None and _in_order(objects, says.relation)
        return _agreement(objects, says.things), ordered

    best = max(_assignments(reading, says), key=fit)
    marks: dict[str, list[bool]] = {name: [] for name in ATTRIBUTES}
    marks["count"].append(len(reading.objects) == len(says.things))
    for seen, thing in zip(best, says.things, strict=True):
        for name in ("shape", "color", "size"):
            if (wanted := getattr(thing, name)) is not None:
                marks[name].append(seen is not None and getattr(seen.thing, name) == wanted)
    if says.cell is not None:
        first = best[0]
        marks["position"].append(first is not None and cell_of(first) == says.cell)
    if says.relation is not None:
        marks["relation"].append(_in_order(best, says.relation))
    if says.background is not None:
        marks["background"].append(reading.background == says.background)
    return marks


def score(readings: Sequence[Reading], says: Sequence[Scene]) -> PromptAccuracy:
    """Accuracy over many pictures and what their prompts say."""
    marks = [check(*pair) for pair in zip(readings, says, strict=True)]
    attributes = {
        name: float(np.mean(flat))
        for name in ATTRIBUTES
        if (flat := [mark for row in marks for mark in row[name]])
    }
    right = [all(mark for values in row.values() for mark in values) for row in marks]
    return PromptAccuracy(len(marks), float(np.mean(right)), attributes)


def _largest_neighbour(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The largest of each 3 × 3 neighbourhood."""
    padded = np.pad(values, ((0, 0), (1, 1), (1, 1)), constant_values=-np.inf)
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(1, 2))
    return windows.max(axis=(-1, -2))


def _grounds(pictures: NDArray[np.uint8]) -> list[tuple[int, int]]:
    """Nearest background colours of the top and bottom margins, where no object ever is."""
    margin = int(MARGIN)
    ends = np.stack([pictures[:, :margin], pictures[:, -margin:]], axis=1)  # (N, 2, 4, SIDE, 3)
    rgb = ends.astype(np.float32).mean(axis=(2, 3)) / 255
    nearest = np.linalg.norm(rgb[:, :, None] - BACKGROUND_RGB, axis=-1).argmin(axis=-1)
    return [(int(top), int(bottom)) for top, bottom in nearest]


def _seen_object(answers: NDArray[np.float32], row: int, column: int, sure: float) -> SeenObject:
    answer = answers[row, column]
    right, down = answer[OFFSET].tolist()
    large = float(answer[RADIUS]) * RADIUS_UNIT > LARGE_FROM
    thing = Thing(int(answer[SHAPE].argmax()), int(answer[COLOR].argmax()), int(large))
    x, y = (column + 0.5 + right) * STRIDE, (row + 0.5 + down) * STRIDE
    return SeenObject(thing, min(max(x, 0.0), SIDE), min(max(y, 0.0), SIDE), sure)


def _assignments(reading: Reading, says: Scene) -> list[tuple[SeenObject | None, ...]]:
    """Every way to assign recognised objects to the wanted things; None where there are too few."""
    surest = sorted(reading.objects, key=lambda seen: -seen.sure)[:4]
    missing = max(0, len(says.things) - len(surest))
    return list(permutations([*surest, *[None] * missing], len(says.things)))


def _agreement(objects: Sequence[SeenObject | None], things: Sequence[Thing]) -> int:
    """How well objects fit what was wanted; shape counts a little more than colour, then size."""
    return sum(
        101 * (one.thing.shape == thing.shape)
        + 100 * (one.thing.color == thing.color)
        + 30 * (one.thing.size == thing.size)
        for one, thing in zip(objects, things, strict=True)
        if one is not None
    )


def cell_of(seen: SeenObject) -> int:
    """The cell of the 3 × 3 grid, row by row, that an object's centre is in."""
    row, column = (sum(value >= edge for edge in THIRDS) for value in (seen.y, seen.x))
    return 3 * row + column


def _in_order(objects: Sequence[SeenObject | None], relation: int) -> bool:
    """Each clearly before the next: further along the axis than it is off to the side."""
    there = [one for one in objects if one is not None]
    if len(there) < len(objects):
        return False
    steps = [(b.x - a.x, b.y - a.y) for a, b in pairwise(there)]
    return all(step[relation] > abs(step[1 - relation]) for step in steps)
