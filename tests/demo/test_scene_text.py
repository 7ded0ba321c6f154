"""What was asked and what was read, in words."""

import pytest

from lydite.demo.scene_text import ATTRIBUTE_NAMES, prompt_text, reading_text
from lydite.embedded.scenes import BACKGROUNDS, COLORS, SIZES, Scene, Thing
from lydite.embedded.shapes import SHAPES
from lydite.evaluate.prompt_accuracy import ATTRIBUTES, Reading, SeenObject


def thing(words: str) -> Thing:
    """`large red star`, with a dash for what is left open."""
    size, color, shape = words.split()
    return Thing(
        None if shape == "-" else SHAPES.index(shape),
        None if color == "-" else COLORS.index(color),
        None if size == "-" else SIZES.index(size),
    )


def ground(top: str, bottom: str) -> tuple[int, int]:
    return BACKGROUNDS.index(top), BACKGROUNDS.index(bottom)


STAR, RING = thing("large red star"), thing("small blue ring")
TWO = Reading(
    (SeenObject(RING, 90, 20, 0.9), SeenObject(STAR, 30, 100, 0.9)), ground("teal", "navy")
)


@pytest.mark.parametrize(
    ("says", "words"),
    [
        (Scene((STAR, RING), 0, None, None), "left to right: large red star, small blue ring"),
        (Scene((STAR, RING), 1, None, None), "top to bottom: large red star, small blue ring"),
        (Scene((thing("- red -"),), None, None, None), "red shape"),
        (Scene((thing("- - star"),), None, 8, None), "star, bottom right"),
        (Scene((thing("- - star"),), None, None, ground("teal", "teal")), "star on teal"),
        (Scene((thing("- - star"),), None, None, ground("teal", "navy")), "star on teal to navy"),
    ],
)
def test_the_text_of_a_prompt_is_all_a_prompt_says_and_no_more(says: Scene, words: str) -> None:
    assert prompt_text(says) == words


@pytest.mark.parametrize(
    ("says", "words"),
    [
        (Scene((STAR, RING), 0, None, None), "left to right: large red star, small blue ring"),
        (Scene((STAR, RING), 1, None, None), "top to bottom: small blue ring, large red star"),
        (Scene((STAR, RING), None, None, None), "large red star, small blue ring"),
        (
            Scene((STAR,), None, 4, ground("white", "white")),
            "large red star, bottom left, small blue ring, top right on teal to navy",
        ),
    ],
)
def test_the_text_of_a_reading_speaks_of_what_was_asked(says: Scene, words: str) -> None:
    assert reading_text(TWO, says) == words


def test_an_empty_picture_is_said() -> None:
    empty = Reading((), ground("teal", "teal"))
    assert (
        reading_text(empty, Scene((STAR, RING), 0, None, ground("navy", "navy")))
        == "nothing on teal"
    )


def test_every_attribute_of_the_judge_has_a_name() -> None:
    assert tuple(ATTRIBUTE_NAMES) == ATTRIBUTES
