"""What a seeded bug is, and all of them.

The truth of a bug is the place of the FIRST wrong value in the reference's order of execution, as a
capture of modules names it: `scope/module.path` and a port. A bug in the glue between modules shows
first as the input of the next module or the output of the enclosing one. Where one array is seen
at several places (a module's input and its first child's), the truth names one of them and the
bench counts the others as the same. More than one place is listed only for arrays that go wrong
together, such as the two slices of one attention.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Literal, NamedTuple

from lydite.pipelines.sd3 import StableDiffusion3

Apply = Callable[[StableDiffusion3], AbstractContextManager[Any]]
Dump = Callable[[str, Any], Any]  # name and array to the array as the port writes it down

# fatal: noise or nonsense; visible: another picture; subtle: a person would not see it
Severity = Literal["fatal", "visible", "subtle"]
Part = Literal["draw", "encode"]
BOTH = ("float32", "bfloat16")
FILES = (
    *("weights", "norms", "attention", "text_attention", "modulation"),
    *("layout", "schedule", "sampling", "text"),
)


class Place(NamedTuple):
    """Where a value is seen: the name of an event and its port."""

    name: str
    port: str = "out"

    def __str__(self) -> str:
        return self.name if self.port == "out" else f"{self.name}:{self.port}"


@dataclass(frozen=True)
class Bug:
    """One slip of a port, with its truth."""

    id: str
    cause: str  # machine-readable; several bugs may share one
    note: str  # class and number in the notes, e.g. "A6"
    site: tuple[Place, ...]
    apply: Apply
    fix: str
    severity: Severity = "visible"
    # Dtypes of a port in which it shows: three times the reference's own rounding at the site, in
    # a free run. Else no alarm is right, and so is one at the site: injection may see more.
    seen_in: tuple[str, ...] = BOTH
    step: int = 0  # of the first wrong value
    held_out: bool = False

    @property
    def component(self) -> str:
        return self.site[0].name.partition("/")[0]

    @property
    def part(self) -> Part:
        """The run it shows in: drawing a picture does not run the VAE's encoder."""
        name = self.site[0].name
        return "encode" if name.startswith(("vae/encoder", "pipeline/image_latents")) else "draw"


@dataclass(frozen=True)
class Control:
    """Something done differently that comes to the same: no bug, whatever the bits say."""

    id: str
    what: str
    component: str
    apply: Apply
    dump: Dump | None = None  # how the port writes its values down
    exact: bool = False  # bit for bit


def out(name: str, *more: str) -> tuple[Place, ...]:
    """Outputs of these modules."""
    return tuple(Place(each) for each in (name, *more))


def fed(name: str, *more: str) -> tuple[Place, ...]:
    """First inputs of these modules."""
    return tuple(Place(each, "in.0") for each in (name, *more))


@cache
def bugs() -> tuple[Bug, ...]:
    """Every seeded bug, dev and held-out."""
    rooms = [import_module(f"lydite.zoo.bugs_{name}") for name in FILES]
    return tuple(bug for room in rooms for bug in room.BUGS)


@cache
def controls() -> tuple[Control, ...]:
    """Every equal-but-different control."""
    from lydite.zoo.controls import CONTROLS

    return CONTROLS


def find_bug(id: str) -> Bug:
    """The bug called `id`; KeyError when there is none."""
    return {bug.id: bug for bug in bugs()}[id]
