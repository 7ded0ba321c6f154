"""A page of chapters as data, and its HTML: one file, pictures inside, nothing fetched, no script.

A page is built from a few blocks; a new kind of block is a dataclass here and a macro of the same
name in templates/blocks.html. All text is escaped: a prompt may hold anything.
"""

import base64
from dataclasses import dataclass
from functools import cache
from typing import Literal

from jinja2 import Environment, PackageLoader, StrictUndefined

GENERATOR = "lydite report"  # by which `made_here` knows a page

Tone = Literal["note", "good", "warn", "bad"]


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class Callout:
    """One highlighted sentence."""

    text: str
    tone: Tone = "note"


@dataclass(frozen=True)
class Fact:
    """A key figure and its label."""

    value: str
    label: str
    tone: Tone = "note"


@dataclass(frozen=True)
class Facts:
    """A row of key figures."""

    items: tuple[Fact, ...]


@dataclass(frozen=True)
class Figure:
    """A PNG, what it shows in words, and the lines under it."""

    png: bytes
    alt: str
    caption: str = ""
    note: str = ""
    tone: Tone = "note"  # "bad" puts a red frame around it

    def __post_init__(self) -> None:
        if not self.alt.strip():
            raise ValueError(f"figure {self.caption!r} has no alt text; say what it shows.")


@dataclass(frozen=True)
class Figures:
    """A grid of pictures that fills the width it has."""

    items: tuple[Figure, ...]
    size: Literal["small", "medium", "large", "whole"] = "medium"  # "whole": one to a line
    crisp: bool = False  # show pixels as squares instead of smoothing them


@dataclass(frozen=True)
class Exhibit:
    """One picture beside a list of terms and texts."""

    figure: Figure
    title: str
    details: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Exhibits:
    """Pictures with a few lines each."""

    items: tuple[Exhibit, ...]


@dataclass(frozen=True)
class Comparison:
    """Two pictures, one above the other to be uncovered, and their difference; all PNGs."""

    reference: bytes
    candidate: bytes
    difference: bytes
    title: str
    note: str = ""


@dataclass(frozen=True)
class Comparisons:
    """Pairs of pictures."""

    items: tuple[Comparison, ...]


@dataclass(frozen=True)
class Table:
    """Rows under a head; columns in `numeric` stand to the right."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.head):
                raise ValueError(f"row {row} has {len(row)} cells; the head has {len(self.head)}.")


@dataclass(frozen=True)
class Commands:
    """Lines to type."""

    lines: tuple[str, ...]


@dataclass(frozen=True)
class Fold:
    """Blocks that are collapsed until a reader opens them."""

    summary: str
    blocks: "tuple[Block, ...]"


Block = Text | Callout | Facts | Figures | Exhibits | Comparisons | Table | Commands | Fold


@dataclass(frozen=True)
class Chapter:
    """A heading, a sentence or two, and blocks."""

    title: str
    lead: str
    blocks: tuple[Block, ...] = ()


@dataclass(frozen=True)
class Page:
    """Everything a reader sees."""

    title: str
    lead: str
    chapters: tuple[Chapter, ...]
    facts: tuple[Fact, ...] = ()
    footer: str = ""


def render(page: Page) -> bytes:
    """The page as HTML. The same page gives the same bytes."""
    text = environment().get_template("page.html").render(page=page, generator=GENERATOR)
    return text.encode(errors="replace")  # a name of a file need not be UTF-8


def made_here(data: bytes) -> bool:
    """Whether `data` is a page that `render` made, and may be overwritten by a newer one."""
    return f'<meta name="generator" content="{GENERATOR}">'.encode() in data


@cache
def environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("lydite.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["data_uri"] = _data_uri
    environment.filters["kind"] = lambda block: type(block).__name__.lower()
    return environment


def _data_uri(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"
