"""What the demo draws, and what one of its chapters is."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lydite.report.page import Chapter, Fact

if TYPE_CHECKING:
    from lydite.demo.demo import Demo

Tick = Callable[[], None]  # called once per denoising step
PROMPTS = (
    "a large red star above a small blue ring",
    "a green heart on a gradient from lavender to navy",
    "a small yellow moon, a pink square and a white cross",
    "a purple circle to the left of an orange triangle",
    "star",
    "a big cyan ring in the bottom right corner on maroon",
    "from left to right a red circle, a yellow square and a green triangle",
    "a huge white crescent moon on a black background",
    "tiny orange donut, top left, teal background",
    "a pink heart over a black square on a beige background",
    "violet ball",
    "a yellow plus sign at the bottom with a background fading from navy to teal",
)


@dataclass(frozen=True)
class Settings:
    """How much is drawn: all of it in a minute or two on two cores, a few pictures in tests."""

    prompts: tuple[str, ...] = PROMPTS  # picture i starts from seed i
    held_out: int = 36  # prompts that are judged
    held_out_seed: int = 99991  # of benchmarks/prompt_accuracy.py; training drew from others
    steps: int = 16


@dataclass(frozen=True)
class Result:
    """A finished chapter: lines for the terminal, a chapter of the page, a figure for its top."""

    lines: tuple[str, ...]
    chapter: Chapter
    fact: Fact | None = None
    passed: bool = True  # False: the numbers are wrong, and the demo ends with status 1


@dataclass(frozen=True)
class DemoChapter:
    """One chapter; `steps` is how often `run` will call its tick."""

    title: str
    steps: Callable[[Settings], int]
    run: "Callable[[Demo, Tick], Result]"
