"""What a prompt states and what the judge read off the picture, in comparable words."""

from lydite.embedded.captions import CELL_KEYWORDS
from lydite.embedded.scenes import BACKGROUNDS, COLORS, SIZES, Scene, Thing
from lydite.embedded.shapes import SHAPES
from lydite.evaluate.prompt_accuracy import Reading, cell_of

ATTRIBUTE_NAMES = {
    "count": "number of objects",
    "shape": "shape",
    "color": "colour",
    "size": "size",
    "position": "place",
    "relation": "order",
    "background": "background",
}
ORDERS = ("left to right: ", "top to bottom: ")


def prompt_text(says: Scene) -> str:
    """Everything a prompt says, and nothing it leaves open."""
    things = ", ".join(_thing(thing) for thing in says.things)
    place = "" if says.cell is None else f", {CELL_KEYWORDS[says.cell][0]}"
    return f"{_order(says)}{things}{place}{_ground(says.background)}"


def reading_text(reading: Reading, says: Scene) -> str:
    """What the judge read, limited to what the prompt states."""
    axis = says.relation or 0
    found = sorted(reading.objects, key=lambda one: (one.x, one.y)[axis])
    things = ", ".join(
        _thing(one.thing) + ("" if says.cell is None else f", {CELL_KEYWORDS[cell_of(one)][0]}")
        for one in found
    )
    ground = None if says.background is None else reading.background
    return f"{_order(says) if found else ''}{things or 'nothing'}{_ground(ground)}"


def _order(says: Scene) -> str:
    return "" if says.relation is None else ORDERS[says.relation]


def _thing(thing: Thing) -> str:
    size = "" if thing.size is None else SIZES[thing.size]
    color = "" if thing.color is None else COLORS[thing.color]
    shape = "shape" if thing.shape is None else SHAPES[thing.shape]
    return " ".join(word for word in (size, color, shape) if word)


def _ground(background: tuple[int, int] | None) -> str:
    if background is None:
        return ""
    top, bottom = (BACKGROUNDS[color] for color in background)
    return f" on {top}" if top == bottom else f" on {top} to {bottom}"
