"""Scenes and captions stay those that the embedded model and its judge were trained on.

A change here would ask the model for what it never saw. No golden value depends on NumPy's streams.
"""

import hashlib
from random import Random
from typing import Any

import numpy as np
import pytest

from lydite.embedded.captions import caption, training_prompts
from lydite.embedded.scenes import (
    BACKGROUND_RGB,
    COLOR_RGB,
    Scene,
    Thing,
    is_held_out,
    sample_scenes,
)
from lydite.embedded.shapes import SHAPE_DISTANCES

N = 4000
SAMPLE = sample_scenes(N, 1)
KINDS = 80  # colours × shapes


def fingerprint(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def test_pairs_that_are_held_out() -> None:
    pairs = np.stack(np.meshgrid(np.arange(KINDS), np.arange(KINDS)), axis=-1)
    held_out = is_held_out(pairs // len(SHAPE_DISTANCES), pairs % len(SHAPE_DISTANCES))
    assert held_out.sum() == 607
    assert fingerprint(np.packbits(held_out).tobytes()) == "550bad82294b00d1"


def test_colours() -> None:
    assert fingerprint(COLOR_RGB.tobytes() + BACKGROUND_RGB.tobytes()) == "1cef507dc6f0e9a6"


AREAS = {  # in squared radii, and the centre: to the right, up
    "circle": (2.776, 0.0, 0.0),
    "square": (2.547, 0.0, 0.0),
    "triangle": (1.456, 0.0, -0.119),
    "star": (1.271, 0.0, 0.0),
    "ring": (2.081, 0.0, 0.0),
    "cross": (1.901, 0.0, 0.0),
    "heart": (2.649, 0.0, 0.168),
    "crescent": (1.304, -0.386, -0.103),
}


@pytest.mark.parametrize("shape", SHAPE_DISTANCES)
def test_areas_and_centres_of_shapes(shape: str) -> None:
    line = (np.arange(400) + 0.5) / 200 * 1.2 - 1.2
    x, y = np.meshgrid(line, -line)
    inside = SHAPE_DISTANCES[shape](x, y, np) < 0
    found = inside.mean() * 2.4**2, x[inside].mean(), y[inside].mean()
    np.testing.assert_allclose(found, AREAS[shape], atol=2e-3)


def test_words_of_captions() -> None:
    rng = Random(0)
    scenes: list[Scene] = []
    for number in range(400):
        count = 1 + number % 3
        kinds = [(rng.randrange(8), rng.randrange(10), rng.randrange(2)) for _ in range(count)]
        top = rng.randrange(8)
        scenes.append(
            Scene(
                things=tuple(Thing(*kind) for kind in kinds),
                relation=rng.randrange(2) if count > 1 else None,
                cell=rng.randrange(9) if count == 1 else None,
                background=(top, top if number % 2 else rng.randrange(8)),
            )
        )
    texts = [caption(scene, rng).text for scene in scenes]
    assert fingerprint("\n".join(texts).encode()) == "c272debaaf7fbaaa", texts[:3]


def near(found: Any, expected: Any, count: int) -> None:
    """Within four standard deviations of a share of `count`."""
    np.testing.assert_allclose(found, expected, atol=4 * 0.5 / count**0.5)


def test_shares_of_what_is_drawn() -> None:
    two, three = SAMPLE[SAMPLE.count == 2], SAMPLE[SAMPLE.count == 3]
    near(np.bincount(SAMPLE.count)[1:] / N, (0.28, 0.44, 0.28), N)
    near(two.size.mean(), 0.5, 2 * len(two))
    near(np.bincount(three.size.sum(axis=1)) / len(three), (0.25, 0.75), len(three))
    near(SAMPLE.relation.mean(), 0.5, N)
    near(np.bincount(SAMPLE.cell) / N, np.full(9, 1 / 9), N)
    # 15 % are made alike, and of the others a tenth or an eighth are by chance
    near((two.color[:, 0] == two.color[:, 1]).mean(), 0.15 + 0.7 / 10, len(two))
    near((two.shape[:, 0] == two.shape[:, 1]).mean(), 0.15 + 0.7 / 8, len(two))


def test_ranges_of_what_is_drawn() -> None:
    tint = np.abs(SAMPLE.rgb - COLOR_RGB[SAMPLE.color]).max()
    ground = np.abs(SAMPLE.background_rgb - BACKGROUND_RGB[SAMPLE.background]).max()
    found = np.rad2deg(np.abs(SAMPLE.angle).max()), tint, ground
    np.testing.assert_allclose(found, (9.0, 0.03, 0.025), rtol=2e-3)
    there = np.arange(3) < SAMPLE.count[:, None]
    for size, (low, high) in enumerate(((11.0, 15.0), (22.0, 29.0))):
        radii = SAMPLE.radius[there & (SAMPLE.size == size)]
        np.testing.assert_allclose((radii.min(), radii.max()), (low, high), rtol=2e-3)
    largest = SAMPLE.radius[SAMPLE.count == 3].max()
    np.testing.assert_allclose(largest, 26.0, rtol=2e-3)
    alone = SAMPLE[SAMPLE.count == 1]
    for place, third in ((alone.x[:, 0], alone.cell % 3), (alone.y[:, 0], alone.cell // 3)):
        middle, last = place[third == 1], place[third == 2]
        assert place[third == 0].max() <= 42.01 and last.min() >= 85.99
        np.testing.assert_allclose((middle.min(), middle.max()), (56, 72), atol=0.2)


def test_training_prompts_name_no_pair_that_is_held_out() -> None:
    prompts = training_prompts(300, 2)
    assert len(prompts) == 300
    for prompt in prompts:
        kinds = [
            (thing.color, thing.shape)
            for thing in prompt.says.things
            if thing.color is not None and thing.shape is not None
        ]
        for number, first in enumerate(kinds):
            for second in kinds[number + 1 :]:
                colors, shapes = np.array([first, second]).T
                assert not is_held_out(colors, shapes), prompt.text
