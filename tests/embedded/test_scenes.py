"""Scenes and their painting."""

from dataclasses import fields, replace

import numpy as np
import pytest

from lydite.embedded.scenes import (
    BACKGROUND_RGB,
    COLOR_RGB,
    GAP,
    MARGIN,
    RADII,
    SHARE_GRADIENT,
    SIDE,
    TOO_CLOSE,
    Scenes,
    is_held_out,
    paint,
    render,
    sample_scenes,
)
from lydite.embedded.shapes import SHAPES

PAIRS = ([0, 1], [0, 2], [1, 2])
ROUNDING = 1e-4  # pixels, of float32 coordinates up to 128


def _there(scenes: Scenes) -> np.ndarray:
    return np.arange(3) < scenes.count[:, None]


def test_a_seed_gives_the_same_scenes_and_pixels_again() -> None:
    one, again, other = sample_scenes(60, 3), sample_scenes(60, 3), sample_scenes(60, 4)
    for field in fields(Scenes):
        np.testing.assert_array_equal(getattr(one, field.name), getattr(again, field.name))
        assert not np.array_equal(getattr(one, field.name), getattr(other, field.name)), field.name
    np.testing.assert_array_equal(paint(one), paint(again))


@pytest.mark.parity
def test_numpy_and_torch_paint_alike() -> None:
    torch = pytest.importorskip("torch")
    scenes = sample_scenes(60, 5)
    assert len(set(scenes.shape[_there(scenes)])) == len(SHAPES)
    theirs = render(scenes.map(torch.from_numpy), torch).numpy()
    assert np.abs(render(scenes) - theirs).max() <= 1 / 255


def test_objects_lie_inside_and_apart() -> None:
    scenes = sample_scenes(4000, 6)
    there = _there(scenes)
    low, high = np.array(RADII).T
    assert ((scenes.radius >= low[scenes.size]) & (scenes.radius <= high[scenes.size]))[there].all()
    for place in (scenes.x, scenes.y):
        edge = np.minimum(place, SIDE - place) - scenes.radius
        assert edge[there].min() >= MARGIN - ROUNDING
    for first, second in PAIRS:
        both = there[:, second]
        apart = np.hypot(
            scenes.x[:, first] - scenes.x[:, second], scenes.y[:, first] - scenes.y[:, second]
        )
        room = apart - scenes.radius[:, first] - scenes.radius[:, second]
        assert room[both].min() >= GAP - ROUNDING


def test_no_ink_reaches_the_frame() -> None:
    """Radii are nominal: the tips of a star fade out up to 2.4 pixels further."""
    scenes = sample_scenes(150, 7)
    ink = np.abs(render(scenes) - render(replace(scenes, count=0 * scenes.count))).max(axis=-1)
    ink[:, 1:-1, 1:-1] = 0
    assert ink.max() == 0


@pytest.mark.parametrize("held_out", [False, True])
def test_held_out_pairs_stay_on_their_side(held_out: bool) -> None:
    scenes = sample_scenes(4000, 8, held_out=held_out)
    unseen = np.zeros(len(scenes), bool)
    for pair in PAIRS:
        colors, shapes = scenes.color[:, pair], scenes.shape[:, pair]
        held = is_held_out(colors, shapes)
        np.testing.assert_array_equal(held, is_held_out(colors[:, ::-1], shapes[:, ::-1]))
        there = scenes.count > pair[1]
        unseen |= there & held
        assert not (there & (np.ptp(colors, axis=1) + np.ptp(shapes, axis=1) == 0)).any()  # twins
    assert set(scenes.count) == {1, 2, 3}
    np.testing.assert_array_equal(unseen[scenes.count > 1], held_out)


def test_edges_are_blends_of_ink_and_background() -> None:
    scenes = sample_scenes(500, 9)
    plain = scenes.background[:, 0] == scenes.background[:, 1]
    scenes = scenes[plain & (scenes.count == 1)]
    assert set(scenes.shape[:, 0]) == set(range(len(SHAPES)))
    ground, ink = scenes.background_rgb[:, 0], scenes.rgb[:, 0]
    contrast = ink - ground
    pictures = render(scenes)
    offset = pictures - ground[:, None, None]
    share = np.einsum("nhwc,nc->nhw", offset, contrast) / np.square(contrast).sum(1)[:, None, None]
    blend = share[..., None] * contrast[:, None, None]
    assert np.abs(offset - blend).max() < 1e-5  # on the line through both colours
    assert share.min() > -1e-5 and share.max() < 1 + 1e-5  # and between them
    between = ((share > 0.05) & (share < 0.95)).sum(axis=(1, 2))
    around = 2 * np.pi * scenes.radius[:, 0]
    assert (between > 0.3 * around).all()
    assert (between < 3 * around).all()  # a line about one pixel wide, not a blur
    assert ((share > 0.999).sum(axis=(1, 2)) > around).all()


def test_backgrounds_are_plain_or_fade_from_top_to_bottom() -> None:
    scenes = sample_scenes(3000, 10)
    plain = scenes.background[:, 0] == scenes.background[:, 1]
    assert abs(1 - plain.mean() - SHARE_GRADIENT) < 0.04  # more than four deviations
    colors, grounds = COLOR_RGB[scenes.color], BACKGROUND_RGB[scenes.background]
    seen = np.linalg.norm(colors[:, :, None] - grounds[:, None], axis=-1).min(axis=-1)
    assert seen[_there(scenes)].min() >= TOO_CLOSE
    some, plain = scenes[:60], plain[:60]
    edge = render(some)[:, :, :1]  # a column of the margin
    assert np.ptp(edge[plain], axis=1).max() < 1e-6  # rounding
    steps = np.diff(edge[~plain], axis=1)
    np.testing.assert_allclose(steps, np.broadcast_to(steps[:, :1], steps.shape), atol=1e-6)
    ends = edge[:, [0, -1], 0]
    assert np.abs(ends - BACKGROUND_RGB[some.background]).max() < 0.04  # tint, and half a pixel
    assert np.abs(ends[~plain, 0] - ends[~plain, 1]).max(axis=-1).min() > 0.05
