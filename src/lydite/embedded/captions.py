"""Captions of scenes: full sentences, sentences without small words, keywords, bare nouns.

A caption says some of what a scene holds and leaves the rest open; with the text comes a `Scene`
that has None wherever the text is silent, which is what a picture is judged by.
"""

from dataclasses import dataclass, replace
from random import Random

from lydite.embedded.scenes import BACKGROUNDS, COLORS, SIZES, Scene, Scenes, Thing, sample_scenes
from lydite.embedded.shapes import SHAPES

MAX_TOKENS = 32  # of CLIP, with both marks; every word and every comma is one token

SHAPE_WORDS = {
    "circle": ("circle", "circle", "disc", "dot", "ball"),
    "square": ("square", "square", "box", "block"),
    "triangle": ("triangle",),
    "star": ("star",),
    "ring": ("ring", "ring", "hoop", "donut"),
    "cross": ("cross", "cross", "plus sign", "plus"),
    "heart": ("heart",),
    "crescent": ("crescent", "moon", "crescent moon"),
}
ANY_SHAPE = ("shape", "object", "thing")
COLOR_WORDS = {name: (name,) for name in COLORS} | {
    "cyan": ("cyan", "cyan", "turquoise"),
    "purple": ("purple", "purple", "violet"),
}
SIZE_WORDS = {"small": ("small", "tiny", "little"), "large": ("large", "big", "huge")}
BACKGROUND_WORDS = {name: (name,) for name in BACKGROUNDS} | {"gray": ("gray", "gray", "grey")}
CELLS = (
    ("in the top left corner", "in the upper left", "at the top left"),
    ("at the top", "near the top edge", "at the top center"),
    ("in the top right corner", "in the upper right", "at the top right"),
    ("on the left", "near the left edge", "on the left side"),
    ("in the center", "in the middle", "at the center"),
    ("on the right", "near the right edge", "on the right side"),
    ("in the bottom left corner", "in the lower left", "at the bottom left"),
    ("at the bottom", "near the bottom edge", "at the bottom center"),
    ("in the bottom right corner", "in the lower right", "at the bottom right"),
)
CELL_KEYWORDS = (
    ("top left", "upper left"), ("top",), ("top right", "upper right"),
    ("left",), ("center", "middle"), ("right",),
    ("bottom left", "lower left"), ("bottom",), ("bottom right", "lower right"),
)  # fmt: skip
PAIRS = (
    (
        "{0} to the left of {1}",
        "{0} left of {1}",
        "{0} on the left and {1} on the right",
        "{1} to the right of {0}",
        "{1} right of {0}",
    ),
    (
        "{0} above {1}",
        "{0} over {1}",
        "{0} on top of {1}",
        "{1} below {0}",
        "{1} under {0}",
        "{1} beneath {0}",
        "{0} at the top and {1} at the bottom",
    ),
)
KEYWORD_PAIRS = (
    ("{0} left, {1} right", "{0} left of {1}", "{1} right of {0}", "{1} right, {0} left"),
    ("{0} top, {1} bottom", "{0} above {1}", "{1} below {0}", "{0} over {1}", "{1} under {0}"),
)
THREES = (
    ("{0}, {1} and {2} from left to right", "from left to right {0}, {1} and {2}"),
    ("{0}, {1} and {2} from top to bottom", "from top to bottom {0}, {1} and {2}"),
)
KEYWORD_THREES = (("left to right: {0}, {1}, {2}",), ("top to bottom: {0}, {1}, {2}",))
OPEN = {
    2: ("{0} and {1}", "{1} and {0}", "{0} with {1}", "{1} next to {0}"),
    3: ("{0}, {1} and {2}", "{2}, {1} and {0}", "{1}, {0} and {2}", "{0}, {2}, and {1}"),
}
KEYWORD_OPEN = {2: ("{0}, {1}", "{1}, {0}"), 3: ("{0}, {1}, {2}", "{2}, {0}, {1}")}
ON_PLAIN = (
    "on a {0} background",
    "against a {0} background",
    "on {0}",
    "over a {0} backdrop",
    "with a {0} background",
)
ON_GRADIENT = (
    "on a gradient from {0} to {1}",
    "on a {0} to {1} gradient",
    "with a background fading from {0} to {1}",
)
LEAD_INS = (
    "a picture of", "an image of", "a drawing of", "a poster with", "a simple icon of", "there is",
)  # fmt: skip
SMALL_WORDS = {"a", "an", "the"}
STYLES = ("sentence", "terse", "keywords", "bare")
STYLE_SHARES = {1: (0.55, 0.10, 0.20, 0.15), 2: (0.75, 0.11, 0.14, 0.0), 3: (0.80, 0.09, 0.11, 0.0)}
SAY_SIZE = 0.6
SAY_RELATION = {2: 0.85, 3: 0.5}
SAY_CELL = 0.65
SAY_BACKGROUND = {1: 0.65, 2: 0.65, 3: 0.55}
HIDE_COLOR, HIDE_SHAPE = 0.06, 0.04  # of the objects in a sentence


