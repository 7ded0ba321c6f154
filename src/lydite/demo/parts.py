"""What a chapter of the demo is made of: something to compute, and what there is to say of it."""

from collections.abc import Callable
from dataclasses import dataclass

from lydite.demo.settings import Settings
from lydite.demo.studio import Studio, Tick
from lydite.report.page import Chapter, Fact


@dataclass(frozen=True)
class Told:
    """A finished chapter: lines for the terminal, a chapter of the page, its figure for the top."""

    lines: tuple[str, ...]
    chapter: Chapter
    fact: Fact | None = None
    fine: bool = True  # False: the numbers are wrong, and the demo ends with status 1


@dataclass(frozen=True)
class Part:
    """A chapter yet to be told. `steps` is how often `tell` will call its tick."""

    title: str
    steps: Callable[[Settings], int]
    tell: Callable[[Studio, Tick], Told]
