"""Captions: what the words say, read back without the code that wrote them."""

import re
from collections.abc import Callable, Sequence
from itertools import permutations
from random import Random
from typing import Any

import numpy as np
import pytest

from lydite.embedded.captions import (
    BACKGROUND_WORDS,
    COLOR_WORDS,
    MAX_TOKENS,
    SHAPE_WORDS,
    SIZE_WORDS,
    STYLES,
    Prompt,
    bare_nouns,
    caption,
    held_out_prompts,
    split,
    training_prompts,
    words,
)
from lydite.embedded.scenes import BACKGROUNDS, COLORS, SIZES, Scene, is_held_out, sample_scenes
from lydite.embedded.shapes import SHAPES

SCENES = sample_scenes(4000, 11)
NAMES = {word: name for name, row in SHAPE_WORDS.items() for word in row}
TINTS = {word: name for name, row in (COLOR_WORDS | BACKGROUND_WORDS).items() for word in row}
EXTENTS = {word: name for name, row in SIZE_WORDS.items() for word in row}
SAME = {"upper": "top", "lower": "bottom", "middle": "center", "over": "above"}
SAME |= {"under": "below", "beneath": "below"}
SIDES = ({"left": 0, "right": 1}, {"top": 0, "above": 0, "bottom": 1, "below": 1})


class Wordy(Random):
    """Takes the longest of everything on offer."""

    def choice(self, seq: Any) -> Any:
        return max(seq, key=lambda phrase: len(split(phrase)))


def _captions(seed: int, count: int = len(SCENES)) -> list[tuple[Scene, Prompt]]:
    rng = Random(seed)
    scenes = [SCENES.scene(index) for index in range(count)]
    return [(scene, caption(scene, rng)) for scene in scenes]


def _names(names: Sequence[str], indices: Sequence[int | None]) -> list[str]:
    return [names[index] for index in indices if index is not None]


def _told(text: str, says: Scene) -> bool:
    """Whether the text has what `says` has, in an order its directions allow, and no more."""
    text = re.sub(r"\bover( a)? (\w+) backdrop", r"\2", text)  # not the direction
    text = text.replace("crescent moon", "moon").replace("plus sign", "plus")
    told = [SAME.get(word, word) for word in split(text)]
    ways = [word for word in told if word in {*SIDES[0], *SIDES[1]}]
    orders = list(permutations(says.things))
    if says.relation is not None:
        if not ways or any(way not in SIDES[says.relation] for way in ways):
            return False
        orders = [says.things[:: -1 if SIDES[says.relation][ways[0]] else 1]]
    elif says.cell is not None:
        row, column = divmod(says.cell, 3)
        expected = {("top", "", "bottom")[row], ("left", "", "right")[column]} - {""}
        if set(ways) != expected or (not expected and "center" not in told):
            return False
    elif ways or "center" in told:
        return False

    shapes = [NAMES[word] for word in told if word in NAMES]
    colors = [TINTS[word] for word in told if word in TINTS]
    sizes = [EXTENTS[word] for word in told if word in EXTENTS]
    ground: list[str] = []
    if says.background is not None:
        top, bottom = _names(BACKGROUNDS, says.background)
        ground = [top] if top == bottom else [top, bottom]
    for things in orders:
        objects = _names(COLORS, [thing.color for thing in things])
        if (
            shapes == _names(SHAPES, [thing.shape for thing in things])
            and sizes == _names(SIZES, [thing.size for thing in things])
            and colors in (objects + ground, ground + objects)
        ):
            return True
    return False


def test_a_seed_gives_the_same_captions_again() -> None:
    assert _captions(1, 500) == _captions(1, 500) != _captions(2, 500)
    for make in (held_out_prompts, bare_nouns):
        assert make(50, 3) == make(50, 3) != make(50, 4)


@pytest.mark.parametrize(("make", "unseen"), [(held_out_prompts, True), (training_prompts, False)])
def test_two_objects_are_a_pair_of_training_or_an_unseen_one(
    make: Callable[[int, int], list[Prompt]], unseen: bool
) -> None:
    said = [p.says.things for p in make(500, 6) if len(p.says.things) == 2]
    told = [
        [np.array([getattr(thing, name) for thing in things]) for name in ("color", "shape")]
        for things in said
        if all(None not in (thing.color, thing.shape) for thing in things)
    ]
    assert len(told) > 50
    assert all(is_held_out(color, shape) == unseen for color, shape in told)


def test_captions_fit_and_use_known_words_only() -> None:
    prompts = [prompt for _, prompt in _captions(3)] + held_out_prompts(1000, 4)
    wordy = Wordy(5)
    prompts += [
        caption(SCENES.scene(index), wordy, style) for index in range(1000) for style in STYLES[:3]
    ]
    split_up = [split(prompt.text) for prompt in prompts]
    assert max(map(len, split_up)) + 2 <= MAX_TOKENS  # the marks of start and end
    known = words()
    assert known == sorted(set(known))
    assert {word for row in split_up for word in row} == set(known)  # and each of them is used


def test_captions_leave_open_but_never_contradict() -> None:
    for scene, prompt in _captions(6):
        says = prompt.says
        assert len(says.things) == len(scene.things)
        for said, drawn in zip(says.things, scene.things, strict=True):
            assert said.shape in (None, drawn.shape), prompt
            assert said.color in (None, drawn.color), prompt
            assert said.size in (None, drawn.size), prompt
            assert said.shape is not None or said.color is not None, prompt
        assert says.relation in (None, scene.relation), prompt
        assert says.cell in (None, scene.cell), prompt
        assert says.background in (None, scene.background), prompt


def test_the_words_say_what_the_prompt_claims() -> None:
    wrong = [prompt for _, prompt in _captions(7) if not _told(prompt.text, prompt.says)]
    assert not wrong, wrong[:3]


def test_bare_nouns_occur() -> None:
    counts = [len(split(prompt.text)) for scene, prompt in _captions(8) if len(scene.things) == 1]
    assert 0.03 < sum(count == 1 for count in counts) / len(counts) < 0.2
    texts = {prompt.text for prompt in bare_nouns(1500, 9)}
    assert {*SHAPES, *COLORS, "a star", "red star"} <= texts
    assert max(len(split(text)) for text in texts) <= len(split("a small red plus sign"))


@pytest.mark.parametrize("n", [1, 3, 40])
def test_as_many_bare_nouns_as_asked_for(n: int) -> None:
    assert [len(bare_nouns(n, seed)) for seed in range(20)] == [n] * 20