@dataclass(frozen=True)
class Prompt:
    """A text and what a picture of it has to show."""

    text: str
    says: Scene


def caption(scene: Scene, rng: Random, style: str | None = None) -> Prompt:
    """Describe a scene in words, in a style drawn at random unless it is given."""
    if style is None:
        (style,) = rng.choices(STYLES, STYLE_SHARES[len(scene.things)])
    if style == "bare":
        return _bare(scene, rng)
    says = _choose(scene, rng)
    return Prompt((_keywords if style == "keywords" else _sentence)(says, rng, style), says)


def held_out_prompts(n: int, seed: int) -> list[Prompt]:
    """Prompts in all styles; those of several objects name a pair never seen in training."""
    return _prompts(sample_scenes(n, seed, held_out=True), seed, style=None)


def training_prompts(n: int, seed: int) -> list[Prompt]:
    """Prompts in all styles of scenes such as the model was trained on."""
    return _prompts(sample_scenes(n, seed), seed, style=None)


def bare_nouns(n: int, seed: int) -> list[Prompt]:
    """Prompts of one to three words: "star", "red", "a star", "red star", "large red star"."""
    scenes = sample_scenes(max(6 * n, 300), seed)  # enough of them hold a single object
    return _prompts(scenes[(scenes.count == 1).nonzero()[0][:n]], seed, style="bare")


def words() -> list[str]:
    """Every word and mark a caption can hold, in a fixed order."""
    rows = [*SHAPE_WORDS.values(), ANY_SHAPE, *COLOR_WORDS.values(), *SIZE_WORDS.values()]
    rows += [*BACKGROUND_WORDS.values(), *CELLS, *CELL_KEYWORDS, *PAIRS, *KEYWORD_PAIRS]
    rows += [*THREES, *KEYWORD_THREES, *OPEN.values(), *KEYWORD_OPEN.values(), ON_PLAIN]
    rows += [ON_GRADIENT, LEAD_INS, ("a", "an")]
    words = {word for row in rows for phrase in row for word in split(phrase)}
    return sorted(word for word in words if "{" not in word)


def split(text: str) -> list[str]:
    """Words and marks of a caption, as CLIP's tokenizer separates them."""
    return text.replace(",", " ,").replace(":", " :").split()


def _prompts(scenes: Scenes, seed: int, style: str | None) -> list[Prompt]:
    rng = Random(seed)
    return [caption(scenes.scene(index), rng, style) for index in range(len(scenes))]


def _choose(scene: Scene, rng: Random) -> Scene:
    """Leave some of the scene unsaid; never the colour and the shape of an object both."""
    count = len(scene.things)
    things: list[Thing] = []
    for thing in scene.things:
        hide = rng.random()
        things.append(
            Thing(
                shape=None if hide > 1 - HIDE_SHAPE else thing.shape,
                color=None if hide < HIDE_COLOR else thing.color,
                size=thing.size if rng.random() < SAY_SIZE else None,
            )
        )
    return Scene(
        things=tuple(things),
        relation=scene.relation if count > 1 and rng.random() < SAY_RELATION[count] else None,
        cell=scene.cell if rng.random() < SAY_CELL else None,
        background=scene.background if rng.random() < SAY_BACKGROUND[count] else None,
    )


def _sentence(says: Scene, rng: Random, style: str) -> str:
    count = len(says.things)
    nouns = [_noun_phrase(thing, rng) for thing in says.things]
    if count == 1:
        body = nouns[0] if says.cell is None else f"{nouns[0]} {rng.choice(CELLS[says.cell])}"
    elif says.relation is None:
        body = rng.choice(OPEN[count]).format(*nouns)
    else:
        body = rng.choice((PAIRS if count == 2 else THREES)[says.relation]).format(*nouns)
    ground = ""
    if says.background is not None:
        ground = _ground(says.background, rng, ON_PLAIN, ON_GRADIENT)
    if ground and rng.random() < 0.2:
        text = f"{ground}, {body}"
    else:
        text = f"{body} {ground}".strip()
        if count < 3 and rng.random() < 0.4:  # three objects leave no room for it
            text = f"{rng.choice(LEAD_INS)} {text}"
    if style == "terse":
        text = " ".join(word for word in text.split() if word not in SMALL_WORDS)
    return text


def _noun_phrase(thing: Thing, rng: Random) -> str:
    phrase = " ".join([*_adjectives(thing, rng), _noun(thing, rng)])
    return f"{'an' if phrase[0] in 'aeiou' else 'a'} {phrase}"


def _noun(thing: Thing, rng: Random) -> str:
    return rng.choice(ANY_SHAPE if thing.shape is None else SHAPE_WORDS[SHAPES[thing.shape]])


def _adjectives(thing: Thing, rng: Random) -> list[str]:
    size = [] if thing.size is None else [rng.choice(SIZE_WORDS[SIZES[thing.size]])]
    return size + ([] if thing.color is None else [rng.choice(COLOR_WORDS[COLORS[thing.color]])])


def _ground(
    background: tuple[int, int], rng: Random, plain: tuple[str, ...], gradient: tuple[str, ...]
) -> str:
    top, bottom = (rng.choice(BACKGROUND_WORDS[BACKGROUNDS[color]]) for color in background)
    return rng.choice(plain if background[0] == background[1] else gradient).format(top, bottom)


def _keywords(says: Scene, rng: Random, style: str) -> str:
    """The words of each object in any order, with or without commas, and no grammar."""
    count = len(says.things)
    comma = ", " if count == 1 and rng.random() < 0.5 else " "
    chunks: list[str] = []
    for thing in says.things:
        parts = [*_adjectives(thing, rng)]
        if thing.shape is not None or not parts:
            parts.append(_noun(thing, rng))
        if count == 1 and says.cell is not None:
            parts.append(rng.choice(CELL_KEYWORDS[says.cell]))
        rng.shuffle(parts)
        chunks.append(comma.join(parts))
    if count == 1:
        body = chunks[0]
    elif says.relation is None:
        body = rng.choice(KEYWORD_OPEN[count]).format(*chunks)
    else:
        rows = KEYWORD_PAIRS if count == 2 else KEYWORD_THREES
        body = rng.choice(rows[says.relation]).format(*chunks)
    if says.background is None:
        return body
    ground = _ground(says.background, rng, ("{0} background",), ("{0} to {1} gradient",))
    return rng.choice((f"{body}, {ground}", f"{ground}, {body}", f"{body} {ground}"))


def _bare(scene: Scene, rng: Random) -> Prompt:
    thing = scene.things[0]
    (kind,) = rng.choices(
        ("shape", "color", "color shape", "size shape", "all"), (0.35, 0.12, 0.33, 0.1, 0.1)
    )
    thing = Thing(
        shape=None if kind == "color" else thing.shape,
        color=thing.color if "color" in kind or kind == "all" else None,
        size=thing.size if "size" in kind or kind == "all" else None,
    )
    if kind == "color":
        text = " ".join(_adjectives(thing, rng))
    elif rng.random() < 0.4:
        text = _noun_phrase(thing, rng)
    else:
        text = " ".join([*_adjectives(thing, rng), _noun(thing, rng)])
    return Prompt(text, replace(scene, things=(thing,), cell=None, background=None))
